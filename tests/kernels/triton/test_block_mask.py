"""block_mask in Triton's interpreter: the bits of the torch implementation, field by field."""

import sys

import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask, reference
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same_fields as assert_same
from kernel_cases import mask_specs

MASK = 99


def both(*args, **options):
    return [block_mask(*args, impl=impl, **options) for impl in ("triton", "torch")]


def packed(prompts, responses, tails, seed=0, dtype=torch.int64):
    """(ids [T], prompt lengths, response lengths, cu_seqlens)."""
    lengths = [sum(parts) for parts in zip(prompts, responses, tails, strict=True)]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(90, (sum(lengths),), generator=generator, dtype=dtype)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return ids, torch.tensor(prompts), torch.tensor(responses), cu_seqlens


@st.composite
def cases(draw):
    spec, size = draw(mask_specs()), draw(st.integers(1, 5))
    lengths = [
        draw(st.lists(st.integers(0, most), min_size=size, max_size=size)) for most in (9, 40, 5)
    ]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    batch = packed(*lengths, draw(st.integers(0, 99)), dtype)
    sample_ids, draws = (
        torch.tensor(draw(st.lists(st.integers(0, most), min_size=size, max_size=size)))
        for most in (2**56 - 1, 2**31)
    )
    options = dict(sample_ids=sample_ids, draw=draws)
    blocks = spec.grid.num_blocks(*batch[1:3])
    choice = draw(st.sampled_from(["uniform", "given", "weights"]))
    if choice == "given":
        options["block"] = draw(st.integers(0, 1000)) % blocks.clamp(min=1)
    if choice == "weights":
        width = max(1, int(blocks.max()))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        most = draw(st.sampled_from([2, 2**24]))  # small weights meet the boundaries between blocks
        weights = torch.randint(most, (size, width), generator=generator)
        weights[:, 0] += weights[:, 0] == 0
        options["block_weights"] = weights
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    if draw(st.booleans()):
        options["block_draw"] = torch.randint(2**31, (size,), generator=generator)
    if draw(st.booleans()):
        options["rate"] = torch.randint(2**24 + 1, (size,), generator=generator)
        options["rate"][0] = draw(st.sampled_from([0, 1, 2**24 - 1, 2**24]))
    if draw(st.booleans()):
        options["factor"] = torch.rand(size, generator=generator, dtype=torch.float64) * 1000
    return batch, spec, options


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(cases())
def test_bits_of_torch(case):
    (ids, prompts, responses, cu_seqlens), spec, options = case
    assert_same(*both(ids, prompts, responses, spec, cu_seqlens=cu_seqlens, **options))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, phases=[Phase.generate])
@given(cases())
def test_bits_of_torch_many(case):
    (ids, prompts, responses, cu_seqlens), spec, options = case
    assert_same(*both(ids, prompts, responses, spec, cu_seqlens=cu_seqlens, **options))


def test_bits_of_the_reference():
    ids, prompts, responses, cu_seqlens = packed([3, 0, 5], [17, 8, 1], [0, 4, 2])
    flat = dict(pairs=True, weight="flat", empty="skip")  # the block of one token has empty halves
    for more in ({}, dict(pairs=True), flat):
        spec = MaskSpec(block_size=4, mask_id=MASK, seed=7, **more)
        for draw in range(4):
            options = dict(cu_seqlens=cu_seqlens, draw=draw)
            own = block_mask(ids, prompts, responses, spec, impl="triton", **options)
            assert_same(own, reference.block_mask(ids, prompts, responses, spec, **options))


def test_given_rates_factors_and_block_draws_are_used():
    ids, prompts, responses, cu_seqlens = packed([2] * 6, [12] * 6, [1] * 6)
    spec = MaskSpec(block_size=4, mask_id=MASK, seed=3, weight="flat", empty="skip")
    rate = torch.tensor([0, 2**24, 2**23, 2**24, 0, 2**23])
    factor = torch.tensor([1, 2, 3, 0.1, 5, 0], dtype=torch.float64)
    options = dict(cu_seqlens=cu_seqlens, rate=rate, factor=factor, block_draw=7)
    own, expected = both(ids, prompts, responses, spec, draw=2, **options)
    assert_same(own, expected)
    assert own.count[rate == 0].sum() == 0 and (own.count[rate == 2**24] == 4).all()
    n = int(own.count[:3].sum())
    assert set(own.row_weight[4:n].tolist()) == {0.75}  # the third sequence, after the second's 4
    seventh = block_mask(ids, prompts, responses, spec, cu_seqlens=cu_seqlens, draw=7)
    assert torch.equal(own.block, seventh.block) and len(set(own.block.tolist())) > 1


@pytest.mark.slow
def test_more_sequences_and_longer_rows_than_one_tile_holds():
    """80 sequences of blocks of 32 take 5 rounds of the row list; 1300 tokens take 3 tiles, and so
    does a block of 1100."""
    spec = MaskSpec(block_size=32, mask_id=MASK, seed=5)
    many = packed([1] * 80, [40] * 80, [0] * 80)
    assert_same(*both(*many[:3], spec, cu_seqlens=many[3]))
    long = packed([100], [1100], [100])
    for more in (dict(pairs=True), dict(high=0.0, low=0.0)):
        spec = MaskSpec(block_size=1100, mask_id=MASK, seed=1, **more)
        own, expected = both(*long[:3], spec, cu_seqlens=long[3], draw=5)
        assert_same(own, expected)
    assert own.count == 1 and own.rows[0] - 100 >= 512  # past the first tile


def test_padded_rows_give_the_marks_of_packed_ones():
    prompts, responses = [3, 7, 0], [20, 5, 11]
    ids, prompts, responses, cu_seqlens = packed(prompts, responses, [0, 0, 0])
    rectangle = torch.full((3, 30), 98)
    for row, (start, stop) in zip(rectangle, cu_seqlens.unfold(0, 2, 1).tolist(), strict=True):
        row[: stop - start] = ids[start:stop]
    spec = MaskSpec(block_size=8, mask_id=MASK, seed=1, suffix_leak=0.5)
    column_major = rectangle.t().contiguous().t()
    own, expected = both(column_major, prompts, responses, spec)
    assert_same(own, expected)
    flat = block_mask(ids, prompts, responses, spec, cu_seqlens=cu_seqlens, impl="triton")
    assert torch.equal(own.row_target[: int(own.num_rows)], flat.row_target[: int(flat.num_rows)])
    assert (own.noisy_ids[:, 23:] == 98).all()


@pytest.mark.parametrize("lengths", [([], [], []), ([4, 2], [0, 0], [1, 0]), ([0], [0], [0])])
def test_nothing_to_mask(lengths):
    ids, prompts, responses, cu_seqlens = packed(*lengths)
    lengths = prompts.long(), responses.long()
    own, expected = both(ids, *lengths, MaskSpec(4, MASK), cu_seqlens=cu_seqlens)
    assert_same(own, expected)
    assert int(own.num_rows) == 0 and torch.equal(own.noisy_ids, ids)


class CountingKernel:
    """Stands in for a kernel and counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


def test_one_launch(monkeypatch):
    block_mask(torch.ones(1, 8).long(), [2], [6], MaskSpec(4, MASK), impl="triton")
    module = sys.modules["bwsft_kernels._block_mask_triton"]
    kernel = CountingKernel(module._block_mask_fwd_kernel)
    monkeypatch.setattr(module, "_block_mask_fwd_kernel", kernel)
    block_mask(torch.ones(6, 80).long(), [2] * 6, [60] * 6, MaskSpec(4, MASK), impl="triton")
    assert kernel.grids == [(1 + 6,)]


def test_rows_past_2_31():
    """40 tokens after 2^31 others: an int32 offset would wrap. Untouched memory costs nothing."""
    from bwsft_kernels import _block_mask_triton as module

    far, length, spec = 2**31 + 16, 40, MaskSpec(8, MASK, seed=3)
    tokens = torch.randint(90, (length,), dtype=torch.int8)
    expected = block_mask(tokens[None], [10], [28], spec, impl="torch")
    torch.use_deterministic_algorithms(False)  # don't fill 6 GB
    ids, noisy, labels = (torch.empty(far + length, dtype=torch.int8) for _ in range(3))
    ids[far:] = tokens
    one = [torch.tensor([n]) for n in (far, length, 10, 28, 0, 0, 0, 0, 0, 0)]
    rows = (torch.empty(8).long(), torch.empty(8).long(), torch.empty(8), torch.empty(1).long())
    counts = [torch.empty(1).long() for _ in range(3)] + [torch.empty(1), torch.empty(1).long()]
    inputs = module.MaskInputs(ids, *one[:6], block=None, block_weights=None)
    module._block_mask_fwd_kernel[(2,)](
        ids, (noisy, labels), rows, tuple(counts), tuple(one), 1, 8, 1, 1, 3, 0,
        PLAN=module.plan_draw(inputs, spec), BLOCK_B=8, BLOCK_Q=1, BLOCK_T=64,
    )
    assert torch.equal(noisy[far:], expected.noisy_ids[0])
    assert torch.equal(labels[far:], expected.labels[0])
    found = int(expected.num_rows)
    assert torch.equal(rows[0][:found], expected.rows[:found] + far)
    assert torch.equal(rows[1], expected.row_target)
