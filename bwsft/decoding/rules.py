"""A token for every masked slot of the active blocks, and which of them a step commits.

S rows, B slots of an active block, N masked slots, D hidden size. Every rule commits at least one
token of every row that has a [MASK] left, so that a block takes at most B steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from bwsft_kernels import GumbelKey, LinearArgmax, linear_argmax
from bwsft_kernels.philox import Stream, gumbel, philox_u24
from torch import Tensor

from bwsft.decoding.canvas import Active, upload
from bwsft.decoding.plan import DecodeConfig
from bwsft.decoding.schedules import hitting_times, masked_share
from bwsft.models.backbone import Backbone, Family


class Head(NamedTuple):
    """What turns hidden states into logits of the token ids below `size`."""

    weight: Tensor  # [V, D], V >= size
    bias: Tensor | None
    size: int


def head_of(model: Backbone) -> Head:
    return Head(*model.head(), model.family.vocab_size)  # may have spare rows behind


def choose(
    family: Family,
    head: Head,
    hidden: Tensor,
    config: DecodeConfig,
    key: tuple[Tensor, ...],
    early: Tensor | None = None,
) -> LinearArgmax:
    """linear_argmax of hidden rows [N, D] with a head; key: request, step, position. Where `early`
    [N] end ids are banned."""
    size, bias = head.size, head.bias

    def best(banned: tuple[int, ...]) -> LinearArgmax:
        return linear_argmax(
            hidden,
            head.weight[:size],
            linear_bias=None if bias is None else bias[:size],
            banned_ids=banned,
            mask_id=family.mask_id,
            temperature=config.temperature,
            gumbel=GumbelKey(config.seed, *key) if config.temperature > 0 else None,
            want=wanted_numbers(config),
            softcap=family.softcap,
        )

    free = best(config.banned_ids)
    if early is None:
        return free
    endless = best(config.banned_ids + family.end_ids)
    columns = {}
    for name in ("token", "confidence", "entropy", "margin"):
        a, b = getattr(endless, name), getattr(free, name)
        columns[name] = None if a is None else torch.where(early, a, b)
    return LinearArgmax(**columns, nan_flag=free.nan_flag | endless.nan_flag)


def wanted_numbers(config: DecodeConfig) -> set[str]:
    """What linear_argmax must return for the rule and the order."""
    return {"confidence", config.ordered_by} & {"confidence", "margin", "entropy"}


def priority(config: DecodeConfig, best: LinearArgmax, key: tuple[Tensor, ...]) -> Tensor:
    """[N], higher goes first; key: request, step and position [N] of each slot."""
    request, step, position = key
    if config.rule == "first_hitting":
        return hitting_times(position, request, config.seed).to(best.confidence.dtype)
    if config.ordered_by == "margin":
        return best.margin
    if config.ordered_by == "entropy":
        return -best.entropy
    if config.ordered_by == "random":
        word = philox_u24(position, step, request, seed=config.seed, stream=Stream.ORDER)
        return word.to(best.confidence.dtype)
    if config.ordered_by == "left":
        return -position.to(best.confidence.dtype)
    return best.confidence


def routed_score(config: DecodeConfig, active: Active, confidence: Tensor) -> Tensor:
    """RDM's score of N tokens: the confidence, or its logarithm and Gumbel noise that fades with
    the share of [MASK]s that the step leaves."""
    scale = config.option("order_noise")
    if not scale:
        return confidence
    request, step, position = active.key
    u24 = philox_u24(position, step, request, seed=config.seed, stream=Stream.ORDER)
    steps, schedule = config.steps_per_block, config.option("schedule")
    left = [masked_share(turn.number, steps, schedule) for turn in active.turns]
    fading = upload(left, confidence.device)[active.slots // active.block.width]
    noise = gumbel(u24, confidence.dtype)
    score = confidence.log() + scale * fading.to(confidence.dtype) * noise
    return score.clamp(min=torch.finfo(score.dtype).min)  # log 0 would tie with closed slots


def rank(priority: Tensor, masked: Tensor) -> Tensor:
    """Place [S, B] of every slot among its row's masked slots; the others stand behind them. Ties
    go to the leftmost slot."""
    order = priority.masked_fill(~masked, -torch.inf).sort(dim=1, descending=True, stable=True)[1]
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def transfer(config: DecodeConfig, active: Active, best: LinearArgmax) -> Tensor:
    """The slots [S, B] that get their token under a rule that never takes one back."""
    if config.rule == "routed":
        goes_first = routed_score(config, active, best.confidence)
    else:
        goes_first = priority(config, best, active.key)
    confidence, goes_first = active.rectangle(best.confidence), active.rectangle(goes_first)
    if active.quota is None:
        return commit_sure(config, goes_first, confidence, active.masked)
    return commit_quota(goes_first, active.masked, active.quota)


def commit_quota(priority: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
    """The `quota` [S] masked slots of every row [S, B] that go first -> bool [S, B].

    Low-confidence remasking seen from the other side: the rest stays [MASK].
    """
    return masked & (rank(priority, masked) < quota[:, None])


def commit_sure(
    config: DecodeConfig, priority: Tensor, confidence: Tensor, masked: Tensor
) -> Tensor:
    """The masked slots [S, B] that a dynamic rule takes -> bool [S, B]; see DecodeConfig."""
    place = rank(priority, masked)
    if config.rule in ("threshold", "edit"):
        sure = masked & (confidence > config.bound)
        return sure | masked & (place == 0) & ~sure.any(1, keepdim=True)
    # The other two take a run of slots from the first on: confidences fall and the bar rises,
    # sums of entropies grow.
    if config.rule == "factor":
        n = place + 1
        enough = confidence >= 1 - config.bound / (n + 1)
    else:
        entropy = (-priority).masked_fill(~masked, torch.inf)
        ordered = torch.empty_like(entropy).scatter_(1, place, entropy)
        enough = ordered.cumsum(1).gather(1, place) < config.bound
    return masked & (enough | (place == 0))
