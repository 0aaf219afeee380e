"""How many tokens each step of a block reveals, where it is not an even share.

Nothing here asks the device: the plan of a row is known before it is decoded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from bwsft_kernels.philox import Stream, philox_u24
from torch import Tensor


def hitting_times(position: Tensor, request: Tensor | int, seed: int) -> Tensor:
    """When each position is revealed under first-hitting decoding: int64 in units of 2^-24.

    Under the linear schedule a [MASK] of time t is still one at s < t with probability s / t. So
    on the way down from time 1 the hitting times are uniform in [0, 1) and independent. BD3-LM's
    sampler (github.com/kuleshov-group/bd3lms) draws the same times one after the other,
    t <- t * U^(1 / masked), each for a uniformly chosen [MASK]. Positions count from the row's
    first token.
    """
    return philox_u24(position, 0, request, seed=seed, stream=Stream.TIME)


def hitting_shares(
    times: Sequence[int], intervals: int | None, clip: tuple[float, float] | None
) -> list[int]:
    """Tokens that each step of a block reveals; the latest times come first.

    One each, or all whose times lie in the same of `intervals` equal stretches: the ancestral
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
