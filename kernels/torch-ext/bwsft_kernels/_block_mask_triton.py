"""`block_mask` in one launch: program 0 lists the supervised rows, the others write the tokens.

Each program recomputes what it needs of a draw (_block_mask_draw_triton.py): nothing passes between
programs. Letters: T tokens, S sequences, B block size, R bound on the supervised rows, Q sequences
that program 0 handles at a time. A block wider than a tile is gone through in tiles.
"""

import torch
import triton
import triton.language as tl

from ._block_mask_draw_triton import (
    choose_block,
    draw_marks,
    marks_at,
    marks_of_tile,
    plan_draw,
    u24_of,
)
from ._block_mask_types import MaskedBatch, MaskInputs, MaskSpec
from ._device_triton import on_device
from .philox import Stream, split_seed

PREFIX, SUFFIX = (tl.constexpr(int(stream)) for stream in (Stream.PREFIX, Stream.SUFFIX))
IGNORE = tl.constexpr(-100)

# Arguments that change from batch to batch; one compilation serves them all.
NUMBERS = ["S", "R", "chunks", "max_blocks", "key_low", "key_high"]

TILE = 512  # tokens that a program handles at a time, 4 a thread
# Left alone, ptxas aims at 128 registers and spills 16 bytes (Triton 3.6). ROCm has no such limit.
REGISTERS = {} if torch.version.hip else {"maxnreg": 168}


@triton.jit
def _list_rows(
    ids_ptr, rows_out, sequences_out, sequences, S, R, max_blocks, key,
    PLAN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_Q: tl.constexpr,
):
    """Supervised rows, ascending: a running offset, then prefix sums over and in sequences."""
    found = tl.zeros((), tl.int64)
    for first in range(0, S, BLOCK_Q):
        seq = (first + tl.arange(0, BLOCK_Q)).to(tl.int64)
        inside = seq < S
        index, start, length, factor = choose_block(seq, inside, sequences, max_blocks, key, PLAN)
        sample = tl.load(sequences[4] + seq, mask=inside, other=0)
        how, count = draw_marks(seq, inside, start, length, sequences, key, PLAN, BLOCK_B)
        rate24 = how[1]
        before = found + tl.cumsum(count, axis=0) - count
        found += tl.sum(count, axis=0)

        denominator = count
        scale = 1.0
        if PLAN.spec.weight == "flat":
            denominator = length
        if PLAN.spec.weight == "rate":
            denominator = rate24 * length
            scale = 16777216.0
        if PLAN.spec.weight == "sum":
            denominator = count * 0 + 1
        if PLAN.spec.pairs:
            if PLAN.spec.empty != "skip":  # a half that is the whole block speaks for both
                factor = tl.where(count == length, 2 * factor, factor)
        # fp64, as in torch: one rounding, so the weights are the same bits too.
        weight = (factor * scale / tl.maximum(denominator, 1).to(tl.float64)).to(tl.float32)
        row_start = tl.load(sequences[0] + seq, mask=inside, other=0)
        for offset in range(0, tl.max(length, axis=0).to(tl.int32), BLOCK_B):
            marks = marks_of_tile(offset, start, length, sample, how, key, BLOCK_B)
            ones = marks.to(tl.int64)
            slot = before[:, None] + tl.cumsum(ones, axis=1) - ones
            before += tl.sum(ones, axis=1)
            marks = marks & (slot < R)  # lengths that don't fit write nowhere else
            row = (row_start + start)[:, None] + offset + tl.arange(0, BLOCK_B)[None, :]
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
    ids_ptr, tokens_out, sequences, S, chunks, max_blocks, key,
    PLAN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """Noisy ids and labels of every `chunks`-th tile of one sequence."""
    part = tl.program_id(0) - 1
    index = (part // chunks).to(tl.int64)
    seq = index + tl.arange(0, 1)  # a vector of one, as the helpers take it
    inside = seq < S
    _, start, length, _ = choose_block(seq, inside, sequences, max_blocks, key, PLAN)
    how, _ = draw_marks(seq, inside, start, length, sequences, key, PLAN, BLOCK_B)
    prompt = tl.load(sequences[2] + seq)
    end = prompt + tl.load(sequences[3] + seq)
    sample = tl.load(sequences[4] + seq)
    own_draw = tl.load(sequences[5] + seq)
    row_start = tl.load(sequences[0] + index)
    row_length = tl.load(sequences[1] + index)
    for first in range(part % chunks * BLOCK_T, row_length.to(tl.int32), chunks * BLOCK_T):
        position = first + tl.arange(0, BLOCK_T).to(tl.int64)
        in_row = position < row_length
        ids = tl.load(ids_ptr + row_start + position, mask=in_row, other=0)
        offset = position - start
        marks = marks_at(offset, start, length, sample, how, key)
        hidden = (offset >= length) & (position < end)
        if PLAN.leak24 > 0:
            hidden = hidden & (u24_of(position, own_draw, sample, SUFFIX, key) >= PLAN.leak24)
        if PLAN.prefix24 > 0:
            noise = u24_of(position, own_draw, sample, PREFIX, key) < PLAN.prefix24
            hidden = hidden | (noise & (position >= prompt) & (offset < 0))
        noisy = tl.where(marks | hidden, PLAN.spec.mask_id, ids)
        tl.store(tokens_out[0] + row_start + position, noisy, mask=in_row)
        labels = tl.where(marks, ids, IGNORE)
        tl.store(tokens_out[1] + row_start + position, labels, mask=in_row)


@triton.jit(do_not_specialize=NUMBERS)
def _block_mask_fwd_kernel(
    ids_ptr, tokens_out, rows_out, sequences_out, sequences,
    S, R, chunks, max_blocks, key_low, key_high,
    PLAN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr,
):
    key = (key_low, key_high)
    if tl.program_id(0) == 0:
        _list_rows(ids_ptr, rows_out, sequences_out, sequences, S, R, max_blocks, key,
                   PLAN, BLOCK_B, BLOCK_Q)
    else:
        _write_tokens(ids_ptr, tokens_out, sequences, S, chunks, max_blocks, key,
                      PLAN, BLOCK_B, BLOCK_T)


def block_mask_triton(inputs: MaskInputs, spec: MaskSpec) -> MaskedBatch:
    """`block_mask` on validated inputs, by one kernel launch."""
    ids, num_sequences = inputs.ids.contiguous(), len(inputs.row_start)
    numel, bound = ids.numel(), min(num_sequences * spec.block_size, ids.numel())
    block, start, length, count = (torch.empty_like(inputs.row_start) for _ in range(4))
    rate = torch.empty_like(inputs.row_start, dtype=torch.float32)
    batch = MaskedBatch(
        noisy_ids=torch.empty_like(ids), labels=torch.empty_like(ids),
        rows=block.new_empty(bound), row_target=block.new_empty(bound),
        row_weight=rate.new_empty(bound), num_rows=block.new_empty(()),
        block=block, block_start=start, block_length=length, rate=rate, count=count,
    )
    choice = inputs.block if inputs.block_weights is None else inputs.block_weights
    sequences = [
        inputs.row_start, inputs.row_length, inputs.prompt_lengths, inputs.response_lengths,
        inputs.sample_ids, inputs.draw, choice,
        inputs.draw if inputs.block_draw is None else inputs.block_draw,
        inputs.rate, inputs.factor,
    ]
    # Where nothing was given, something to point to.
    sequences = [inputs.row_start if value is None else value for value in sequences]
    block_b = min(TILE, triton.next_power_of_2(spec.block_size))  # wider blocks go round
    # About one program per tile of tokens; a longer sequence goes round.
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
            num_sequences, bound, chunks, sequences[6].shape[-1], key_low, key_high,
            PLAN=plan_draw(inputs, spec),
            BLOCK_B=block_b, BLOCK_Q=TILE // block_b, BLOCK_T=TILE,
            num_warps=4, enable_fp_fusion=False, **REGISTERS,
        )
    return batch
