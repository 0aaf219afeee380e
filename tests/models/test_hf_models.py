"""Models of transformers as backbones: packed, recorded and active passes against plain forwards
of one sequence at a time, in float64."""

import pytest
import torch
import torch.nn.functional as F
from tiny_hf import ENCODERS, TIGHT, alone, assert_same_gradients, backbone, logits
from tiny_hf import float64 as float64  # a fixture
from tiny_modes import batch, mode_of, two_steps
from tiny_packed import LENGTHS, full, masked, packed, span, supervised_rows

from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.models.kv_cache import Context


@pytest.fixture(params=["qwen2", *ENCODERS])
def name(request):
    return request.param


@pytest.mark.parametrize("lengths", [LENGTHS, (13, 13)])
@torch.no_grad()
def test_packed_sequences_equal_the_plain_model_on_each(name, lengths):
    model, batch = backbone(name), packed(lengths)
    torch.testing.assert_close(logits(model, full(model, batch)), alone(name, batch)[0], **TIGHT)


@pytest.mark.parametrize(("name", "shift"), [("qwen2", 1), *((n, 0) for n in ("qwen2", *ENCODERS))])
def test_exact_loss_and_gradients_are_plain_ones_with_and_without_a_span(name, shift):
    batch, where = packed(), span()
    rows, target, weight = supervised_rows(batch, where)
    found, slow = alone(name, batch)
    expected = (F.cross_entropy(found[rows - shift], target, reduction="none") * weight).sum()
    expected.backward()
    for context, checkpointing in ((None, False), (Context(where), False), (None, True)):
        model = backbone(name, shift).train()
        model.set_gradient_checkpointing(checkpointing)
        loss = model(batch, rows, target, weight, context)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # the loss is fp32
        assert_same_gradients(model.model, slow, rtol=1e-6, atol=1e-9 if name == "qwen2" else 1e-8)


@pytest.mark.parametrize("lengths", [LENGTHS, (13, 13, 13)])
@torch.no_grad()
def test_active_passes_over_the_cached_state_equal_the_whole_forward(name, lengths):
    even = len(set(lengths)) == 1
    where = span(sizes=(4, 4, 4)) if even else span()
    model, batch = backbone(name), masked(packed(lengths), where)
    flat = where.flat(batch.cu_seqlens)
    cache = model.new_cache(3, max(lengths))
    first = model.fill(batch, cache, wanted=flat)
    active = model.active_hidden_states(batch.ids[flat], where, cache)
    some = model.active_hidden_states(
        batch.ids[flat], where, cache, wanted=torch.tensor([[2], [4], [11]])
    )
    assert (cache.even is not None) == even
    expected = alone(name, batch)[0][flat.flatten()]
    for got in (first, active):
        torch.testing.assert_close(logits(model, got), expected, **TIGHT)
    torch.testing.assert_close(logits(model, some), expected[[2, 4, 11]], **TIGHT)


MODES = {
    "exact": {"even": True}, "frozen": {}, "cached": {"draws": 2, "even": True},
    "uneven": {"draws": 2}, "block_causal": {},
}


@pytest.mark.parametrize(
    ("name", "shift", "mode"),
    [(n, 0, mode) for n in ENCODERS for mode in ("exact", "frozen", "cached", "block_causal")]
    + [("qwen2", 0, "exact"), ("qwen2", 1, "frozen"), ("qwen2", 0, "cached")]
    + [("qwen2", 1, "uneven"), ("qwen2", 0, "block_causal")],
)
def test_modes_train(name, shift, mode):
    """Finite gradients everywhere, and one step along them lowers the loss."""
    around = mode_of({"uneven": "cached"}.get(mode, mode), backbone(name, shift), **MODES[mode])
    before, after = two_steps(around, batch(), 1e-2 if name == "qwen2" else 1e-3)
    assert after < before


@pytest.mark.parametrize("context", ["cached", "prefix", "block_causal"])
def test_answers_do_not_depend_on_the_batch(name, context):
    model = backbone(name).eval()
    config = DecodeConfig(gen_length=8, block_size=4, context=context)
    prompts = [[5, 9, 3], [7, 2, 30, 41, 8, 11]]
    together = [g.tokens for g in generate(model, prompts, config)]
    assert together == [generate(model, [p], config)[0].tokens for p in prompts]


def test_bfloat16_autocast_reaches_the_cache(name):
    model, where = backbone(name).float(), span()
    batch = masked(packed(), where)
    with torch.autocast("cpu", torch.bfloat16):
        context = Context(where, model.new_cache(3, max(LENGTHS)))
        model(batch, None, None, None, context)
        loss = model(batch, *supervised_rows(batch, where), context)
    loss.backward()
    exact = backbone(name)(batch, *supervised_rows(batch, where)).item()
    assert context.cache.keys[0].dtype == torch.bfloat16
    assert loss.item() == pytest.approx(exact, rel=2**-6)  # bf16 keeps 8 bits
