"""Tokens per forward pass (TPF), and accuracy under parallelism: what a decoder's answers are worth
at each TPF, in one figure."""

from __future__ import annotations

import math
from collections.abc import Sequence

PENALTY, WORST = 3.0, 5.0  # alpha, and percentage points below the slowest point


def per_forward(tokens: int, passes: int) -> float | None:
    """TPF: the tokens that are kept, for each forward pass that a sequence took part in; None where
    there was none."""
    return tokens / passes if passes else None


def aup(points: Sequence[tuple[float, float]], best: float | None = None) -> float:
    """AUP of d3LLM (arXiv:2601.07568): area under accuracy over TPF, weighted by accuracy.

    points: (TPF, accuracy in percent) of one model at several settings. Of them count those at most
    5 points less accurate than the slowest one; each accuracy y between two of them is weighted by
    exp(-3 (1 - y / best)), at most 1. best: the highest accuracy of any method on the task, in
    percent; none: of these points. Of equal TPF the more accurate point counts. ValueError for no
    points, or figures out of range.
    """
    if not points:
        raise ValueError("accuracy under parallelism needs at least one point")
    for rate, accuracy in points:
        if not (0 < rate < math.inf and 0 <= accuracy <= 100):
            raise ValueError(
                f"TPF {rate:g} with accuracy {accuracy:g} is no point: TPF is above 0 and accuracy "
                "in percent"
            )
    curve = [(rate, y) for rate, y in sorted(dict(sorted(points)).items())]
    least = curve[0][1] - WORST
    curve = [point for point in curve if point[1] >= least]
    best = max(y for _, y in curve) if best is None else best

    def worth(accuracy: float) -> float:
        weight = math.exp(-PENALTY * (1 - accuracy / best)) if best > 0 else 0.0
        return accuracy * min(weight, 1.0)

    area = curve[0][0] * curve[0][1]
    for (slow, y), (fast, z) in zip(curve[:-1], curve[1:], strict=True):
        area += (fast - slow) * (worth(y) + worth(z)) / 2
    return area
