"""LoRA through peft, on the block matrices of a backbone and never on its head."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from bwsft.checkpoints.facts import read_adapter_config
from bwsft.checkpoints.folders import ADAPTER, load_adapter_weights

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


def add_lora(backbone, config, seed: int) -> None:
    """Wrap `backbone.model` with adapters in place (fp32 parameters, frozen base).

    config has rank, alpha, dropout and targets as in bwsft.config.LoraConfig. A is drawn from
    `seed`, B is zero.
    """
    import peft

    kind = backbone.base_model.config.model_type
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_TARGETS.get(kind, _DECODER_TARGETS)[config.targets],
        bias="none",
    )
    torch.manual_seed(seed)
    _wrap(backbone, lora)


def _wrap(backbone, lora) -> None:
    import peft

    with warnings.catch_warnings():
        # peft asks transformers for a property by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        backbone.model = peft.get_peft_model(backbone.model, lora)
    prepare_adapters(backbone)


def prepare_adapters(backbone) -> None:
    """Adapters keep fp32 parameters, but their matmuls run in the autocast dtype on CUDA.

    peft would cast every adapter input to fp32 first: up to a quarter more activation memory.
    """
    from peft.tuners.lora import LoraLayer

    for module in backbone.model.modules():
        if isinstance(module, LoraLayer) and next(module.parameters()).is_cuda:
            module.cast_input_dtype_enabled = False


def load_adapter(backbone, folder, trainable: bool) -> None:
    """Put the LoRA adapter saved in `folder` on the backbone.

    Which matrices it is on and their ranks are read from its tensors, not from the patterns of
    adapter_config.json: a pattern may be a regular expression that takes for ever. ValueError
    unless every tensor fits a matrix of this model, other than the head, and the config.
    """
    import peft

    stored = read_adapter_config(folder)
    ranks = _adapted(backbone, Path(folder) / ADAPTER)
    _check_targets(stored, ranks, folder)
    lora = peft.LoraConfig(
        r=stored.r,
        lora_alpha=stored.lora_alpha,
        lora_dropout=stored.lora_dropout,
        use_rslora=stored.use_rslora,
        use_dora=stored.use_dora,
        target_modules=sorted(ranks),
        rank_pattern={re.escape(n): rank for n, rank in ranks.items() if rank != stored.r},
        alpha_pattern=stored.alpha_pattern,
        inference_mode=not trainable,
    )
    _wrap(backbone, lora)
    load_adapter_weights(folder, backbone)


def _adapted(backbone, file: Path) -> dict[str, int]:
    """Module name -> rank of its adapter, from the file's header alone."""
    try:
        with safe_open(file, framework="pt") as handle:
            shapes = {n: tuple(handle.get_slice(n).get_shape()) for n in handle.keys()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({error}): copy the adapter again") from None
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


def _check_targets(stored, ranks: dict[str, int], folder) -> None:
    """``ValueError`` where adapter_config.json contradicts the tensors."""
    if not stored.rank_pattern and (odd := [n for n, rank in ranks.items() if rank != stored.r]):
        raise ValueError(
            f"{folder}: adapter_config.json says r = {stored.r}, but {odd[0]} has rank "
            f"{ranks[odd[0]]}: take both files from the same adapter"
        )
    if unfit := [p for p in stored.alpha_pattern if not re.fullmatch(r"[\w.^$\\]+", p)]:
        raise ValueError(f"{folder}: alpha_pattern {unfit[0][:80]!r} is no plain module name")
    names = stored.target_modules
    if isinstance(names, str):
        return
    for target in names:
        if not any(n == target or n.endswith(f".{target}") for n in ranks):
            raise ValueError(
                f"{folder}: adapter_config.json targets {target:.80}, but no tensor belongs to it: "
                "take both files from the same adapter"
            )
