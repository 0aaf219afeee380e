"""Several active blocks: draws for a decoder that fills a group of blocks at a time.

Such a decoder works on up to g unfinished blocks in a row. The first is filled the most, and the
next one opens once a share of it is filled (MultiTF of Multi-Block Diffusion, arXiv:2606.29215;
D2F, arXiv:2508.09192). Each visit cuts a response in groups of g blocks, of which the first is
short by any number of blocks and the last has what remains. A group of blocks 1..n is masked so:

1. Block 1 gets its rate pi_1 and its marks as if it were active alone.
2. pi_{j+1} ~ U(pi_j, high): a later block is masked more, at pi_j = high - (high - low) / 2^j on
   average.
3. A later block without a masked token follows `empty` at the rate that it has: "redraw" masks one
   of its tokens, uniformly chosen.

A block's words are those of a draw of its own, so that marks and rates of blocks are independent
but for 2. Within a block tokens weigh as if it were active alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from bwsft_kernels import MaskedBatch, MaskSpec, Stream, block_mask
from bwsft_kernels.philox import MASK32, philox_u24
from torch import Tensor

from bwsft.objectives.base import (
    IGNORE,
    ONE24,
    Groups,
    between,
    response_rows,
    row_list,
)
from bwsft.objectives.block_choice import num_blocks

if TYPE_CHECKING:
    from bwsft.data.packing import Batch


def mask_groups(
    batch: Batch,
    spec: MaskSpec,
    chosen: Tensor,  # [S] a block of each group, whichever it is
    draw: Tensor,  # [S] numbers of the draws that mask the first blocks
    factor: Tensor,  # [S] fp64, of the weights
    active: int,
) -> MaskedBatch:
    """Masks of the groups of up to `active` blocks that hold the blocks `chosen`; each block of a
    group has an equal share of the weight. `block_length` is the group's, the lists have T entries,
    and `block`, `rate` and `count` are the first block's."""
    rows, offset = response_rows(batch), groups_of(batch, spec.seed, active, MASK32).offset
    begin = chosen - (chosen + offset) % active  # below 0 where the first group is short
    first, end = begin.clamp(min=0), torch.minimum(begin + active, num_blocks(batch, spec))
    mask = functools.partial(
        block_mask, batch.ids, batch.prompt_lengths, batch.response_lengths, spec,
        cu_seqlens=batch.cu_seqlens, sample_ids=batch.sample_ids,
        factor=factor / (end - first),
    )  # fmt: skip
    masked = own = mask(draw=draw, block=first)
    rate = rate24(masked)
    for later in range(1, active):
        number, block = number_of(draw, later, active), first + later
        rate = rate_after(rate, number, batch.sample_ids, spec)
        own = mask(draw=number, block=torch.minimum(block, end - 1), rate=rate)
        there = (block < end)[rows.owner] & (rows.position >= own.block_start[rows.owner])
        masked = joined(masked, own, there)
    stop = own.block_start + own.block_length  # of the group's last block
    return dataclasses.replace(masked, block_length=stop - masked.block_start)


def number_of(draw: Tensor, later: int, active: int) -> Tensor:
    """The numbers [S] of the draws of blocks `later` after the first ones, which are draws [S]:
    counted down from the last number there is, where no visit and no evaluation comes."""
    return MASK32 - (draw * (active - 1) + later - 1)


def groups_of(batch: Batch, seed: int, active: int, word: int = 0) -> Groups:
    """How the responses of a visit are cut in groups: the first one is short by any number of
    blocks, with equal chances. Word 0 of the visit chooses a block where one is chosen: MASK32,
    which is no block's number, is independent of that."""
    u24 = philox_u24(word, batch.visits, batch.sample_ids, seed=seed, stream=Stream.BLOCK)
    return Groups(active, active * u24 >> 24)


def rising_rates(
    alone: MaskedBatch,  # the blocks of a batch, as sequences [N] with rates of their own
    later: Tensor,  # [N] bool: not the first one of its group
    draw: Tensor,  # [N] their numbers
    sample_ids: Tensor,  # [N]
    spec: MaskSpec,
    active: int,
) -> Tensor:
    """The rates [N] of blocks in groups, in units of 2^-24."""
    rate = first = rate24(alone)
    for _ in range(1, active):
        rate = torch.where(later, rate_after(rate.roll(1), draw, sample_ids, spec), first)
    return rate


def rate_after(rate: Tensor, draw: Tensor, sample_ids: Tensor, spec: MaskSpec) -> Tensor:
    """The rates [N] of draws of blocks, uniform from those of the blocks before them, `rate`, to
    spec.high; in units of 2^-24."""
    u24 = philox_u24(0, draw, sample_ids, seed=spec.seed, stream=Stream.RATE)
    return between(rate, spec.bounds24[1], u24)


def rate24(masked: MaskedBatch) -> Tensor:
    """The rates [S] of a mask in units of 2^-24, which fp32 holds exactly."""
    return (masked.rate * ONE24).long()


def joined(one: MaskedBatch, other: MaskedBatch, there: Tensor) -> MaskedBatch:
    """A mask whose tokens `there` [T] are as in another of the same batch. Its lists have T
    entries."""

    def weights(masked: MaskedBatch) -> Tensor:
        return torch.zeros_like(there, dtype=torch.float32).index_add_(
            0, masked.rows, masked.row_weight)  # fmt: skip

    labels = torch.where(there, other.labels, one.labels)
    weight = torch.where(there, weights(other), weights(one))
    rows, real = row_list(labels != IGNORE)
    return dataclasses.replace(
        one, noisy_ids=torch.where(there, other.noisy_ids, one.noisy_ids), labels=labels, rows=rows,
        row_target=torch.where(real, labels[rows].long(), IGNORE),
        row_weight=torch.where(real, weight[rows], 0.0), num_rows=real.sum(),
    )  # fmt: skip
