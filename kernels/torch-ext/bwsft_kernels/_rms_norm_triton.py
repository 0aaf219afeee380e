"""RMSNorm with the residual add before it, in Triton: a row in the registers of one program.

The Triton implementation of _rms_norm.py. Letters: N rows, D features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import close, down_cast, on_device
from ._tuning import processors

# 16 numbers a thread: backward holds four of each (total, two gradients, weight, its sum) in fp32,
# and with 16 warps a thread has 128 registers.
MOST_D = 8192
PER_WARP = 512


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
    HAS_TOTAL_GRAD: tl.constexpr, WANT_WEIGHT: tl.constexpr, BLOCK_D: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    cols = tl.arange(0, BLOCK_D)
    inside = cols < D
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK_D,), tl.float32)
    for row in range(first, tl.minimum(first + ROWS, N)):
        total = tl.load(total_ptr + row * stride_total + cols, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + row * stride_grad + cols, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        unit = total.to(tl.float32) * scale
        if WANT_WEIGHT:
            # The rounded rows are what weight was multiplied with.
            part += grad * down_cast(unit, dtype).to(tl.float32)
        # u = x / rms(x) sends a gradient g back as (g - u mean(g u)) / rms(x).
        grad *= weight
        out = (grad - unit * (tl.sum(grad * unit, axis=0) / D)) * scale
        if HAS_TOTAL_GRAD:
            more_ptr = total_grad_ptr + row * stride_total_grad
            out += tl.load(more_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * D + cols, down_cast(out, dtype), mask=inside)
    if WANT_WEIGHT:
        tl.store(parts_ptr + tl.program_id(0) * D + cols, part, mask=inside)


def _shape_of(hidden: int) -> dict:
    block = triton.next_power_of_2(hidden)
    return {"BLOCK_D": block, "num_warps": max(1, block // PER_WARP), "enable_fp_fusion": True}


def rms_norm_fwd(
    x: Tensor, weight: Tensor, eps: float,  # [N, D] fp32 or 16 bits, [D]
    residual: Tensor | None,  # [N, D]
) -> tuple[Tensor, ...]:  # [N, D], [N, D], [N, 1] fp32
    """Normed, x + residual where there is one, and 1 / rms."""
    x, (size, hidden) = close(x), x.shape
    other = x if residual is None else close(residual)
    dtype = torch.promote_types(x.dtype, other.dtype)
    total = x if residual is None else x.new_empty(x.shape, dtype=dtype)
    out = x.new_empty(x.shape, dtype=torch.promote_types(dtype, weight.dtype))
    scale = x.new_empty(size, 1, dtype=torch.float32)
    if size:
        with on_device(x):
            _rms_norm_fwd_kernel[(size,)](
                x, other, weight.contiguous(), total, out, scale,
                hidden, x.stride(0), other.stride(0), eps,
                HAS_RESIDUAL=residual is not None, **_shape_of(hidden),
            )
    return (out, scale) if residual is None else (out, total, scale)


def rms_norm_bwd(
    grad: Tensor,  # [N, D] of normed
    total_grad: Tensor | None,  # [N, D] of total, where it is used elsewhere
    total: Tensor, weight: Tensor, scale: Tensor,  # [N, D], [D], [N, 1] 1 / rms of total
    want_weight: bool,
) -> tuple[Tensor, Tensor | None]:  # [N, D], [D]
    """Gradients of total, and of weight if wanted.

    The gradient of weight is summed over each program's rows in registers, then over the programs
    in a fixed order: no atomics, and the same bits in every run.
    """
    grad, total = close(grad), close(total)
    more = grad if total_grad is None else close(total_grad)
    size, hidden = total.shape
    out = torch.empty_like(total, memory_format=torch.contiguous_format)
    # Two programs on each SM hide each other's latency; every one adds a row of partial sums.
    rows = -(-size // (2 * processors(total.device))) if want_weight else 1
    programs = -(-size // max(1, rows))
    parts = scale.new_empty(programs, hidden) if want_weight else scale
    if size:
        with on_device(total):
            _rms_norm_bwd_kernel[(programs,)](
                grad, more, total, weight.contiguous(), scale, out, parts,
                size, hidden, grad.stride(0), more.stride(0), total.stride(0), rows,
                HAS_TOTAL_GRAD=total_grad is not None, WANT_WEIGHT=want_weight,
                **_shape_of(hidden),
            )
    return out, parts.sum(0).to(weight.dtype) if want_weight else None
