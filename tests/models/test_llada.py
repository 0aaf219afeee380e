"""LLaDA's logits, loss and gradients against a plain float64 re-implementation."""

import dataclasses
import math
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from tiny_llada import SMALL, backbone, packed

from bwsft.models.llada_layers import LladaBlock

VARIANTS = {
    "plain": {},
    "grouped": {"n_kv_heads": 2},
    "one_kv_head": {"n_kv_heads": 1},
    "tied": {"weight_tying": True},
    "mlp_ratio": {"mlp_hidden_size": None, "mlp_ratio": 3},
    "spare_rows": {"embedding_size": 56},
    "theta_eps": {"rope_theta": 100.0, "rms_norm_eps": 0.1},
}


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


def test_only_relative_positions_matter():
    b = backbone()
    ids, positions, boundaries = packed()
    base = b.hidden_states(ids, positions, boundaries)
    torch.testing.assert_close(
        b.hidden_states(ids, positions + 30, boundaries), base, rtol=0, atol=1e-10
    )
    assert (b.hidden_states(ids, positions * 2, boundaries) - base).abs().max() > 1e-2


def supervised_rows(ids, rows):
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
    rows, target, weight = supervised_rows(ids, (2, 6, 7, 14, 20))
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
    rows, target, weight = supervised_rows(ids, (2, 6, 20))
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
    with pytest.raises(ValueError, match="reserved ids"):
        b.model.resize_token_embeddings(60)
