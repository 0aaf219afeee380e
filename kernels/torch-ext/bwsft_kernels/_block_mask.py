"""Blockwise masks: one active block of each response masked at a random rate, the suffix hidden.

The corruption of Blockwise SFT, built without a host synchronization: the prefix stays clean, and
only masked tokens of the active block are supervised. Letters: T tokens in the batch, S sequences,
L length, B block size, M blocks of a response, R bound on the supervised rows.
"""

import functools
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from ._block_mask_torch import block_mask_torch, checked
from ._block_mask_types import MaskedBatch, MaskInputs, MaskSpec
from ._dispatch import triton_implementation
from ._operator import operator
from .philox import MASK32

Lengths = Tensor | Sequence[int]


def block_mask(
    ids: Tensor,  # [T] packed with cu_seqlens, or [S, L] right-padded; integers
    prompt_lengths: Lengths,  # [S]
    response_lengths: Lengths,  # [S]
    spec: MaskSpec,
    *,
    cu_seqlens: Tensor | None = None,  # [S + 1]
    sample_ids: Tensor | None = None,  # [S] numbers in the source, default 0..S-1
    draw: int | Tensor = 0,  # [S] visit of the example, below 2^32
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
    must get the same. factor multiplies each sequence's row weights. ValueError for lengths, draws,
    blocks, weights, rates or factors that don't fit (on a GPU: with BWSFT_DEBUG=1).
    """
    if block is not None and block_weights is not None:
        raise ValueError("give block or block_weights, not both")
    inputs = _inputs(ids, prompt_lengths, response_lengths, cu_seqlens, sample_ids)
    found = _block_mask(
        *inputs,
        *_numbers(draw, block_draw, inputs[1]),
        *_given(block, block_weights, rate, factor, inputs[1]),
        spec.block_size, spec.mask_id, _signed(spec.seed), spec.low, spec.high, spec.weight,
        spec.empty, spec.block_factor, spec.prefix_noise, spec.suffix_leak, spec.block_origin,
        spec.pairs, impl,
    )
    noisy_ids, labels, *rest = found
    return MaskedBatch(noisy_ids.view(ids.shape), labels.view(ids.shape), *rest)


def _inputs(
    ids: Tensor, prompt_lengths: Lengths, response_lengths: Lengths,  # [T] or [S, L], [S], [S]
    cu_seqlens: Tensor | None, sample_ids: Tensor | None,  # [S + 1], [S]
) -> tuple[Tensor, ...]:
    """Where the sequences are: the first six of MaskInputs."""
    if ids.is_floating_point() or ids.dim() != (2 if cu_seqlens is None else 1):
        raise ValueError("ids must be integers: packed [T] with cu_seqlens, or padded [S, L] alone")
    per_sequence = functools.partial(_per_sequence, device=ids.device)
    if cu_seqlens is None:
        size, length = ids.shape
        row_start = torch.arange(size, device=ids.device) * length
        row_length = torch.full_like(row_start, length)
    else:
        ends = torch.as_tensor(cu_seqlens, dtype=torch.int64, device=ids.device)
        size = ends.shape[0] - 1
        row_start, row_length = ends[:-1], ends.diff()
    if sample_ids is None:
        sample_ids = torch.arange(size, device=ids.device)
    lengths = dict(
        prompt_lengths=prompt_lengths, response_lengths=response_lengths, sample_ids=sample_ids
    )
    per_row = [per_sequence(value, name, size) for name, value in lengths.items()]
    return ids.reshape(-1), row_start, row_length, *per_row


def _per_sequence(value: int | Lengths, name: str, size: int, device: torch.device) -> Tensor:
    """int64 of shape [size]."""
    if isinstance(value, int):  # filled on the device: a copy can't go into a CUDA graph
        return torch.full((size,), value, dtype=torch.int64, device=device)
    value = torch.as_tensor(value, dtype=torch.int64, device=device)
    if value.shape not in ((size,), ()):
        raise ValueError(f"{name} must have shape [{size}], not {list(value.shape)}")
    return value.expand(size)


def _numbers(
    draw: int | Tensor, block_draw: int | Tensor | None, like: Tensor,  # like [S]
) -> tuple[Tensor, Tensor | None]:  # each [S]
    """draw and block_draw as tensors; the op checks the values of those that are tensors."""
    found = []
    for name, value in (("draw", draw), ("block_draw", block_draw)):
        if isinstance(value, int) and not 0 <= value <= MASK32:
            raise ValueError(f"{name} must lie in [0, 2^32), not {value}")
        if value is not None:
            value = _per_sequence(value, name, like.shape[0], like.device)
        found.append(value)
    return found[0], found[1]


def _given(
    block: Tensor | None, block_weights: Tensor | None,  # [S], [S, M]
    rate: Tensor | None, factor: Tensor | None, like: Tensor,  # each [S]
) -> tuple[Tensor | None, ...]:
    """Shapes and dtypes of what replaces or scales a part of the draw."""
    device, size = like.device, like.shape[0]
    if block is not None:
        block = torch.as_tensor(block, dtype=torch.int64, device=device)
        if block.shape != (size,):
            raise ValueError(f"block must have shape [{size}], not {list(block.shape)}")
    if block_weights is not None:
        block_weights = torch.as_tensor(block_weights, device=device)
        integers = not block_weights.is_floating_point()
        if not integers or block_weights.dim() != 2 or block_weights.shape[0] != size:
            raise ValueError(f"block_weights must be integers of shape [{size}, most blocks]")
        block_weights = block_weights.to(torch.int64)
    if rate is not None:
        rate = torch.as_tensor(rate, device=device)
        if rate.is_floating_point() or rate.shape != (size,):
            raise ValueError(f"rate must be integers in units of 2^-24, of shape [{size}]")
        rate = rate.to(torch.int64)
    if factor is not None:
        factor = torch.as_tensor(factor, device=device).detach()
        if not factor.is_floating_point() or factor.shape != (size,):
            raise ValueError(f"factor must be floating-point numbers of shape [{size}]")
        factor = factor.to(torch.float64)
    return block, block_weights, rate, factor


def _signed(seed: int) -> int:
    """A 64-bit seed as an operator takes it."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


# --- the operator: takes MaskInputs and MaskSpec, returns MaskedBatch, each field by field ---


_TENSORS = len(fields(MaskInputs))


def _body(*arguments: Tensor | int | float | str | bool | None) -> tuple[Tensor, ...]:
    *options, impl = arguments[_TENSORS:]
    spec = MaskSpec(*options)
    inputs = checked(MaskInputs(*arguments[:_TENSORS]), spec)
    kernels = triton_implementation(impl, inputs.ids, "_block_mask_triton")
    batch = (kernels.block_mask_triton if kernels else block_mask_torch)(inputs, spec)
    return tuple(getattr(batch, field.name) for field in fields(batch))


def _fake(*arguments: Tensor | int | float | str | bool | None) -> tuple[Tensor, ...]:
    ids, row_start, block_size = arguments[0], arguments[1], arguments[_TENSORS]
    bound = torch.sym_min(row_start.shape[0] * block_size, ids.shape[0])
    rows, row = row_start.new_empty(bound), torch.empty_like(row_start)
    return (
        torch.empty_like(ids), torch.empty_like(ids),  # noisy ids, labels
        rows, torch.empty_like(rows), torch.empty_like(rows, dtype=torch.float32),
        row_start.new_empty(()),
        row, torch.empty_like(row), torch.empty_like(row),  # block, its start and length
        torch.empty_like(row, dtype=torch.float32), torch.empty_like(row),  # rate, count
    )


_block_mask = operator(
    "block_mask",
    "(Tensor ids, Tensor row_start, Tensor row_length, Tensor prompt_lengths, "
    "Tensor response_lengths, Tensor sample_ids, Tensor draw, Tensor? block_draw, Tensor? block, "
    "Tensor? block_weights, Tensor? rate, Tensor? factor, "
    "int block_size, int mask_id, int seed, float low, float high, str weight, str empty, "
    "str block_factor, float prefix_noise, float suffix_leak, str block_origin, bool pairs, "
    f"str impl) -> ({', '.join(['Tensor'] * len(fields(MaskedBatch)))})",
    _body, _fake,
)
