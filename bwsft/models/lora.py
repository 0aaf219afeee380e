"""LoRA through peft, on the block matrices of a backbone and never on its head."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from bwsft.config import LoraConfig
from bwsft.models.backbone import Backbone
from bwsft.models.weight_files import opened, read_tensors
from bwsft.utils import config_check, strict_json

if TYPE_CHECKING:
    import peft

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"

# Anchored on `blocks.N.`: LLaDA's head is called ff_out too, and a suffix list would adapt it.
# `released` is what the paper's released list of Llama names hits in LLaDA: four of the seven.
LLADA_TARGETS = {
    "all": r".*\.blocks\.\d+\.(q_proj|k_proj|v_proj|attn_out|ff_proj|up_proj|ff_out)",
    "released": r".*\.blocks\.\d+\.(q_proj|k_proj|v_proj|up_proj)",
}
# The same matrices under the names of other layouts.
_DECODER_TARGETS = {
    "all": r".*\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "released": r".*\.layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.up_proj)",
}
_BERT = r".*\.encoder\.layer\.\d+\."
_TARGETS = {
    "llada": LLADA_TARGETS,
    "bert": {
        "all": _BERT + r"(attention\.self\.(query|key|value)|(attention\.)?output\.dense"
        r"|intermediate\.dense)",
        "released": _BERT + r"(attention\.self\.(query|key|value)|intermediate\.dense)",
    },
    "modernbert": {  # Wqkv is q, k and v; Wi is gate and up
        "all": r".*\.layers\.\d+\.(attn\.(Wqkv|Wo)|mlp\.(Wi|Wo))",
        "released": r".*\.layers\.\d+\.(attn\.Wqkv|mlp\.Wi)",
    },
}


def add_lora(backbone: Backbone, config: LoraConfig, seed: int) -> None:
    """Wrap `backbone.model` with adapters in place (fp32 parameters, frozen base). A is drawn from
    `seed`, B is zero."""
    import peft

    kind = backbone.base_model.config.model_type
    lora = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout,
        target_modules=_TARGETS.get(kind, _DECODER_TARGETS)[config.targets], bias="none",
    )  # fmt: skip
    torch.manual_seed(seed)
    _wrap(backbone, lora)


def _wrap(backbone: Backbone, lora: peft.LoraConfig) -> None:
    import peft

    with warnings.catch_warnings():
        # peft asks transformers for a property by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        backbone.model = peft.get_peft_model(backbone.model, lora)
    # Adapters keep fp32 parameters, but their matmuls run in the autocast dtype on CUDA: peft would
    # cast every adapter's input to fp32 first, which is up to a quarter more activation memory.
    for module in backbone.model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer) and next(module.parameters()).is_cuda:
            module.cast_input_dtype_enabled = False


def load_adapter(backbone: Backbone, folder: Path | str) -> None:
    """Put the LoRA adapter saved in `folder` on the backbone, frozen.

    Which matrices it is on and their ranks are read from its tensors, not from the patterns of
    adapter_config.json: a pattern may be a regular expression that takes forever. ValueError
    unless every tensor fits a matrix of this model, other than the head, and the config.
    """
    import peft

    stored = read_adapter_config(folder)
    ranks = _adapted(backbone, Path(folder) / ADAPTER)
    _check_targets(stored, ranks, folder)
    same = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "alpha_pattern")
    lora = peft.LoraConfig(
        target_modules=sorted(ranks),
        rank_pattern={re.escape(n): rank for n, rank in ranks.items() if rank != stored.r},
        inference_mode=True,
        **{name: getattr(stored, name) for name in same},
    )
    _wrap(backbone, lora)
    load_adapter_weights(folder, backbone)


def _adapted(backbone: Backbone, file: Path) -> dict[str, int]:
    """Module name -> rank of its adapter, from the file's header alone."""
    with opened(file) as handle:
        shapes = {n: tuple(handle.get_slice(n).get_shape()) for n in handle.keys()}
    modules, head = dict(backbone.model.named_modules()), backbone.head()[0]
    ranks = {}
    for tensor, shape in shapes.items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_(A|B)\.weight", tensor)
        if found is None:
            continue  # an unknown tensor, or a magnitude of DoRA: compared by name later
        module = modules.get(found[1])
        weight = getattr(module, "weight", None)
        if not isinstance(module, torch.nn.Linear) or weight is head:
            raise ValueError(
                f"{file} adapts {found[1]:.200}, which is no inner matrix of this model: it is an "
                "adapter of another one"
            )
        down = found[2] == "A"  # [rank, in], while B is [out, rank]
        if len(shape) != 2 or shape[down] != weight.shape[down]:
            raise ValueError(
                f"{file}: {tensor} has shape {shape}, which does not fit a matrix of shape "
                f"{tuple(weight.shape)}: it is an adapter of another model"
            )
        if ranks.setdefault(found[1], shape[not down]) != shape[not down]:
            raise ValueError(f"{file}: {found[1]} has matrices of different rank: copy it again")
    if not ranks:
        raise ValueError(f"{file} holds no LoRA matrices")
    return ranks


def _check_targets(stored: AdapterConfig, ranks: dict[str, int], folder: Path | str) -> None:
    """``ValueError`` where adapter_config.json contradicts the tensors."""
    if not stored.rank_pattern and (odd := [n for n, rank in ranks.items() if rank != stored.r]):
        raise ValueError(
            f"{folder}: adapter_config.json says r = {stored.r}, but {odd[0]} has rank "
            f"{ranks[odd[0]]}: take both files from the same adapter"
        )
    if unfit := [p for p in stored.alpha_pattern if not re.fullmatch(r"[\w.^$\\]+", p)]:
        raise ValueError(f"{folder}: alpha_pattern {unfit[0][:80]!r} is no plain module name")
    names = stored.target_modules
    for target in () if isinstance(names, str) else names:
        if not any(n == target or n.endswith(f".{target}") for n in ranks):
            raise ValueError(
                f"{folder}: adapter_config.json targets {target:.80}, but no tensor belongs to it: "
                "take both files from the same adapter"
            )


def load_adapter_weights(folder: Path | str, backbone: Backbone) -> None:
    """Overwrite the adapters of `backbone` by those in a checkpoint; ValueError unless names and
    shapes are exactly the same."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    path = Path(folder) / ADAPTER
    tensors = read_tensors(path)
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


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The options of an adapter_config.json that decide what its tensors mean."""

    peft_type: Literal["LORA"]
    r: int
    lora_alpha: float
    target_modules: str | tuple[str, ...]
    base_model_name_or_path: str | None = None
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    alpha_pattern: dict[str, float] = dataclasses.field(default_factory=dict)
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] = True


# Where the adapter came from, or which layers it is on: the tensors' names say that better.
_PROVENANCE = frozenset(
    "auto_mapping inference_mode megatron_core peft_version qalora_group_size revision task_type "
    "layers_pattern layers_to_transform exclude_modules fan_in_fan_out runtime_config eva_config"
    " ensure_weight_tying".split()
)


def read_adapter_config(folder: Path | str) -> AdapterConfig:
    """The adapter_config.json of a plain LoRA adapter (DoRA included); ValueError naming the field
    for anything else, so that no option is dropped in silence."""
    path = Path(folder) / ADAPTER_CONFIG
    found = strict_json.read_object(path)
    names = {field.name for field in dataclasses.fields(AdapterConfig)}
    for name, value in found.items():
        if name not in names | _PROVENANCE and value not in (None, False, "none", [], {}):
            raise ValueError(f"{path}: option {name:.80} is not supported: merge it with peft")
    known = {name: value for name, value in found.items() if name in names}
    config = config_check.build(AdapterConfig, known, str(path))
    if config.r < 1 or not config.lora_alpha > 0:
        raise ValueError(f"{path}: r and lora_alpha must be positive")
    return config
