"""Decoders of transformers made bidirectional: masks, frozen contexts, decoding, in float64. What
they share with encoders: test_hf_models.py."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from block_masks import block_causal_mask
from bwsft_kernels import range_plan
from tiny_hf import (
    DECODER,
    FAMILY,
    TIGHT,
    assert_same_gradients,
    backbone,
    logits,
    plain,
    reference,
)
from tiny_hf import float64 as float64  # a fixture
from tiny_packed import (
    EOS,
    LENGTHS,
    MASK,
    SIZES,
    STARTS,
    batch_of,
    full,
    masked,
    packed,
    plain_decode,
    span,
    supervised_rows,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.models.hf_decoder import new_decoder
from bwsft.models.kv_cache import Context


def test_llama_packed_equals_each_sequence_alone_and_is_bidirectional():
    model, batch = backbone("llama"), packed()
    with torch.no_grad():
        alone = torch.cat([full(model, batch_of(ids)) for ids in batch.ids.split(LENGTHS)])
        torch.testing.assert_close(full(model, batch), alone, **TIGHT)
        batch.ids[12] = (batch.ids[12] + 1) % MASK
        change = (full(model, batch) - alone).abs().amax(1)
    assert (change[:13] > 1e-6).all() and (change[13:] < 1e-12).all()


def test_a_plan_equals_separate_forwards():
    """Each block sees itself and those before it."""
    model, batch = backbone("qwen2"), packed((8, 8))
    block = torch.arange(8) // 3
    plan, rows = range_plan(torch.tensor([0, 0]), torch.tensor([8, 8]), 3)
    clean = (rows.copy == 0).nonzero()[:, 0]
    with torch.no_grad():
        got = full(model, batch, plan=plan.part(clean, clean))
        mask = block_causal_mask(block)
        expected = torch.cat([reference(model, ids, mask) for ids in batch.ids.split(8)])
    torch.testing.assert_close(got, expected, **TIGHT)


def test_attention_has_the_models_own_scale():
    """As in Granite: not 1 / sqrt(E)."""
    slow, net, ids = plain("qwen2"), backbone("qwen2"), packed((9,)).ids
    for layer in (*slow.model.layers, *net.decoder.layers):
        layer.self_attn.scaling = 0.9
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    expected = slow(input_ids=ids[None], attention_mask=mask).logits[0]
    torch.testing.assert_close(logits(net, full(net, batch_of(ids))), expected, **TIGHT)


def test_a_pass_over_some_rows_of_a_larger_cache():
    """Only their slots are written, and an active pass sees the slots that are shown alone."""
    model, batch, where = backbone("qwen2"), packed((13, 17)), span((5, 9), (4, 4))
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
    rows, target, weight = supervised_rows(clean, where)
    model = backbone("qwen2").train()
    model.set_gradient_checkpointing(checkpointing)
    cache = model.new_cache(3, max(LENGTHS))
    model(context, None, None, None, Context(where, cache))
    loss = model(noisy, rows, target, weight, Context(where, cache))
    model(clean, rows, target, weight, Context(where, cache))
    loss.backward()

    slow, hidden = backbone("qwen2"), []
    for s, ids in enumerate(context.ids.split(LENGTHS)):
        start, size = STARTS[s], SIZES[s]
        block = noisy.ids.split(LENGTHS)[s][start : start + size]
        hidden.append(reference(slow, block, frozen=(start, ids)))
    logits = torch.cat(hidden) @ slow.head()[0].T
    expected = (F.cross_entropy(logits, target, reduction="none") * weight).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(model, slow, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("context", ["exact", "cached"])
def test_generate_equals_a_plain_loop(context, shift):
    model = backbone("qwen2", shift).eval()
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


def test_what_it_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="leave the option at auto"):
        backbone("qwen2").set_fused_ops("on")
    model = backbone("qwen2").model
    with pytest.raises(ValueError, match="logit_shift must be 0 or 1"):
        new_decoder(model, dataclasses.replace(FAMILY, logit_shift=2))
    with pytest.raises(ValueError, match="mask_id=50 has no embedding"):
        new_decoder(model, dataclasses.replace(FAMILY, mask_id=50, vocab_size=51))
    with pytest.raises(ValueError, match="the family at 30"):
        new_decoder(model, dataclasses.replace(FAMILY, softcap=30.0))
    sliding = Qwen2Config(**DECODER, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding_attention"):
        new_decoder(Qwen2ForCausalLM(sliding), FAMILY)
    with pytest.raises(ValueError, match="a sequence needs 65 positions"):
        full(new_decoder(model, FAMILY), packed((65,)))
    with pytest.raises(ValueError, match="call its Backbone"):
        model(input_ids=torch.tensor([[3, 4]]))
    model.model.layers[1].self_attn.config = Qwen2Config(**DECODER, attn_implementation="eager")
    with pytest.raises(ValueError, match="the attention of 1 of its 2 layers"):
        full(new_decoder(model, FAMILY), packed((5,)))
    capped = backbone("qwen2")
    capped.decoder.register_forward_pre_hook(
        lambda module, args, options: (args, options | {"softcap": 30.0}), with_kwargs=True)
    with pytest.raises(ValueError, match="attention with softcap"):
        full(capped, packed((5,)))
