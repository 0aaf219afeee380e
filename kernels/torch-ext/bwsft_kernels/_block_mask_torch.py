"""`block_mask` in torch, and the checks of the values that it gets.

Letters: T tokens in the batch, S sequences, B block size, R bound on the supervised rows.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ._block_mask_types import ONE24, MaskedBatch, MaskInputs, MaskSpec
from ._dispatch import checking, require
from .philox import MASK32, Stream, philox_u24

IGNORE = -100


def checked(inputs: MaskInputs, spec: MaskSpec) -> MaskInputs:
    """The inputs, with weight 0 for blocks that don't exist. ValueError for numbers that don't fit;
    on a GPU with BWSFT_DEBUG=1, and else for what replaces a part of the draw a device assertion.
    """
    if checking(inputs.ids):
        _check_places(inputs)
        fits = ((inputs.sample_ids >= 0) & (inputs.sample_ids < 1 << 56)).all()
        require(fits, lambda: "sample_ids must lie in [0, 2^56)")
        for name, draw in (("draw", inputs.draw), ("block_draw", inputs.block_draw)):
            if draw is not None:
                fits = ((draw >= 0) & (draw <= MASK32)).all()
                require(fits, partial("{} must lie in [0, 2^32)".format, name))
    if inputs.rate is not None:
        fits = ((inputs.rate >= 0) & (inputs.rate <= ONE24)).all()
        require(fits, lambda: "rate must lie in [0, 2^24]")
    if inputs.factor is not None:
        fits = ((inputs.factor >= 0) & inputs.factor.isfinite()).all()
        require(fits, lambda: "factor must be finite and not negative")
    if inputs.block is None and inputs.block_weights is None:
        return inputs

    num_blocks = spec.grid.num_blocks(inputs.prompt_lengths, inputs.response_lengths)
    if inputs.block is not None:
        block = inputs.block
        fits = ((block >= 0) & (block < num_blocks.clamp(min=1))).all()
        require(fits, lambda: f"block {block.tolist()} must lie below {num_blocks.tolist()}")
        return inputs
    width = inputs.block_weights.shape[1]
    exists = torch.arange(width, device=num_blocks.device) < num_blocks[:, None]
    weights = torch.where(exists, inputs.block_weights, 0)
    fits = ((weights >= 0) & (weights < ONE24)).all() & (num_blocks <= width).all()
    require(fits & ((weights.sum(1) > 0) | (num_blocks == 0)).all(),
            lambda: "block_weights must lie in [0, 2^24), cover every block and not all be 0")
    return replace(inputs, block_weights=weights)


def _check_places(inputs: MaskInputs) -> None:
    """The sequences cover the ids, and prompts and responses lie in them."""
    start, length, tokens = inputs.row_start, inputs.row_length, inputs.ids.numel()
    fits = (length >= 0).all() & (length.sum() == tokens) & (start[:1] == 0).all()
    require(fits, lambda: f"cu_seqlens must rise from 0 to the {tokens} tokens of ids")
    prompt, response = inputs.prompt_lengths, inputs.response_lengths
    fits = ((prompt >= 0) & (response >= 0) & (prompt + response <= length)).all()
    require(fits, lambda: "prompt_lengths + response_lengths must fit the rows of ids")


def _active_block(
    inputs: MaskInputs, spec: MaskSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # each [S]
    """(index, start, length, importance factor 1 / rho in float64) of the active block."""
    grid, shape = spec.grid, (inputs.prompt_lengths, inputs.response_lengths)
    num_blocks = grid.num_blocks(*shape)
    if inputs.block is not None:
        index, inverse_rho = inputs.block.clone(), num_blocks.double()
    else:
        draw = inputs.draw if inputs.block_draw is None else inputs.block_draw
        draw = draw & ~1 if spec.pairs else draw
        u24 = _numbers(spec, Stream.BLOCK, 0, draw, inputs.sample_ids)
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


def _numbers(
    spec: MaskSpec, stream: Stream, position: int | Tensor, draw: Tensor, sample_ids: Tensor
) -> Tensor:
    return philox_u24(position, draw, sample_ids, seed=spec.seed, stream=stream)


def _marks(
    inputs: MaskInputs, spec: MaskSpec,
    position: Tensor,  # [S, B] in the sequence
    inside: Tensor,  # [S, B] bool: in the active block
) -> tuple[Tensor, Tensor]:  # [S], [S, B] bool
    """(rate in units of 2^-24, which tokens of the active block are masked)."""
    low24, high24 = spec.bounds24
    ids = inputs.sample_ids
    draw = inputs.draw & ~1 if spec.pairs else inputs.draw  # an odd half follows the even one
    rate24 = inputs.rate
    if rate24 is None:
        rate24 = low24 + ((high24 - low24) * _numbers(spec, Stream.RATE, 0, draw, ids) >> 24)
    u24 = _numbers(spec, Stream.MARKS, position, draw[:, None], ids[:, None])
    marks = (u24 < rate24[:, None]) & inside
    if spec.empty != "skip":
        length = inside.sum(1)
        empty = ~marks.any(1) & (length > 0)
        token = length - 1
        if spec.empty == "redraw":
            # The rate and the number of one token change places; as far as the rate may go.
            token = _numbers(spec, Stream.RATE, 1, draw, ids) * length >> 24
            most24 = high24 if inputs.rate is None else inputs.rate
            new24 = u24.gather(1, token[:, None])[:, 0].clamp(max=most24)
            rate24 = torch.where(empty, new24, rate24)
            marks |= (u24 < rate24[:, None]) & inside & empty[:, None]
        forced = torch.arange(spec.block_size, device=marks.device) == token[:, None]
        marks |= forced & empty[:, None]
    if spec.pairs:
        marks = torch.where((inputs.draw & 1 == 1)[:, None], inside & ~marks, marks)
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
        u24 = _numbers(spec, stream, position, inputs.draw[row], inputs.sample_ids[row])
        return u24 < round(probability * ONE24)

    if spec.suffix_leak > 0:
        hidden &= ~chance(Stream.SUFFIX, spec.suffix_leak)
    if spec.prefix_noise > 0:
        prefix = (position >= prompt) & (position < start)
        hidden |= prefix & chance(Stream.PREFIX, spec.prefix_noise)
    return hidden


def block_mask_torch(inputs: MaskInputs, spec: MaskSpec) -> MaskedBatch:
    """`block_mask` on checked inputs."""
    ids, device = inputs.ids, inputs.ids.device
    block, start, length, factor = _active_block(inputs, spec)
    offset = torch.arange(spec.block_size, device=device)
    inside = offset < length[:, None]  # [S, B]
    rate24, marks = _marks(inputs, spec, start[:, None] + offset, inside)
    count = marks.sum(1)
    denominator = {
        "count": count, "flat": length, "rate": rate24.double() * length * 2.0**-24,
        "sum": torch.ones_like(count),
    }  # fmt: skip
    if spec.pairs and spec.empty != "skip":  # a half that is the whole block speaks for both
        factor = torch.where(count == length, 2 * factor, factor)
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
