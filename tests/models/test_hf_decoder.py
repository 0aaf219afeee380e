"""A tiny random Qwen2 made bidirectional: packed, recorded and active passes, in float64."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_packed import (
    EOS,
    LENGTHS,
    MASK,
    SIZES,
    STARTS,
    full,
    loss_rows,
    masked,
    packed,
    plain_decode,
    span,
    two_steps,
)
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.models.backbone import Family
from bwsft.models.hf_decoder import new_decoder
from bwsft.models.kv_cache import Context
from bwsft.training.context_modes import Mode

FAMILY = Family(mask_id=MASK, eos_id=EOS, end_ids=(EOS,), vocab_size=50, max_positions=64)
SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=50,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    initializer_range=0.15,
)
TIGHT = {"rtol": 1e-11, "atol": 1e-12}


@pytest.fixture(autouse=True)
def float64_norms(monkeypatch):
    """transformers normalises in float32 even in a float64 model, which would hide all behind
    1e-7 and spoil finite differences."""

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, True) + self.variance_epsilon)

    for kind in (Qwen2RMSNorm, LlamaRMSNorm):
        monkeypatch.setattr(kind, "forward", norm)


def backbone(shift=0, kind=Qwen2ForCausalLM, config=Qwen2Config):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = kind(config(**SHAPE)).double()
        for name, p in model.named_parameters():
            if "bias" in name:  # Qwen2 starts them at 0
                torch.nn.init.normal_(p, std=0.3)
    return new_decoder(model, dataclasses.replace(FAMILY, logit_shift=shift))


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def assert_same(a, b, **tolerance):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def reference(model, ids, mask=None, frozen=None):
    """A bidirectional Qwen2 forward in plain operations, one sequence. With `frozen` = (start,
    other ids): the rows of `ids`, which start there, against the constant rest of `other`."""
    core, turned = model.decoder, model.decoder.rotary_emb
    start, other = frozen or (0, ids)
    stop = start + len(ids)
    streams = [(core.embed_tokens(other), 0), (core.embed_tokens(ids), start)]

    def turn(x, first):
        cos, sin = turned(x, torch.arange(first, first + len(x))[None])
        a, b = x.chunk(2, -1)
        return x * cos[0][:, None] + torch.cat([-b, a], -1) * sin[0][:, None]

    for layer in core.layers:
        a, found = layer.self_attn, []
        for x, first in streams:
            n = layer.input_layernorm(x)
            q, k, v = (p(n).unflatten(-1, (-1, 8)) for p in (a.q_proj, a.k_proj, a.v_proj))
            found.append((turn(q, first), turn(k, first), v))
        (q0, k0, v0), (q1, k1, v1) = found
        k2, v2 = (
            torch.cat([c[:start].detach(), x, c[stop:].detach()]) for c, x in ((k0, k1), (v0, v1))
        )
        after = []
        for (x, first), q, k, v in zip(streams, (q0, q1), (k0, k2), (v0, v2), strict=True):
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            score = torch.einsum("qhe,khe->hqk", q, k) / 8**0.5
            if mask is not None:
                score = score.masked_fill(~mask, -torch.inf)
            x = x + a.o_proj(torch.einsum("hqk,khe->qhe", score.softmax(-1), v).flatten(1))
            after.append((x + layer.mlp(layer.post_attention_layernorm(x)), first))
        streams = after
    return core.norm(streams[1][0])


def test_packed_equals_plain_operations_on_each_sequence():
    model, batch = backbone(), packed()
    with torch.no_grad():
        expected = torch.cat([reference(model, ids) for ids in batch.ids.split(LENGTHS)])
        torch.testing.assert_close(full(model, batch), expected, **TIGHT)


def test_llama_packed_equals_each_sequence_alone_and_is_bidirectional():
    model, batch = backbone(0, LlamaForCausalLM, LlamaConfig), packed()
    with torch.no_grad():
        alone = torch.cat([full(model, packed_of(ids)) for ids in batch.ids.split(LENGTHS)])
        torch.testing.assert_close(full(model, batch), alone, **TIGHT)
        batch.ids[12] = (batch.ids[12] + 1) % MASK
        change = (full(model, batch) - alone).abs().amax(1)
    assert (change[:13] > 1e-6).all() and (change[13:] < 1e-12).all()


def packed_of(ids):
    positions = torch.arange(len(ids))
    return SimpleNamespace(
        ids=ids, position_ids=positions, cu_seqlens=torch.tensor([0, len(ids)]), max_length=len(ids)
    )


def test_mask_equals_separate_forwards():
    """Each block sees itself and those before it."""
    model, batch = backbone(), packed((8, 8))
    block = torch.arange(8) // 3
    mask = block[:, None] >= block
    with torch.no_grad():
        got = full(model, batch, mask=mask.expand(2, 1, 8, 8))
        expected = torch.cat([reference(model, ids, mask) for ids in batch.ids.split(8)])
    torch.testing.assert_close(got, expected, **TIGHT)


@pytest.mark.parametrize("shift", [0, 1])
def test_exact_loss_and_gradients_are_plain_ones_with_and_without_a_span(shift):
    batch, where = packed(), span()
    rows, target, weight = loss_rows(batch, where)
    slow = backbone()
    hidden = torch.cat([reference(slow, ids) for ids in batch.ids.split(LENGTHS)])
    logits = hidden[rows - shift] @ slow.head()[0].T
    expected = (F.cross_entropy(logits, target, reduction="none") * weight).sum()
    expected.backward()
    for context, checkpointing in ((None, False), (Context(where), False), (None, True)):
        model = backbone(shift).train()
        model.set_gradient_checkpointing(checkpointing)
        loss = model(batch, rows, target, weight, context)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # the loss is fp32
        assert_same(gradients(model), gradients(slow), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("lengths", [LENGTHS, (13, 13, 13)])
def test_active_rows_of_the_state_that_was_cached_equal_the_whole_forward(lengths):
    even = len(set(lengths)) == 1
    where = span(sizes=(4, 4, 4)) if even else span()
    model, batch = backbone(), masked(packed(lengths), where)
    flat = where.flat(batch.cu_seqlens)
    cache = model.new_cache(3, max(lengths))
    with torch.no_grad():
        first = model.fill(batch, cache, wanted=flat)
        active = model.active_hidden_states(batch.ids[flat], where, cache)
        some = model.active_hidden_states(
            batch.ids[flat], where, cache, wanted=torch.tensor([[2], [4], [11]])
        )
        expected = full(model, batch)[flat.flatten()]
    assert (cache.even is not None) == even
    for got in (first, active):
        torch.testing.assert_close(got, expected, **TIGHT)
    torch.testing.assert_close(some, expected[[2, 4, 11]], **TIGHT)


def test_a_pass_over_some_rows_of_a_larger_cache():
    """Only their slots are written, and an active pass sees the slots that are shown alone."""
    model, batch, where = backbone(), packed((13, 17)), span((5, 9), (4, 4))
    cache = model.new_cache(4, 20)
    part = cache.at(torch.tensor([3, 1]))
    flat = where.flat(batch.cu_seqlens)
    with torch.no_grad():
        model.fill(batch, part)
        assert not any(b[[0, 2]].any() for b in cache.keys + cache.values)
        part.show(where.start + where.length, 13)
        got = model.active_hidden_states(batch.ids[flat], where, part)
        for row, stop in ((3, 9), (1, 13)):
            for buffer in cache.keys + cache.values:
                buffer[row, stop:] = 1e3
        again = model.active_hidden_states(batch.ids[flat], where, part)
    torch.testing.assert_close(again, got, rtol=0, atol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_cached_gradients_equal_those_of_an_explicitly_frozen_context(checkpointing):
    """Also when another draw comes between forward and backward."""
    where, clean = span(), packed()
    noisy = masked(clean, span(sizes=(2, 1, 3)))
    context = masked(clean, where)
    rows, target, weight = loss_rows(clean, where)
    model = backbone().train()
    model.set_gradient_checkpointing(checkpointing)
    cache = model.new_cache(3, max(LENGTHS))
    model(context, None, None, None, Context(where, cache))
    loss = model(noisy, rows, target, weight, Context(where, cache))
    model(clean, rows, target, weight, Context(where, cache))
    loss.backward()

    slow, hidden = backbone(), []
    for s, ids in enumerate(context.ids.split(LENGTHS)):
        start, size = STARTS[s], SIZES[s]
        block = noisy.ids.split(LENGTHS)[s][start : start + size]
        hidden.append(reference(slow, block, frozen=(start, ids)))
    logits = torch.cat(hidden) @ slow.head()[0].T
    expected = (F.cross_entropy(logits, target, reduction="none") * weight).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_same(gradients(model), gradients(slow), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("mode", "shift"),
    [
        (Mode("exact", even=True), 0),
        (Mode("exact", context_grad=False), 1),
        (Mode("cached", draws=2, even=True), 0),
        (Mode("cached", draws=2), 1),
        (Mode("block_causal"), 0),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_modes_train(mode, shift):
    """Finite gradients everywhere, and one step along them lowers the loss."""
    before, after = two_steps(backbone(shift), mode, 1e-2)
    assert after < before


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("context", ["exact", "cached"])
def test_generate_equals_a_plain_loop(context, shift):
    model = backbone(shift).eval()
    config = DecodeConfig(gen_length=12, block_size=4, context=context, banned_ids=(EOS,))
    prompts = [[5, 9, 3], [7, 2, 30, 41, 8, 11], [4, 4, 17, 20]]

    def logits(x, entered, start, stop):
        """The whole canvas every step, or the active rows against the canvas as it was entered."""
        if context == "cached":
            rows = x[start - shift : stop - shift]
            hidden = reference(model, rows, frozen=(start - shift, entered))
        else:
            hidden = reference(model, x)[start - shift : stop - shift]
        return hidden @ model.head()[0].T

    for prompt, found in zip(prompts, generate(model, prompts, config), strict=True):
        assert found.tokens == plain_decode(logits, prompt, config)


@pytest.mark.parametrize("context", ["prefix", "block_causal"])
def test_generate_in_the_other_modes_does_not_depend_on_the_batch(context):
    model = backbone().eval()
    config = DecodeConfig(gen_length=8, block_size=4, context=context)
    prompts = [[5, 9, 3], [7, 2, 30, 41, 8, 11]]
    together = [g.tokens for g in generate(model, prompts, config)]
    assert together == [generate(model, [p], config)[0].tokens for p in prompts]


def test_bfloat16_autocast_reaches_the_cache():
    model, where = backbone().float(), span()
    batch = masked(packed(), where)
    with torch.autocast("cpu", torch.bfloat16):
        cache = model.new_cache(3, max(LENGTHS))
        context = Context(where, cache)
        model(batch, None, None, None, context)
        loss = model(batch, *loss_rows(batch, where), context)
    loss.backward()
    exact = backbone()(batch, *loss_rows(batch, where)).item()
    assert cache.keys[0].dtype == torch.bfloat16
    assert loss.item() == pytest.approx(exact, rel=2**-6)  # bf16 keeps 8 bits


def test_what_it_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="leave the option at auto"):
        backbone().set_fused_ops("on")
    model = backbone().model
    with pytest.raises(ValueError, match="logit_shift must be 0 or 1"):
        new_decoder(model, dataclasses.replace(FAMILY, logit_shift=2))
    with pytest.raises(ValueError, match="mask_id=50 has no embedding"):
        new_decoder(model, dataclasses.replace(FAMILY, mask_id=50, vocab_size=51))
    with pytest.raises(ValueError, match="the family at 30"):
        new_decoder(model, dataclasses.replace(FAMILY, softcap=30.0))
    sliding = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding_attention"):
        new_decoder(Qwen2ForCausalLM(sliding), FAMILY)
    with pytest.raises(ValueError, match="a sequence needs 65 positions"):
        full(new_decoder(model, FAMILY), packed((65,)))
