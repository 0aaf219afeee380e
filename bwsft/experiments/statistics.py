"""Means, intervals and Welch's test over seeds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Contrast:
    """Difference of two means, its 95 % interval and two-sided p-value; `n` values a side."""

    mean: float
    low: float
    high: float
    p: float
    n: int


def mean_error(values: list[float]) -> tuple[float, float]:
    """(mean, standard error; NaN for a single value)."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def contrast(a: list[float], b: list[float]) -> Contrast:
    """Welch's t test of mean(a) - mean(b): two arms of the same seeds are not correlated, so their
    values are not paired. As many values on both sides, and one of them may be constant."""
    n, mean = len(a), statistics.fmean(a) - statistics.fmean(b)
    if n < 2:
        return Contrast(mean, math.nan, math.nan, math.nan, n)
    # Squared errors of the two means. scipy.stats.ttest_ind warns of a constant side.
    u, v = statistics.variance(a) / n, statistics.variance(b) / n
    if u + v == 0:
        return Contrast(mean, mean, mean, 1.0 if mean == 0 else 0.0, n)
    error, freedom = math.sqrt(u + v), (n - 1) * (u + v) ** 2 / (u**2 + v**2)
    half = float(stats.t.ppf(0.975, freedom)) * error
    p = float(2 * stats.t.sf(abs(mean / error), freedom))
    return Contrast(mean, mean - half, mean + half, p, n)


def holm(p_values: list[float]) -> list[float]:
    """p-values adjusted for their number (Holm), in the order given; NaN stays, uncounted."""
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    out, worst = list(p_values), 0.0
    for rank, (p, i) in enumerate(known):
        worst = max(worst, min(1.0, p * (len(known) - rank)))
        out[i] = worst
    return out


def verdict(found: Contrast, adjusted_p: float) -> str:
    """For a claim that the difference is below 0: reproduced, opposite or undecided, at 5 %."""
    if math.isnan(adjusted_p) or adjusted_p > 0.05 or found.mean == 0:
        return "undecided"
    return "reproduced" if found.mean < 0 else "opposite"
