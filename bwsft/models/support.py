"""Which models bwsft loads, told from a config.json alone."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

DECODERS = ("qwen2", "qwen3", "llama")
ENCODERS = ("bert", "modernbert")
DIFFUSION_GEMMA = "diffusion_gemma"
# What the published families fix, as fields of a Family.
_GRID = {"attention": "block_causal", "block_origin": "absolute"}
_CANVAS = {"attention": "block_causal", "clean_attention": "causal", "noise": "uniform"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llada": {}, "Dream": {"logit_shift": 1}, "sdar": _GRID,
    "a2d-qwen3": {}, "a2d-qwen2": {}, "a2d-llama": {},
    "Fast_dLLM_Qwen": _GRID | {"logit_shift": 1},
    "sdar_moe": _GRID, "lladamoe": {}, "llada2_moe": _GRID, DIFFUSION_GEMMA: _CANVAS,
}  # fmt: skip
SUPPORTED = (*PUBLISHED, *DECODERS, *ENCODERS)
MIXTURES = ("sdar_moe", "lladamoe", "llada2_moe")
STACKED = (*MIXTURES, DIFFUSION_GEMMA)  # the experts of a layer are one tensor in memory

_EXPERT_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts")


def kind_of(found: dict[str, Any]) -> Any:
    """The model_type of a config.json, by which bwsft tells models apart: LLaDA-MoE's says "llada",
    and has experts."""
    kind = found.get("model_type")
    mixture = kind == "llada" and any(found.get(field) for field in _EXPERT_FIELDS)
    return "lladamoe" if mixture else kind


def check_supported(found: dict[str, Any], file: Path) -> None:
    """``ValueError`` that names the file, the model and the reason unless bwsft loads a model with
    the config ``found``."""
    kind = kind_of(found)
    if kind not in SUPPORTED:
        raise ValueError(
            f"{file} has model_type {reprlib.repr(kind)}: bwsft loads {', '.join(SUPPORTED)}"
        )
    for field in _EXPERT_FIELDS if kind not in MIXTURES else ():
        if found.get(field):
            raise ValueError(
                f"{file} is of a {kind} with {field}, which is not supported: experts are those of "
                f"{', '.join(MIXTURES)}"
            )
