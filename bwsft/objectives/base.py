"""What the whole-response objectives (mdlm, soft_masked, rdm, two_step) have in common.

Each of them is a module with two functions:

- ``prepare(config, family, responses) -> options``, a subclass of `Options`: called once;
  ``responses`` yields the training responses (token ids, with their end token and fill) for
  objectives that need statistics of them.
- ``draws(batch, options, place, predict) -> Iterator[Drawn]``: the corruptions of one visit of each
  example. Every random choice is a function of (seed, example, visit) or (seed, step).
  ``predict(noisy, rows)`` is a forward without gradient: token and confidence at the rows.

The loss is the sum over draws of weight * CE, divided once by the sequences of the update.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from bwsft_kernels.philox import Stream, philox_u24
from torch import Tensor

IGNORE = -100
ONE24 = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every objective needs to know; each adds fields of its own."""

    mask_id: int
    seed: int
    low: int  # lowest and highest time in units of 2^-24: floats never decide a mask
    high: int
    excluded_id: int | None = None  # column of the head that leaves the softmax


def common(config, family) -> dict[str, int]:
    """The fields of `Options` for a run `config` on a model `family`."""
    objective = config.objective
    return {
        "mask_id": family.mask_id,
        "seed": config.seed,
        "low": round(objective.low * ONE24),
        "high": round(objective.high * ONE24),
    }


class Place(NamedTuple):
    """Where a micro-batch stands in the training."""

    step: int  # optimiser updates before this one
    first: int  # place of its first sequence in the whole update, over ranks too
    sequences: int  # of the update
    tokens: int  # response tokens of the update


@dataclass(frozen=True)
class Drawn:
    """One corruption of a batch: what the network sees and which rows bear loss."""

    noisy: Any  # the batch with its noisy ids
    rows: Tensor  # [T] flat indices of the loss rows, the tail 0
    target: Tensor  # [T] clean tokens, the tail -100
    weight: Tensor  # [T] fp32, the tail 0
    num_rows: Tensor  # 0-dim
    region: Tensor  # 0-dim: tokens of the supervised region, masked or not
    smoothing: Tensor | float = 0.0  # label smoothing of each row


class Rows(NamedTuple):
    """Response tokens of a packed batch. [T] each but the last."""

    inside: Tensor  # is a response token (its end token and fill included)
    owner: Tensor  # its sequence
    position: Tensor  # its position in the row
    lengths: Tensor  # [S] response tokens


def response_rows(batch) -> Rows:
    counts = batch.cu_seqlens.diff().long()
    owner = torch.repeat_interleave(
        torch.arange(len(counts), device=counts.device), counts, output_size=batch.ids.numel()
    )
    start = batch.prompt_lengths[owner]
    position = batch.position_ids
    inside = (position >= start) & (position < start + batch.response_lengths[owner])
    return Rows(inside, owner, position, batch.response_lengths)


def sequence_u24(batch, seed: int, stream: Stream, draw) -> Tensor:
    """One integer in [0, 2^24) per sequence, [S]."""
    return philox_u24(0, draw, batch.sample_ids, seed=seed, stream=stream)


def token_u24(batch, rows: Rows, seed: int, stream: Stream, draw: Tensor) -> Tensor:
    """One integer in [0, 2^24) per token, [T]; draw [S]. With Stream.MARKS the bits of block_mask:
    a token is masked iff its integer lies below its rate times 2^24."""
    ids = batch.sample_ids[rows.owner]
    return philox_u24(rows.position, draw[rows.owner], ids, seed=seed, stream=stream)


def between(low, high, u24) -> Tensor:
    """Uniform integers in [low, high), with block_mask's arithmetic."""
    return low + ((high - low) * u24 >> 24)


def times(batch, options: Options) -> Tensor:
    """One time per sequence, uniform in [low, high), in units of 2^-24: block_mask's rates."""
    u24 = sequence_u24(batch, options.seed, Stream.RATE, batch.visits)
    return between(options.low, options.high, u24)


def count(where: Tensor, rows: Rows) -> Tensor:
    """Tokens of each sequence with ``where`` [T], [S]."""
    return torch.zeros_like(rows.lengths).index_add_(0, rows.owner, where.long())


def ranks(batch, rows: Rows, among: Tensor, key: Tensor) -> Tensor:
    """Place of each token of ``among`` [T] in its sequence by ascending ``key`` [T], from 0; ties
    by position. Tokens not ``among`` come behind."""
    by_key = key.argsort(stable=True)
    group = rows.owner * 2 + (~among).long()
    order = by_key[group[by_key].argsort(stable=True)]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place - batch.cu_seqlens[:-1].long()[rows.owner]


def row_list(where: Tensor) -> tuple[Tensor, Tensor]:
    """(indices of ``where`` [T] with a tail of 0, which of them are real), without a host read."""
    size = where.numel()
    index = torch.nonzero_static(where, size=size, fill_value=0).squeeze(1)
    return index, torch.arange(size, device=where.device) < where.sum()


def drawn(batch, marked: Tensor, weight: Tensor, rows: Rows, mask_id: int) -> Drawn:
    """The corruption that masks ``marked`` [T] and weighs each masked token by ``weight`` [T]."""
    noisy = dataclasses.replace(batch, ids=batch.ids.masked_fill(marked, mask_id))
    return supervise(noisy, batch.ids, marked, weight, rows)


def supervise(noisy, clean: Tensor, where: Tensor, weight: Tensor, rows: Rows) -> Drawn:
    """Loss at ``where`` [T] of a noisy batch; no row for a token without weight."""
    where = where & (weight > 0)
    index, real = row_list(where)
    return Drawn(
        noisy=noisy,
        rows=index,
        target=torch.where(real, clean[index], IGNORE),
        weight=torch.where(real, weight[index].float(), 0.0),
        num_rows=where.sum(),
        region=rows.lengths.sum(),
    )
