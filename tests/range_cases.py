"""Layouts of range attention and their dense reference, for tests in torch and in Triton."""

import torch
import torch.nn.functional as F
from bwsft_kernels import range_attention, range_plan
from bwsft_kernels.block_grid import BlockGrid
from hypothesis import strategies as st


@st.composite
def layouts(draw, longest=40, copies=3):
    """Arguments of range_plan: ragged, empty prompts and responses, both grids, groups."""
    count = draw(st.integers(0, 3))
    lengths = st.lists(st.integers(0, longest), min_size=count, max_size=count)
    origin, group = draw(st.sampled_from(["response", "absolute"])), draw(st.integers(1, 4))
    offsets = st.lists(st.integers(0, group - 1), min_size=count, max_size=count)
    return dict(
        prompt_lengths=torch.tensor(draw(lengths), dtype=torch.int64),
        response_lengths=torch.tensor(draw(lengths), dtype=torch.int64),
        block_size=draw(st.integers(1, 9) | st.just(32)), origin=origin,
        copies=draw(st.integers(1, copies)), clean=draw(st.sampled_from(["block", "causal"])),
        prompt_blocks=origin == "absolute" and draw(st.booleans()), group=group,
        group_offset=torch.tensor(draw(offsets), dtype=torch.int64),
    )


def block_numbers(position, prompt, block_size, origin, prompt_blocks):
    """0 for a whole prompt, then 1, 2, ... on the grid."""
    if prompt_blocks:
        return position // block_size + 1
    grid = BlockGrid(block_size, origin)
    return torch.where(position < prompt, 0, grid.index_of(position, prompt) + 1)


def visible(
    rows, prompt_lengths, block_size, origin, clean, prompt_blocks, group, group_offset, **_
):
    """Boolean [T, T] from the words of range_plan: the query (first) may see the key (second)."""
    grid = block_size, origin, prompt_blocks
    numbers = block_numbers(rows.position, prompt_lengths[rows.sequence], *grid)
    first = block_numbers(prompt_lengths, prompt_lengths, *grid)[rows.sequence]
    groups = (numbers - first + group_offset[rows.sequence]).div(group, rounding_mode="floor")
    groups = torch.where(numbers < first, -1, groups)  # of prompts
    order = rows.position if clean == "causal" else numbers
    same = rows.sequence[:, None] == rows.sequence
    clean_key, clean_query = rows.copy == 0, (rows.copy == 0)[:, None]
    among_clean = clean_query & clean_key & (order <= order[:, None])
    before = ~clean_query & clean_key & (groups < groups[:, None])
    own = ~clean_query & (rows.copy == rows.copy[:, None]) & (groups == groups[:, None])
    own &= numbers <= numbers[:, None]
    return same & (among_clean | before | own)


def mask_of(ranges, count):
    """Boolean [rows, count] of two ranges each; they must not overlap."""
    place = torch.arange(count, device=ranges.device)
    first, second = (
        (place >= start[:, None]) & (place < stop[:, None]) for start, stop in ranges.split(2))
    assert not (first & second).any()
    return first | second


def dense(q, k, v, mask):
    """torch's attention with a mask [T, N] and repeated heads; zeros where a row has no key."""
    group = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask)
    return out[0].transpose(0, 1).masked_fill(~mask.any(1)[:, None, None], 0.0)


def tensors(plan, dtype, heads=(2, 1), width=16, seed=0):
    """(q, k, v, upstream gradient) of a plan's sizes."""
    generator = torch.Generator().manual_seed(seed)
    rows, keys = plan.query_ranges.size(1), plan.key_ranges.size(1)
    sizes = (rows, heads[0]), (keys, heads[1]), (keys, heads[1]), (rows, heads[0])
    return [torch.randn(*size, width, generator=generator, dtype=torch.float64).to(dtype)
            for size in sizes]


def with_gradients(attend, q, k, v, upstream, dtype=None):
    """[out, dQ, dK, dV], computed in `dtype`."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def check_against_dense(plan, case, impl):
    """At most twice the error of torch's dense attention in the same dtype, against float64."""
    mask = mask_of(plan.query_ranges, plan.key_ranges.size(1))
    truth = with_gradients(lambda *x: dense(*x, mask), *case, dtype=torch.float64)
    plain = with_gradients(lambda *x: dense(*x, mask), *case)
    found = with_gradients(lambda *x: range_attention(*x, plan, impl=impl), *case)
    if case[0].dtype == torch.float64:
        return torch.testing.assert_close(found, truth)
    eps = torch.finfo(case[0].dtype).eps
    for name, one, other, true in zip(("out", "q", "k", "v"), found, plain, truth, strict=True):
        error, allowed = ((x.double() - true).norm() for x in (one, other))
        # Where a row sees one key dense attention has no error at all, and no gradient of scores;
        # and the fewer the numbers, the more two norms of rounding differ by chance.
        count = max(true.numel(), 1) ** 0.5
        luck = eps * true.norm() * (1 / 4 + 2 / count)
        if name in ("q", "k"):
            luck += 4 * torch.finfo(torch.float32).eps * count
        assert error <= 2 * allowed + luck, name


def example(**changes):
    """A plan of three ragged sequences, one without a response."""
    options = dict(block_size=4, copies=2) | changes
    return range_plan(torch.tensor([3, 5, 0]), torch.tensor([10, 0, 5]), **options)[0]
