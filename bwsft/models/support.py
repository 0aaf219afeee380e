"""Which models bwsft loads, told from a config.json alone, and the names of those it refuses."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

DECODERS = ("qwen2", "qwen3", "llama")
ENCODERS = ("bert", "modernbert")
SUPPORTED = ("llada", "Dream", "sdar", *DECODERS, *ENCODERS)

_EXPERTS = "it is a mixture of experts, and bwsft has dense layers only"
# Name, what model_type or a class of architectures begins with (lower case), and the reason.
# A model_type alone does not tell: LLaDA-MoE's is "llada".
_REFUSED = (
    ("LLaDA-MoE", ("lladamoe", "llada_moe"), _EXPERTS),
    ("LLaDA2.x", ("llada2",), _EXPERTS),
    ("SDAR-MoE", ("sdarmoe", "sdar_moe"), _EXPERTS),
    (
        "DiffusionGemma", ("diffusiongemma", "diffusion_gemma"),
        "its canvas holds random tokens and no [MASK]; docs/diffusion_gemma.md trains it in Python",
    ),
    (
        "Fast-dLLM v2", ("fast_dllm",),
        "its decoder of small blocks within blocks is not implemented, nor are its numbers tested",
    ),
    (
        "a2d", ("a2d",),
        "its classes are not in transformers",
    ),
)  # fmt: skip
_EXPERT_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts")


def check_supported(found: dict[str, Any], file: Path) -> None:
    """``ValueError`` that names the file, the model and the reason unless bwsft loads a model with
    the config ``found``."""
    kind, classes = found.get("model_type"), found.get("architectures")
    said = [kind, *classes] if isinstance(classes, list | tuple) else [kind]
    said = [name.lower() for name in said if isinstance(name, str)]
    for model, starts, reason in _REFUSED:
        if any(name.startswith(starts) for name in said):
            raise ValueError(f"{file} is of {model}, which is not supported: {reason}")
    if kind not in SUPPORTED:
        raise ValueError(
            f"{file} has model_type {reprlib.repr(kind)}: bwsft loads {', '.join(SUPPORTED)}"
        )
    for field in _EXPERT_FIELDS:
        if found.get(field):
            model = "LLaDA-MoE" if kind == "llada" else f"a {kind} with {field}"
            raise ValueError(f"{file} is of {model}, which is not supported: {_EXPERTS}")
