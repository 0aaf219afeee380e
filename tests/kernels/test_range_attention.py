"""range_attention in torch on a CPU: plans, values, gradients, what is refused."""

from unittest import mock

import pytest
import range_cases as cases
import torch
from bwsft_kernels import _range_attention_torch, cache_plan, range_attention, range_plan
from hypothesis import given, settings
from hypothesis import strategies as st

FEW = settings(max_examples=40, deadline=None)


def rows_in_tiles(tiles):
    return [row for start, stop in tiles.tolist() for row in range(start, stop)]


@FEW
@given(layout=cases.layouts())
def test_a_plan_says_what_its_words_say(layout):
    plan, rows = range_plan(**layout)
    count = len(rows.position)
    seen = cases.mask_of(plan.query_ranges, count)
    assert torch.equal(seen, cases.visible(rows, **layout))
    assert torch.equal(cases.mask_of(plan.key_ranges, count), seen.t())
    assert rows_in_tiles(plan.query_tiles) == rows_in_tiles(plan.key_tiles) == list(range(count))
    same, _ = range_plan(**layout, rows=count)
    assert all(torch.equal(t, vars(same)[name]) for name, t in vars(plan).items())
    # Of each sequence the clean tokens in order, and every response token once in each copy.
    for number, prompt in enumerate(layout["prompt_lengths"].tolist()):
        own = rows.sequence == number
        length = prompt + int(layout["response_lengths"][number])
        for copy in range(layout["copies"] + 1):
            position = rows.position[own & (rows.copy == copy)].tolist()
            assert position == list(range(length - len(position), length))
            assert len(position) == length if copy == 0 else len(position) >= length - prompt


def test_the_order_of_rows_by_hand():
    """Prompt of 2, response of 5, blocks of 2, two copies: clean, then block by block, or group by
    group."""
    lengths = torch.tensor([2]), torch.tensor([5])
    _, rows = range_plan(*lengths, 2, copies=2)
    assert rows.position.tolist() == [*range(7), 2, 3, 2, 3, 4, 5, 4, 5, 6, 6]
    assert rows.copy.tolist() == [0] * 7 + [1, 1, 2, 2] * 2 + [1, 2]
    _, rows = range_plan(*lengths, 2, copies=2, group=2)
    assert rows.position.tolist() == [*range(7), 2, 3, 4, 5, 2, 3, 4, 5, 6, 6]
    assert rows.copy.tolist() == [0] * 7 + [1] * 4 + [2] * 4 + [1, 2]
    plan, rows = range_plan(*lengths, 2, group=2, group_offset=torch.tensor([1]))
    assert rows.position.tolist() == [*range(7), 2, 3, 4, 5, 6]
    assert plan.query_ranges[:, 7:].T.tolist() == [[0, 2, 7, 9]] * 2 + [[0, 4, 9, 11]] * 2 + [
        [0, 4, 9, 12]]


@settings(max_examples=60, deadline=None)
@given(layout=cases.layouts(), seed=st.integers(0, 99), width=st.sampled_from([1, 8, 20]),
       dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
       heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]), pairs=st.sampled_from([0, 300, 1 << 15]))
def test_values_and_gradients(layout, seed, width, dtype, heads, pairs):
    """By slices alone, some rows under masks, and most of them."""
    plan, rows = range_plan(**layout)
    if len(rows.position) * width < 64:  # too few to compare two norms of rounding
        dtype = torch.float64
    with mock.patch.object(_range_attention_torch, "MOST_PAIRS", pairs):
        cases.check_against_dense(plan, cases.tensors(plan, dtype, heads, width, seed), "torch")


def test_short_sequences_take_one_call_each():
    """Long ones for what is before each block, and eight own blocks in one, but for their begin."""
    for lengths, calls, masks in (((50, 40, 8), 1, 1), ((128, 512, 32), 33, 1)):
        prompts, responses, _ = (torch.tensor([n] * 3) for n in lengths)
        plan = range_plan(prompts, responses, lengths[2])[0]
        parts = list(_range_attention_torch._parts(plan.query_ranges))
        masked = [part.mask for part in parts if part.mask is not None]
        assert (len(parts), len(masked)) == (3 * calls, 3 * masks)
        most = plan.query_ranges.size(1) * _range_attention_torch.MOST_KEYS
        assert sum(mask.numel() for mask in masked) <= most


def test_inference_mode_gives_the_same():
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            plan, _ = range_plan(torch.tensor([3, 9]), torch.tensor([13, 8]), 4)
            found.append(range_attention(*cases.tensors(plan, torch.float32, (2, 1), 8)[:3], plan))
    assert torch.equal(*found)


@pytest.mark.parametrize("clean", ["block", "causal"])
def test_gradcheck(clean):
    plan, _ = range_plan(torch.tensor([2, 1]), torch.tensor([3, 2]), 2, clean=clean)
    leaves = [x.requires_grad_() for x in cases.tensors(plan, torch.float64, (2, 1), 2)[:3]]
    assert torch.autograd.gradcheck(lambda *x: range_attention(*x, plan, scale=0.7), leaves)


@FEW
@given(layout=cases.layouts(), data=st.data())
def test_a_part_of_a_plan(layout, data):
    """Some queries and keys see each other as they did among all rows, gradients included."""
    plan, rows = range_plan(**layout)
    count = len(rows.position)
    one = st.integers(0, count - 1) if count else st.nothing()
    queries, keys = (
        torch.tensor(sorted(data.draw(some)), dtype=torch.int64)
        for some in (st.lists(one), st.sets(one)))  # queries may come again
    part = plan.part(queries, keys)
    seen = cases.mask_of(plan.query_ranges, count)[queries][:, keys]
    assert torch.equal(cases.mask_of(part.query_ranges, len(keys)), seen)
    assert torch.equal(cases.mask_of(part.key_ranges, len(queries)), seen.t())
    assert rows_in_tiles(part.query_tiles) == list(range(len(queries)))
    assert rows_in_tiles(part.key_tiles) == list(range(len(keys)))
    cases.check_against_dense(part, cases.tensors(part, torch.float64), "torch")


def test_a_cache():
    """A block of 2 after 3 and after 5 tokens; then ragged: a finished block and the one after it,
    a prompt, a row that sees nothing."""
    even = cache_plan(torch.tensor([5, 5, 7, 7]), torch.tensor([0, 2, 4]), 8)
    assert even.query_ranges[:2].T.tolist() == [[0, 5]] * 2 + [[8, 15]] * 2
    ragged = cache_plan(
        torch.tensor([5, 5, 7, 7, 3, 3, 3, 0, 8]), torch.tensor([0, 4, 7, 7, 9]), 8)
    assert ragged.query_ranges[1].tolist() == [5, 5, 7, 7, 11, 11, 11, 24, 32]
    for plan in (even, ragged):
        keys = plan.key_ranges.size(1)
        seen = cases.mask_of(plan.query_ranges, keys)
        assert torch.equal(cases.mask_of(plan.key_ranges, len(seen)), seen.t())
        assert rows_in_tiles(plan.key_tiles) == list(range(keys))
        assert rows_in_tiles(plan.query_tiles) == list(range(len(seen)))
        cases.check_against_dense(plan, cases.tensors(plan, torch.float32), "torch")
    q, k, v, _ = cases.tensors(ragged, torch.float32)
    assert not range_attention(q, k, v, ragged)[7].any()  # it sees nothing


def test_the_state_of_a_layer():
    """Tensors that aren't contiguous, autocast, an upstream gradient that is expanded."""
    plan = cases.example()
    q, k, v, upstream = cases.tensors(plan, torch.float32, (2, 2), 8)
    joint = torch.stack((q, k, v), 2).flatten(1).unflatten(1, (2, 3, 8))
    expected = cases.with_gradients(lambda *x: range_attention(*x, plan), q, k, v, upstream)
    found = cases.with_gradients(
        lambda *x: range_attention(*(t.flip(0).flip(0) for t in x), plan),
        *joint.unbind(2), upstream)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    mean = cases.with_gradients(
        lambda *x: range_attention(*x, plan), q, k, v, torch.ones(1, 1, 1).expand(q.shape))
    torch.testing.assert_close(mean[3].sum((0, 2)), torch.full((2,), 8.0 * int(
        cases.mask_of(plan.query_ranges, len(q)).any(1).sum())))
    with torch.autocast("cpu", torch.bfloat16):
        assert range_attention(q, k.bfloat16(), v, plan).dtype == torch.bfloat16
        assert range_attention(*(x.double() for x in (q, k, v)), plan).dtype == torch.float64


def test_what_is_kept_for_backward():
    """Rows and a few integers for each, no pairs."""
    plan = range_plan(torch.tensor([64]), torch.tensor([448]), 32, copies=2)[0]
    q, k, v, upstream = cases.tensors(plan, torch.float32, (1, 1), 8)
    q.requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        range_attention(q, k, v, plan)
    assert sum(kept.values()) <= 4 * (4 * q.numel() + 13 * len(q))


PLAN = cases.example()
Q, K, V, _ = cases.tensors(PLAN, torch.float32)
LENGTHS = torch.tensor([3]), torch.tensor([4])
REFUSED = [
    ("q must be .T, H, E.", lambda: range_attention(Q[0], K, V, PLAN)),
    ("q must be .T, H, E.", lambda: range_attention(Q, K, V[:, :, :3], PLAN)),
    ("one dtype", lambda: range_attention(Q, K.double(), V, PLAN)),
    ("not a multiple", lambda: range_attention(Q[:, :1], K.repeat(1, 2, 1), V.repeat(1, 2, 1),
                                               PLAN)),
    ("1 to 256 entries", lambda: range_attention(*(x.repeat(1, 1, 20) for x in (Q, K, V)), PLAN)),
    ("the plan is for", lambda: range_attention(Q[1:], K, V, PLAN)),
    ("move it with plan.to", lambda: range_attention(Q, K, V, PLAN.to("meta"))),
    ("must be floating point", lambda: range_attention(Q.int(), K, V, PLAN)),
    ("impl must be", lambda: range_attention(Q, K, V, PLAN, impl="cuda")),
    ("clean must be one of", lambda: range_plan(*LENGTHS, 4, clean="none")),
    ("copies must be at least 1", lambda: range_plan(*LENGTHS, 4, copies=0)),
    ("block_size must be at least 1", lambda: range_plan(*LENGTHS, 0)),
    ("group must be at least 1", lambda: range_plan(*LENGTHS, 4, group=0)),
    ("an integer for each", lambda: range_plan(*LENGTHS, 4, group_offset=torch.zeros(2).int())),
    ("must lie in .0, 2", lambda: range_plan(*LENGTHS, 4, group=2, group_offset=LENGTHS[0])),
    ('needs origin="absolute"', lambda: range_plan(*LENGTHS, 4, prompt_blocks=True)),
    ("prompt_lengths must be integers", lambda: range_plan(LENGTHS[0].float(), LENGTHS[1], 4)),
    ("one entry for each", lambda: range_plan(torch.tensor([1, 2]), LENGTHS[1], 4)),
    ("a length is negative", lambda: range_plan(-LENGTHS[0], LENGTHS[1], 4)),
    ("the batch has 11", lambda: range_plan(*LENGTHS, 4, rows=12)),
    ("stops must rise", lambda: cache_plan(torch.tensor([4, 3]), torch.tensor([0, 2]), 8)),
    ("stops must rise", lambda: cache_plan(torch.tensor([9]), torch.tensor([0, 1]), 8)),
    ("stops must be integers", lambda: cache_plan(torch.tensor([[9]]), torch.tensor([0, 1]), 8)),
]


@pytest.mark.parametrize("match, call", REFUSED)
def test_refused(match, call):
    with pytest.raises(ValueError, match=match):
        call()
