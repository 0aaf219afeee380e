"""RMSNorm with the residual add before it, in Triton: whole rows in the registers of a program.

The Triton implementation of _rms_norm.py. Letters: N rows, D features.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import down_cast, empty_like, on_device, rows_of
from ._tuning import processors

# Short rows go several to a program of 4 warps, 8 numbers a thread: the norms of queries and keys
# (D 128) have a row for each head of each token. A warp for each would read 8 bytes at a time, and
# one after another, as backward's sum over the rows wants them, they'd leave most of a chip idle.
SHORT = 1024
PER_WARP = 512  # of a long row: 16 numbers a thread
# Sums of the weight's gradient that the programs of a streaming multiprocessor keep, in numbers:
# 8 programs of short rows hide each other's latency, and of D 4096 and above 2.
SUMS = 8192


@triton.jit(do_not_specialize=["N"])  # rows come in any number; compile once
def _rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, out_ptr,
    N, D, stride_x, stride_residual, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < N) & (cols < D)
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + cols, mask=inside, other=0.0)
        x += residual.to(tl.float32)
        total = down_cast(x, dtype)
        tl.store(total_ptr + row * D + cols, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    out = down_cast(x * scale, dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * D + cols, down_cast(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "ROWS"])
def _rms_norm_bwd_kernel(
    grad_ptr, total_grad_ptr, total_ptr, weight_ptr, out_ptr, parts_ptr,
    N, D, stride_grad, stride_total_grad, stride_total, eps, ROWS,
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
        unit = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(unit * unit, axis=1) / D + eps)[:, None]
        unit *= scale
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
def _tile_of(hidden: int) -> dict:
    block = triton.next_power_of_2(hidden)
    return {"BLOCK_N": max(1, SHORT // block), "BLOCK_D": block,
            "num_warps": max(4, block // PER_WARP), "enable_fp_fusion": True}


def rms_norm_fwd(
    x: Tensor, weight: Tensor, residual: Tensor | None,  # [..., D] fp32 or 16 bits, [D], [..., D]
    eps: float,
) -> tuple[Tensor, Tensor | None]:  # [..., D] both
    """Normed, and x + residual where there is one."""
    rows, stride = rows_of(x)
    if residual is None:
        total, total_out, other, other_stride, dtype = None, rows, rows, stride, x.dtype
    else:
        dtype = torch.promote_types(x.dtype, residual.dtype)
        total = total_out = _of(x, dtype)
        other, other_stride = rows_of(residual)
    out = _of(x, dtype if weight.dtype == dtype else torch.promote_types(dtype, weight.dtype))
    hidden = len(weight)
    if size := x.numel() // hidden:
        tile = _tile_of(hidden)
        with on_device(x):
            _rms_norm_fwd_kernel[(-(-size // tile["BLOCK_N"]),)](
                rows, other, weight.contiguous(), total_out, out,
                size, hidden, stride, other_stride, eps,
                HAS_RESIDUAL=residual is not None, **tile,
            )
    return out, total


def _of(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Empty and of the shape of `like`."""
    return empty_like(like) if like.dtype == dtype else like.new_empty(like.shape, dtype=dtype)


def rms_norm_bwd(
    grad: Tensor,  # [..., D] of normed
    total_grad: Tensor | None,  # [..., D] of total, where it is used elsewhere
    total: Tensor, weight: Tensor,  # [..., D], [D]
    eps: float, want_weight: bool,
) -> tuple[Tensor, Tensor | None]:  # [..., D], [D]
    """Gradients of total, and of weight if wanted; 1 / rms is made again, not kept.

    The gradient of weight is summed over each program's rows in registers, then over the programs
    in a fixed order: no atomics, and the same bits in every run.
    """
    hidden = len(weight)
    size = total.numel() // hidden
    out = empty_like(total)
    total, stride = rows_of(total)
    grad, grad_stride = rows_of(grad)
    more, more_stride = (grad, 0) if total_grad is None else rows_of(total_grad)
    tile, parts = _tile_of(hidden), out
    rows = tile["BLOCK_N"]
    if want_weight:
        slots = min(8, max(2, SUMS // tile["BLOCK_D"])) * processors(total.device)
        rows *= max(1, -(-size // (rows * slots)))
    programs = -(-size // rows)
    if want_weight:
        parts = out.new_empty((programs, hidden), dtype=torch.float32)
    if size:
        with on_device(total):
            _rms_norm_bwd_kernel[(programs,)](
                grad, more, total, weight.contiguous(), out, parts,
                size, hidden, grad_stride, more_stride, stride, eps, rows,
                HAS_TOTAL_GRAD=total_grad is not None, WANT_WEIGHT=want_weight, **tile,
            )
    return out, parts.sum(0).to(weight.dtype) if want_weight else None
