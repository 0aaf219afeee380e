"""`block_mask` in one launch: program 0 lists the loss rows, the others write the tokens.

Every decision is an integer comparison on Philox words, so the marks are the bits of the torch
implementation. A program recomputes what it needs of a draw; nothing is passed between programs.
Letters: T tokens, S sequences, B block size, M blocks of a response, R bound on the loss rows, Q
sequences that program 0 handles at a time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._device_triton import on_device, philox_words
from ._mask_types import ONE24, MaskedBatch, MaskInputs, MaskSpec
from .philox import Stream, split_seed

BLOCK = tl.constexpr(int(Stream.BLOCK))
RATE = tl.constexpr(int(Stream.RATE))
MARKS = tl.constexpr(int(Stream.MARKS))
PREFIX = tl.constexpr(int(Stream.PREFIX))
SUFFIX = tl.constexpr(int(Stream.SUFFIX))
IGNORE = tl.constexpr(-100)

# Tokens that a program handles at a time: 4 a thread. With 8, Triton 3.6 spills 8 bytes.
TILE = 512


@dataclass(frozen=True)
class Plan:
    """The compile-time side of MaskSpec, without the seed; probabilities in units of 2^-24."""

    block_size: int
    mask_id: int
    low24: int
    span24: int
    prefix24: int
    leak24: int
    weight: str
    absolute: bool
    last: bool
    pairs: bool
    sum_blocks: bool
    given_block: bool
    max_blocks: int  # columns of block_weights, 0 without them


@triton.jit
def _u24(position, draw, sample, stream: tl.constexpr, key):
    high = (sample >> 32) | (stream << 24)
    word, _, _, _ = philox_words(position, draw, sample & 0xFFFFFFFF, high, key[0], key[1])
    return (word >> 8).to(tl.int64)


@triton.jit
def _choose_block(seq, inside, sequences, key, PLAN: tl.constexpr):
    """(index, start, length, weight numerator in fp64) of the active block; seq [Q]."""
    prompt = tl.load(sequences[2] + seq, mask=inside, other=0)
    response = tl.load(sequences[3] + seq, mask=inside, other=0)
    sample = tl.load(sequences[4] + seq, mask=inside, other=0)
    draw = tl.load(sequences[5] + seq, mask=inside, other=0)
    origin = prompt
    if PLAN.absolute:
        origin = prompt - prompt % PLAN.block_size
    end = prompt + response
    blocks = (end - origin + PLAN.block_size - 1) // PLAN.block_size
    blocks = tl.where(response > 0, blocks, 0)
    if PLAN.pairs:
        draw = draw & -2
    inverse_rho = blocks.to(tl.float64)
    if PLAN.given_block:
        index = tl.load(sequences[6] + seq, mask=inside, other=0)
    else:
        u24 = _u24(seq * 0, draw, sample, BLOCK, key)
        index = (u24 * blocks) >> 24
        if PLAN.max_blocks > 0:
            weights = sequences[6] + seq * PLAN.max_blocks
            total = blocks * 0
            for m in range(PLAN.max_blocks):
                total += tl.load(weights + m, mask=inside, other=0)
            threshold = (u24 * total) >> 24
            cumulative = blocks * 0
            index = blocks * 0
            for m in range(PLAN.max_blocks):
                cumulative += tl.load(weights + m, mask=inside, other=0)
                index += (cumulative <= threshold).to(tl.int64)
            index = tl.where(blocks > 0, index, 0)
            chosen = tl.load(weights + index, mask=inside, other=1)
            inverse_rho = total.to(tl.float64) / tl.maximum(chosen, 1).to(tl.float64)
    start = tl.maximum(origin + index * PLAN.block_size, prompt)
    length = tl.minimum(end, origin + (index + 1) * PLAN.block_size) - start
    length = tl.where(blocks > 0, length, 0)
    factor = inverse_rho
    if not PLAN.sum_blocks:
        factor = inverse_rho / tl.maximum(blocks, 1).to(tl.float64)
    return index, start, length, factor


@triton.jit
def _marked(position, draw, sample, rate24, flip, key):
    return (_u24(position, draw, sample, MARKS, key) < rate24) != flip


@triton.jit
def _draw_marks(
    seq, inside, start, length, sequences, key, PLAN: tl.constexpr, BLOCK_B: tl.constexpr
):
    """How to mark: (draw, rate24, complement?, force the last token?, marks [Q, BLOCK_B])."""
    sample = tl.load(sequences[4] + seq, mask=inside, other=0)
    draw = tl.load(sequences[5] + seq, mask=inside, other=0)
    offset = tl.arange(0, BLOCK_B)[None, :]
    position = start[:, None] + offset
    in_block = offset < length[:, None]
    rate24 = PLAN.low24 + ((PLAN.span24 * _u24(seq * 0, draw, sample, RATE, key)) >> 24)
    flip = tl.zeros_like(draw) != 0
    if PLAN.pairs:
        even = draw & -2
        shared24 = PLAN.low24 + ((PLAN.span24 * _u24(seq * 0, even, sample, RATE, key)) >> 24)
        marks = _marked(
            position, even[:, None], sample[:, None], shared24[:, None], flip[:, None], key
        )
        some = tl.max((marks & in_block).to(tl.int32), axis=1)
        rest = tl.max((in_block & ~marks).to(tl.int32), axis=1)
        both = (some & rest) > 0
        flip = both & ((draw & 1) == 1)
        rate24 = tl.where(both, shared24, rate24)
        draw = tl.where(both, even, draw)
    marks = in_block & _marked(
        position, draw[:, None], sample[:, None], rate24[:, None], flip[:, None], key
    )
    force = tl.zeros_like(draw) != 0
    if PLAN.last:
        force = tl.max(marks.to(tl.int32), axis=1) == 0
        marks = marks | (force[:, None] & (offset == length[:, None] - 1))
    return draw, rate24, flip, force, marks


@triton.jit
def _list_rows(
    ids_ptr,
    rows_out,
    sequences_out,
    sequences,
    S,
    R,
    key,
    PLAN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Loss rows in row-major order: a running offset, then prefix sums over and in sequences."""
    found = tl.zeros((), tl.int64)
    for first in range(0, S, BLOCK_Q):
        seq = (first + tl.arange(0, BLOCK_Q)).to(tl.int64)
        inside = seq < S
        index, start, length, factor = _choose_block(seq, inside, sequences, key, PLAN)
        _, rate24, _, _, marks = _draw_marks(
            seq, inside, start, length, sequences, key, PLAN, BLOCK_B
        )
        marks = marks & inside[:, None]
        ones = marks.to(tl.int64)
        count = tl.sum(ones, axis=1)
        before = found + tl.cumsum(count, axis=0) - count
        slot = before[:, None] + tl.cumsum(ones, axis=1) - ones
        found += tl.sum(count, axis=0)

        denominator = count
        scale = 1.0
        if PLAN.weight == "flat":
            denominator = length
        if PLAN.weight == "rate":
            denominator = rate24 * length
            scale = 16777216.0
        # fp64, as in torch: one rounding, so the weights are the same bits too.
        weight = (factor * scale / tl.maximum(denominator, 1).to(tl.float64)).to(tl.float32)
        row_start = tl.load(sequences[0] + seq, mask=inside, other=0)
        row = (row_start + start)[:, None] + tl.arange(0, BLOCK_B)[None, :]
        tl.store(rows_out[0] + slot, row, mask=marks)
        target = tl.load(ids_ptr + row, mask=marks, other=0)
        tl.store(rows_out[1] + slot, target.to(tl.int64), mask=marks)
        tl.store(rows_out[2] + slot, weight[:, None] + tl.zeros_like(slot), mask=marks)
        tl.store(sequences_out[0] + seq, index, mask=inside)
        tl.store(sequences_out[1] + seq, start, mask=inside)
        tl.store(sequences_out[2] + seq, length, mask=inside)
        rate = rate24.to(tl.float32) * (1.0 / 16777216.0)
        tl.store(sequences_out[3] + seq, rate, mask=inside)
        tl.store(sequences_out[4] + seq, count, mask=inside)
    tl.store(rows_out[3], found)
    for first in range(0, R, BLOCK_B):
        slot = (first + tl.arange(0, BLOCK_B)).to(tl.int64)
        tail = (slot >= found) & (slot < R)
        tl.store(rows_out[0] + slot, tl.zeros_like(slot), mask=tail)
        tl.store(rows_out[1] + slot, tl.zeros_like(slot) + IGNORE, mask=tail)
        tl.store(rows_out[2] + slot, tl.zeros_like(slot).to(tl.float32), mask=tail)


@triton.jit
def _write_tokens(
    ids_ptr,
    tokens_out,
    sequences,
    S,
    chunks,
    key,
    PLAN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Noisy ids and labels of every `chunks`-th tile of one row."""
    part = tl.program_id(0).to(tl.int64) - 1
    seq = part // chunks + tl.arange(0, 1)  # a vector of one, as the helpers take it
    inside = seq < S
    _, start, length, _ = _choose_block(seq, inside, sequences, key, PLAN)
    draw, rate24, flip, force, _ = _draw_marks(
        seq, inside, start, length, sequences, key, PLAN, BLOCK_B
    )
    prompt = tl.load(sequences[2] + seq)
    end = prompt + tl.load(sequences[3] + seq)
    sample = tl.load(sequences[4] + seq)
    own_draw = tl.load(sequences[5] + seq)
    row_start = tl.load(sequences[0] + part // chunks)
    row_length = tl.load(sequences[1] + part // chunks)
    for first in range(part % chunks * BLOCK_T, row_length, chunks * BLOCK_T):
        position = first + tl.arange(0, BLOCK_T).to(tl.int64)
        in_row = position < row_length
        ids = tl.load(ids_ptr + row_start + position, mask=in_row, other=0)
        offset = position - start
        marked = _marked(position, draw, sample, rate24, flip, key)
        marked = marked | (force & (offset == length - 1))
        marked = marked & (offset >= 0) & (offset < length)
        hidden = (offset >= length) & (position < end)
        if PLAN.leak24 > 0:
            hidden = hidden & (_u24(position, own_draw, sample, SUFFIX, key) >= PLAN.leak24)
        if PLAN.prefix24 > 0:
            noise = _u24(position, own_draw, sample, PREFIX, key) < PLAN.prefix24
            hidden = hidden | (noise & (position >= prompt) & (offset < 0))
        noisy = tl.where(marked | hidden, PLAN.mask_id, ids)
        tl.store(tokens_out[0] + row_start + position, noisy, mask=in_row)
        labels = tl.where(marked, ids, IGNORE)
        tl.store(tokens_out[1] + row_start + position, labels, mask=in_row)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _block_mask_fwd_kernel(
    ids_ptr,
    tokens_out,
    rows_out,
    sequences_out,
    sequences,
    S,
    R,
    chunks,
    key_low,
    key_high,
    PLAN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    key = (key_low, key_high)
    if tl.program_id(0) == 0:
        _list_rows(
            ids_ptr, rows_out, sequences_out, sequences, S, R, key, PLAN, BLOCK_B, BLOCK_Q
        )
    else:
        _write_tokens(ids_ptr, tokens_out, sequences, S, chunks, key, PLAN, BLOCK_B, BLOCK_T)


def _plan(inputs: MaskInputs, spec: MaskSpec) -> Plan:
    low24, high24, prefix24, leak24 = (
        round(chance * ONE24)
        for chance in (spec.low, spec.high, spec.prefix_noise, spec.suffix_leak)
    )
    return Plan(
        block_size=spec.block_size,
        mask_id=spec.mask_id,
        low24=low24,
        span24=high24 - low24,
        prefix24=prefix24,
        leak24=leak24,
        weight=spec.weight,
        absolute=spec.block_origin == "absolute",
        last=spec.empty == "last",
        pairs=spec.pairs,
        sum_blocks=spec.block_factor == "sum",
        given_block=inputs.block is not None,
        max_blocks=0 if inputs.block_weights is None else inputs.block_weights.shape[1],
    )


def block_mask_triton(inputs: MaskInputs, spec: MaskSpec) -> MaskedBatch:
    """`block_mask` on validated inputs, by one kernel launch."""
    ids, num_sequences = inputs.ids.contiguous(), len(inputs.row_start)
    numel, bound = ids.numel(), min(num_sequences * spec.block_size, ids.numel())
    counts = [torch.empty_like(inputs.row_start) for _ in range(4)]
    rate = torch.empty_like(inputs.row_start, dtype=torch.float32)
    batch = MaskedBatch(
        noisy_ids=torch.empty_like(ids),
        labels=torch.empty_like(ids),
        rows=rate.new_empty(bound, dtype=torch.int64),
        row_target=rate.new_empty(bound, dtype=torch.int64),
        row_weight=rate.new_empty(bound),
        num_rows=rate.new_empty((), dtype=torch.int64),
        block=counts[0],
        block_start=counts[1],
        block_length=counts[2],
        rate=rate,
        count=counts[3],
    )
    choice = inputs.block if inputs.block_weights is None else inputs.block_weights
    sequences = [
        inputs.row_start, inputs.row_length, inputs.prompt_lengths, inputs.response_lengths,
        inputs.sample_ids, inputs.draw, inputs.row_start if choice is None else choice,
    ]
    block_b = triton.next_power_of_2(spec.block_size)
    block_q = min(triton.next_power_of_2(max(1, num_sequences)), max(1, TILE // block_b))
    # About one program per tile of tokens; a longer row goes round.
    chunks = max(1, triton.cdiv(numel, TILE * max(1, num_sequences)))
    # Signed words: a seed above 2^31 must not change the argument's type and compile anew.
    key_low, key_high = (word - ((word >> 31) << 32) for word in split_seed(spec.seed))
    with on_device(ids):
        _block_mask_fwd_kernel[(1 + num_sequences * chunks,)](
            ids,
            (batch.noisy_ids, batch.labels),
            (batch.rows, batch.row_target, batch.row_weight, batch.num_rows),
            (batch.block, batch.block_start, batch.block_length, batch.rate, batch.count),
            tuple(value.contiguous() for value in sequences),
            num_sequences, bound, chunks, key_low, key_high,
            PLAN=_plan(inputs, spec), BLOCK_B=block_b, BLOCK_Q=block_q, BLOCK_T=TILE,
            num_warps=4, enable_fp_fusion=False,
        )
    return batch
