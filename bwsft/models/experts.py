"""Masked-diffusion mixtures of experts: SDAR-MoE, LLaDA-MoE and LLaDA2.x, under their own names.

transformers' own layers run: Qwen3-MoE's for the first two, GLM-4-MoE's for LLaDA2.x. Its
conversion on loading stacks the matrices of the experts of a layer, and saving writes each one as
published. Routers compute in float32 at least, under autocast too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeExperts,
    Glm4MoeForCausalLM,
    Glm4MoeTopkRouter,
)
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeForCausalLM,
    Qwen3MoeTopKRouter,
)

from bwsft.models.dream_sdar import BlocksGiven, BothWays, OlderSpelling, older_spelling, register
from bwsft.models.grouped_experts import GroupedExperts


class SoftmaxRouter(Qwen3MoeTopKRouter):
    """The top experts of a softmax, of logits that are float32 at least."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., D] -> (logits [T, experts], weights [T, K], indices [T, K])."""
        rows = hidden_states.reshape(-1, self.hidden_dim)
        wide = torch.promote_types(rows.dtype, torch.float32)
        with torch.autocast(rows.device.type, enabled=False):
            logits = F.linear(rows.to(wide), self.weight.to(wide))
        weights, chosen = logits.softmax(-1).topk(self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(rows.dtype), chosen


class SigmoidRouter(Glm4MoeTopkRouter):
    """transformers' own, in its float32 under autocast too."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As that of :class:`SoftmaxRouter`."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits, weights, chosen = super().forward(hidden_states)
        return logits, weights.to(hidden_states.dtype), chosen


class QwenExperts(GroupedExperts, Qwen3MoeExperts):
    """Those of SDAR-MoE and LLaDA-MoE."""


class GlmExperts(GroupedExperts, Glm4MoeExperts):
    """Those of LLaDA2.x."""


class Routed:
    """A model of transformers whose routers and experts are `parts`, which derive from theirs."""

    parts: tuple[type[nn.Module], ...]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        ours = {part.__bases__[-1]: part for part in self.parts}
        for module in self.modules():
            module.__class__ = ours.get(type(module), type(module))


class SdarMoeConfig(OlderSpelling, Qwen3MoeConfig):
    """SDAR-30B-A3B's config.json: Qwen3-MoE's fields and those of SDAR."""

    model_type = "sdar_moe"
    attribute_map = {"num_local_experts": "num_experts"}
    head_dim: int | None = None
    mask_token_id: int | None = 151669
    block_size: int | None = None


class SDARMoeForCausalLM(Routed, BlocksGiven, Qwen3MoeForCausalLM):
    """SDAR with experts and its head. Position i predicts token i."""

    config_class = SdarMoeConfig
    parts = SoftmaxRouter, QwenExperts


class LladaMoeConfig(Qwen3MoeConfig):
    """LLaDA-MoE's config.json (model card LLaDA-MoE-7B-A1B-Instruct), whose model_type is "llada".

    Its code is a softmax router without renormalization and norms of each head's queries and keys.
    ``ValueError`` for options that ask for more.
    """

    model_type = "lladamoe"
    attribute_map = {
        "num_local_experts": "num_experts",
        "moe_intermediate_size": "expert_intermediate_size",
        "intermediate_size": "dense_intermediate_size",
    }
    mask_token_id: int | None = 156895
    expert_intermediate_size: int = 1024
    dense_intermediate_size: int | None = 8192
    shared_expert_intermediate_size: int | None = None
    moe_layer_freq: list[int] | None = None
    qk_layernorm: bool = True
    clip_qkv: float | None = None
    moe_router_enable_expert_bias: bool | None = False
    moe_router_score_function: str | None = "softmax"
    routed_scaling_factor: float | None = 1.0
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float | int = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        frequent = self.moe_layer_freq or [1] * self.num_hidden_layers
        self.mlp_only_layers = [i for i, experts in enumerate(frequent) if not experts]
        plain = {
            "shared_expert_intermediate_size": (None, 0), "qk_layernorm": (True,),
            "clip_qkv": (None,), "moe_router_enable_expert_bias": (None, False),
            "moe_router_score_function": (None, "softmax"), "partial_rotary_factor": (1,),
            "routed_scaling_factor": (None, 1),
        }  # fmt: skip
        for name, values in plain.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"LLaDA-MoE config option {name}={value} is not implemented")
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """As that of transformers. Whatever norm_topk_prob says, null too, the model's own code
        renormalizes nothing; without num_key_value_heads there are as many as heads."""
        fixed, heads = {"norm_topk_prob": False}, config_dict.get("num_attention_heads")
        if heads and config_dict.get("num_key_value_heads") is None:
            fixed["num_key_value_heads"] = heads
        return super().from_dict(config_dict | fixed, **options)

    def to_diff_dict(self) -> dict[str, Any]:
        fields = older_spelling(super().to_diff_dict())
        for own in ("mlp_only_layers", "decoder_sparse_step"):
            fields.pop(own, None)
        return fields | {"model_type": "llada"}


class LLaDAMoEModelLM(Routed, BothWays, Qwen3MoeForCausalLM):
    """LLaDA-MoE with its head: no causal mask. Position i predicts token i."""

    config_class = LladaMoeConfig
    parts = SoftmaxRouter, QwenExperts


class LLaDA2MoeConfig(OlderSpelling, Glm4MoeConfig):
    """The config.json of LLaDA2.0 and 2.1 (model card LLaDA2.0-mini)."""

    model_type = "llada2_moe"
    attribute_map = {
        "num_local_experts": "num_experts", "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias",
    }  # fmt: skip
    default_theta = 600000.0
    mask_token_id: int | None = 156895
    head_dim: int = 128
    num_experts: int = 256
    num_shared_experts: int = 1
    use_qkv_bias: bool = False
    use_bias: bool = False
    use_qk_norm: bool = True
    score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    norm_head: bool = False
    rms_norm_eps: float = 1e-6
    num_mtp_layers: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        plain = {
            "score_function": "sigmoid", "use_qkv_bias": False, "use_bias": False,
            "norm_head": False, "moe_router_enable_expert_bias": True, "num_mtp_layers": 0,
        }  # fmt: skip
        for name, value in plain.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"LLaDA2 config option {name}={getattr(self, name)} is not implemented"
                )
        super().__post_init__(**kwargs)


class LLaDA2MoeModelLM(Routed, BlocksGiven, Glm4MoeForCausalLM):
    """LLaDA2.x with its head: attention from block to block on a grid that starts at position 0.
    Position i predicts token i."""

    config_class = LLaDA2MoeConfig
    parts = SigmoidRouter, GlmExperts


for _name, _config, _model, _stored_as in (
    ("sdar_moe", SdarMoeConfig, SDARMoeForCausalLM, "qwen3_moe"),
    ("lladamoe", LladaMoeConfig, LLaDAMoEModelLM, "qwen3_moe"),
    # Sarvam's names are LLaDA2's, and its layers are GLM-4-MoE's too.
    ("llada2_moe", LLaDA2MoeConfig, LLaDA2MoeModelLM, "sarvam_moe"),
):
    register(_config, _model)
    _mapping = get_checkpoint_conversion_mapping(_stored_as)
    register_checkpoint_conversion_mapping(_name, _mapping or [], overwrite=True)
