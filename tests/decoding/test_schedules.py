"""Schedules of the planned rules: numbers by hand, by enumeration, and distributions of times."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.plan import hitting_shares, masked_share, quotas, routed_shares
from bwsft.decoding.rules import hitting_times

ONE = 2**24


def left(masked, steps, schedule):
    shares = routed_shares(masked, steps, schedule)
    return [masked - sum(shares[: i + 1]) for i in range(steps)]


def test_what_the_schedules_of_rdm_leave_by_hand():
    assert left(32, 8, "cosine") == [31, 29, 26, 22, 17, 12, 6, 0]
    assert left(32, 8, "linear") == [28, 24, 20, 16, 12, 8, 4, 0]
    # A floor of the float share gives 3, 1, 0, 0 at the end.
    assert left(10, 10, "linear") == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert left(4, 3, "cosine") == [3, 2, 0]
    for steps in range(3, 100, 3):  # cos 60 degrees is 1/2, and a double may be less
        assert left(16, steps, "cosine")[2 * steps // 3 - 1] == 8
    assert masked_share(3, 4, "linear") == 0 == pytest.approx(masked_share(3, 4, "cosine"))


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from(["linear", "cosine"]))
def test_routed_shares_fill_a_block_and_never_wait_at_first(masked, steps, schedule):
    shares = routed_shares(masked, steps, schedule)
    assert len(shares) == steps and sum(shares) == masked
    assert shares[0] >= 1 and min(shares) >= 0


@given(st.integers(1, 16), st.integers(1, 8))
def test_the_linear_schedule_is_that_of_llada_where_steps_divide(steps, each):
    assert routed_shares(steps * each, steps, "linear") == quotas(steps * each, steps)


def test_hitting_shares_by_hand():
    times = [int(t * ONE) for t in (0.95, 0.1, 0.5, 0.92, 0.3, 0.05)]
    assert hitting_shares(times, None, None) == [1] * 6
    assert hitting_shares(times, None, (0.2, 0.9)) == [2, 1, 1, 2]
    assert hitting_shares(times, None, (0.4, 0.9)) == [2, 1, 3]
    assert hitting_shares(times, None, (0.0, 0.97)) == [1] * 6
    assert hitting_shares(times, 2, None) == [3, 3]  # 1/2 is the start of the upper half
    assert hitting_shares(times, 10, None) == [2, 1, 1, 2]  # 0.1 is rounded down
    assert hitting_shares([], None, None) == []
    assert hitting_shares([7, 7], None, None) == [1, 1]


@pytest.mark.parametrize("open_slots", [1, 2, 3])
@pytest.mark.parametrize("low, high", [(0, 8), (2, 7), (3, 4)])
def test_expected_steps_of_a_clipped_block_by_enumeration(open_slots, low, high):
    """Times on a grid of eighths: the two ends take a step if they hold a time, the rest one step
    for each of its times."""
    cells = [ONE // 8 * i for i in range(8)]
    found = [
        len(hitting_shares(times, None, (low / 8, high / 8)))
        for times in itertools.product(cells, repeat=open_slots)
    ]
    below, above = Fraction(low, 8), Fraction(8 - high, 8)
    ends = 2 - (1 - above) ** open_slots - (1 - below) ** open_slots
    assert Fraction(sum(found), len(found)) == ends + open_slots * (1 - above - below)


def test_expected_steps_of_the_ancestral_sampler_by_enumeration():
    cells = [ONE // 8 * i for i in range(8)]
    for intervals, n in ((2, 3), (4, 3), (8, 2)):
        times = itertools.product(cells, repeat=n)
        found = [len(hitting_shares(t, intervals, None)) for t in times]
        expected = intervals * (1 - (1 - Fraction(1, intervals)) ** n)
        assert Fraction(sum(found), len(found)) == expected


def chi_square(counts, probabilities):
    expected = [sum(counts) * p for p in probabilities]
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


def bound(freedom):
    """Chi-square exceeds this once in a million (Wilson and Hilferty's cube)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4.753 * math.sqrt(spread)) ** 3


def times_of(requests, places, seed=3):
    position = torch.arange(5, 5 + places)[None]
    return hitting_times(position, torch.arange(requests)[:, None], seed).double() / ONE


def test_hitting_times_are_the_order_statistics_of_uniform_numbers():
    n, requests = 4, 4000
    ordered = times_of(requests, n).sort(1, descending=True).values
    assert ordered[:, 0].mean().item() == pytest.approx(
        n / (n + 1), abs=4 * math.sqrt(n / ((n + 1) ** 2 * (n + 2)) / requests)
    )
    edges = torch.linspace(0, 1, 9, dtype=torch.float64)
    for k in range(n):  # P(the k-th latest <= x): at least n - k of the times lie below
        cdf = sum(math.comb(n, j) * edges**j * (1 - edges) ** (n - j) for j in range(n - k, n + 1))
        expected = cdf.diff()
        counts = torch.histc(ordered[:, k], 8, 0, 1)
        enough = (expected * requests) > 5
        merged = [*counts[enough].tolist(), counts[~enough].sum().item()]
        shares = [*expected[enough].tolist(), expected[~enough].sum().item()]
        if not shares[-1]:
            merged, shares = merged[:-1], shares[:-1]
        assert chi_square(merged, shares) < bound(len(shares) - 1), k


def test_hitting_times_are_those_of_the_published_recursion():
    """t <- t U^(1 / masked): the powers of the ratios are uniform, and so is the order."""
    times = times_of(6000, 3)
    ordered, order = times.sort(1, descending=True)
    before = torch.cat([torch.ones(6000, 1, dtype=torch.float64), ordered[:, :-1]], 1)
    uniform = (ordered / before) ** torch.tensor([3.0, 2.0, 1.0])
    for k in range(3):
        counts = torch.histc(uniform[:, k], 16, 0, 1).tolist()
        assert chi_square(counts, [1 / 16] * 16) < bound(15)
    found = [tuple(row) for row in order.tolist()]
    counts = [found.count(p) for p in itertools.permutations(range(3))]
    assert chi_square(counts, [1 / 6] * 6) < bound(5)
    # Independent: both ratios lie in the same half as often as chance has it.
    same = ((uniform[:, 0] < 0.5) == (uniform[:, 1] < 0.5)).sum().item()
    assert abs(same - 3000) < 5 * math.sqrt(1500)


def test_a_plan_of_first_hitting_follows_the_times():
    for request, origin, fields in itertools.product(
        range(4), ("response", "absolute"), ({}, {"clip": (0.3, 0.8)}, {"steps": 8})
    ):
        config = DecodeConfig(16, 4, rule="first_hitting", seed=5, **fields)
        plan = config.method.plan(6, origin, given=[1, 9], request=request)
        assert sum(turn.quota for turn in plan) == (14 if origin == "response" else 16)
        for start in {turn.start for turn in plan}:
            turns = [turn for turn in plan if turn.start == start]
            places = [p for p in range(start, turns[0].stop) if p not in (7, 15)]
            times = hitting_times(torch.tensor(places), request, 5).tolist()
            intervals = 2 if "steps" in fields else None
            shares = hitting_shares(times, intervals, fields.get("clip"))
            assert [turn.quota for turn in turns] == shares
            assert [turn.number for turn in turns] == list(range(len(turns)))
