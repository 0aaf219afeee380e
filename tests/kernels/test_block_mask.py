"""block_mask against the reference implementation; its invariances, edges and refusals."""

from dataclasses import replace

import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask, reference
from bwsft_kernels.philox import Stream, philox_u24
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same_fields as assert_same
from kernel_cases import mask_specs

MASK = 99
PER_TOKEN = ("noisy_ids", "labels")
PER_SEQUENCE = ("block", "block_start", "block_length", "rate", "count")


@st.composite
def batches(draw):
    """(packed ids, cu_seqlens, padded ids, keyword arguments of block_mask)."""
    size = draw(st.integers(0, 4))
    lengths = st.lists(st.integers(0, 11), min_size=size, max_size=size)
    prompt, response, extra = (torch.tensor(draw(lengths)).long() for _ in range(3))
    row = prompt + response + extra % 4
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), row.cumsum(0)])
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    packed = torch.arange(int(cu[-1]), dtype=dtype) % 97
    padded = torch.full((size, int(row.max()) if size else 5), 98, dtype=dtype)
    for s in range(size):
        padded[s, : row[s]] = packed[cu[s] : cu[s + 1]]
    ids = st.lists(st.integers(0, 2**56 - 1), min_size=size, max_size=size)
    options = dict(
        prompt_lengths=prompt, response_lengths=response, sample_ids=torch.tensor(draw(ids)).long(),
        draw=torch.tensor(draw(lengths)).long(),
    )
    chance = draw(st.sampled_from([None, "block", "block_weights"]))
    if chance == "block":
        options["block"] = torch.zeros(size, dtype=torch.int64)
    elif chance == "block_weights":
        weights = st.lists(st.integers(1, 2**24 - 1), min_size=23 * size, max_size=23 * size)
        options["block_weights"] = torch.tensor(draw(weights)).long().view(size, 23)
    more = dict(
        block_draw=st.integers(0, 2**32 - 1),
        rate=st.sampled_from([0, 1, 2**23, 2**24]) | st.integers(0, 2**24),
        factor=st.floats(0, 1e6),
    )
    for name in draw(st.sets(st.sampled_from(sorted(more)))):
        values = draw(st.lists(more[name], min_size=size, max_size=size))
        dtype = torch.float64 if name == "factor" else torch.int64
        options[name] = torch.tensor(values, dtype=dtype)
    return packed, cu, padded, options


@settings(max_examples=150, deadline=None)
@given(batches(), mask_specs())
def test_equals_the_reference_and_padding_changes_nothing(batch, spec):
    ids, cu, padded_ids, options = batch
    packed = block_mask(ids, spec=spec, cu_seqlens=cu.int(), **options)
    assert_same(packed, reference.block_mask(ids, spec=spec, cu_seqlens=cu, **options))
    padded = block_mask(padded_ids, spec=spec, **options)
    assert_same(padded, reference.block_mask(padded_ids, spec=spec, **options))
    for name in PER_SEQUENCE:
        assert torch.equal(getattr(packed, name), getattr(padded, name)), name
    for s, (start, end) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        for name in PER_TOKEN:
            one, other = getattr(packed, name)[start:end], getattr(padded, name)[s]
            assert torch.equal(one, other[: end - start]), name
    n = int(packed.num_rows)
    assert n == padded.num_rows and torch.equal(packed.row_target[:n], padded.row_target[:n])
    assert torch.equal(packed.row_weight[:n], padded.row_weight[:n])


def uniform_batch(size, prompt, response, extra=0):
    ids = torch.arange(size * (prompt + response + extra)).view(size, -1) % 97
    return ids, torch.full((size,), prompt), torch.full((size,), response)


@pytest.mark.parametrize("pairs", [False, True])
def test_any_order_and_any_split_give_the_same_marks(pairs):
    spec = MaskSpec(4, MASK, seed=5, prefix_noise=0.3, suffix_leak=0.3, pairs=pairs)
    ids, prompt, response = uniform_batch(12, 3, 14, 2)
    response = response - torch.arange(12) % 5
    sample_ids, draw = torch.arange(12) * 1_000_003, torch.arange(12) % 3
    whole = block_mask(ids, prompt, response, spec, sample_ids=sample_ids, draw=draw)
    for part in (torch.randperm(12, generator=torch.manual_seed(0)), torch.arange(5, 9)):
        some = block_mask(
            ids[part], prompt[part], response[part], spec,
            sample_ids=sample_ids[part], draw=draw[part],
        )
        for name in PER_TOKEN + PER_SEQUENCE:
            assert torch.equal(getattr(some, name), getattr(whole, name)[part]), name


def test_rows_are_row_major_with_a_dead_tail():
    ids, prompt, response = uniform_batch(6, 2, 11)
    batch = block_mask(ids, prompt, response, MaskSpec(4, MASK, seed=1))
    n = int(batch.num_rows)
    assert 0 < n < 24 and len(batch.rows) == 24
    assert torch.equal(batch.rows[:n], (batch.labels.reshape(-1) != -100).nonzero()[:, 0])
    assert torch.equal(batch.row_target[:n], ids.reshape(-1)[batch.rows[:n]])
    assert not batch.rows[n:].any() and not batch.row_weight[n:].any()
    assert (batch.row_target[n:] == -100).all() and batch.count.sum() == n
    assert batch.row_weight.dtype == torch.float32


@pytest.mark.parametrize("origin", ["response", "absolute"])
def test_regions(origin):
    """Prompt and what follows the response untouched, prefix clean, suffix all [MASK]."""
    ids, prompt, response = uniform_batch(200, 5, 21, 3)
    batch = block_mask(ids, prompt, response, MaskSpec(8, MASK, block_origin=origin))
    position = torch.arange(29)
    start, end = batch.block_start[:, None], (batch.block_start + batch.block_length)[:, None]
    inside, suffix = (position >= start) & (position < end), (position >= end) & (position < 26)
    marked = batch.labels != -100
    assert torch.equal(batch.noisy_ids == MASK, marked | suffix)
    assert torch.equal(batch.noisy_ids[~(marked | suffix)], ids[~(marked | suffix)])
    assert not (marked & ~inside).any() and torch.equal(batch.labels[marked], ids[marked])
    assert torch.equal(marked.sum(1), batch.count) and (batch.count >= 1).all()
    edges = {5: 8, 13: 8, 21: 5} if origin == "response" else {5: 3, 8: 8, 16: 8, 24: 2}
    found = set(zip(batch.block_start.tolist(), batch.block_length.tolist(), strict=True))
    assert found == set(edges.items())


@pytest.mark.parametrize("length, blocks", [(96, (12, 6, 3, 2)), (100, (13, 7, 4, 2))])
def test_block_counts(length, blocks):
    for size, count in zip((8, 16, 32, 64), blocks, strict=True):
        ids, prompt, response = uniform_batch(1, 3, length)
        spec = MaskSpec(size, MASK, block_factor="sum", empty="skip", weight="flat", low=1.0)
        last = block_mask(ids, prompt, response, spec, block=torch.tensor([count - 1]))
        assert last.block_length == length - size * (count - 1)
        assert last.row_weight.sum() == pytest.approx(count, rel=1e-6)
        with pytest.raises(ValueError, match="block"):
            block_mask(ids, prompt, response, spec, block=torch.tensor([count]))


def test_length_zero_is_not_supervised_and_changes_no_neighbor():
    ids, prompt, response = uniform_batch(3, 4, 9)
    spec = MaskSpec(4, MASK, block_origin="absolute")
    full = block_mask(ids, prompt, response, spec)
    response = torch.tensor([9, 0, 9])
    batch = block_mask(ids, prompt, response, spec)
    assert torch.equal(batch.noisy_ids[1], ids[1]) and (batch.labels[1] == -100).all()
    assert batch.block_length[1] == 0 and batch.count[1] == 0
    assert torch.equal(batch.noisy_ids[[0, 2]], full.noisy_ids[[0, 2]])
    assert block_mask(ids, prompt, response * 0, spec).num_rows == 0


def test_wide_blocks_are_classical_sft():
    """B >= response: one block; marks, labels and weights of classical masking at the same rate."""
    ids, prompt, response = uniform_batch(50, 3, 20, 2)
    for weight in ("count", "rate"):
        spec = MaskSpec(20, MASK, seed=9, weight=weight, empty="skip")
        batch = block_mask(ids, prompt, response, spec)
        rows = torch.arange(50)[:, None]
        rate = batch.rate.double()[:, None]
        u = philox_u24(torch.arange(25), 0, rows, seed=9, stream=Stream.MARKS) / 2**24
        answer = (torch.arange(25) >= 3) & (torch.arange(25) < 23)
        masked = (u < rate) & answer
        assert torch.equal(batch.noisy_ids, torch.where(masked, MASK, ids))
        assert torch.equal(batch.labels, torch.where(masked, ids, -100))
        per_row = 1 / masked.sum(1, keepdim=True) if weight == "count" else 1 / (20 * rate)
        expected = per_row.expand(masked.shape)[masked].float()
        torch.testing.assert_close(batch.row_weight[: len(expected)], expected, rtol=2e-7, atol=0)
        wider = block_mask(ids, prompt, response, replace(spec, block_size=33))
        assert torch.equal(wider.labels, batch.labels)


def test_a_given_rate_replaces_the_drawn_one_and_a_factor_scales_the_weights():
    ids, prompt, response = uniform_batch(40, 2, 15)
    for weight, pairs in (("count", True), ("rate", False), ("flat", True)):
        spec = MaskSpec(5, MASK, seed=3, low=0.2, weight=weight, empty="skip", pairs=pairs)
        drawn = block_mask(ids, prompt, response, spec)
        rate = (drawn.rate * 2**24).long()
        factor = torch.rand(40, dtype=torch.float64, generator=torch.manual_seed(0)) + 0.5
        # The drawn marks depend on the rate alone: other bounds change nothing.
        other = replace(spec, low=0.9)
        given = block_mask(ids, prompt, response, other, rate=rate)
        assert_same(given, drawn)
        scaled = block_mask(ids, prompt, response, spec, factor=factor)
        assert torch.equal(scaled.labels, drawn.labels)
        n = int(drawn.num_rows)
        expected = drawn.row_weight[:n] * factor[drawn.rows[:n] // 17]
        torch.testing.assert_close(scaled.row_weight[:n].double(), expected, rtol=1.2e-7, atol=0)


def test_block_draw_chooses_the_block_and_nothing_else():
    ids, prompt, response = uniform_batch(60, 2, 15)
    spec, draw = MaskSpec(5, MASK, seed=3), torch.arange(60)
    third = block_mask(ids, prompt, response, spec, draw=3)
    mixed = block_mask(ids, prompt, response, spec, draw=draw, block_draw=3)
    given = block_mask(ids, prompt, response, spec, draw=draw, block=third.block)
    assert len(set(third.block.tolist())) == 3
    assert_same(mixed, given)


GOOD = dict(zip(("ids", "prompt_lengths", "response_lengths"), uniform_batch(2, 3, 9), strict=True))
BAD_CALLS = {
    "ids": dict(ids=torch.zeros(2, 12)),
    "packed": dict(ids=torch.zeros(24, dtype=torch.int64)),
    "cu_seqlens": dict(ids=torch.zeros(24).long(), cu_seqlens=torch.tensor([0, 12, 23])),
    "prompt_lengths": dict(prompt_lengths=torch.tensor([3, 4])),
    "response_lengths": dict(response_lengths=torch.tensor([9, 9, 9])),
    "sample_id": dict(sample_ids=torch.tensor([0, -1])),
    r"sample_ids must lie in \[0, 2\^56\)": dict(sample_ids=torch.tensor([0, 1 << 56])),
    "draw": dict(draw=torch.tensor([0])),
    "block": dict(block=torch.tensor([0, 3])),
    "cover every block": dict(block_weights=torch.ones(2, 2).long()),
    "block_weights": dict(block_weights=torch.zeros(2, 3).long()),
    "integers": dict(block_weights=torch.ones(2, 3)),
    "block_draw": dict(block_draw=torch.tensor([0])),
    r"\[0, 2\^24\]": dict(rate=torch.tensor([0, 2**24 + 1])),
    "rate must lie": dict(rate=torch.tensor([-1, 0])),
    "units of": dict(rate=torch.tensor([0.5, 0.5])),
    r"2\^-24, of shape \[2\]": dict(rate=torch.tensor(5)),
    "floating": dict(factor=torch.tensor([1, 2])),
    r"numbers of shape \[2\]": dict(factor=torch.tensor([1.0])),
    "finite": dict(factor=torch.tensor([1.0, float("inf")])),
    "not negative": dict(factor=torch.tensor([1.0, -0.5])),
    "not both": dict(block=torch.zeros(2).long(), block_weights=torch.ones(2, 3).long()),
    "impl": dict(impl="cuda"),
}


@pytest.mark.parametrize("word", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(word):
    with pytest.raises(ValueError, match=word):
        block_mask(**{**GOOD, **BAD_CALLS[word]}, spec=MaskSpec(4, MASK))


BAD_SPECS = {
    "block_size": dict(block_size=0),
    "mask_id": dict(mask_id=-1),
    "low": dict(low=0.6, high=0.5),
    "prefix_noise": dict(prefix_noise=1.5),
    "suffix_leak": dict(suffix_leak=-0.1),
    'empty="skip"': dict(weight="rate"),
    "belongs to": dict(weight="flat", empty="redraw"),
    "pairs": dict(weight="rate", empty="skip", pairs=True),
    "block_origin": dict(block_origin="prompt"),
    "block_factor": dict(block_factor="max"),
}


@pytest.mark.parametrize("word", BAD_SPECS)
def test_bad_specs_say_what_is_wrong(word):
    with pytest.raises(ValueError, match=word):
        MaskSpec(**{"block_size": 4, "mask_id": MASK, **BAD_SPECS[word]})
