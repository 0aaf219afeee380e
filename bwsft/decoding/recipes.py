"""Published decoding settings by name, each with its source. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Settings of `DecodeSettings`, and where they are published."""

    source: str
    settings: dict[str, Any]


def _llada(source: str, gen_length: int, block_size: int, ends: str) -> Recipe:
    shape = {"gen_length": gen_length, "block_size": block_size, "steps": gen_length}
    how = {"context": "exact", "rule": "quota", "order": "confidence", "temperature": 0.0}
    return Recipe(source, shape | how | {"ends": ends})


_EVALUATION = "EVAL.md of github.com/ML-GSAI/LLaDA: "
RECIPES: dict[str, Recipe] = {
    "llada-instruct-gsm8k": _llada(
        f"{_EVALUATION}LLaDA-8B-Instruct on GSM8K, no switch against end tokens", 256, 8, "free"
    ),
    "llada-instruct-math": _llada(
        f"{_EVALUATION}LLaDA-8B-Instruct on MATH, confidence_eos_eot_inf", 512, 512, "last"
    ),
    "llada-1.5-gsm8k": _llada(
        f"{_EVALUATION}LLaDA 1.5 on GSM8K, confidence_eos_eot_inf", 256, 16, "last"
    ),
    "dream": Recipe(
        "README of github.com/DreamLM/Dream: diffusion_generate, alg entropy, alg_temp 0",
        {
            "gen_length": 512, "block_size": 512, "steps": 512, "context": "exact",
            "rule": "dream", "order": "entropy", "temperature": 0.2, "top_p": 0.95,
            "confidence": "tempered",
        },
    ),
    "sdar-dynamic": Recipe(
        "generate.py of github.com/JetAstra/SDAR: low_confidence_dynamic; gen_length is that "
        "of its evaluation configs",
        {
            "gen_length": 2048, "block_size": 4, "steps": 2048, "context": "block_causal",
            "rule": "threshold", "threshold": 0.85, "temperature": 1.0, "confidence": "tempered",
        },
    ),
    "fast-dllm": Recipe(
        "arXiv:2505.22618, LLaDA on GSM8K: prefix cache and parallel decoding above 0.9",
        {
            "gen_length": 256, "block_size": 32, "context": "prefix", "rule": "threshold",
            "threshold": 0.9, "temperature": 0.0,
        },
    ),
    "fast-dllm-v2": Recipe(
        "model card Fast_dLLM_v2_7B, without its sub-blocks of 8",
        {
            "gen_length": 2048, "block_size": 32, "context": "block_causal", "rule": "threshold",
            "threshold": 0.9, "temperature": 0.0,
        },
    ),
    "llada2": Recipe(
        "arXiv:2512.15745, LLaDA2.0: parallel decoding above 0.95",
        {
            "block_size": 32, "context": "block_causal", "rule": "threshold", "threshold": 0.95,
            "temperature": 0.0,
        },
    ),
    "llada2.1": Recipe(
        "model card LLaDA2.1-mini, quality mode: threshold 0.7, editing_threshold 0.5",
        {
            "block_size": 32, "context": "block_causal", "rule": "edit", "threshold": 0.7,
            "edit_threshold": 0.5, "post_steps": 16, "temperature": 0.0,
        },
    ),
}  # fmt: skip
