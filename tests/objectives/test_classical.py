"""Objectives over the kernels: which block a visit masks, classical SFT as one wide block, and the
held-out NELBO against exact enumeration. (Marks and weights themselves: test_block_mask*.py.)"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask
from tiny_modes import corrupt
from tiny_objectives import family_of, packed

from bwsft import config as c
from bwsft import presets
from bwsft.objectives import block_choice, blockwise
from bwsft.objectives.classical import Classical
from bwsft.objectives.nelbo import HeldOut

MASK = 99
FAMILY = family_of(MASK)
ORIGINS = ["response", "absolute"]


def batch_of(lengths, *, visit=0, block_size=4, canvas="response", origin="response", first_id=0):
    """Packed rows of (prompt, response) lengths; visit: one number or one per row."""
    return packed(
        FAMILY, [(np.arange(p) % 90, np.arange(r) % 90) for p, r in lengths], visits=visit,
        ids=range(first_id, first_id + len(lengths)), canvas=canvas, block_size=block_size,
        gen_length=8 * block_size, max_length=64, block_origin=origin,
    )


def loss_of_ones(batch, rows, weight):
    """[S] loss if every row's cross-entropy is 1."""
    row = torch.searchsorted(batch.cu_seqlens[1:], rows.int(), right=True)
    return torch.zeros(batch.num_sequences).index_add_(0, row, weight)


LENGTHS = [(3, 16), (5, 1), (2, 4), (7, 13), (1, 21), (4, 5)]


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_traversal_visits_every_block_once(origin):
    spec = MaskSpec(4, MASK, seed=11, block_origin=origin)
    batch = batch_of(LENGTHS, origin=origin)
    counts = block_choice.num_blocks(batch, spec).tolist()
    grid = (0, 0, 0, 0, 0, 0) if origin == "response" else (3, 1, 2, 3, 1, 0)
    assert counts == [math.ceil((into + r) / 4) for (_, r), into in zip(LENGTHS, grid, strict=True)]
    orders = set()
    for traversal in range(4):
        for s, m in enumerate(counts):
            visits = [
                dataclasses.replace(batch, visits=torch.full((len(counts),), traversal * m + turn))
                for turn in range(m)
            ]
            seen = [int(block_choice.choose_blocks(b, spec, "traversal")[s]) for b in visits]
            assert sorted(seen) == list(range(m))
            orders.add((s, *seen))
    assert len(orders) > 2 * len(counts)  # shuffled anew, per example and traversal


def test_sequential_blocks_come_in_turn_and_start_again():
    spec = MaskSpec(4, MASK)
    for visit in range(9):
        chosen = block_choice.choose_blocks(batch_of(LENGTHS, visit=visit), spec, "sequential")
        assert chosen.tolist() == [visit % m for m in (4, 1, 1, 4, 6, 2)]


@pytest.mark.parametrize("order", ["uniform", "traversal", "sequential"])
def test_a_visit_is_the_same_in_any_batch(order):
    """The draw is a function of (seed, example, visit): alone, or with longer neighbours."""
    spec = MaskSpec(4, MASK, seed=5, prefix_noise=0.3, suffix_leak=0.2)
    lengths = [(3, 14)] * 5 + [(2, 30)]
    together, masked = corrupt(batch_of(lengths, visit=range(6)), spec, order)
    for s in range(5):
        alone, one = corrupt(batch_of(lengths[:1], visit=s, first_id=s), spec, order)
        assert torch.equal(together.ids[17 * s : 17 * (s + 1)], alone.ids)
        assert masked.block[s] == one.block and masked.count[s] == one.count
    if order != "uniform":
        assert set(masked.block.tolist()) != {0}


def test_uniform_takes_the_visit_as_the_draw():
    batch, spec = batch_of(LENGTHS, visit=range(6)), MaskSpec(4, MASK, seed=2)
    _, masked = corrupt(batch, spec)
    expected = block_mask(
        batch.ids, batch.prompt_lengths, batch.response_lengths, spec,
        cu_seqlens=batch.cu_seqlens, sample_ids=batch.sample_ids, draw=torch.arange(6),
    )
    assert torch.equal(masked.noisy_ids, expected.noisy_ids)
    assert torch.equal(masked.row_weight, expected.row_weight)


@pytest.mark.parametrize("order", ["uniform", "traversal", "sequential"])
def test_the_draws_of_a_visit_share_the_block_and_not_the_marks(order):
    spec, lengths = MaskSpec(4, MASK, seed=6, empty="skip"), [(3, 16)] * 200
    visits = [corrupt(batch_of(lengths, visit=v), spec, order, d, 3)[1]
              for v in (0, 1) for d in (0, 1, 2)]
    for first in (0, 3):
        one, two, three = visits[first : first + 3]
        assert torch.equal(one.block, two.block) and torch.equal(one.block, three.block)
    labels = [v.labels for v in visits]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(labels, 2))
    if order == "uniform":  # each block of four a quarter of the time, 4.5 standard errors
        shares = torch.bincount(visits[0].block, minlength=4) / 200
        assert ((shares - 0.25).abs() < 4.5 * math.sqrt(0.1875 / 200)).all()
        alone = corrupt(batch_of(lengths, visit=0), spec, order)[1]
        assert torch.equal(alone.block, visits[0].block)


def test_mask_spec_carries_every_choice():
    objective = c.ObjectiveConfig(
        weight="flat", empty="skip", block_factor="sum", low=0.25, high=0.75, prefix_noise=0.1,
        suffix_leak=0.2, pairs=True,
    )
    config = dataclasses.replace(presets.debug(), objective=objective, seed=77, block_size=16)
    family = dataclasses.replace(FAMILY, block_origin="absolute")
    assert blockwise.mask_spec(config, family) == MaskSpec(
        16, MASK, seed=77, low=0.25, high=0.75, weight="flat", empty="skip", block_factor="sum",
        prefix_noise=0.1, suffix_leak=0.2, block_origin="absolute", pairs=True,
    )


@pytest.mark.parametrize("weight", ["count", "rate", "flat"])
@pytest.mark.parametrize("origin", ORIGINS)
def test_classical_is_blockwise_with_one_block(weight, origin):
    """With B >= Lr ids, labels and weights are those of classical SFT."""
    objective = c.ObjectiveConfig(weight=weight, empty="last" if weight == "count" else "skip")
    config = dataclasses.replace(presets.debug(), objective=objective, seed=4)
    family = dataclasses.replace(FAMILY, block_origin=origin)
    wide = dataclasses.replace(config, block_size=64, gen_length=64)
    batch = batch_of([(3, 60), (6, 1), (2, 33)], visit=range(3), canvas="fixed", block_size=8)
    for order in ("uniform", "traversal", "sequential"):
        noisy, ours = corrupt(batch, Classical.of(config, family).spec, order)
        _, theirs = corrupt(batch, blockwise.mask_spec(wide, FAMILY))
        n = int(ours.num_rows)
        assert n == theirs.num_rows and torch.equal(ours.rate, theirs.rate)
        assert torch.equal(ours.noisy_ids, theirs.noisy_ids)
        assert torch.equal(noisy.ids, ours.noisy_ids)
        for name in ("rows", "row_target", "row_weight"):
            assert torch.equal(getattr(ours, name)[:n], getattr(theirs, name)[:n]), name
        assert (ours.block == 0).all()
        assert torch.equal(ours.block_length, batch.response_lengths)


@pytest.mark.parametrize("objective", [blockwise.Blockwise, Classical])
@pytest.mark.parametrize("weight", ["count", "rate", "flat"])
def test_rate_one_masks_everything_and_all_weights_agree(objective, weight):
    choice = c.ObjectiveConfig(weight=weight, empty="skip", low=1.0, high=1.0)
    config = dataclasses.replace(presets.debug(), objective=choice, block_size=4)
    batch = batch_of(LENGTHS)
    noisy, masked = corrupt(batch, objective.of(config, FAMILY).spec)
    torch.testing.assert_close(
        loss_of_ones(batch, masked.rows, masked.row_weight), torch.ones(6), rtol=1e-6, atol=0
    )
    assert torch.equal(masked.count, masked.block_length)
    after_prompt = batch.position_ids >= torch.repeat_interleave(
        batch.prompt_lengths, batch.cu_seqlens.diff().long()
    )
    if objective is Classical:
        assert torch.equal(noisy.ids == MASK, after_prompt)


def test_all_blocks_in_turn_average_to_the_mean_and_add_up_to_the_sum():
    """Constant CE of 1, 10, 100 in the three blocks: mean 37, sum 111, each without variance."""
    batch = batch_of([(2, 12)])
    for factor, expected in (("mean", 37.0), ("sum", 111.0)):
        spec = MaskSpec(4, MASK, block_factor=factor)
        total = 0.0
        for visit in range(3):
            visited = dataclasses.replace(batch, visits=torch.tensor([visit]))
            _, masked = corrupt(visited, spec, "sequential")
            loss = loss_of_ones(batch, masked.rows, masked.row_weight)
            total += float(loss) * 10**visit
        assert total / 3 == pytest.approx(expected, rel=1e-6)


# --- the held-out NELBO ---


@pytest.mark.parametrize("origin", ORIGINS)
def test_states_mask_one_block_and_hide_what_follows(origin):
    spec = MaskSpec(4, MASK, block_origin=origin)
    batch = batch_of(LENGTHS, canvas="fixed", origin=origin)
    row = torch.repeat_interleave(torch.arange(6), batch.cu_seqlens.diff().long())
    end = (batch.prompt_lengths + batch.response_lengths)[row]
    for state in HeldOut(spec=spec, count=5).draws(batch):
        noisy, rows, target, weight = state.noisy, state.rows, state.target, state.weight
        start, stop = state.block_start, state.block_start + state.block_length
        assert torch.equal(target, batch.ids[rows]) and (noisy.ids[rows] == MASK).all()
        torch.testing.assert_close(loss_of_ones(batch, rows, weight), torch.ones(6))
        grid = batch.position_ids if origin == "absolute" else (
            batch.position_ids - batch.prompt_lengths[row]
        )
        active = torch.full((6,), -1).scatter_reduce(0, row[rows], grid[rows] // 4, "amax")
        assert torch.equal(active[row[rows]], grid[rows] // 4)  # one block per sequence
        response = (batch.position_ids >= batch.prompt_lengths[row]) & (batch.position_ids < end)
        later = response & (grid // 4 > active[row])
        marked = torch.zeros_like(response)
        marked[rows] = True
        inside = (batch.position_ids >= start[row]) & (batch.position_ids < stop[row])
        assert torch.equal(inside, response & (grid // 4 == active[row]))
        assert torch.equal(noisy.ids, torch.where(marked | later, MASK, batch.ids))


def test_states_spread_over_the_blocks():
    """As many states as equal blocks: each block exactly once; half as many: every other one."""
    batch, spec = batch_of([(3, 16)] * 50), MaskSpec(4, MASK)
    offset = torch.arange(50)[:, None] * 19 + 3
    for draws in (4, 8, 2):
        blocks = []
        for state in HeldOut(spec=spec, count=draws).draws(batch):
            hit = torch.zeros(50 * 19, dtype=torch.bool)
            hit[state.rows] = True
            blocks.append(hit[offset + torch.arange(16)].view(50, 4, 4).any(-1))
        visits = torch.stack(blocks).long().sum(0)  # [50, 4]
        assert (visits == draws / 4).all() if draws >= 4 else (visits.sum(1) == draws).all()
        if draws == 2:
            assert (visits[:, :2].sum(1) == 1).all()


def test_the_states_of_an_example_have_marks_of_their_own():
    """Of 4 tokens 2 hidden twice: the same 2 in a sixth of the cases, 4.5 standard errors. (States
    0 and 5 mostly have the same count: 5 steps of the golden ratio are 0.09 from a whole.)"""
    batch, spec = batch_of([(3, 4)] * 4000), MaskSpec(4, MASK)
    states = HeldOut(spec=spec, count=6).draws(batch)
    hidden = [(state.noisy.ids == MASK).view(4000, 7) for state in states]
    both = (hidden[0].sum(1) == 2) & (hidden[5].sum(1) == 2)
    same = (hidden[0] == hidden[5]).all(1)[both].double()
    assert len(same) > 500
    assert abs(float(same.mean()) - 1 / 6) < 4.5 * math.sqrt(5 / 36 / len(same))


def toy_cross_entropy(hidden: int, position: int) -> float:
    """A made-up CE of a position, given which of 5 response tokens are hidden (bits)."""
    return ((hidden * 37 + position * 11) % 23) / 7 + 0.3 * position


def exact_bound(length=5, size=3) -> float:
    """Nats per token: for every block, sum over l of (1/l) E over the masked sets of size l."""
    total = 0.0
    for start in range(0, length, size):
        block = range(start, min(start + size, length))
        suffix = sum(1 << i for i in range(start + size, length))
        for count in range(1, len(block) + 1):
            subsets = list(itertools.combinations(block, count))
            sums = [
                sum(toy_cross_entropy(suffix + sum(1 << j for j in chosen), i) for i in chosen)
                for chosen in subsets
            ]
            total += sum(sums) / len(subsets) / count
    return total / length


@pytest.mark.parametrize("draws", [1, 3, 4])
def test_nelbo_is_unbiased_for_exact_enumeration(draws):
    """Blocks of 3 and 2: mean over 6,000 examples within 4.5 standard errors of the truth, which
    a wrong block share, count or set distribution misses by tens of them."""
    table = torch.tensor([[toy_cross_entropy(h, i) for i in range(5)] for h in range(32)])
    estimates = torch.zeros(6000)

    def score(state):
        rows, weight = state.rows, state.weight
        hidden = (state.noisy.ids.view(-1, 7)[:, 2:] == MASK).long() @ (1 << torch.arange(5))
        ce = table[hidden[rows // 7], rows % 7 - 2]
        estimates.index_add_(0, rows // 7, weight * ce / draws)
        return (weight * ce).sum()

    batch = batch_of([(2, 5)] * 6000, block_size=3)
    value = HeldOut(spec=MaskSpec(3, MASK, seed=1), count=draws).nelbo(score, [batch])
    assert value == pytest.approx(float(estimates.mean()), rel=1e-5)
    error = float(estimates.std()) / math.sqrt(6000)
    assert abs(value - exact_bound()) < 4.5 * error
    assert error < 0.02  # the bound is about 3 nats


def test_nelbo_is_fixed_and_needs_no_particular_batches():
    def score(state):
        return (state.weight * state.noisy.ids.sum().remainder(7) * len(state.rows)).sum()

    spec = MaskSpec(4, MASK, seed=9)
    one = [batch_of([length], first_id=i) for i, length in enumerate(LENGTHS)]
    again = HeldOut(spec=spec, count=3).nelbo(score, one)
    assert HeldOut(spec=spec, count=3).nelbo(score, one) == again
    other = dataclasses.replace(spec, seed=10)
    assert HeldOut(spec=other, count=3).nelbo(score, one) != again

    def constant(state):
        return 2.5 * state.weight.sum()

    for batches in (one, [batch_of(LENGTHS)]):
        assert HeldOut(spec=spec, count=3).nelbo(constant, batches) == pytest.approx(2.5, rel=1e-6)
