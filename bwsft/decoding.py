"""The decoder's policies as small functions: block grid, quotas, which tokens a step commits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeConfig:
    """How a canvas is filled. ValueError, naming the field, for values that fill no canvas."""

    gen_length: int = 128
    """Response positions of the canvas."""
    block_size: int = 32
    """Tokens in a block, B; it must divide gen_length."""
    steps: int | None = None
    """Denoising steps for the whole canvas, split evenly over its blocks; default: one per
    token. Fewer steps commit several tokens at a time."""
    temperature: float = 0.0
    """0: the most probable token; above: Gumbel noise on the choice, never on the confidence."""
    seed: int = 0
    """Seed of the noise; a prompt's noise depends on this and on its request number only."""
    banned_ids: tuple[int, ...] = ()
    """Token ids that are never produced; they leave the confidence's softmax too."""
    stop_at_end: bool = True
    """A row is done once an end token is committed with no [MASK] before it."""
    batch_size: int = 8
    """Prompts decoded together; no result depends on it."""

    def __post_init__(self) -> None:
        for name in ("gen_length", "block_size", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.gen_length % self.block_size:
            raise ValueError(
                f"block_size {self.block_size} must divide gen_length {self.gen_length}; try "
                f"gen_length {math.ceil(self.gen_length / self.block_size) * self.block_size}"
            )
        blocks = self.gen_length // self.block_size
        if self.steps is not None and (self.steps < blocks or self.steps % blocks):
            raise ValueError(
                f"steps {self.steps} must be a multiple of the number of blocks, {blocks} "
                "(gen_length / block_size): every block gets the same number"
            )
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or positive, not {self.temperature}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), not {self.seed}")

    @property
    def steps_per_block(self) -> int:
        if self.steps is None:
            return self.block_size
        return self.steps // (self.gen_length // self.block_size)


@dataclass(frozen=True)
class PlannedStep:
    """One denoising step of one row; positions are counted from the row's first token."""

    start: int  # of the active block
    stop: int
    masked: int  # [MASK]s of the active block before the step
    quota: int  # tokens that it commits, at least 1


def quotas(masked: int, steps: int) -> list[int]:
    """Tokens to commit in each of `steps` steps: as even as can be, the remainder on the first
    steps (LLaDA's rule). Steps beyond one per token get 0."""
    base, extra = divmod(masked, steps)
    return [base + (step < extra) for step in range(steps)]


def block_bounds(prompt_length: int, config: DecodeConfig, origin: str) -> list[tuple[int, int]]:
    """[start, stop) of every block of a row's canvas, counted from the row's first token.

    origin "response": the grid starts at the canvas' first position. "absolute": it starts at
    position 0 of the row, so that the first and the last block may be short.
    """
    size, end = config.block_size, prompt_length + config.gen_length
    start = prompt_length // size * size if origin == "absolute" else prompt_length
    return [(max(s, prompt_length), min(s + size, end)) for s in range(start, end, size)]


def plan_row(prompt_length: int, config: DecodeConfig, origin: str) -> list[PlannedStep]:
    """All steps of a row. With quotas they are known beforehand, so that nobody has to ask the
    device how many [MASK]s are left; steps that would commit nothing are left out.

    Every block gets the same number of steps, a short one of an absolute grid included.
    """
    plan = []
    for start, stop in block_bounds(prompt_length, config, origin):
        masked = stop - start
        for quota in quotas(masked, config.steps_per_block):
            if quota:
                plan.append(PlannedStep(start, stop, masked, quota))
                masked -= quota
    return plan


def commit_quota(confidence: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
    """The `quota` [S] most confident masked slots of every row [S, B] -> bool [S, B].

    Low-confidence remasking seen from the other side: the rest stays [MASK]. Ties go to the
    leftmost slot.
    """
    ranked = confidence.masked_fill(~masked, -torch.inf)
    order = ranked.sort(dim=1, descending=True, stable=True).indices
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    return masked & (rank < quota[:, None])


def final_rows(canvas: Tensor, mask_id: int, end_ids: Tensor) -> Tensor:
    """Rows [S] of a response canvas [S, G] whose text is final: an end token stands in it with no
    [MASK] before it. Committed tokens never change, so what follows cannot matter."""
    mask_before = (canvas == mask_id).cumsum(1) > 0
    return (torch.isin(canvas, end_ids) & ~mask_before).any(1)
