"""The denoising steps of a sequence, and how many tokens each step of a block commits.

Nothing here asks the device: where a rule plans its steps they are known before decoding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class OpenBlock(NamedTuple):
    """One of several active blocks of a sequence."""

    start: int
    stop: int
    masked: int  # [MASK]s before the step
    places: int  # [MASK]s when it opened


@dataclass(frozen=True)
class PlannedStep:
    """One denoising step of one sequence; positions are counted from its first token. Of several
    active blocks: from the first of them to the last one that has a [MASK]."""

    start: int  # of the active block
    stop: int
    masked: int  # [MASK]s of the active block before the step (revise cond: at most)
    quota: int  # tokens that it commits, at least 1; under a dynamic rule 0, for unknown; under a
    # planned rule that revises the tokens that stand in the block after it
    number: int  # of the step in its block, from 0
    open: int = 0  # slots of the block that a revising rule may change, 0 under other rules
    spare: int = 0  # rule edit: steps that may follow once no [MASK] is left
    drafts: int = 0  # rule speculative: drafted tokens that the pass tries
    window: tuple[OpenBlock, ...] = ()  # the active blocks, where several may be

    @property
    def end(self) -> int:
        """Where the active blocks end, those that wait without a [MASK] too."""
        return self.window[-1].stop if self.window else self.stop

    @property
    def asked(self) -> int:
        """Slots that are projected to logits."""
        return self.open or self.masked


Plan = list[PlannedStep]  # of a sequence
Planned = list[PlannedStep]  # of a step: one of each sequence


def opened(
    plan: Plan, window: Sequence[OpenBlock], number: int, most: int, share: float
) -> PlannedStep | None:
    """The step of a sequence whose active blocks were `window`: finished ones leave at its front,
    and those of the plan that follow open up to `most`, each once `share` of the one before it is
    filled. `number` is that of the step in the first one, if it is still the first. None: nothing
    is left."""
    after = window[-1].stop if window else 0
    waiting = (step for step in plan if step.start >= after)
    blocks = list(itertools.dropwhile(lambda block: not block.masked, window))
    while len(blocks) < most and (not blocks or filled_share(blocks[-1]) >= share):
        if (new := next(waiting, None)) is None:
            break
        blocks.append(OpenBlock(new.start, new.stop, new.masked, new.masked))
    if not blocks:
        return None
    first, stop = blocks[0], max(block.stop for block in blocks if block.masked)
    number = number if window and window[0].start == first.start else 0
    masked = sum(block.masked for block in blocks)
    return PlannedStep(first.start, stop, masked, 0, number, window=tuple(blocks))


def filled_share(block: OpenBlock) -> float:
    """Of its places that were open; a quotient, so that a share of 0.55 is met by 11 of 20."""
    return (block.places - block.masked) / block.places


def quotas(masked: int, steps: int) -> list[int]:
    """Tokens to commit in each of `steps` steps: as even as can be, the remainder on the first
    steps (LLaDA's rule). Steps beyond one per token get 0."""
    base, extra = divmod(masked, steps)
    return [base + (step < extra) for step in range(steps)]


def timestep_shares(masked: int, steps: int) -> list[int]:
    """Tokens to commit in each of `steps` steps by Dream's rule: int(m (1 - s / t)) of the m
    [MASK]s that are left on the way from timestep t to s, and all in the last step. Timesteps fall
    evenly from 1 to 0.001, in fp32 as in the published code, whose rounding decides at whole
    numbers."""
    times, left, shares = torch.linspace(1, 1e-3, steps + 1), masked, []
    for t, s in itertools.pairwise(times):
        shares.append(int(left * (1 - s / t)) if len(shares) < steps - 1 else left)
        left -= shares[-1]
    return shares


def hitting_shares(
    times: Sequence[int], intervals: int | None, clip: tuple[float, float] | None
) -> list[int]:
    """Tokens that each step of a block reveals by their hitting times; the latest come first.

    One each, or all whose times are in the same of `intervals` equal stretches: the ancestral
    sampler with that many steps, less those in which nothing happens. `clip` (low, high): times
    from high on share the first step and those below low the last. So a model trained with mask
    rates in [low, high] sees no others, but for the first step, where all is [MASK].
    """
    low, high = (round(bound * 2**24) for bound in clip or (0.0, 1.0))

    def step_of(entry: tuple[int, int]) -> tuple[str, int]:
        number, time = entry
        if intervals is not None:
            return "interval", time * intervals >> 24
        if time >= high:
            return "first", 0
        return ("last", 0) if time < low else ("alone", number)

    ordered = enumerate(sorted(times, reverse=True))
    return [len(list(run)) for _, run in itertools.groupby(ordered, step_of)]


def masked_share(step: int, steps: int, schedule: str) -> float:
    """Share of a block that is [MASK] after step number `step` of RDM's schedule."""
    if schedule == "linear":
        return (steps - 1 - step) / steps
    return math.cos(math.pi * (step + 1) / (2 * steps))


def routed_shares(masked: int, steps: int, schedule: str) -> list[int]:
    """[MASK]s that each step of a block reveals under RDM's schedule, linear or cosine: what the
    step leaves is rounded down."""

    def left(step: int) -> int:
        if schedule == "linear":  # integers: the float share would miss whole numbers
            return masked * (steps - 1 - step) // steps
        return math.floor(masked * masked_share(step, steps, schedule) + 1e-9)

    counts = [masked, *map(left, range(steps))]
    return [before - after for before, after in itertools.pairwise(counts)]
