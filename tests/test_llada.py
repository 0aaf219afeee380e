"""LLaDA against a plain float64 re-implementation, and against itself in other layouts."""

import dataclasses
import inspect
import json
import math
import os
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bwsft.backbones import attention
from bwsft.backbones.llada import LladaBackbone, LladaConfig, LladaForMaskedDiffusion, family_of
from bwsft.backbones.llada_layers import LladaBlock, LladaRMSNorm
from bwsft.backbones.load import new_backbone
from bwsft.backbones.lora import LLADA_TARGETS

SMALL = dict(
    d_model=32,
    n_layers=2,
    n_heads=4,
    mlp_hidden_size=48,
    vocab_size=50,
    max_sequence_length=64,
    mask_token_id=49,
    eos_token_id=1,
    pad_token_id=1,
)
VARIANTS = {
    "plain": {},
    "grouped": {"n_kv_heads": 2},
    "one_kv_head": {"n_kv_heads": 1},
    "tied": {"weight_tying": True},
    "mlp_ratio": {"mlp_hidden_size": None, "mlp_ratio": 3},
    "spare_rows": {"embedding_size": 56},
    "theta_eps": {"rope_theta": 100.0, "rms_norm_eps": 0.1},
}
LENGTHS = (5, 9, 1, 7)


def config(**changes) -> LladaConfig:
    return LladaConfig(**{**SMALL, **changes})


def backbone(dtype=torch.float64, seed=0, **changes) -> LladaBackbone:
    return new_backbone(config(**changes), seed, dtype=dtype)


def packed(lengths=LENGTHS, seed=0):
    """Random ids [T], positions [T] counted from each sequence's start, boundaries [S + 1]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SMALL["vocab_size"], (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    boundaries = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    return ids, positions, boundaries


def reference_logits(model, ids, positions):
    """One sequence [L] -> logits [L, V]: the published equations, one head at a time.

    RoPE is written as a product of complex numbers whose parts are the two halves of a head.
    """
    c, w = model.config, dict(model.named_parameters())

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * w[name]

    def turn(x):
        half = x.shape[-1] // 2
        frequency = c.rope_theta ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = positions[:, None] * frequency
        z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    x = w["model.transformer.wte.weight"][ids]
    size, kv_heads = c.d_model // c.n_heads, c.n_kv_heads or c.n_heads
    for n in range(c.n_layers):
        p = f"model.transformer.blocks.{n}."
        h = norm(x, p + "attn_norm.weight")
        q, k, v = (h @ w[f"{p}{name}_proj.weight"].T for name in "qkv")
        heads = []
        for i in range(c.n_heads):
            j = i // (c.n_heads // kv_heads)
            mine, theirs = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scores = turn(q[:, mine]) @ turn(k[:, theirs]).T / math.sqrt(size)
            heads.append(scores.softmax(-1) @ v[:, theirs])
        x = x + torch.cat(heads, -1) @ w[p + "attn_out.weight"].T
        h = norm(x, p + "ff_norm.weight")
        gate = h @ w[p + "ff_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ w[p + "up_proj.weight"].T)) @ w[p + "ff_out.weight"].T
    head = "wte" if c.weight_tying else "ff_out"
    return norm(x, "model.transformer.ln_f.weight") @ w[f"model.transformer.{head}.weight"].T


def reference_packed(model, ids, positions, boundaries):
    pieces = zip(boundaries[:-1], boundaries[1:], strict=True)
    return torch.cat([reference_logits(model, ids[a:b], positions[a:b]) for a, b in pieces])


def test_official_names_shapes_and_parameter_count():
    folder = Path(os.environ.get("BWSFT_DATA_DIR", "/nonexistent")) / "llada_8b_instruct"
    if not folder.is_dir():
        pytest.skip("BWSFT_DATA_DIR has no llada_8b_instruct")
    with torch.device("meta"):
        model = LladaForMaskedDiffusion(LladaConfig.from_pretrained(folder))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(model.state_dict()) == set(index["weight_map"])
    assert len(model.state_dict()) == 291
    count = sum(p.numel() for p in model.parameters())
    assert count == 8_015_581_184
    assert 2 * count == index["metadata"]["total_size"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_plain_implementation(variant):
    b = backbone(**VARIANTS[variant])
    ids, _, boundaries = packed()
    positions = torch.randint(0, 64, ids.shape, generator=torch.Generator().manual_seed(1))
    expected = reference_packed(b.model, ids, positions, boundaries)
    got = b.hidden_states(ids, positions, boundaries) @ b.head()[0].T
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    alone = b.model(ids[None, :5], position_ids=positions[None, :5]).logits[0]
    torch.testing.assert_close(alone, expected[:5], rtol=0, atol=1e-10)
    assert got.std() > 0.1


def layouts(b, ids, positions, boundaries):
    """Hidden states [T, D] of the same sequences: one by one, packed, and right-padded."""
    spans = list(zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True))
    alone = torch.cat(
        [b.hidden_states(ids[i:j], positions[i:j], torch.tensor([0, j - i])) for i, j in spans]
    )
    grid = torch.zeros(len(spans), max(j - i for i, j in spans), dtype=torch.long)
    keep = torch.zeros_like(grid)
    for row, (i, j) in enumerate(spans):
        grid[row, : j - i] = ids[i:j]
        keep[row, : j - i] = 1
    logits = b.model(grid, attention_mask=keep).logits[keep.bool()]
    return alone, b.hidden_states(ids, positions, boundaries), logits


def test_a_sequence_is_the_same_alone_packed_and_padded():
    b = backbone(n_kv_heads=2)
    alone, together, logits = layouts(b, *packed())
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits, alone @ b.head()[0].T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sequence_is_the_same_in_low_precision(dtype):
    """Packed may err from float64 by no more than twice what one sequence alone errs."""
    exact, rough = backbone(), backbone(dtype)
    exact.model.load_state_dict(rough.model.state_dict())
    batch = packed((5, 9, 17, 7, 33))
    truth = exact.hidden_states(*batch)
    alone, together, _ = layouts(rough, *batch)
    assert together.dtype == dtype
    floor = (alone.double() - truth).abs().max()
    assert (together.double() - truth).abs().max() <= 2 * floor
    assert floor <= 64 * torch.finfo(dtype).eps * truth.abs().max()


def test_only_relative_positions_matter():
    b = backbone()
    ids, positions, boundaries = packed()
    base = b.hidden_states(ids, positions, boundaries)
    torch.testing.assert_close(
        b.hidden_states(ids, positions + 30, boundaries), base, rtol=0, atol=1e-10
    )
    assert (b.hidden_states(ids, positions * 2, boundaries) - base).abs().max() > 1e-2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_invisible(side):
    b = backbone()
    ids = torch.arange(2, 10)[None]
    bare = b.model(ids).logits
    outs = []
    for pad in (1, 7):
        width = (3, 0) if side == "left" else (0, 3)
        padded = F.pad(ids, width, value=pad)
        mask = F.pad(torch.ones_like(ids), width)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = b.model(padded, attention_mask=mask, position_ids=positions).logits
        outs.append(logits[mask.bool()])
    assert torch.equal(*outs)
    torch.testing.assert_close(outs[0], bare[0], rtol=1e-12, atol=1e-12)


def test_four_dimensional_mask_separates_sequences():
    b = backbone(n_kv_heads=2)
    ids, positions, boundaries = packed((4, 6))
    owner = torch.tensor([0] * 4 + [1] * 6)
    mask = (owner[:, None] == owner)[None, None]
    joint = b.model(ids[None], attention_mask=mask, position_ids=positions[None]).logits[0]
    apart = b.hidden_states(ids, positions, boundaries) @ b.head()[0].T
    torch.testing.assert_close(joint, apart, rtol=1e-12, atol=1e-12)


def test_inputs_embeds_and_masks_are_checked():
    model = backbone().model
    ids = torch.arange(6)[None]
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(embedded, model(ids).logits)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6))
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(1, 5))
    model(ids, use_cache=False, output_attentions=None, return_dict=True)
    for option in ({"use_cache": True}, {"labels": ids}, {"return_dict": False}):
        with pytest.raises(ValueError, match=next(iter(option))):
            model(ids, **option)


def loss_rows(ids, rows):
    """Fixed-bound row list: two tail rows of weight 0."""
    rows = torch.tensor([*rows, 0, 0])
    target = ids[rows].clone()
    target[-2:] = -100
    weight = torch.linspace(0.5, 2, len(rows))
    weight[-2:] = 0
    return rows, target, weight


@pytest.mark.parametrize("variant", ["plain", "grouped", "tied", "spare_rows"])
def test_loss_and_gradients_equal_full_logits(variant):
    b = backbone(**VARIANTS[variant])
    ids, positions, boundaries = packed()
    rows, target, weight = loss_rows(ids, (2, 6, 7, 14, 20))
    batch = types.SimpleNamespace(ids=ids, position_ids=positions, cu_seqlens=boundaries)
    loss = b(batch, rows, target, weight)
    got = torch.autograd.grad(loss, list(b.parameters()))
    logits = reference_packed(b.model, ids, positions, boundaries)[rows]
    every = F.cross_entropy(logits, target, reduction="none", ignore_index=-100)
    expected = torch.autograd.grad((every * weight).sum(), list(b.parameters()))
    torch.testing.assert_close(loss.item(), (every * weight).sum().item(), rtol=1e-12, atol=0)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_loss_is_a_float32_scalar_and_obeys_shift_and_softcap():
    b = backbone(torch.float32)
    ids, positions, boundaries = packed()
    rows, target, weight = loss_rows(ids, (2, 6, 20))
    batch = types.SimpleNamespace(ids=ids, position_ids=positions, cu_seqlens=boundaries)
    assert b(batch, rows, target, weight).shape == ()
    assert b(batch, rows, target, weight).dtype == torch.float32
    b.family = dataclasses.replace(b.family, logit_shift=1, softcap=0.5)
    assert b.predicting_rows(rows).tolist() == [1, 5, 19, 0, 0]
    logits = b.hidden_states(*packed()).double()[(rows - 1)[:3]] @ b.head()[0].double().T
    every = F.cross_entropy(0.5 * (logits / 0.5).tanh(), target[:3], reduction="none")
    expected = (every * weight[:3]).sum().item()
    assert b(batch, rows, target, weight).item() == pytest.approx(expected, rel=1e-6)


def gradients(b, batch):
    b.zero_grad()
    (b.hidden_states(*batch) * torch.linspace(-1, 1, 32)).sum().backward()
    return [p.grad.clone() for p in b.parameters() if p.grad is not None]


@pytest.mark.parametrize("switch", ["backbone", "transformers"])
def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(switch, monkeypatch):
    b = backbone().train()
    plain = gradients(b, packed())
    if switch == "backbone":
        b.set_gradient_checkpointing(True)
    else:
        # The name that every supported release knows; 5.24 calls it deprecated.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            b.model.gradient_checkpointing_enable({"use_reentrant": False})
    calls, forward = [], LladaBlock.forward
    monkeypatch.setattr(LladaBlock, "forward", lambda *a: calls.append(1) or forward(*a))
    again = gradients(b, packed())
    assert len(calls) == 2 * SMALL["n_layers"]
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))
    b.set_gradient_checkpointing(False)
    calls.clear()
    gradients(b, packed())
    assert len(calls) == SMALL["n_layers"]


def test_norm_and_rotation_round_where_the_official_code_does():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    norm = LladaRMSNorm(32, 1e-5).bfloat16()
    torch.nn.init.uniform_(norm.weight)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), norm.weight * wide.bfloat16())
    # At position 4000 an angle in bfloat16 is off by up to 8 rad, in float32 by 1.2e-4, and again
    # as much for each rounding of the frequency. The result is rounded to bfloat16 once (2^-8).
    positions = torch.arange(4000, 4064)
    heads = x.view(64, 2, 16)
    rough = attention.rotate(heads, attention.rope_tables(positions, 16, 5e5, torch.bfloat16))
    exact = attention.rotate(
        heads.double(), attention.rope_tables(positions, 16, 5e5, torch.float64)
    )
    bound = 2**-8 * exact.abs() + 5e-4 * heads.double().norm(dim=-1, keepdim=True)
    assert rough.dtype == torch.bfloat16
    assert ((rough.double() - exact).abs() <= bound).all()


def loop_kernel(q, k, v, cu_q, cu_k, max_q, max_k):
    """A varlen function by definition; checks that the longest length is not understated."""
    assert torch.equal(cu_q, cu_k) and cu_q.dtype == torch.int32
    assert max_q == max_k >= int(cu_q.diff().max())
    out = []
    for a, b in zip(cu_q[:-1], cu_q[1:], strict=True):
        scores = torch.einsum("qhe,khe->hqk", q[a:b], k[a:b]) / math.sqrt(q.shape[-1])
        out.append(torch.einsum("hqk,khe->qhe", scores.softmax(-1), v[a:b]))
    return torch.cat(out)


@pytest.mark.parametrize("max_length", [None, 9, 64])
def test_varlen_kernels_get_packed_rows(monkeypatch, max_length):
    b = backbone(n_kv_heads=2)
    expected = b.hidden_states(*packed())
    monkeypatch.setattr("bwsft.backbones.llada.varlen_kernel", lambda *a: loop_kernel)
    got = b.hidden_states(*packed(), max_length=max_length)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_choice_of_the_varlen_kernel(monkeypatch):
    from torch.nn.attention.varlen import varlen_attn

    cuda, cpu, bf16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert attention.varlen_kernel(cuda, bf16, 128) is varlen_attn
    assert attention.varlen_kernel(cuda, torch.float16, 64, "sdpa") is varlen_attn
    for device, dtype, size in [
        (cpu, bf16, 128),
        (cuda, torch.float32, 128),
        (cuda, bf16, 12),
        (cuda, bf16, 264),
    ]:
        assert attention.varlen_kernel(device, dtype, size) is None
    package = types.SimpleNamespace(flash_attn_varlen_func=loop_kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert attention.varlen_kernel(cuda, bf16, 128, "flash_attention_2") is loop_kernel
    # Called by position: the order has to be the one that attend() relies on.
    names = list(inspect.signature(varlen_attn).parameters)[:7]
    assert names == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_wraps_seven_matrices_per_layer_and_leaves_the_head_alone(checkpointing):
    import peft

    b = backbone(torch.float32).train()
    plain = b.hidden_states(*packed())
    head = b.head()[0]
    b.model = peft.get_peft_model(
        b.model, peft.LoraConfig(r=4, target_modules=LLADA_TARGETS["all"])
    )
    layers = [m for m in b.model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert len(layers) == 7 * SMALL["n_layers"]
    assert b.head()[0] is head
    assert torch.equal(b.hidden_states(*packed()), plain)  # B starts at zero
    b.set_gradient_checkpointing(checkpointing)
    b.hidden_states(*packed()).square().sum().backward()
    with_gradient = {n for n, p in b.named_parameters() if p.grad is not None}
    assert with_gradient == {n for n, _ in b.named_parameters() if "lora_" in n}


@pytest.mark.parametrize("tied, target", [(False, "ff_out"), (True, "wte")])
def test_an_adapter_on_the_head_is_refused(tied, target):
    import peft

    b = backbone(weight_tying=tied)
    b.model = peft.get_peft_model(b.model, peft.LoraConfig(r=4, target_modules=[target]))
    with pytest.raises(ValueError, match="LM head.*anchor target_modules"):
        b.head()


def test_peft_all_linear_leaves_the_head_alone():
    import peft

    b = backbone()
    b.model = peft.get_peft_model(b.model, peft.LoraConfig(r=4, target_modules="all-linear"))
    assert isinstance(b.head()[0], torch.nn.Parameter)


@pytest.mark.parametrize(
    "field, value",
    [
        ("block_type", "sequential"),
        ("block_group_size", 4),
        ("activation_type", "swiglu"),
        ("layer_norm_type", "default"),
        ("layer_norm_with_affine", False),
        ("bias_for_layer_norm", True),
        ("attention_layer_norm", True),
        ("multi_query_attention", True),
        ("alibi", True),
        ("rope", False),
        ("rope_full_precision", False),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("include_bias", True),
        ("include_qkv_bias", True),
        ("input_emb_norm", True),
        ("scale_logits", True),
        ("attention_dropout", 0.1),
        ("residual_dropout", 0.1),
        ("embedding_dropout", 0.1),
        ("init_fn", "full_megatron"),
        ("n_layers", 0),
        ("n_heads", 5),
        ("n_heads", 32),
        ("n_kv_heads", 3),
        ("embedding_size", 49),
        ("mlp_hidden_size", 0),
    ],
)
def test_unsupported_config_is_refused_by_name(field, value):
    config()
    with pytest.raises(ValueError, match=field):
        config(**{field: value})


def test_bad_batches_are_refused():
    b = backbone()
    ids, positions, boundaries = packed()
    for wrong in (50, -1):
        with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary"):
            b.hidden_states(ids.index_fill(0, torch.tensor([3]), wrong), positions, boundaries)
    with pytest.raises(ValueError, match="65 positions, the model has 64"):
        b.hidden_states(ids, positions.index_fill(0, torch.tensor([3]), 64), boundaries)
    with pytest.raises(ValueError, match="negative"):
        b.hidden_states(ids, positions - 1, boundaries)
    with pytest.raises(ValueError, match="empty sequences"):
        b.hidden_states(ids, positions, torch.tensor([0, 5, 5, 22]))
    with pytest.raises(ValueError, match="shorten the prompt"):
        b.model(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(ValueError, match="context"):
        b.hidden_states(ids, positions, boundaries, context=object())
    with pytest.raises(ValueError, match="reserved ids"):
        b.model.resize_token_embeddings(60)


def test_new_backbone_depends_on_the_seed_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = backbone(torch.float32, seed=3).model.state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again = backbone(torch.float32, seed=3).model.state_dict()
    other = backbone(torch.float32, seed=4).model.state_dict()
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not any(torch.equal(first[n], other[n]) for n in first if "proj" in n)


@pytest.mark.parametrize(
    "init_fn, name, std",
    [
        ("normal", "blocks.1.attn_out", 0.02),
        ("normal", "wte", 0.02),
        ("mitchell", "blocks.0.q_proj", 1 / 8),
        ("mitchell", "blocks.1.attn_out", 1 / 8 / 2),
        ("mitchell", "blocks.0.ff_out", 1 / 16 / math.sqrt(2)),
        ("mitchell", "ff_out", 1 / 8),
    ],
)
def test_initial_scale(init_fn, name, std):
    sizes = dict(d_model=64, mlp_hidden_size=256, vocab_size=500, init_fn=init_fn)
    weight = backbone(torch.float32, **sizes).model.get_parameter(
        f"model.transformer.{name}.weight"
    )
    assert weight.std().item() == pytest.approx(std, rel=0.06)  # 4 sigma of 4,096 draws is 4.4 %
    assert (weight.abs().max() <= 3 * std) == (init_fn == "mitchell")


def test_family_names_the_end_of_turn_of_the_published_vocabulary():
    assert family_of(config()).end_ids == (1,)
    family = family_of(LladaConfig())
    assert (family.mask_id, family.eos_id) == (126336, 126081)
    assert family.end_ids == (126081, 126348)
    assert (family.max_positions, family.logit_shift, family.attention) == (4096, 0, "full")
    for field in ("mask_token_id", "eos_token_id"):
        for value in (None, 50):
            with pytest.raises(ValueError, match=field):
                family_of(config(**{field: value}))
