"""The distribution of one draw, by enumeration of every order of a rate and its tokens' numbers.

For a rate and B numbers that are uniform on (0, 1) only their order matters, and all (B + 1)!
orders have one chance, as have the B tokens that a redraw may choose. So the sums below are the
expectations themselves, at low 0 and high 1.
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask
from bwsft_kernels import _block_mask_torch as module
from bwsft_kernels.philox import Stream

MASK = 99
ONE24 = 1 << 24


@pytest.fixture
def every_order(monkeypatch):
    """draws(B, **options of MaskSpec) -> marks [S, B] and weights [S, B] of all orders, fp64."""

    def draws(size, steps=None, half=0, **options):
        """steps: numbers of so many values each, independent, in the place of orders; half: of a
        pair."""
        values = range(size + 1) if steps is None else range(steps)
        sets = itertools.permutations(values) if steps is None else itertools.product(
            values, repeat=size + 1)
        cases = [(*order, token) for order in sets for token in range(size)]
        table = torch.tensor(cases)
        numbers = table[:, : size + 1] * (ONE24 // len(values)) + 1
        token = table[:, -1:] * ONE24 // size + 1  # floor(u size) is the token

        def u24(position, draw, sample_ids, *, seed, stream):
            if stream == Stream.MARKS:
                return numbers[sample_ids, position + 1]
            assert stream in (Stream.RATE, Stream.BLOCK) and position in (0, 1)
            return (token if position else numbers)[sample_ids, 0]

        monkeypatch.setattr(module, "philox_u24", u24)
        spec = MaskSpec(size, MASK, **{"low": 0.0, **options})
        count = len(cases)
        lengths = torch.zeros(count).long(), torch.full((count,), size)
        ids = torch.ones(count, size).long()
        masked = block_mask(ids, *lengths, spec, draw=half, impl="torch")
        weights = torch.zeros(count * size, dtype=torch.float64)
        weights.index_add_(0, masked.rows, masked.row_weight.double())
        return masked.labels == 1, weights.view(count, size)

    return draws


def distribution(marks):
    """Chance of every masked set."""
    return {s: n / len(marks) for s, n in Counter(map(tuple, marks.tolist())).items()}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("empty", ["redraw", "last", "skip"])
def test_expected_weight_of_every_token(every_order, size, empty):
    _, weights = every_order(size, empty=empty)
    own = 1 / (size + 1)
    expected = torch.full((size,), 1 / size if empty == "redraw" else own).double()
    expected[-1] += own if empty == "last" else 0  # twice the others'
    torch.testing.assert_close(weights.mean(0), expected, rtol=1e-7, atol=0)  # fp32 weights


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_redraw_is_distributed_as_a_draw_that_masked_something(every_order, size):
    """The masked count is uniform on 1..B, and its set uniform given the count."""
    redrawn = distribution(every_order(size, empty="redraw")[0])
    skipped = distribution(every_order(size, empty="skip")[0])
    nothing = (False,) * size
    assert skipped.pop(nothing) == pytest.approx(1 / (size + 1), rel=1e-12)
    assert redrawn.keys() == skipped.keys() and len(redrawn) == 2**size - 1
    for marks, chance in redrawn.items():
        assert chance == pytest.approx(skipped[marks] * (size + 1) / size, rel=1e-12)
        assert chance == pytest.approx(1 / (size * math.comb(size, sum(marks))), rel=1e-12)


def test_redrawn_losses_estimate_the_bound_per_token(every_order):
    """For losses that depend in any way on what is masked: (1 / B) sum over l of the mean loss of
    the masked sets of l tokens. Masking the last token estimates something else."""
    size, generator = 4, torch.Generator().manual_seed(0)
    sets = [s for s in itertools.product((False, True), repeat=size) if any(s)]
    loss = {s: torch.rand(size, generator=generator, dtype=torch.float64) for s in sets}
    bound = sum(
        float(loss[s][list(s)].mean()) / math.comb(size, sum(s)) for s in sets) / size  # fmt: skip

    def estimate(empty):
        marks, weights = every_order(size, empty=empty)
        losses = torch.stack([loss[tuple(m)] for m in marks.tolist()])
        return float((weights * losses).sum(1).mean())

    assert estimate("redraw") == pytest.approx(bound, rel=1e-7)
    assert abs(estimate("last") / bound - 1) > 0.02


@pytest.mark.parametrize("options", [
    dict(low=0.3, high=0.7), dict(low=0.4, high=0.4), dict(low=0.5), dict(high=0.2),
    dict(pairs=True), dict(low=0.3, high=0.7, pairs=True),
])  # fmt: skip
def test_redrawn_tokens_weigh_the_same_at_any_rates(every_order, options):
    """Independent numbers of 8 values, ties among them; no rate beyond the highest."""
    size = 3
    halves = [every_order(size, steps=8, half=half, empty="redraw", **options) for half in (0, 1)]
    assert halves[0][0].any(1).all()
    mean = sum(weights.mean(0) for _, weights in halves) / 2
    torch.testing.assert_close(mean, torch.full((size,), 1 / size).double(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("weight", ["count", "sum"])
@pytest.mark.parametrize("empty", ["redraw", "skip"])
def test_a_pair_weighs_every_state_as_draws_without_pairs_do(every_order, size, weight, empty):
    """Also the whole block masked, the decoder's first state."""

    def by_state(marks, weights):
        found = Counter()
        for state, own in zip(map(tuple, marks.tolist()), weights.sum(1).tolist(), strict=True):
            found[state] += own / len(marks)
        found.pop((False,) * size, None)
        return found

    options = dict(weight=weight, empty=empty)
    single = by_state(*every_order(size, **options))
    halves = [every_order(size, half=half, pairs=True, **options) for half in (0, 1)]
    pair = by_state(*(torch.cat(parts) for parts in zip(*halves, strict=True)))
    assert pair == pytest.approx(single, rel=1e-6) and len(single) == 2**size - 1
    assert torch.equal(halves[0][0], ~halves[1][0])
    total = sum(weights.sum(1) for _, weights in halves)
    if weight == "count" and empty == "redraw":  # no variance from the count
        torch.testing.assert_close(total, torch.full_like(total, 2), rtol=1e-6, atol=0)
