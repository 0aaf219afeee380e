"""Primary claims judged: at least one of several ways to train is better than another.

A claim holds if its best variant is significantly better after a correction for their number
(Bonferroni), and fails if every variant is significantly worse. The claims of a page are one family
(Holm) in each of the two directions. Nothing is judged before ten seeds are finished.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bwsft.experiments.arms import Plan, Primary
from bwsft.experiments.statistics import Contrast, contrast, holm

SEEDS = 10
"""Seeds of every way that a claim is about, before it is judged."""
RESAMPLES = 10_000
LEVEL = 0.05

Values = Mapping[str, Sequence[Sequence[float]]]
"""Of every way to train: a list for each budget, with a value per seed."""


@dataclass(frozen=True)
class Verdict:
    """A claim, what was found of each variant, and p-values adjusted by Holm."""

    claim: Primary
    found: dict[str, Contrast]
    """Differences to the other way at the largest budget, or multipliers."""
    p_for: float
    p_against: float
    verdict: str

    @property
    def best(self) -> str:
        """The variant with the lowest difference or the largest multiplier."""
        sign = 1 if self.claim.multiplier is None else -1
        return min(self.found, key=lambda name: sign * self.found[name].mean)


def judge(plan: Plan, values: Values) -> list[Verdict]:
    """The plan's primary claims; one with fewer than SEEDS finished seeds of any way that it is
    about is undecided."""
    each = [parts(claim, plan.budgets, values) for claim in plan.primary]
    fors = holm([p for _, p, _ in each])
    againsts = holm([p for _, _, p in each])
    out = []
    for claim, (found, *_), p_for, p_against in zip(
        plan.primary, each, fors, againsts, strict=True
    ):
        names = (*claim.variants, claim.other)
        done = min(len(of_budget) for name in names for of_budget in values[name])
        verdict = f"undecided: {done} of {SEEDS} seeds"
        if done >= SEEDS:
            verdict = "accepted" if p_for <= LEVEL else "undecided"
            verdict = "falsified" if p_against <= LEVEL else verdict
        out.append(Verdict(claim, found, p_for, p_against, verdict))
    return out


def parts(
    claim: Primary, budgets: Sequence[int], values: Values
) -> tuple[dict[str, Contrast], float, float]:
    """(what was found of each variant, p-value of the claim, p-value of its contrary). Two-sided
    p-values: a difference the wrong way counts as 1."""
    found = {}
    for name in claim.variants:
        pair = values[name], values[claim.other]
        if claim.multiplier is None:
            found[name] = shared(pair[0][-1], pair[1][-1])
        else:
            found[name] = multiplier(*pair, budgets, claim.multiplier)
    aim = 0.0 if claim.multiplier is None else claim.multiplier
    sign = 1 if claim.multiplier is None else -1
    better = [f.p if sign * (f.mean - aim) < 0 else 1.0 for f in found.values()]
    worse = [f.p if sign * (f.mean - aim) > 0 else 1.0 for f in found.values()]
    if any(math.isnan(f.p) for f in found.values()):
        return found, math.nan, math.nan
    return found, min(1.0, len(better) * min(better)), max(worse)


def shared(a: Sequence[float], b: Sequence[float]) -> Contrast:
    """Welch's test of two ways on the seeds that both have finished."""
    n = min(len(a), len(b))
    if n == 0:
        return Contrast(math.nan, math.nan, math.nan, math.nan, 0)
    return contrast(list(a[:n]), list(b[:n]))


def multiplier(
    variant: Sequence[Sequence[float]], other: Sequence[Sequence[float]], budgets: Sequence[int],
    aim: float,
) -> Contrast:  # fmt: skip
    """How many times fewer FLOPs the variant needs for the other's final value, with a 95 %
    bootstrap interval over seeds and the two-sided p-value of its being `aim`."""
    n = min(len(seeds) for seeds in (*variant, *other))
    if n < 2:
        return Contrast(math.nan, math.nan, math.nan, math.nan, n)
    ends = (variant[0], variant[-1], other[0], other[-1])
    ratio = budgets[-1] / budgets[0]
    chance = np.random.default_rng(0)
    means = []
    for seeds in ends:
        taken = np.asarray(seeds[:n], float)
        drawn = taken[chance.integers(n, size=(RESAMPLES, n))].mean(1)
        # A resample's mean has (n - 1) / n of the variance that the mean of n seeds has.
        means.append(taken.mean() + (drawn - taken.mean()) * math.sqrt(n / (n - 1)))
    many = [crossing(*point, ratio) for point in zip(*means, strict=True)]
    middle = crossing(*(statistics.fmean(seeds[:n]) for seeds in ends), ratio)
    low, high = np.quantile(many, [0.025, 0.975])
    # Ends of the curve are reached by no chance: a value at the aim counts on both sides.
    tail = min(np.sum(np.less_equal(many, aim)), np.sum(np.greater_equal(many, aim)))
    p = min(1.0, 2 * (float(tail) + 1) / (RESAMPLES + 1))
    return Contrast(middle, float(low), float(high), p, n)


def crossing(
    first: float, last: float, other_first: float, other_last: float, ratio: float
) -> float:
    """The multiplier of a way with these values at the smallest and the largest budget, which are
    `ratio` apart, on a curve that is straight over log FLOPs: from 1 / ratio to ratio, and no
    further where a curve ends."""
    if last <= other_last:  # reached: on the variant's curve
        share = 0.0 if first <= other_last else (first - other_last) / (first - last)
        return ratio ** (1 - share)
    share = 0.0 if other_first <= last else (other_first - last) / (other_first - other_last)
    return ratio ** (share - 1)
