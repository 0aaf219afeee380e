"""Mixtures of experts against their definition: from the tensors that are stored, under their
published names, a token and an expert at a time, in float64."""

import json

import pytest
import torch
from block_masks import block_causal_mask, masked_states
from safetensors.torch import load_file
from tiny_experts import COMMON, CONFIGS
from tiny_folders import WEIGHTS, saved
from torch.nn import functional as F
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from bwsft import config as c
from bwsft.models.families import read_config
from bwsft.models.loading import load_backbone, new_backbone
from bwsft.models.lora import add_lora
from bwsft.models.quantization import quantize

# The sigmoid router computes in float32 in a float64 model too: 2^-24 of weights up to 2.5, a few
# times over.
TOLERANCE = {"sdar_moe": 1e-11, "lladamoe": 1e-11, "llada2_moe": 3e-6}
kinds = pytest.mark.parametrize("kind", CONFIGS)


def model_of(kind):
    net = new_backbone(CONFIGS[kind], 1, dtype=torch.float64)
    for name, buffer in net.model.named_buffers():
        if name.endswith("correction_bias"):  # it starts at 0
            buffer.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    return net


def rotated(x, theta, width):
    """Tokens [T, H, E]: the first `width` of E turned by their positions, the tables in float32."""
    frequencies = 1 / theta ** (torch.arange(0, width, 2).float() / width)
    angles = torch.arange(len(x)).float()[:, None] * frequencies
    cos, sin = (f.double()[:, None] for f in (angles.cos(), angles.sin()))
    a, b, rest = x.split([width // 2, width // 2, x.shape[-1] - width], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attended(w, at, x, config, sees):
    """Attention of a layer `at`; each head's queries and keys are normalized."""
    heads, fused = config.num_attention_heads, f"{at}attention.query_key_value.weight"
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = [width * n for n in (heads, *[config.num_key_value_heads] * 2)]
    if fused in w:
        matrices, names = w[fused].split(sizes), ("query_layernorm", "key_layernorm", "dense")
        names = [f"attention.{name}" for name in names]
    else:
        matrices = [w[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]
        names = [f"self_attn.{name}" for name in ("q_norm", "k_norm", "o_proj")]
    q, k, v = ((x @ m.T).unflatten(-1, (-1, width)) for m in matrices)
    q, k = (normed(t, w[f"{at}{n}.weight"], config) for t, n in ((q, names[0]), (k, names[1])))
    share = 0.5 if fused in w else 1
    q, k = (rotated(t, 1e4, int(width * share)) for t in (q, k))
    k, v = (t.repeat_interleave(heads // config.num_key_value_heads, 1) for t in (k, v))
    scores = torch.einsum("qhe,khe->hqk", q, k) / width**0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights, v).flatten(1) @ w[f"{at}{names[2]}.weight"].T


def normed(x, weight, config):
    return weight * x * (x.square().mean(-1, True) + config.rms_norm_eps).rsqrt()


def swiglu(w, at, x):
    gate, up, down = (w[f"{at}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def routed(kind, w, at, x, config):
    """[(expert, weight)] of one token [D]."""
    scores, k = w[f"{at}gate.weight"] @ x, config.num_experts_per_tok
    if kind != "llada2_moe":
        shares = scores.softmax(-1)
        best = shares.topk(k).indices.tolist()
        total = sum(shares[e] for e in best) if kind == "sdar_moe" else 1
        return [(e, shares[e] / total) for e in best]
    shares = scores.sigmoid()
    choice = shares + w[f"{at}gate.expert_bias"]
    groups = choice.unflatten(0, (config.n_group, -1))
    kept = groups.topk(2).values.sum(-1).topk(config.topk_group).indices
    open_ = torch.zeros(config.n_group, dtype=torch.bool).index_fill(0, kept, True)
    groups = groups.masked_fill(~open_[:, None], -torch.inf)
    best = groups.flatten().topk(k).indices.tolist()
    return [(e, 2.5 * shares[e] / sum(shares[i] for i in best)) for e in best]


def by_definition(kind, w, ids, sees):
    config = CONFIGS[kind]
    names = "model.embed_tokens.weight", "model.word_embeddings.weight"
    x = w[next(name for name in names if name in w)][ids]
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        normal = normed(x, w[f"{at}input_layernorm.weight"], config)
        x = x + attended(w, at, normal, config, sees)
        normal, at = normed(x, w[f"{at}post_attention_layernorm.weight"], config), f"{at}mlp."
        if f"{at}gate.weight" not in w:
            x = x + swiglu(w, at, normal)
            continue
        x = x + torch.stack([
            sum(share * swiglu(w, f"{at}experts.{e}.", row)
                for e, share in routed(kind, w, at, row, config))
            for row in normal
        ])  # fmt: skip
        if kind == "llada2_moe":
            x = x + swiglu(w, f"{at}shared_experts.", normal)
    return normed(x, w["model.norm.weight"], config) @ w["lm_head.weight"].T


@kinds
@torch.no_grad()
def test_logits_are_those_of_the_definition(kind, tmp_path, monkeypatch):
    for norm in (Qwen3MoeRMSNorm, Glm4MoeRMSNorm):  # in float32 otherwise
        monkeypatch.setattr(norm, "forward", lambda self, x: self.weight * x * torch.rsqrt(
            x.square().mean(-1, True) + self.variance_epsilon))  # fmt: skip
    folder = saved(tmp_path / "m", model_of(kind).model)
    net = load_backbone(folder)
    stored = {name: tensor.double() for name, tensor in load_file(folder / WEIGHTS).items()}
    ids = torch.arange(11) * 5 % 60
    sees = block_causal_mask(torch.arange(11) // 4)
    found = F.linear(masked_states(net, ids, sees), *net.head())
    expected = by_definition(kind, stored, ids, sees)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[kind])
    assert expected.std() > 0.1


@kinds
def test_a_router_is_no_half_precision(kind):
    """Under autocast the experts of a token are those of float32 logits, whatever the weights."""
    net = new_backbone(CONFIGS[kind], 1)
    router = net.model.model.layers[1].mlp.gate
    rows = torch.randn(200, 32, generator=torch.Generator().manual_seed(1))
    wide = router(rows)
    with torch.autocast("cpu", torch.bfloat16):
        logits, weights, chosen = router(rows)
    assert logits.dtype == torch.float32 and torch.equal(logits, wide[0])
    assert torch.equal(chosen.sort().values, wide[2].sort().values)
    rounded = F.linear(rows.bfloat16(), router.weight.bfloat16()).float()
    assert not torch.equal(rounded, logits)


@kinds
def test_adapters_are_on_attention_and_dense_layers_alone(kind):
    net = new_backbone(CONFIGS[kind], 1)
    add_lora(net, c.LoraConfig(rank=2), 0)
    adapted = {n for n, m in net.model.named_modules() if hasattr(m, "lora_A")}
    assert not any(".experts" in name for name in adapted)
    assert len([name for name in adapted if "self_attn" in name]) == 2 * 4
    assert len(adapted) == {"sdar_moe": 8, "lladamoe": 8 + 3, "llada2_moe": 8 + 3 + 3}[kind]


# What the published config.json of each says of its layers, in small sizes.
PUBLISHED = {
    "sdar_moe": {
        "model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"], "head_dim": 16,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 12,
        "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 3, "rope_theta": 1e6,
        "intermediate_size": 20, "num_key_value_heads": 2, "mask_token_id": 60,
    },
    "lladamoe": {
        "model_type": "llada", "architectures": ["LLaDAMoEModelLM"], "rope_theta": 5e4,
        "dense_intermediate_size": 20, "expert_intermediate_size": 12, "moe_layer_freq": [1, 1],
        "shared_expert_intermediate_size": None, "qk_layernorm": True, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_router_enable_expert_bias": False, "clip_qkv": None,
        "moe_router_score_function": "softmax", "num_key_value_heads": 4,
        "partial_rotary_factor": 1,
    },
    "llada2_moe": {
        "model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"], "rope_theta": 600000,
        "first_k_dense_replace": 1, "head_dim": 16, "intermediate_size": 20, "n_group": 4,
        "moe_intermediate_size": 12, "norm_head": False, "norm_topk_prob": True, "num_experts": 8,
        "num_experts_per_tok": 3, "num_key_value_heads": 2, "num_shared_experts": 1,
        "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
        "topk_group": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip


@kinds
def test_a_published_config_is_read_and_written_as_it_was(kind, tmp_path):
    own = {k: v for k, v in COMMON.items() if k not in ("intermediate_size", "rope_theta")}
    published = own | {"mask_token_id": 60} | PUBLISHED[kind]
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = read_config(tmp_path)
    assert type(config) is type(CONFIGS[kind])
    net = new_backbone(config)
    net.model.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: written[name] for name in published} == published
    assert read_config(tmp_path / "again").to_dict() == net.model.config.to_dict()


@pytest.mark.parametrize(("kind", "field", "value"), [
    ("lladamoe", "shared_expert_intermediate_size", 64), ("lladamoe", "clip_qkv", 8.0),
    ("lladamoe", "moe_router_enable_expert_bias", True), ("lladamoe", "qk_layernorm", False),
    ("llada2_moe", "score_function", "softmax"), ("llada2_moe", "use_qkv_bias", True),
    ("llada2_moe", "norm_head", True), ("llada2_moe", "moe_router_enable_expert_bias", False),
])  # fmt: skip
def test_options_that_change_numbers_are_refused(kind, field, value):
    fields = CONFIGS[kind].to_dict() | {field: value}
    with pytest.raises(ValueError, match=f"{field}={value} is not implemented"):
        type(CONFIGS[kind]).from_dict(fields)


def test_experts_are_not_quantized_in_silence(monkeypatch):
    monkeypatch.setattr("bwsft.models.quantization.require_bitsandbytes", lambda: None)
    with pytest.raises(ValueError, match="--lora.quantize.*experts"):
        quantize(new_backbone(CONFIGS["sdar_moe"]), torch.device("cpu"))
