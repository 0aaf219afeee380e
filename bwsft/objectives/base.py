"""What every objective offers the trainer, and what the objectives share.

An objective is a dataclass in a file of its own: ``of`` makes it for a run, ``draws`` corrupts a
batch. Every random choice is a function of (seed, example, visit) or (seed, update): see
bwsft_kernels.philox. The loss is the sum over draws of weight * CE / `of`, divided once by the
sequences of the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from bwsft_kernels import LinearArgmax, Stream
from bwsft_kernels.philox import philox_u24
from torch import Tensor

if TYPE_CHECKING:
    from bwsft.data.packing import Batch

IGNORE = -100
ONE24 = 1 << 24  # rates and times are whole numbers of 2^-24: floats never decide a mask


class Place(NamedTuple):
    """Which part of which update a micro-batch is."""

    step: int  # optimizer updates before this one
    first: int  # number of its first sequence in the whole update, over ranks too
    sequences: int  # of the update
    tokens: int  # response tokens of the update


class Groups(NamedTuple):
    """Blocks of responses in groups: block b, from 0, is in group (b + offset) // size."""

    size: int
    offset: Tensor  # [S] in [0, size)


@dataclass(frozen=True)
class Draw:
    """One corruption of a batch: what the network sees and which tokens are supervised."""

    noisy: Batch  # the batch with its noisy ids
    rows: Tensor  # [N] flat indices of the supervised tokens in the ids, the tail 0
    target: Tensor  # [N] clean tokens, the tail -100
    weight: Tensor  # [N] fp32, the tail 0
    num_rows: Tensor  # 0-dim: supervised tokens
    region: Tensor  # 0-dim: tokens of the supervised regions, masked or not
    # [S] the first position of the active block, or of the group of them, in its row, and how many
    # tokens it has; None: the whole response is supervised
    block_start: Tensor | None = None
    block_length: Tensor | None = None
    groups: Groups | None = None  # of blocks that see each other, where a draw masks all blocks
    smoothing: Tensor | float = 0.0  # label smoothing of each supervised token
    # [T] bool: tokens whose block sees what the model itself says of it (uniform noise)
    conditioned: Tensor | None = None
    number: int = 0  # of the draw among the `of` draws of a visit, which share their context
    of: int = 1

    def to(self, device: torch.device) -> Draw:
        moved = {k: v.to(device) for k, v in vars(self).items() if hasattr(v, "to")}
        return dataclasses.replace(self, **moved)


# (noisy batch, rows [N]) -> token and confidence that the model gives these rows, without gradient.
Predict = Callable[["Batch", Tensor], LinearArgmax]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is masked and how it is weighed."""

    excluded_id: int | None = None  # column of the head that leaves the softmax

    @classmethod
    def of(cls, config: Any, family: Any, responses: Iterable = ()) -> Objective:
        """The objective of a run `config` (a bwsft Config) on a model `family`; `responses` are the
        token ids of the training responses, with end token and fill."""
        raise NotImplementedError

    def visited(self, batch: Batch) -> Batch:
        """What of a batch this visit of its examples trains on: all of it."""
        return batch

    def draws(self, batch: Batch, place: Place, predict: Predict) -> Iterator[Draw]:
        """The corruptions of one visit of each example, on the device of the batch."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class WholeResponse(Objective):
    """An objective that masks tokens anywhere in the response; each adds fields of its own."""

    mask_id: int
    seed: int
    low: int  # lowest and highest time in units of 2^-24
    high: int


def common(config: Any, family: Any) -> dict[str, int]:
    """The fields of `WholeResponse` for a run `config` on a model `family`."""
    low, high = (round(t * ONE24) for t in (config.objective.low, config.objective.high))
    return {"mask_id": family.mask_id, "seed": config.seed, "low": low, "high": high}


class Rows(NamedTuple):
    """Response tokens of a packed batch. [T] each but the last."""

    inside: Tensor  # is a response token (its end token and fill included)
    owner: Tensor  # its sequence
    position: Tensor  # its position in the row
    lengths: Tensor  # [S] response tokens


def response_rows(batch: Batch) -> Rows:
    """Which tokens of a packed batch belong to responses."""
    counts = batch.cu_seqlens.diff().long()
    owner = torch.repeat_interleave(
        torch.arange(len(counts), device=counts.device), counts, output_size=batch.ids.numel()
    )
    start = batch.prompt_lengths[owner]
    position = batch.position_ids
    inside = (position >= start) & (position < start + batch.response_lengths[owner])
    return Rows(inside, owner, position, batch.response_lengths)


def sequence_u24(batch: Batch, seed: int, stream: Stream, draw: Tensor | int) -> Tensor:
    """One integer in [0, 2^24) per sequence, [S]."""
    return philox_u24(0, draw, batch.sample_ids, seed=seed, stream=stream)


def token_u24(batch: Batch, rows: Rows, seed: int, stream: Stream, draw: Tensor) -> Tensor:
    """One integer in [0, 2^24) per token, [T]; draw [S]. With Stream.MARKS the bits of block_mask:
    a token is masked iff its integer is below its rate times 2^24."""
    ids = batch.sample_ids[rows.owner]
    return philox_u24(rows.position, draw[rows.owner], ids, seed=seed, stream=stream)


def between(low: int | Tensor, high: int | Tensor, u24: Tensor) -> Tensor:
    """Uniform integers in [low, high), with block_mask's arithmetic."""
    return low + ((high - low) * u24 >> 24)


def times(batch: Batch, options: WholeResponse) -> Tensor:
    """One time per sequence, uniform in [low, high), in units of 2^-24: block_mask's rates."""
    u24 = sequence_u24(batch, options.seed, Stream.RATE, batch.visits)
    return between(options.low, options.high, u24)


def count(where: Tensor, rows: Rows) -> Tensor:
    """Tokens of each sequence with ``where`` [T], [S]."""
    return torch.zeros_like(rows.lengths).index_add_(0, rows.owner, where.long())


def ranks(batch: Batch, rows: Rows, among: Tensor, key: Tensor) -> Tensor:
    """Place of each token of ``among`` [T] in its sequence by ascending ``key`` [T], from 0; ties
    by position. Tokens not ``among`` come last."""
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


def masked_draw(
    batch: Batch, marked: Tensor, weight: Tensor, rows: Rows, mask_id: int,
    where: Tensor | None = None,
) -> Draw:  # fmt: skip
    """The corruption that masks ``marked`` [T] and weighs each masked token, or those ``where`` [T]
    among them, by ``weight`` [T]."""
    noisy = dataclasses.replace(batch, ids=batch.ids.masked_fill(marked, mask_id))
    return supervise(noisy, batch.ids, marked if where is None else where, weight, rows)


def supervise(noisy: Batch, clean: Tensor, where: Tensor, weight: Tensor, rows: Rows) -> Draw:
    """Loss at ``where`` [T] of a noisy batch with clean ids ``clean`` [T]; a token without weight
    is not supervised."""
    where = where & (weight > 0)
    index, real = row_list(where)
    return Draw(
        noisy=noisy,
        rows=index,
        target=torch.where(real, clean[index], IGNORE),
        weight=torch.where(real, weight[index].float(), 0.0),
        num_rows=where.sum(),
        region=rows.lengths.sum(),
    )
