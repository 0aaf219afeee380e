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

from bwsft.decoding.canvas import Active, Canvas, Change, upload
from bwsft.decoding.plan import Plan, PlannedStep, opened, quotas
from bwsft.decoding.rules import Rule, rank


@dataclass(frozen=True)
class Dynamic(Rule):
    """The host learns from the device how many [MASK]s a step has filled."""

    dynamic = True

    def shares(self, places: Sequence[int], request: int) -> list[int]:
        return [0]

    def first(self, plan: Plan) -> PlannedStep | None:
        most, share = self.config.active_blocks, self.config.opening_share
        return super().first(plan) if most == 1 else opened(plan, (), 0, most, share)

    def following(
        self, plan: Plan, planned: PlannedStep, number: int,
        filled: Sequence[int], edited: bool, drafted: int,
    ) -> PlannedStep | None:  # fmt: skip
        after, config = planned.number + 1, self.config
        if planned.window:
            pairs = zip(planned.window, filled, strict=False)  # it has a count for each that may be
            window = [block._replace(masked=block.masked - count) for block, count in pairs]
            return opened(plan, window, after, config.active_blocks, config.opening_share)
        left = planned.masked - filled[0]
        if left:
            return dataclasses.replace(planned, masked=left, number=after)
        if planned.spare and (edited or planned.masked):
            return dataclasses.replace(planned, masked=0, number=after, spare=planned.spare - 1)
        return next((later for later in plan if later.start > planned.start), None)

    def commit(self, canvas: Canvas, active: Active, best: LinearArgmax) -> Change:
        goes_first = active.rectangle(self.priority(best, active))
        confidence = active.rectangle(best.confidence)
        floor = self.floor([step.number for step in active.planned], confidence.device)
        if active.blocks is None:
            return Change(self.sure(goes_first, confidence, active.masked, floor))
        # Each block by itself; what is in the later ones waits until the model is sure of it.
        masked = active.masked[:, None] & active.blocks  # [S, g, B]
        floors = torch.zeros_like(masked[..., 0], dtype=torch.long)
        floors[:, :1] = floor
        scores = (x[:, None].expand_as(masked).flatten(0, 1) for x in (goes_first, confidence))
        taken = self.sure(*scores, masked.flatten(0, 1), floors.view(-1, 1))
        return Change(taken.view_as(masked).any(1))

    def floor(self, numbers: Sequence[int], device: torch.device) -> Tensor | int:
        """The least number of tokens that a step commits, of each sequence [S, 1] by the number of
        its step in the block."""
        return 1

    def sure(
        self, priority: Tensor, confidence: Tensor, masked: Tensor, floor: Tensor | int = 1
    ) -> Tensor:
        """The masked slots [S, B] that are taken -> bool [S, B]; `floor` (a number, or [S, 1]) of
        them at least."""
        raise NotImplementedError


@dataclass(frozen=True)
class Threshold(Dynamic):
    """Fast-dLLM (arXiv:2505.22618): all with a confidence above `threshold`, or the first one.
    SDAR's dynamic rule: where they are fewer than an even share of `steps` steps, the first of
    these."""

    name = "threshold"
    windowed = True
    threshold: float = 0.9
    steps: int | None = None

    def floor(self, numbers: Sequence[int], device: torch.device) -> Tensor | int:
        if self.steps is None:
            return 1
        size = self.config.block_size
        shares = quotas(size, self.steps // (self.config.gen_length // size))
        # Once all shares are spent no [MASK] is left; rule edit still looks at the block.
        least = [max(shares[number], 1) if number < len(shares) else 1 for number in numbers]
        return upload(least, device)[:, None]

    def sure(
        self, priority: Tensor, confidence: Tensor, masked: Tensor, floor: Tensor | int = 1
    ) -> Tensor:
        sure = masked & (confidence > self.threshold)
        few = sure.sum(1, keepdim=True) < floor
        return torch.where(few, masked & (rank(priority, masked) < floor), sure)


@dataclass(frozen=True)
class Factor(Dynamic):
    """Fast-dLLM: the n most confident while the n-th has 1 - factor / (n + 1). A run of slots from
    the first on: confidences fall and the bar rises."""

    name = "factor"
    windowed = True
    own_order = "confidence"
    factor: float = 1.0

    def sure(
        self, priority: Tensor, confidence: Tensor, masked: Tensor, floor: Tensor | int = 1
    ) -> Tensor:
        place = rank(priority, masked)
        n = place + 1
        return masked & ((confidence >= 1 - self.factor / (n + 1)) | (place < floor))


@dataclass(frozen=True)
class Entropy(Dynamic):
    """SDAR's bound, with the full entropy: in order of entropy while their sum in nats is below
    `entropy_bound`. A run of slots from the first on: sums of entropies grow."""

    name = "entropy"
    windowed = True
    own_order = "entropy"
    entropy_bound: float = 0.35

    def sure(
        self, priority: Tensor, confidence: Tensor, masked: Tensor, floor: Tensor | int = 1
    ) -> Tensor:
        place = rank(priority, masked)
        entropy = (-priority).masked_fill(~masked, torch.inf)
        ordered = torch.empty_like(entropy).scatter_(1, place, entropy)
        enough = ordered.cumsum(1).gather(1, place) < self.entropy_bound
        return masked & (enough | (place < floor))
