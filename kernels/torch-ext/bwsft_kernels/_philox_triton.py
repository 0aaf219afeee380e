"""Philox numbers in one launch each, where torch's integer operators take more than a hundred.

The Triton implementation of philox.py. Letters: N rows, R x C numbers of a grid.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import on_device, philox_words

Ints = int | Tensor
BLOCK = 512  # 4 numbers a thread


@triton.jit
def _number(value, row, col, stride_row, stride_col, inside, TENSOR: tl.constexpr):
    """An argument at each place: an entry of a tensor, or the one number."""
    if TENSOR:
        value = tl.load(value + row * stride_row + col * stride_col, mask=inside, other=0)
    return value + tl.zeros_like(row)


@triton.jit(do_not_specialize=[
    "position", "draw", "sample", "R", "C", "stream", "key_low", "key_high"])
def _u24_kernel(
    position, draw, sample, out_ptr, R, C,
    position_row, position_col, draw_row, draw_col, sample_row, sample_col,
    stream, key_low, key_high, TENSORS: tl.constexpr, BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < R.to(tl.int64) * C
    row, col = place // C, place % C
    position = _number(position, row, col, position_row, position_col, inside, TENSORS[0])
    draw = _number(draw, row, col, draw_row, draw_col, inside, TENSORS[1])
    sample = _number(sample, row, col, sample_row, sample_col, inside, TENSORS[2])
    high = sample >> 32
    tl.device_assert((high >= 0) & (high < 16777216), "sample_id must lie in [0, 2^56)", inside)
    word, _, _, _ = philox_words(
        position, draw, sample, high | (stream.to(tl.int64) << 24), key_low, key_high)
    u24 = word >> 8
    if out_ptr.dtype.element_ty == tl.float32:
        tl.store(out_ptr + place, u24.to(tl.float32) * 5.9604644775390625e-8, mask=inside)
    else:
        tl.store(out_ptr + place, u24.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["N", "stream", "key_low", "key_high"])
def _gumbel_rows_kernel(
    position_ptr, step_ptr, request_ptr, out_ptr,  # [N] each, [5, N]
    N, stride_position, stride_step, stride_request, stream, key_low, key_high,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < N
    position = tl.load(position_ptr + row * stride_position, mask=inside, other=0)
    step = tl.load(step_ptr + row * stride_step, mask=inside, other=0)
    request = tl.load(request_ptr + row * stride_request, mask=inside, other=0)
    zero = tl.zeros_like(row)
    low, high, _, _ = philox_words(
        zero, zero, request >> 32, zero + (stream.to(tl.int64) << 24), key_low, key_high)
    tl.store(out_ptr + row, position.to(tl.int64), mask=inside)
    tl.store(out_ptr + N + row, step.to(tl.int64), mask=inside)
    tl.store(out_ptr + 2 * N + row, request, mask=inside)
    tl.store(out_ptr + 3 * N + row, low.to(tl.int64), mask=inside)
    tl.store(out_ptr + 4 * N + row, high.to(tl.int64), mask=inside)


def u24(
    position: Ints, draw: Ints, sample_id: Ints,  # int64, broadcast to `shape`
    shape: torch.Size, device: torch.device, stream: int,
    key: tuple[int, int], dtype: torch.dtype,  # int64, or fp32 for the numbers times 2^-24
) -> Tensor:  # of `shape`
    out = torch.empty(shape, dtype=dtype, device=device)
    cols = shape[-1] if shape else 1
    values, strides = [], []
    for value in (position, draw, sample_id):
        if isinstance(value, Tensor):
            value = value.expand(shape).reshape(-1, cols) if out.numel() else value
            strides += value.stride() if out.numel() else (0, 0)
        else:
            strides += (0, 0)
        values.append(value)
    if out.numel():
        with on_device(out):
            _u24_kernel[(triton.cdiv(out.numel(), BLOCK),)](
                *values, out, out.numel() // cols, cols, *strides, stream, *key,
                TENSORS=tuple(isinstance(value, Tensor) for value in values), BLOCK=BLOCK,
                num_warps=4, enable_fp_fusion=True,
                debug=True, sanitize_overflow=False,  # debug: device_assert is compiled in
            )
    return out


def gumbel_rows(
    position: Tensor, step: Tensor, request: Tensor,  # [N] integers
    stream: int, key: tuple[int, int],
) -> Tensor:  # [5, N] int64
    """Position, step, request and the two key words of each row's Gumbel noise."""
    size = len(request)
    out = torch.empty(5, size, dtype=torch.int64, device=request.device)
    if size:
        with on_device(out):
            _gumbel_rows_kernel[(triton.cdiv(size, BLOCK),)](
                position, step, request, out, size, position.stride(0), step.stride(0),
                request.stride(0), stream, *key, BLOCK=BLOCK,
                num_warps=4, enable_fp_fusion=True,
            )
    return out
