"""Rules that may take back or replace tokens of the active block until it is finished, and the
routing of RDM.

rcr     Running Confidence Remasking (MDPO, arXiv:2508.13148): every [MASK] is filled, then the
        least confident slots, by the confidence that each had when it was filled, are masked again
routed  RDM (arXiv:2302.05737): a schedule says how many [MASK]s a step leaves; a token goes back
        with `revise`
edit    LLaDA2.1 (arXiv:2602.08676): a token is replaced by another that the model is sure of

A given token is never touched, and a finished block neither: so text is final at the end of a block
only. Every block ends: rcr and routed have a fixed number of steps, edit fills a [MASK] in every
step and then looks again `post_steps` times at most.

S rows, B slots of an active block, N slots that the head sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from bwsft_kernels import LinearArgmax
from torch import Tensor

from bwsft.decoding.canvas import Active, Canvas
from bwsft.decoding.plan import DecodeConfig
from bwsft.decoding.rules import commit_sure, priority, rank, routed_score


class Block(NamedTuple):
    """The active blocks [S, B]: what stands in them and what the model would put there."""

    masked: Tensor  # bool
    open: Tensor  # bool: not given; what is masked is open
    token: Tensor
    confidence: Tensor  # of the token when it was put there
    new_token: Tensor
    new_confidence: Tensor  # -inf where not open


class Revision(NamedTuple):
    """What becomes of the slots [S, B], bool: they take the new token, or become [MASK]."""

    taken: Tensor
    masked: Tensor


def rcr(block: Block, standing: Tensor) -> Revision:
    """Fill every [MASK], keep the `standing` [S] most confident open slots."""
    running = torch.where(block.masked, block.new_confidence, block.confidence)
    stays = block.open & (rank(running, block.open) < standing[:, None])
    return Revision(stays & block.masked, block.open & ~stays)


def route(block: Block, score: Tensor, standing: Tensor, revise: str) -> Revision:
    """`score` [S, B] of what the model would put there now: all but the `standing` [S] best open
    slots are routed to [MASK], where they go if they are [MASK] or revise lets them: "uncond", or
    "cond", if the model still wants the same token and is less sure of it."""
    low = block.open & (rank(score, block.open) >= standing[:, None])
    back = low & ~block.masked
    if revise == "cond":
        back &= (block.new_token == block.token) & (block.new_confidence < block.confidence)
    return Revision(block.masked & ~low, block.masked & low | back)


def edit(config: DecodeConfig, block: Block, goes_first: Tensor) -> Revision:
    """Fill as rule threshold does, and replace tokens by others above `edit_threshold`."""
    filled = commit_sure(config, goes_first, block.new_confidence, block.masked)
    other = block.open & ~block.masked & (block.new_token != block.token)
    edited = other & (block.new_confidence > config.option("edit_threshold"))
    return Revision(filled | edited, block.masked & ~filled)


def revise(
    config: DecodeConfig, canvas: Canvas, active: Active, best: LinearArgmax, step: int
) -> tuple[Tensor, Tensor]:
    """What a revising rule does with the model's choice of the N open slots; writes the canvas.
    Returns the slots that got a token, and those of them that had another [S, B]."""
    block = Block(
        active.masked,
        active.asked,
        canvas.ids[active.flat],
        canvas.confidence[active.flat],
        active.rectangle(best.token, 0),
        active.rectangle(best.confidence),
    )
    if config.rule == "rcr":
        taken, masked = rcr(block, active.quota)
    elif config.rule == "routed":
        score = active.rectangle(routed_score(config, active, best.confidence))
        taken, masked = route(block, score, active.quota, config.option("revise"))
    else:
        goes_first = active.rectangle(priority(config, best, active.key))
        taken, masked = edit(config, block, goes_first)
    rows, got, gone = active.rows, *(x.flatten()[active.slots] for x in (taken, masked))

    def write(column: Tensor, new: Tensor | int, none: int) -> None:
        column[rows] = torch.where(got, new, column[rows].masked_fill(gone, none))

    write(canvas.ids, best.token, canvas.family.mask_id)
    write(canvas.committed_at, step, -1)
    write(canvas.confidence, best.confidence, 0)
    return taken, taken & ~block.masked
