"""Small mixtures of experts of each family."""

from tiny_folders import SHAPE

from bwsft.models.experts import LLaDA2MoeConfig, LladaMoeConfig, SdarMoeConfig

COMMON = {
    **SHAPE, "num_experts": 8, "num_experts_per_tok": 3, "vocab_size": 64, "mask_token_id": 60,
    "eos_token_id": 3, "pad_token_id": 3, "rope_theta": 1e4,
}  # fmt: skip
CONFIGS = {
    "sdar_moe": SdarMoeConfig(
        **COMMON, num_key_value_heads=2, head_dim=16, moe_intermediate_size=12, norm_topk_prob=True
    ),
    "lladamoe": LladaMoeConfig(
        **{k: v for k, v in COMMON.items() if k != "intermediate_size"}, num_key_value_heads=4,
        expert_intermediate_size=12, dense_intermediate_size=20, moe_layer_freq=[0, 1],
    ),
    "llada2_moe": LLaDA2MoeConfig(
        **COMMON, num_key_value_heads=2, head_dim=16, moe_intermediate_size=12, n_group=4,
        topk_group=2, routed_scaling_factor=2.5, partial_rotary_factor=0.5,
    ),
}  # fmt: skip
