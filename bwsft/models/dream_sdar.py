"""Masked-diffusion models in the layouts of Qwen2, Qwen3 and Llama, under the names of their own
code.

Weights, config fields and class names are those of the published checkpoints, so that a folder
written here is read by the official code, and the other way round. transformers runs the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM


def older_spelling(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json for code written for transformers 4, which knows only these spellings."""
    fields.pop("layer_types", None)
    if (dtype := fields.pop("dtype", None)) is not None:
        fields["torch_dtype"] = dtype
    rope = dict(fields.pop("rope_parameters", None) or {})
    if (part := rope.pop("partial_rotary_factor", None)) is not None:
        fields["partial_rotary_factor"] = part
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    return fields


class OlderSpelling:
    """A config of transformers, written as code for transformers 4 reads it."""

    def to_diff_dict(self) -> dict[str, Any]:
        return older_spelling(super().to_diff_dict())


class BothWays:
    """The forward of a causal LM of transformers without its causal mask."""

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
    ):
        """As transformers' own, but ``attention_mask`` [S, L] (zeros at padding; None: no padding)
        hides keys alone; boolean [S, 1, L, L] is taken as it is. Positions count from the
        sequence's start: give ``position_ids`` where padding is there."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.ndim == 2:
            keys = (attention_mask != 0)[:, None, None, :]
            attention_mask = keys.expand(-1, 1, input_ids.shape[1], -1)
        return super().forward(input_ids, attention_mask, **options)


class BlocksGiven:
    """The forward of a causal LM of transformers under a mask that must be given: attention from
    block to block on a grid that starts at position 0 (prompt included), both ways within one."""

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
    ):
        """As transformers' own, with a boolean ``attention_mask`` [S, 1, L, L], True where query
        may see key. ``ValueError`` without one: the blocks' size is the caller's choice."""
        if attention_mask is None or attention_mask.ndim != 4:
            raise ValueError(
                f"{type(self).__name__} needs a boolean attention_mask [S, 1, L, L] that says "
                "which block sees which"
            )
        return super().forward(input_ids, attention_mask, **options)


class DreamConfig(OlderSpelling, Qwen2Config):
    """Dream's config.json (Ye et al. 2025, arXiv:2508.15487; model card Dream-v0-Instruct-7B)."""

    model_type = "Dream"
    mask_token_id: int | None = 151666
    use_mrope: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.use_mrope:
            raise ValueError("Dream config option use_mrope=True is not implemented")


class DreamModel(BothWays, Qwen2ForCausalLM):
    """Dream with its head: Qwen2's layers, no causal mask. Position i predicts token i + 1."""

    config_class = DreamConfig


class SdarConfig(OlderSpelling, Qwen3Config):
    """SDAR's config.json (Cheng et al. 2025, arXiv:2510.06303; model card SDAR-4B-Chat). The last
    fields switch its training code and change no result here."""

    model_type = "sdar"
    mask_token_id: int | None = 151669
    block_size: int | None = None
    fuse_cross_entropy: bool = False
    debug: bool = False
    ep_size: int = 1
    micro_forward: bool = False
    skip_checkpoint: bool = False
    use_deepep: bool = False


class SDARForCausalLM(BlocksGiven, Qwen3ForCausalLM):
    """SDAR with its head: Qwen3's layers. Position i predicts token i."""

    config_class = SdarConfig


class FastDllmConfig(OlderSpelling, Qwen2Config):
    """The config.json of Fast-dLLM v2 (Wu et al. 2025, arXiv:2509.26328; model card
    Fast_dLLM_v2_7B); ``bd_size`` is its block size."""

    model_type = "Fast_dLLM_Qwen"
    attribute_map = {"block_size": "bd_size"}
    mask_token_id: int | None = 151665
    bd_size: int | None = 32


class Fast_dLLM_QwenForCausalLM(BlocksGiven, Qwen2ForCausalLM):  # noqa: N801 - as published
    """Fast-dLLM v2 with its head: Qwen2's layers. Position i predicts token i + 1, the first of a
    block from the last token before it."""

    config_class = FastDllmConfig


class A2DQwen3Config(OlderSpelling, Qwen3Config):
    """The config.json of dllm's a2d models, autoregressive ones made bidirectional (Zhou et al.
    2026, arXiv:2602.22661; model card Qwen3-0.6B-diffusion-mdlm-v0.1)."""

    model_type = "a2d-qwen3"
    mask_token_id: int | None = None  # the tokenizer's


class A2DQwen2Config(OlderSpelling, Qwen2Config):
    """As A2DQwen3Config."""

    model_type = "a2d-qwen2"
    mask_token_id: int | None = None


class A2DLlamaConfig(OlderSpelling, LlamaConfig):
    """As A2DQwen3Config."""

    model_type = "a2d-llama"
    mask_token_id: int | None = None


class A2DQwen3LMHeadModel(BothWays, Qwen3ForCausalLM):
    """Qwen3 without its causal mask. Position i predicts token i."""

    config_class = A2DQwen3Config


class A2DQwen2LMHeadModel(BothWays, Qwen2ForCausalLM):
    """Qwen2 without its causal mask. Position i predicts token i."""

    config_class = A2DQwen2Config


class A2DLlamaLMHeadModel(BothWays, LlamaForCausalLM):
    """Llama without its causal mask. Position i predicts token i."""

    config_class = A2DLlamaConfig


def register(config: type, model: type) -> None:
    """Let the Auto classes of transformers know a model with its head by its config."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)


for _config, _model in (
    (DreamConfig, DreamModel), (SdarConfig, SDARForCausalLM),
    (FastDllmConfig, Fast_dLLM_QwenForCausalLM), (A2DQwen3Config, A2DQwen3LMHeadModel),
    (A2DQwen2Config, A2DQwen2LMHeadModel), (A2DLlamaConfig, A2DLlamaLMHeadModel),
):  # fmt: skip
    register(_config, _model)
