"""Rules that may take back or replace tokens of the active block until it is finished.

A given token is never touched, and a finished block neither: so text is final at the end of a block
only. Every block ends: rcr and routed have a fixed number of steps, edit fills a [MASK] in every
step and then looks again `post_steps` times at most.

S sequences, B slots of an active block, N slots that are projected to logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from bwsft_kernels import LinearArgmax
from bwsft_kernels.philox import Stream, gumbel, philox_u24
from torch import Tensor

from bwsft.decoding.canvas import Active, Canvas, Change, upload
from bwsft.decoding.dynamic import Threshold
from bwsft.decoding.plan import masked_share, routed_shares
from bwsft.decoding.rules import Quota, Rule, rank


class Block(NamedTuple):
    """The active blocks [S, B]: what is in them and what the model would put there."""

    masked: Tensor  # bool
    open: Tensor  # bool: not given; what is masked is open
    token: Tensor
    confidence: Tensor  # of the token when it was put there
    new_token: Tensor
    new_confidence: Tensor  # -inf where not open

    @classmethod
    def of(cls, canvas: Canvas, active: Active, best: LinearArgmax) -> Block:
        standing = canvas.ids[active.flat], canvas.confidence[active.flat]
        new = active.rectangle(best.token, 0), active.rectangle(best.confidence)
        return cls(active.masked, active.asked, *standing, *new)


@dataclass(frozen=True)
class Rcr(Quota):
    """Running Confidence Remasking (MDPO, arXiv:2508.13148): every [MASK] is filled, then the least
    confident slots, by the confidence that each had when it was filled, are masked again."""

    name = "rcr"
    own_order = "confidence"
    revising = True

    def commit(self, canvas: Canvas, active: Active, best: LinearArgmax) -> Change:
        return self.remask(Block.of(canvas, active, best), active.quota)

    def remask(self, block: Block, standing: Tensor) -> Change:
        """Fill every [MASK], keep the `standing` [S] most confident open slots."""
        running = torch.where(block.masked, block.new_confidence, block.confidence)
        stays = block.open & (rank(running, block.open) < standing[:, None])
        return Change(stays & block.masked, block.open & ~stays)


@dataclass(frozen=True)
class Routed(Quota):
    """RDM (arXiv:2302.05737): a schedule says how many [MASK]s a step leaves; with `revise` a token
    goes back."""

    name = "routed"
    own_order = "confidence"
    schedule: str = "linear"
    revise: str = "never"
    order_noise: float = 0.0

    @property
    def revising(self) -> bool:
        return self.revise != "never"

    def shares(self, places: Sequence[int], request: int) -> list[int]:
        return routed_shares(len(places), self.steps_per_block, self.schedule)

    def priority(self, best: LinearArgmax, active: Active) -> Tensor:
        """RDM's score: the confidence, or its logarithm and Gumbel noise that fades with the share
        of [MASK]s that the step leaves."""
        if not self.order_noise:
            return best.confidence
        request, step, position = active.key
        u24 = philox_u24(position, step, request, seed=self.config.seed, stream=Stream.ORDER)
        steps = self.steps_per_block
        left = [masked_share(step.number, steps, self.schedule) for step in active.planned]
        fading = upload(left, u24.device)[active.slots // active.block.width]
        noise = gumbel(u24, best.confidence.dtype)
        score = best.confidence.log() + self.order_noise * fading.to(noise.dtype) * noise
        return score.clamp(min=torch.finfo(score.dtype).min)  # log 0 would tie with closed slots

    def commit(self, canvas: Canvas, active: Active, best: LinearArgmax) -> Change:
        if not self.revising:
            return super().commit(canvas, active, best)
        score = active.rectangle(self.priority(best, active))
        return self.route(Block.of(canvas, active, best), score, active.quota)

    def route(self, block: Block, score: Tensor, standing: Tensor) -> Change:
        """`score` [S, B] of what the model would put there now: all but the `standing` [S] best
        open slots are routed to [MASK], where they go if they are [MASK] or `revise` lets them:
        "uncond", or "cond", if the model still wants the same token and is less sure of it."""
        low = block.open & (rank(score, block.open) >= standing[:, None])
        back = low & ~block.masked
        if self.revise == "cond":
            back &= (block.new_token == block.token) & (block.new_confidence < block.confidence)
        return Change(block.masked & ~low, block.masked & low | back)


@dataclass(frozen=True)
class Edit(Threshold):
    """LLaDA2.1 (arXiv:2602.08676): fill as rule threshold does, and replace tokens by others with a
    confidence above `edit_threshold`."""

    name = "edit"
    revising = True
    windowed = False
    edit_threshold: float = 0.9
    post_steps: int = 16

    @property
    def spare(self) -> int:
        return self.post_steps if self.edit_threshold < 1 else 0  # no confidence is above 1

    def commit(self, canvas: Canvas, active: Active, best: LinearArgmax) -> Change:
        goes_first = active.rectangle(self.priority(best, active))
        floor = self.floor([step.number for step in active.planned], goes_first.device)
        return self.edit(Block.of(canvas, active, best), goes_first, floor)

    def edit(self, block: Block, goes_first: Tensor, floor: Tensor | int = 1) -> Change:
        filled = self.sure(goes_first, block.new_confidence, block.masked, floor)
        other = block.open & ~block.masked & (block.new_token != block.token)
        edited = other & (block.new_confidence > self.edit_threshold)
        return Change(filled | edited, block.masked & ~filled)


@dataclass(frozen=True)
class Renoise(Rule):
    """Of a model whose undecided tokens are random ones: random_canvases.py. None: as the model's
    generation_config.json says."""

    name = "renoise"
    revising = True
    own_order = "entropy"
    only_context = "block_causal"
    entropy_bound: float | None = None
    steps: int | None = None
