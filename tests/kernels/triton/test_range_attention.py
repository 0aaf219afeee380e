"""range_attention in Triton's interpreter: values and gradients, what isn't read, layouts."""

import pytest
import range_cases as cases
import torch
from bwsft_kernels import _range_tiles, cache_plan, range_attention, range_plan
from bwsft_kernels._range_plan import TILE
from bwsft_kernels._range_tiles import RangeTile
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from kernel_cases import past_2_31

# Weights of keys that a row doesn't see are dropped after exp2, which may be infinite.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow", "ignore:invalid value", "ignore:All-NaN")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that small batches have several tiles, and a tile of the plan several parts."""
    monkeypatch.setattr(_range_tiles, "TABLE", {
        key: (RangeTile(32, 16, 4, 1),) * 4 for key in _range_tiles.TABLE})


ANY = dict(layout=cases.layouts(), seed=st.integers(0, 99), width=st.sampled_from([8, 16, 20]),
           dtype=st.sampled_from([torch.float32, torch.float16]),
           heads=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2)]))


def check_a_layout(layout, seed, width, dtype, heads):
    plan, rows = range_plan(**layout)
    assume(len(rows.position) * width >= 64)  # or there are too few to compare norms of rounding
    cases.check_against_dense(plan, cases.tensors(plan, dtype, heads, width, seed), "triton")


@settings(max_examples=3, deadline=None, phases=[Phase.generate])
@given(**ANY)
def test_values_and_gradients(**case):
    check_a_layout(**case)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
@given(**ANY)
def test_values_and_gradients_of_many(**case):
    check_a_layout(**case)


@pytest.mark.parametrize("dtype, layout", [
    # One clean row, one noisy.
    (torch.float32, dict(prompt_lengths=[0], response_lengths=[1], block_size=4)),
    (torch.float16, dict(prompt_lengths=[1], response_lengths=[0], block_size=4)),
    (torch.float32, dict(prompt_lengths=[40, 9], response_lengths=[50, 33], block_size=32,
                         copies=2)),
    (torch.float16, dict(prompt_lengths=[21, 5], response_lengths=[14, 0], block_size=8,
                         origin="absolute", prompt_blocks=True, clean="causal")),
    (torch.float32, dict(prompt_lengths=[9, 3], response_lengths=[43, 30], block_size=8, copies=2,
                         origin="absolute", group=3, group_offset=[1, 2])),
])
def test_named_layouts(dtype, layout):
    lengths = {name: torch.tensor(layout.pop(name)) for name in (
        "prompt_lengths", "response_lengths", "group_offset") if name in layout}
    plan, _ = range_plan(**lengths, **layout)
    cases.check_against_dense(plan, cases.tensors(plan, dtype, (2, 1)), "triton")


def test_a_cache_with_a_row_that_sees_nothing():
    plan = cache_plan(torch.tensor([17] * 8 + [24] * 8 + [0] * 8 + [40] * 8),
                      torch.tensor([0, 16, 32]), 40)
    cases.check_against_dense(plan, cases.tensors(plan, torch.float32, (4, 2)), "triton")


def test_a_part_in_which_queries_come_again():
    """More of them than a tile holds, in the place of one tile of the whole plan."""
    plan, rows = range_plan(torch.tensor([5]), torch.tensor([60]), 32, copies=2)
    noisy = rows.copy.nonzero()[:, 0].repeat_interleave(2)
    part = plan.part(noisy)
    assert len(noisy) > 128 and int(part.query_tiles.diff(dim=1).max()) <= 128
    cases.check_against_dense(part, cases.tensors(part, torch.float32), "triton")


def test_other_sequences_are_not_read():
    """NaN in a sequence stays there, forward and backward, though tiles are wider than it."""
    plan, rows = range_plan(torch.tensor([5, 6, 3]), torch.tensor([9, 7, 4]), 4, copies=2)
    case = cases.tensors(plan, torch.float32)
    bad = rows.sequence == 1
    clean = cases.with_gradients(lambda *x: range_attention(*x, plan, impl="triton"), *case)
    for x in case:
        x[bad] = float("nan")
    found = cases.with_gradients(lambda *x: range_attention(*x, plan, impl="triton"), *case)
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one[~bad], other[~bad]) and one[bad].isnan().all()


def test_what_no_row_of_a_tile_sees_is_not_read():
    """Keys that no query of a tile sees may be NaN, and queries that see no key of a tile."""
    plan, _ = range_plan(torch.tensor([20]), torch.tensor([30]), 8, copies=2)
    q, k, v, upstream = cases.tensors(plan, torch.float32, (1, 1))
    seen = cases.mask_of(plan.query_ranges, len(q))
    for begin, end in ((32, 50), (50, 82), (82, len(q))):  # of 50 clean and 60 noisy rows
        own = slice(begin, end)
        hidden = ~seen[own].any(0)[:, None, None]
        spoiled = (x.masked_fill(hidden, float("nan")) for x in (k, v))
        assert range_attention(q, *spoiled, plan, impl="triton")[own].isfinite().all()
        unseeing = ~seen[:, own].any(1)[:, None, None]
        spoiled = (x.masked_fill(unseeing, float("nan")) for x in (q, upstream))
        leaves = [k.clone().requires_grad_(), v.clone().requires_grad_()]
        one, other = spoiled
        out = range_attention(one, *leaves, plan, impl="triton")
        for grad in torch.autograd.grad(out, leaves, other):
            assert grad[own].isfinite().all()


def test_layouts_of_tensors_and_the_same_bits_again():
    plan = cases.example()
    q, k, v, upstream = cases.tensors(plan, torch.float32, (2, 2), 8)

    def run(*x):
        return cases.with_gradients(lambda *t: range_attention(*t, plan, impl="triton"), *x)

    expected = run(q, k, v, upstream)
    joint = torch.stack((q, k, v), 2).flatten(1).unflatten(1, (2, 3, 8))
    split = [x.requires_grad_() for x in joint.unbind(2)]
    out = range_attention(*split, plan, impl="triton")
    grads = torch.autograd.grad(out, split, upstream.transpose(1, 2).contiguous().transpose(1, 2))
    for one, other in zip((out, *grads), expected, strict=True):
        assert torch.equal(one, other)
    far = [x.new_zeros(*x.shape[:2], 2, 8).index_copy_(2, torch.tensor([1]), x[:, :, None])[:, :, 1]
           for x in (q, k, v)]
    strided = [x.flatten(1).unflatten(1, (2, 8)) for x in far]
    for one, other in zip(run(*strided, upstream), expected, strict=True):
        assert torch.equal(one, other)


def test_rows_past_2_31():
    far = past_2_31()
    plan, _ = range_plan(torch.tensor([1]), torch.tensor([2]), 2)
    q, k, v, _ = cases.tensors(plan, torch.float16, (1, 1), 8)
    expected = range_attention(q, k, v, plan, impl="triton")
    for index in range(3):
        moved = [far(x) if index == i else x for i, x in enumerate((q, k, v))]
        assert torch.equal(range_attention(*moved, plan, impl="triton"), expected)


def test_every_tile_divides_the_plans(monkeypatch):
    monkeypatch.undo()
    for (_, _, size), tiles in _range_tiles.TABLE.items():
        for tile in tiles:
            assert TILE % tile.rows == 0 and min(tile.rows, tile.cols) >= 16, size
