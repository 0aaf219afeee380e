"""RMSNorm with the residual add before it, in Triton: whole rows in the registers of a program.

The Triton implementation of _rms_norm.py. Letters: N rows, D features.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import down_cast, on_device, rows_of
from ._tuning import processors

PER_WARP = 512  # 16 numbers a thread
# Backward of rows below 4 warps takes several at a time: queries' and keys' norms (D 128) have a
# row for each head of each token, and one after another they would leave most of a chip idle.
TILE = 4 * PER_WARP


@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, out_ptr, scale_ptr,
    D, stride_x, stride_residual, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    inside = cols < D
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + cols, mask=inside, other=0.0)
        x += residual.to(tl.float32)
        total = down_cast(x, dtype)
        tl.store(total_ptr + row * D + cols, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    tl.store(scale_ptr + row, scale)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    out = down_cast(x * scale, dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * D + cols, down_cast(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_bwd_kernel(
    grad_ptr, total_grad_ptr, total_ptr, weight_ptr, scale_ptr, out_ptr, parts_ptr,
    N, D, stride_grad, stride_total_grad, stride_total, ROWS,
    HAS_TOTAL_GRAD: tl.constexpr, WANT_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    last = tl.minimum(first + ROWS, N)
    cols = tl.arange(0, BLOCK_D)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)[:, None]
        inside = (row < last) & (cols < D)
        total = tl.load(total_ptr + row * stride_total + cols, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + row * stride_grad + cols, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=row < last, other=0.0)
        unit = total.to(tl.float32) * scale
        if WANT_WEIGHT:
            # The rounded rows are what weight was multiplied with.
            part += grad * down_cast(unit, dtype).to(tl.float32)
        # u = x / rms(x) sends a gradient g back as (g - u mean(g u)) / rms(x).
        grad *= weight
        mean = tl.sum(grad * unit, axis=1) / D
        out = (grad - unit * mean[:, None]) * scale
        if HAS_TOTAL_GRAD:
            more_ptr = total_grad_ptr + row * stride_total_grad
            out += tl.load(more_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * D + cols, down_cast(out, dtype), mask=inside)
    if WANT_WEIGHT:
        sums = tl.sum(part, axis=0)[None, :]
        tl.store(parts_ptr + tl.program_id(0) * D + cols, sums, mask=cols < D)


@functools.cache
def _shape_of(hidden: int) -> dict:
    block = triton.next_power_of_2(hidden)
    return {"BLOCK_D": block, "num_warps": max(1, block // PER_WARP), "enable_fp_fusion": True}


@functools.cache
def _bwd_shape_of(hidden: int) -> dict:
    shape = _shape_of(hidden)
    rows = max(1, TILE // shape["BLOCK_D"])
    return {**shape, "BLOCK_N": rows, "num_warps": max(4, shape["num_warps"])}


def rms_norm_fwd(
    x: Tensor, weight: Tensor, eps: float,  # [..., D] fp32 or 16 bits, [D]
    residual: Tensor | None,  # [..., D]
) -> tuple[Tensor, Tensor | None, Tensor]:  # [..., D], [..., D], [...] fp32
    """Normed, x + residual where there is one, and 1 / rms."""
    shape, hidden = x.shape, x.shape[-1]
    scale = x.new_empty(shape[:-1], dtype=torch.float32)
    rows, stride = rows_of(x)
    if residual is None:
        total, total_out, other, other_stride, dtype = None, rows, rows, stride, x.dtype
    else:
        dtype = torch.promote_types(x.dtype, residual.dtype)
        total = total_out = _empty(x, dtype)
        other, other_stride = rows_of(residual)
    out = _empty(x, torch.promote_types(dtype, weight.dtype))
    if size := scale.numel():
        with on_device(x):
            _rms_norm_fwd_kernel[(size,)](
                rows, other, weight.contiguous(), total_out, out, scale,
                hidden, stride, other_stride, eps,
                HAS_RESIDUAL=residual is not None, **_shape_of(hidden),
            )
    return out, total, scale


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous and of the shape of `like`."""
    if like.dtype == dtype:  # half the time of the general way
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return like.new_empty(like.shape, dtype=dtype)


def rms_norm_bwd(
    grad: Tensor,  # [..., D] of normed
    total_grad: Tensor | None,  # [..., D] of total, where it is used elsewhere
    total: Tensor, weight: Tensor, scale: Tensor,  # [..., D], [D], [...] 1 / rms of total
    want_weight: bool,
) -> tuple[Tensor, Tensor | None]:  # [..., D], [D]
    """Gradients of total, and of weight if wanted.

    The gradient of weight is summed over each program's rows in registers, then over the programs
    in a fixed order: no atomics, and the same bits in every run.
    """
    size, hidden = scale.numel(), len(weight)
    out = torch.empty_like(total, memory_format=torch.contiguous_format)
    total, stride = rows_of(total)
    grad, grad_stride = rows_of(grad)
    more, more_stride = (grad, 0) if total_grad is None else rows_of(total_grad)
    tile = _bwd_shape_of(hidden)
    rows, parts = tile["BLOCK_N"], scale
    if want_weight:
        # Programs on each SM hide each other's latency; every one adds a row of partial sums.
        # Two of the long rows, 8 of the 4 warps of several short ones.
        slots = (2 if rows == 1 else 8) * processors(total.device)
        rows *= max(1, -(-size // (rows * slots)))
    programs = -(-size // rows)
    if want_weight:
        parts = scale.new_empty(programs, hidden)
    if size:
        with on_device(total):
            _rms_norm_bwd_kernel[(programs,)](
                grad, more, total, weight.contiguous(), scale, out, parts,
                size, hidden, grad_stride, more_stride, stride, rows,
                HAS_TOTAL_GRAD=total_grad is not None, WANT_WEIGHT=want_weight, **tile,
            )
    return out, parts.sum(0).to(weight.dtype) if want_weight else None
