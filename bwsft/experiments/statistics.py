"""Means, intervals and paired tests over seeds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Contrast:
    """Mean of paired differences, its 95 % t interval and two-sided p-value."""

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


def contrast(differences: list[float]) -> Contrast:
    """Paired t test of differences, one per seed, against 0."""
    mean, error = mean_error(differences)
    n = len(differences)
    if n < 2:
        return Contrast(mean, math.nan, math.nan, math.nan, n)
    if error == 0:
        return Contrast(mean, mean, mean, 1.0 if mean == 0 else 0.0, n)
    half = float(stats.t.ppf(0.975, n - 1)) * error
    p = float(2 * stats.t.sf(abs(mean / error), n - 1))
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
