"""What one draw of `block_mask` decides: the device helpers of _block_mask_triton.py.

Every decision is an integer comparison on Philox words, so the marks are the bits of the torch
implementation. `sequences` is a tuple of pointers to [S] int64: row start, row length, prompt
length, response length, sample id, draw, the given block or the weights [S, max_blocks], the draw
that chooses the block, the given rate in units of 2^-24, and the given factor (fp64).
Letters: S sequences, Q of them handled at a time, B block size, M blocks of a response.
"""

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from ._block_mask_types import ONE24, MaskInputs, MaskSpec
from ._device_triton import philox_words
from .philox import Stream

BLOCK, RATE, MARKS = (tl.constexpr(int(s)) for s in (Stream.BLOCK, Stream.RATE, Stream.MARKS))


@dataclass(frozen=True)
class DrawPlan:
    """The compile-time side of a call; probabilities in units of 2^-24."""

    spec: MaskSpec  # its seed is no constant, and 0 here
    low24: int
    span24: int
    prefix24: int
    leak24: int
    given_block: bool
    weighted_block: bool
    given_rate: bool
    given_factor: bool


def plan_draw(inputs: MaskInputs, spec: MaskSpec) -> DrawPlan:
    low24, high24 = spec.bounds24
    prefix24, leak24 = (round(chance * ONE24) for chance in (spec.prefix_noise, spec.suffix_leak))
    given = (inputs.block, inputs.block_weights, inputs.rate, inputs.factor)
    return DrawPlan(
        replace(spec, seed=0), low24, high24 - low24, prefix24, leak24,
        *(value is not None for value in given),
    )


@triton.jit
def u24_of(position, draw, sample, stream: tl.constexpr, key):
    high = (sample >> 32) | (stream << 24)
    word, _, _, _ = philox_words(position, draw, sample & 0xFFFFFFFF, high, key[0], key[1])
    return (word >> 8).to(tl.int64)


@triton.jit
def choose_block(seq, inside, sequences, max_blocks, key, PLAN: tl.constexpr):
    """(index, start, length, weight numerator in fp64) of the active block; seq [Q].

    The block's bounds are block_grid.BlockGrid.num_blocks and .bounds in device code.
    """
    prompt = tl.load(sequences[2] + seq, mask=inside, other=0)
    response = tl.load(sequences[3] + seq, mask=inside, other=0)
    sample = tl.load(sequences[4] + seq, mask=inside, other=0)
    draw = tl.load(sequences[7] + seq, mask=inside, other=0)
    origin = prompt
    if PLAN.spec.block_origin == "absolute":
        origin = prompt - prompt % PLAN.spec.block_size
    end = prompt + response
    blocks = (end - origin + PLAN.spec.block_size - 1) // PLAN.spec.block_size
    blocks = tl.where(response > 0, blocks, 0)
    if PLAN.spec.pairs:
        draw = draw & -2
    inverse_rho = blocks.to(tl.float64)
    if PLAN.given_block:
        index = tl.load(sequences[6] + seq, mask=inside, other=0)
    else:
        u24 = u24_of(seq * 0, draw, sample, BLOCK, key)
        index = (u24 * blocks) >> 24
        if PLAN.weighted_block:
            weights = sequences[6] + seq * max_blocks
            total = blocks * 0
            for m in range(max_blocks):
                total += tl.load(weights + m, mask=inside, other=0)
            threshold = (u24 * total) >> 24
            cumulative = blocks * 0
            index = blocks * 0
            for m in range(max_blocks):
                cumulative += tl.load(weights + m, mask=inside, other=0)
                index += (cumulative <= threshold).to(tl.int64)
            index = tl.where(blocks > 0, index, 0)
            chosen = tl.load(weights + index, mask=inside, other=1)
            inverse_rho = total.to(tl.float64) / tl.maximum(chosen, 1).to(tl.float64)
    start = tl.maximum(origin + index * PLAN.spec.block_size, prompt)
    length = tl.minimum(end, origin + (index + 1) * PLAN.spec.block_size) - start
    length = tl.where(blocks > 0, length, 0)
    factor = inverse_rho
    if PLAN.spec.block_factor == "mean":
        factor = inverse_rho / tl.maximum(blocks, 1).to(tl.float64)
    if PLAN.given_factor:
        factor = factor * tl.load(sequences[9] + seq, mask=inside, other=0)
    return index, start, length, factor


@triton.jit
def rate_of(seq, inside, draw, sample, sequences, key, PLAN: tl.constexpr):
    if PLAN.given_rate:
        rate24 = tl.load(sequences[8] + seq, mask=inside, other=0)
    else:
        rate24 = PLAN.low24 + ((PLAN.span24 * u24_of(seq * 0, draw, sample, RATE, key)) >> 24)
    return rate24


@triton.jit
def marks_at(offset, start, length, sample, how, key):
    """Which tokens at these offsets in the active block are masked; `how`: draw, rate24,
    complement?, offset of a token that is masked anyway (-1: none)."""
    draw, rate24, flip, forced = how
    marks = u24_of(start + offset, draw, sample, MARKS, key) < rate24
    return ((marks | (offset == forced)) != flip) & (offset >= 0) & (offset < length)


@triton.jit
def marks_of_tile(first, start, length, sample, how, key, BLOCK_B: tl.constexpr):
    """marks_at [Q, BLOCK_B] of the offsets from `first` on."""
    draw, rate24, flip, forced = how
    offset = first + tl.arange(0, BLOCK_B)[None, :]
    how = draw[:, None], rate24[:, None], flip[:, None], forced[:, None]
    return marks_at(offset, start[:, None], length[:, None], sample[:, None], how, key)


@triton.jit
def count_marks(start, length, sample, how, key, BLOCK_B: tl.constexpr):
    count = tl.zeros_like(length)
    for first in range(0, tl.max(length, axis=0).to(tl.int32), BLOCK_B):
        marks = marks_of_tile(first, start, length, sample, how, key, BLOCK_B)
        count += tl.sum(marks.to(tl.int64), axis=1)
    return count


@triton.jit
def draw_marks(
    seq, inside, start, length, sequences, key, PLAN: tl.constexpr, BLOCK_B: tl.constexpr
):
    """(`how` of marks_at, masked tokens [Q])."""
    sample = tl.load(sequences[4] + seq, mask=inside, other=0)
    draw = tl.load(sequences[5] + seq, mask=inside, other=0)
    odd = draw != draw
    if PLAN.spec.pairs:  # an odd half follows the even one
        odd = (draw & 1) == 1
        draw = draw & -2
    rate24 = rate_of(seq, inside, draw, sample, sequences, key, PLAN)
    flip = draw != draw
    forced = draw * 0 - 1
    count = count_marks(start, length, sample, (draw, rate24, flip, forced), key, BLOCK_B)
    if PLAN.spec.empty != "skip":
        empty = (count == 0) & (length > 0)
        token = length - 1
        if PLAN.spec.empty == "redraw":
            # The rate and the number of one token change places; as far as the rate may go.
            token = (u24_of(seq * 0 + 1, draw, sample, RATE, key) * length) >> 24
            new24 = u24_of(start + token, draw, sample, MARKS, key)
            most24 = rate24 if PLAN.given_rate else PLAN.low24 + PLAN.span24
            rate24 = tl.where(empty, tl.minimum(new24, most24), rate24)
        forced = tl.where(empty, token, -1)
        if PLAN.spec.empty == "redraw":
            how = draw, rate24, flip, forced
            count = count_marks(start, length, sample, how, key, BLOCK_B)
        else:
            count = tl.where(empty, 1, count)
    count = tl.where(odd, length - count, count)
    return (draw, rate24, odd, forced), count
