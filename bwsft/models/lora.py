"""LoRA through peft, on the block matrices of a backbone and never on its head."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bwsft.config import LoraConfig
from bwsft.models.adapter_config import AdapterConfig, read_adapter_config
from bwsft.models.adapter_tensors import (
    PREFIX,
    adapted,
    check_targets,
    ends_in,
    is_saved,
    whole_weights,
)
from bwsft.models.backbone import Backbone
from bwsft.models.loading import check_adapters
from bwsft.models.support import MIXTURES
from bwsft.models.weight_files import opened, read_tensors

if TYPE_CHECKING:
    import peft

ADAPTER = "adapter_model.safetensors"
_ROWS = re.compile(rf"{re.escape(PREFIX)}(.+)\.token_adapter\.trainable_tokens_delta")
# Under bias="all" peft writes biases of modules_to_save a second time by these names.
_REPEATED = re.compile(r"\.(modules_to_save\.\w+|original_module)\..*bias$")

# Anchored on `blocks.N.`: LLaDA's head is called ff_out too, and a suffix list would adapt it.
# `released` is what the paper's released list of Llama names hits in LLaDA: four of the seven.
LLADA_TARGETS = {
    "all": r".*\.blocks\.\d+\.(q_proj|k_proj|v_proj|attn_out|ff_proj|up_proj|ff_out)",
    "attention": r".*\.blocks\.\d+\.(q_proj|k_proj|v_proj|attn_out)",
    "released": r".*\.blocks\.\d+\.(q_proj|k_proj|v_proj|up_proj)",
}
# The same matrices under the names of other layouts.
_DECODER_TARGETS = {
    "all": r".*\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(shared_experts\.)?(gate|up|down)_proj)",
    "attention": r".*\.layers\.\d+\.self_attn\.[qkvo]_proj",
    "released": r".*\.layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.(shared_experts\.)?up_proj)",
}
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]  # one tensor a layer
_CANVASES = r".*\.decoder\.layers\.\d+\."  # whose modules the encoder runs too
_BERT = r".*\.encoder\.layer\.\d+\."
_TARGETS = {
    "llada": LLADA_TARGETS,
    "diffusion_gemma": {
        "all": _CANVASES + r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
        "attention": _CANVASES + r"self_attn\.[qkvo]_proj",
        "released": _CANVASES + r"(self_attn\.[qkv]_proj|mlp\.up_proj)",
    },
    "bert": {
        "all": _BERT + r"(attention\.self\.(query|key|value)|(attention\.)?output\.dense"
        r"|intermediate\.dense)",
        "attention": _BERT + r"attention\.(self\.(query|key|value)|output\.dense)",
        "released": _BERT + r"(attention\.self\.(query|key|value)|intermediate\.dense)",
    },
    "modernbert": {  # Wqkv is q, k and v; Wi is gate and up
        "all": r".*\.layers\.\d+\.(attn\.(Wqkv|Wo)|mlp\.(Wi|Wo))",
        "attention": r".*\.layers\.\d+\.attn\.(Wqkv|Wo)",
        "released": r".*\.layers\.\d+\.(attn\.Wqkv|mlp\.Wi)",
    },
}


def add_lora(backbone: Backbone, config: LoraConfig, seed: int) -> None:
    """Wrap `backbone.model` with adapters in place (fp32 parameters, frozen base). A is drawn from
    `seed`, B is zero. ValueError for the routed experts of a model that has none."""
    import peft

    routed = config.targets == "experts"
    if routed and backbone.base_model.config.model_type not in MIXTURES:
        raise ValueError(
            "--lora.targets experts: this model has no routed experts, or none that take adapters "
            "here; leave it at all"
        )
    lora = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, bias="none",
        target_modules=_targets(backbone, "all" if routed else config.targets),
        target_parameters=_EXPERTS if routed else None,
    )  # fmt: skip
    torch.manual_seed(seed)
    _wrap(backbone, lora)


def add_adapter(backbone: Backbone, peft_config: peft.PeftConfig, seed: int) -> None:
    """Wrap `backbone.model` with the adapter that a config of peft describes, drawn from `seed`.
    LoRA that names no target_modules goes on all matrices of every block. ValueError for a target
    that the model does not have, for the head, for an adapter that is not in the layers, and for a
    model that has one already."""
    import peft

    if isinstance(backbone.model, peft.PeftModel):
        raise ValueError("the model has an adapter already: leave peft_config out, or merge it")
    check_adapters([peft_config])
    peft_config = copy.copy(peft_config)
    if getattr(peft_config, "target_modules", ()) is None:
        peft_config.target_modules = _targets(backbone, "all")
    if not isinstance(targets := getattr(peft_config, "target_modules", ()), str):
        names = [name for name, _ in backbone.model.named_modules()]
        absent = sorted(t for t in targets if not any(ends_in(name, t) for name in names))
        if absent:  # peft leaves them out in silence as long as another one fits
            raise ValueError(
                f"peft_config: no module of this model is called {', '.join(absent)}; without "
                "target_modules all matrices of every block are adapted"
            )
    torch.manual_seed(seed)
    _wrap(backbone, peft_config)
    backbone.head()  # ValueError if the adapter is on it


def _targets(backbone: Backbone, which: str) -> str:
    """A regular expression for names of matrices; `which`: a value of LoraConfig.targets."""
    return _TARGETS.get(backbone.base_model.config.model_type, _DECODER_TARGETS)[which]


def _wrap(backbone: Backbone, lora: peft.PeftConfig) -> None:
    import peft

    from bwsft.models.expert_lora import multiply_in_turn

    with warnings.catch_warnings():
        # peft asks transformers for a property by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        backbone.model = peft.get_peft_model(backbone.model, lora)
    multiply_in_turn(backbone.model)
    # Adapters keep fp32 parameters, but their matmuls run in the autocast dtype on CUDA: peft would
    # cast every adapter's input to fp32 first, which is up to a quarter more activation memory.
    for module in backbone.model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer) and next(module.parameters()).is_cuda:
            module.cast_input_dtype_enabled = False


def load_adapter(backbone: Backbone, folder: Path | str) -> None:
    """Put the LoRA adapter saved in `folder` on the backbone, frozen, as peft would.

    Which matrices it is on and their ranks are read from its tensors, not from the patterns of
    adapter_config.json: a pattern may be a regular expression that takes forever. Whole weights in
    the file (modules_to_save, bias) and rows of embeddings (trainable_token_indices) take the place
    of the model's. Targets that the model does not have are named in a warning. ValueError unless
    every tensor fits a weight of this model and the config; for LoRA on the head, too.
    """
    import peft

    stored, file = read_adapter_config(folder), Path(folder) / ADAPTER
    with opened(file) as handle:
        names = [name for name in handle.keys() if not _REPEATED.search(name)]
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in names}
    ranks = adapted(backbone, shapes, stored, file)
    whole = whole_weights(backbone, shapes, stored, file)
    check_targets(backbone, stored, ranks, whole, folder)
    alphas = stored.alphas(list(ranks))
    same = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "lora_bias")
    stacks = {name for name, _ in backbone.model.named_parameters()} & ranks.keys()
    lora = peft.LoraConfig(
        target_modules=sorted(ranks.keys() - stacks),
        target_parameters=sorted(stacks) or None,
        rank_pattern={re.escape(n): rank for n, rank in ranks.items() if rank != stored.r},
        alpha_pattern={re.escape(n): alpha for n, alpha in alphas.items()},
        inference_mode=True,
        **{name: getattr(stored, name) for name in same},
    )
    tensors = {name: tensor for name, tensor in read_tensors(file).items() if name in shapes}
    taken = {place: tensors.pop(name) for name, place in whole.items()}
    _take_weights(backbone, taken, stored)
    rows = {found[1]: tensors.pop(name) for name in shapes if (found := _ROWS.fullmatch(name))}
    _take_rows(backbone, rows, stored, file)
    _wrap(backbone, lora)
    backbone.model.requires_grad_(False)
    _set_adapter_weights(file, tensors, backbone)
    # What a merge must know: these are no low-rank updates of matrices.
    embeddings = [name for name in ranks if f"{PREFIX}{name}.lora_embedding_A" in shapes]
    others = {*rows, *embeddings, *(place for place in taken if not place.endswith("bias"))}
    lora.modules_to_save = sorted(others) or None
    lora.bias = stored.bias if any(p.endswith("bias") for p in taken) else "none"


@torch.no_grad()
def _take_weights(backbone: Backbone, taken: dict[str, Tensor], stored: AdapterConfig) -> None:
    """Whole weights of an adapter, by the parameter's name. As in peft those of modules_to_save
    are tied to no other weight any more, unless the config says ensure_weight_tying."""
    for place, tensor in taken.items():
        module, _, name = place.rpartition(".")
        owner = backbone.model.get_submodule(module)
        old = getattr(owner, name)
        if is_saved(place, stored.modules_to_save or ()) and not stored.ensure_weight_tying:
            setattr(owner, name, nn.Parameter(tensor.to(old.device, old.dtype)))
        else:
            old.copy_(tensor)


@torch.no_grad()
def _take_rows(
    backbone: Backbone, rows: dict[str, Tensor], stored: AdapterConfig, file: Path
) -> None:
    """Rows of embeddings [n, D], by the module's name; a head that is tied has them too."""
    modules = dict(backbone.model.named_modules())
    for name, tensor in rows.items():
        ids, weight = stored.token_ids(name), getattr(modules.get(name), "weight", None)
        known = weight is not None and all(0 <= i < len(weight) for i in ids)
        if not known or tensor.shape != (len(ids), weight.shape[1]):
            raise ValueError(
                f"{file}: the rows of {name:.200} are not those of trainable_token_indices in "
                "this model: take both files from the same adapter"
            )
        weight[list(ids)] = tensor.to(weight.device, weight.dtype)


def load_adapter_weights(folder: Path | str, backbone: Backbone) -> None:
    """Overwrite the adapters of `backbone` by those in a checkpoint; ValueError unless names and
    shapes are exactly the same."""
    file = Path(folder) / ADAPTER
    _set_adapter_weights(file, read_tensors(file), backbone)


def _set_adapter_weights(path: Path, tensors: dict[str, Tensor], backbone: Backbone) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    expected = get_peft_model_state_dict(backbone.model, save_embedding_layers=False)
    if odd := sorted(set(tensors) ^ set(expected)):
        lacks = "lacks" if odd[0] in expected else "has an unknown"
        raise ValueError(f"{path} {lacks} tensor {odd[0]}: it is of another model or --lora config")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the run needs "
                f"{tuple(expected[name].shape)}"
            )
    set_peft_model_state_dict(backbone.model, tensors)
