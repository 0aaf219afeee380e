"""Rules that commit as many tokens in a step as the model is sure of, at least one.

S sequences, B slots of an active block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from bwsft_kernels import LinearArgmax
from torch import Tensor

from bwsft.decoding.canvas import Active, Canvas, Change
from bwsft.decoding.plan import Plan, PlannedStep
from bwsft.decoding.rules import Rule, rank


@dataclass(frozen=True)
class Dynamic(Rule):
    """The host learns from the device how many [MASK]s a step has filled."""

    dynamic = True

    def shares(self, places: Sequence[int], request: int) -> list[int]:
        return [0]

    def following(
        self, plan: Plan, planned: PlannedStep, number: int, filled: int | None, edited: bool
    ) -> PlannedStep | None:
        left, after = planned.masked - filled, planned.number + 1
        if left:
            return dataclasses.replace(planned, masked=left, number=after)
        if planned.spare and (edited or planned.masked):
            return dataclasses.replace(planned, masked=0, number=after, spare=planned.spare - 1)
        return next((later for later in plan if later.start > planned.start), None)

    def commit(self, canvas: Canvas, active: Active, best: LinearArgmax) -> Change:
        goes_first = active.rectangle(self.priority(best, active))
        confidence = active.rectangle(best.confidence)
        return Change(self.sure(goes_first, confidence, active.masked))

    def sure(self, priority: Tensor, confidence: Tensor, masked: Tensor) -> Tensor:
        """The masked slots [S, B] that are taken -> bool [S, B]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Threshold(Dynamic):
    """Fast-dLLM (arXiv:2505.22618): all with a confidence above `threshold`."""

    name = "threshold"
    threshold: float = 0.9

    def sure(self, priority: Tensor, confidence: Tensor, masked: Tensor) -> Tensor:
        sure = masked & (confidence > self.threshold)
        return sure | masked & (rank(priority, masked) == 0) & ~sure.any(1, keepdim=True)


@dataclass(frozen=True)
class Factor(Dynamic):
    """Fast-dLLM: the n most confident while the n-th has 1 - factor / (n + 1). A run of slots from
    the first on: confidences fall and the bar rises."""

    name = "factor"
    own_order = "confidence"
    factor: float = 1.0

    def sure(self, priority: Tensor, confidence: Tensor, masked: Tensor) -> Tensor:
        place = rank(priority, masked)
        n = place + 1
        return masked & ((confidence >= 1 - self.factor / (n + 1)) | (place == 0))


@dataclass(frozen=True)
class Entropy(Dynamic):
    """SDAR's bound, with the full entropy: in order of entropy while their sum in nats is below
    `entropy_bound`. A run of slots from the first on: sums of entropies grow."""

    name = "entropy"
    own_order = "entropy"
    entropy_bound: float = 0.35

    def sure(self, priority: Tensor, confidence: Tensor, masked: Tensor) -> Tensor:
        place = rank(priority, masked)
        entropy = (-priority).masked_fill(~masked, torch.inf)
        ordered = torch.empty_like(entropy).scatter_(1, place, entropy)
        enough = ordered.cumsum(1).gather(1, place) < self.entropy_bound
        return masked & (enough | (place == 0))
