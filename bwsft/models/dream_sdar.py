"""Masked-diffusion models in the layouts of Qwen2 and Qwen3, under the names of their own code.

Weights, config fields and class names are those of the published checkpoints, so that a folder
written here is read by the official code, and the other way round. transformers runs the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM


def _older_spelling(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json for code written for transformers 4, which knows only these spellings."""
    fields.pop("layer_types", None)
    if (dtype := fields.pop("dtype", None)) is not None:
        fields["torch_dtype"] = dtype
    rope = dict(fields.pop("rope_parameters", None) or {})
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    return fields


class DreamConfig(Qwen2Config):
    """Dream's config.json (Ye et al. 2025, arXiv:2508.15487; model card Dream-v0-Instruct-7B)."""

    model_type = "Dream"
    mask_token_id: int | None = 151666
    use_mrope: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.use_mrope:
            raise ValueError("Dream config option use_mrope=True is not implemented")

    def to_diff_dict(self) -> dict[str, Any]:
        return _older_spelling(super().to_diff_dict())


class DreamModel(Qwen2ForCausalLM):
    """Dream with its head: Qwen2's layers, no causal mask. Position i predicts token i + 1."""

    config_class = DreamConfig

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
    ):
        """As transformers' Qwen2, but ``attention_mask`` [S, L] (zeros at padding; None: no
        padding) hides keys alone; boolean [S, 1, L, L] is taken as it is. Positions count from the
        sequence's start: give ``position_ids`` where padding is there."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.ndim == 2:
            keys = (attention_mask != 0)[:, None, None, :]
            attention_mask = keys.expand(-1, 1, input_ids.shape[1], -1)
        return super().forward(input_ids, attention_mask, **options)


class SdarConfig(Qwen3Config):
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

    def to_diff_dict(self) -> dict[str, Any]:
        return _older_spelling(super().to_diff_dict())


class SDARForCausalLM(Qwen3ForCausalLM):
    """SDAR with its head: Qwen3's layers, attention from block to block on a grid that starts at
    position 0 (prompt included) and both ways within a block. Position i predicts token i."""

    config_class = SdarConfig

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
    ):
        """As transformers' Qwen3, with a boolean ``attention_mask`` [S, 1, L, L], True where query
        may see key. ``ValueError`` without one: the blocks' size is the caller's choice."""
        if attention_mask is None or attention_mask.ndim != 4:
            raise ValueError(
                "SDAR needs a boolean attention_mask [S, 1, L, L] that says which block sees which"
            )
        return super().forward(input_ids, attention_mask, **options)


for _config, _model in ((DreamConfig, DreamModel), (SdarConfig, SDARForCausalLM)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)
