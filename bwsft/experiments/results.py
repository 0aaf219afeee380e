"""From finished cells to numbers: values of arms over seeds, and the claims judged."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from bwsft.experiments.arms import Claim, Plan
from bwsft.experiments.statistics import Contrast, contrast, holm, verdict


@dataclass(frozen=True)
class Measured:
    """An arm and the records of its cells: one per finished seed in order, or one of the untouched
    base."""

    name: str
    cells: list[dict]
    flops: float | None
    """Training FLOPs of a cell; of one update where gradients are measured."""

    def values(self, measure: str, rule: str = "value") -> list | None:
        """One value per cell (`rule`: "strict" of an answer file; [value, low, high] for the parts
        of a gradient); None if the arm doesn't take this measure."""
        kind, _, at = measure.partition("@")
        if kind == "curve":
            return [curve(cell, float(at) / 100) for cell in self.cells]
        if measure == "cpu_seconds":
            return [cell["train"]["cpu_seconds"] for cell in self.cells]
        if not self.cells or any(measure not in cell["measures"] for cell in self.cells):
            return None
        return [cell["measures"][measure][rule] for cell in self.cells]

    def trained(self, name: str) -> float | None:
        """Mean over cells of what the training counted."""
        if not self.cells or "train" not in self.cells[0]:
            return None
        return statistics.fmean(cell["train"][name] for cell in self.cells)


def is_nelbo(measure: str) -> bool:
    return measure.startswith(("nelbo", "pilot", "curve"))


def is_gradient(measure: str) -> bool:
    return measure.startswith("gradient")


def is_of_training(measure: str) -> bool:
    """Whether the training itself left it: a point of its curve, or its CPU seconds."""
    return measure.startswith("curve") or measure == "cpu_seconds"


def curve(cell: dict, share: float) -> float:
    """Held-out NELBO at the evaluation nearest to this share of the updates."""
    evals = cell["train"]["evals"]
    return min(evals, key=lambda e: abs(e[0] - share * evals[-1][0]))[1]


@dataclass(frozen=True)
class Judged:
    """A claim with its test over the seeds."""

    claim: Claim
    found: Contrast
    adjusted_p: float
    verdict: str


def judge(plan: Plan, arms: list[Measured], seeds: int) -> list[Judged]:
    """The plan's claims in order; p-values are adjusted over those about the NELBO, and over those
    about exact match or CPU seconds (Holm)."""
    by_name = {arm.name: arm for arm in arms}
    found = [
        contrast(
            [claim.factor * value for value in side(claim.smaller, by_name, seeds)],
            side(claim.larger, by_name, seeds),
        )
        for claim in plan.claims
    ]
    adjusted = [math.nan] * len(found)
    kinds = [is_nelbo(claim.smaller[0][1]) for claim in plan.claims]
    for kind in set(kinds):
        family = [i for i, own in enumerate(kinds) if own == kind]
        for i, p in zip(family, holm([found[i].p for i in family]), strict=True):
            adjusted[i] = p
    return [
        Judged(claim, f, p, verdict(f, p))
        for claim, f, p in zip(plan.claims, found, adjusted, strict=True)
    ]


def side(
    members: tuple[tuple[str, str], ...], arms: dict[str, Measured], seeds: int
) -> list[float]:
    """Per seed, the mean over one side of a claim."""
    columns = [over_seeds(arms[name].values(measure), seeds) for name, measure in members]
    return [statistics.fmean(column[i] for column in columns) for i in range(seeds)]


def over_seeds(values: list[float], seeds: int) -> list[float]:
    """The untouched base has one value for all seeds."""
    return values * seeds if len(values) == 1 else values
