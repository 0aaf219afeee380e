"""Blockwise masks: one active block of each response masked at a random rate, the suffix hidden.

The corruption of Blockwise SFT, built without a host synchronization: the prefix stays clean, and
only masked tokens of the active block are supervised. Letters: T tokens in the batch, S sequences,
L length, B block size, M blocks of a response, R bound on the supervised rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ._block_mask_types import ONE24, MaskedBatch, MaskInputs, MaskSpec
from ._dispatch import checking, graph_break, require, triton_implementation
from .philox import Stream, philox_u24

IGNORE = -100
Lengths = Tensor | Sequence[int]


@graph_break
@torch.no_grad()
def block_mask(
    ids: Tensor,  # [T] packed with cu_seqlens, or [S, L] right-padded; integers
    prompt_lengths: Lengths,  # [S]
    response_lengths: Lengths,  # [S]
    spec: MaskSpec,
    *,
    cu_seqlens: Tensor | None = None,  # [S + 1]
    sample_ids: Tensor | None = None,  # [S] numbers in the source, default 0..S-1
    draw: int | Tensor = 0,  # [S] visit of the example
    block: Tensor | None = None,  # [S] active block
    block_weights: Tensor | None = None,  # [S, M] integers in [0, 2^24)
    block_draw: int | Tensor | None = None,  # [S], default draw
    rate: Tensor | None = None,  # [S] integers from 0 to 2^24
    factor: Tensor | None = None,  # [S] floating point
    impl: str = "auto",
) -> MaskedBatch:
    """Corrupt a batch for Blockwise SFT and list its supervised rows.

    Packed and padded ids give the same marks; tokens after prompt + response stay as they are, and
    a response of length 0 is not supervised. Without `block` the active block is drawn, uniformly
    or with chances block_weights, by the number that belongs to block_draw. rate: mask rates in
    units of 2^-24 instead of rates drawn between spec.low and spec.high; the two draws of a pair
    must get the same. factor multiplies each sequence's row weights. ValueError for lengths,
    blocks, weights, rates or factors that don't fit (on a GPU: with BWSFT_DEBUG=1).
    """
    if block is not None and block_weights is not None:
        raise ValueError("give block or block_weights, not both")
    inputs = _inputs(ids, prompt_lengths, response_lengths, cu_seqlens, sample_ids, draw)
    inputs = _with_choice(inputs, spec, block, block_weights)
    inputs = _with_draw(inputs, block_draw, rate, factor)
    kernels = triton_implementation(impl, ids, "_block_mask_triton")
    flat = (kernels.block_mask_triton if kernels else _block_mask_torch)(inputs, spec)
    return replace(
        flat, noisy_ids=flat.noisy_ids.view(ids.shape), labels=flat.labels.view(ids.shape)
    )


def _inputs(
    ids: Tensor, prompt_lengths: Lengths, response_lengths: Lengths,  # [T] or [S, L], [S], [S]
    cu_seqlens: Tensor | None, sample_ids: Tensor | None, draw: int | Tensor,  # [S + 1], [S], [S]
) -> MaskInputs:
    """Check where the sequences are and what numbers their draws have."""
    if ids.is_floating_point() or ids.dim() != (2 if cu_seqlens is None else 1):
        raise ValueError("ids must be integers: packed [T] with cu_seqlens, or padded [S, L] alone")

    per_sequence = partial(_per_sequence, device=ids.device)
    if cu_seqlens is None:
        num_sequences, length = ids.shape
        row_start = torch.arange(num_sequences, device=ids.device) * length
        row_length = torch.full_like(row_start, length)
    else:
        ends = per_sequence(cu_seqlens, "cu_seqlens", len(cu_seqlens))
        num_sequences = len(ends) - 1
        row_start, row_length = ends[:-1], ends.diff()
        if checking(ids):
            fits = (ends[0] == 0) & (ends[-1] == ids.numel()) & (row_length >= 0).all()
            require(fits, lambda: f"cu_seqlens must rise from 0 to the {ids.numel()} tokens of ids")
    prompt = per_sequence(prompt_lengths, "prompt_lengths", num_sequences)
    response = per_sequence(response_lengths, "response_lengths", num_sequences)
    if checking(ids):
        fits = ((prompt >= 0) & (response >= 0) & (prompt + response <= row_length)).all()
        require(fits, lambda: "prompt_lengths + response_lengths must fit the rows of ids")
    if sample_ids is None:
        sample_ids = torch.arange(num_sequences, device=ids.device)
    sample_ids = per_sequence(sample_ids, "sample_ids", num_sequences)
    draw = per_sequence(draw, "draw", num_sequences)
    return MaskInputs(ids.reshape(-1), row_start, row_length, prompt, response, sample_ids, draw)


def _per_sequence(value: int | Lengths, name: str, size: int, device: torch.device) -> Tensor:
    """int64 of shape [size]."""
    if isinstance(value, int):  # filled on the device: a copy can't go into a CUDA graph
        return torch.full((size,), value, dtype=torch.int64, device=device)
    value = torch.as_tensor(value, dtype=torch.int64, device=device)
    if value.shape not in ((size,), ()):
        raise ValueError(f"{name} must have shape [{size}], not {list(value.shape)}")
    return value.expand(size)


def _with_choice(
    inputs: MaskInputs, spec: MaskSpec,
    block: Tensor | None, block_weights: Tensor | None,  # [S], [S, M]
) -> MaskInputs:
    """Check and attach the given active blocks or the chances of the blocks."""
    if block is None and block_weights is None:
        return inputs
    num_blocks = spec.grid.num_blocks(inputs.prompt_lengths, inputs.response_lengths)
    device, size = num_blocks.device, len(num_blocks)
    if block is not None:
        block = torch.as_tensor(block, dtype=torch.int64, device=device)
        if block.shape != (size,):
            raise ValueError(f"block must have shape [{size}], not {list(block.shape)}")
        fits = ((block >= 0) & (block < num_blocks.clamp(min=1))).all()
        require(fits, lambda: f"block {block.tolist()} must lie below {num_blocks.tolist()}")
        return replace(inputs, block=block)
    weights = torch.as_tensor(block_weights, device=device)
    if weights.is_floating_point() or weights.dim() != 2 or len(weights) != size:
        raise ValueError(f"block_weights must be integers of shape [{size}, most blocks]")
    exists = torch.arange(weights.shape[1], device=device) < num_blocks[:, None]
    weights = torch.where(exists, weights.to(torch.int64), 0)
    fits = ((weights >= 0) & (weights < ONE24)).all() & (num_blocks <= weights.shape[1]).all()
    require(fits & ((weights.sum(1) > 0) | (num_blocks == 0)).all(),
            lambda: "block_weights must lie in [0, 2^24), cover every block and not all be 0")
    return replace(inputs, block_weights=weights)


def _with_draw(
    inputs: MaskInputs,
    block_draw: int | Tensor | None, rate: Tensor | None, factor: Tensor | None,  # [S]
) -> MaskInputs:
    """Check and attach what replaces or scales a part of the draw."""
    size, device = len(inputs.draw), inputs.draw.device
    if block_draw is not None:
        block_draw = _per_sequence(block_draw, "block_draw", size, device)
    if rate is not None:
        rate = torch.as_tensor(rate, device=device)
        if rate.is_floating_point() or rate.shape != (size,):
            raise ValueError(f"rate must be integers in units of 2^-24, of shape [{size}]")
        rate = rate.to(torch.int64)
        require(((rate >= 0) & (rate <= ONE24)).all(), lambda: "rate must lie in [0, 2^24]")
    if factor is not None:
        factor = torch.as_tensor(factor, device=device)
        if not factor.is_floating_point() or factor.shape != (size,):
            raise ValueError(f"factor must be floating-point numbers of shape [{size}]")
        factor = factor.to(torch.float64)
        fits = ((factor >= 0) & factor.isfinite()).all()
        require(fits, lambda: "factor must be finite and not negative")
    return replace(inputs, block_draw=block_draw, rate=rate, factor=factor)


def _active_block(
    inputs: MaskInputs, spec: MaskSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # each [S]
    """(index, start, length, importance factor 1 / rho in float64) of the active block."""
    grid, shape = spec.grid, (inputs.prompt_lengths, inputs.response_lengths)
    num_blocks = grid.num_blocks(*shape)
    if inputs.block is not None:
        index, inverse_rho = inputs.block, num_blocks.double()
    else:
        draw = inputs.draw if inputs.block_draw is None else inputs.block_draw
        draw = draw & ~1 if spec.pairs else draw
        u24 = philox_u24(0, draw, inputs.sample_ids, seed=spec.seed, stream=Stream.BLOCK)
        if inputs.block_weights is None:
            index, inverse_rho = (u24 * num_blocks) >> 24, num_blocks.double()
        else:
            total = inputs.block_weights.sum(1)
            threshold = (u24 * total) >> 24
            index = (inputs.block_weights.cumsum(1) <= threshold[:, None]).sum(1)
            index = torch.where(num_blocks > 0, index, 0)
            inverse_rho = total / inputs.block_weights.gather(1, index[:, None])[:, 0].double()
    start, stop = grid.bounds(index, *shape)
    factor = inverse_rho if spec.block_factor == "sum" else inverse_rho / num_blocks
    return index, start, stop - start, factor if inputs.factor is None else factor * inputs.factor


def _marks(
    inputs: MaskInputs, spec: MaskSpec,
    position: Tensor,  # [S, B] in the sequence
    inside: Tensor,  # [S, B] bool: in the active block
) -> tuple[Tensor, Tensor]:  # [S], [S, B] bool
    """(rate in units of 2^-24, which tokens of the active block are masked)."""
    low24, high24 = round(spec.low * ONE24), round(spec.high * ONE24)

    def of_draw(draw: Tensor) -> tuple[Tensor, Tensor]:
        ids = inputs.sample_ids
        u24 = philox_u24(0, draw, ids, seed=spec.seed, stream=Stream.RATE)
        rate24 = low24 + ((high24 - low24) * u24 >> 24) if inputs.rate is None else inputs.rate
        u24 = philox_u24(
            position, draw[:, None], ids[:, None], seed=spec.seed, stream=Stream.MARKS
        )
        return rate24, (u24 < rate24[:, None]) & inside

    rate24, marks = of_draw(inputs.draw)
    if spec.pairs:
        own_rate24, own_marks = rate24, marks
        rate24, marks = of_draw(inputs.draw & ~1)
        both_halves = marks.any(1) & (inside & ~marks).any(1) | (spec.weight == "flat")
        marks = torch.where((inputs.draw & 1 == 1)[:, None], inside & ~marks, marks)
        rate24 = torch.where(both_halves, rate24, own_rate24)
        marks = torch.where(both_halves[:, None], marks, own_marks)
    if spec.empty == "last":
        length = inside.sum(1, keepdim=True)
        last = torch.arange(spec.block_size, device=marks.device) == length - 1
        marks = marks | (last & ~marks.any(1, keepdim=True))
    return rate24, marks


def _hidden(
    inputs: MaskInputs, spec: MaskSpec, start: Tensor, length: Tensor,  # [S]
) -> Tensor:  # [T] bool
    """Context tokens that the network may not see, i.e. the suffix and prefix noise."""
    index = torch.arange(inputs.ids.numel(), device=inputs.ids.device)
    row = torch.searchsorted(inputs.row_start + inputs.row_length, index, right=True)
    row = row.clamp(max=len(start) - 1)
    position = index - inputs.row_start[row]
    prompt, start = inputs.prompt_lengths[row], start[row]
    end = prompt + inputs.response_lengths[row]
    hidden = (position >= start + length[row]) & (position < end)

    def chance(stream: Stream, probability: float) -> Tensor:
        u24 = philox_u24(
            position, inputs.draw[row], inputs.sample_ids[row], seed=spec.seed, stream=stream
        )
        return u24 < round(probability * ONE24)

    if spec.suffix_leak > 0:
        hidden &= ~chance(Stream.SUFFIX, spec.suffix_leak)
    if spec.prefix_noise > 0:
        prefix = (position >= prompt) & (position < start)
        hidden |= prefix & chance(Stream.PREFIX, spec.prefix_noise)
    return hidden


def _block_mask_torch(inputs: MaskInputs, spec: MaskSpec) -> MaskedBatch:
    ids, device = inputs.ids, inputs.ids.device
    block, start, length, factor = _active_block(inputs, spec)
    offset = torch.arange(spec.block_size, device=device)
    inside = offset < length[:, None]  # [S, B]
    rate24, marks = _marks(inputs, spec, start[:, None] + offset, inside)
    count = marks.sum(1)
    denominator = {"count": count, "flat": length, "rate": rate24.double() * length * 2.0**-24}
    weight = (factor / denominator[spec.weight]).float()  # factor is float64: one rounding

    # Compaction by prefix sum; what isn't supervised lands in a spare last slot.
    bound, tokens = min(marks.numel(), ids.numel()), ids.numel()
    slot = torch.where(marks, marks.flatten().cumsum(0).view_as(marks) - 1, bound).flatten()
    index = torch.where(marks, (inputs.row_start + start)[:, None] + offset, 0).flatten()
    rows = index.new_zeros(bound + 1).scatter_(0, slot, index)[:bound]
    row_weight = weight[:, None].expand(marks.shape).flatten()
    row_weight = weight.new_zeros(bound + 1).scatter_(0, slot, row_weight)[:bound]
    real = torch.arange(bound, device=device) < count.sum()

    marked = torch.zeros(tokens + 1, dtype=torch.bool, device=device)
    marked = marked.scatter_(0, torch.where(marks.flatten(), index, tokens), True)[:tokens]
    hidden = marked | _hidden(inputs, spec, start, length)
    return MaskedBatch(
        noisy_ids=torch.where(hidden, spec.mask_id, ids), labels=torch.where(marked, ids, IGNORE),
        rows=rows, row_target=torch.where(real, ids[rows].long(), IGNORE), row_weight=row_weight,
        num_rows=count.sum(), block=block, block_start=start, block_length=length,
        rate=(rate24 * 2.0**-24).float(), count=count,
    )
