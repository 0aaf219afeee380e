"""silu(gate) * up and its gradients in Triton, entry by entry.

The Triton implementation of _swiglu.py. Letters: N rows, M features.
"""

import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import down_cast, empty_like, on_device, rows_of

BLOCK_M = 2048  # 16 numbers a thread with 4 warps


@triton.jit
def _swiglu_fwd_kernel(gate_ptr, up_ptr, out_ptr, M, stride_gate, stride_up, BLOCK_M: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = cols < M
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * stride_gate + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + cols, mask=inside, other=0.0).to(tl.float32)
    silu = down_cast(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    tl.store(out_ptr + row * M + cols, down_cast(silu * up, dtype), mask=inside)


@triton.jit
def _swiglu_bwd_kernel(
    grad_ptr, gate_ptr, up_ptr, gate_grad_ptr, up_grad_ptr,
    M, stride_grad, stride_gate, stride_up, BLOCK_M: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = cols < M
    dtype: tl.constexpr = gate_grad_ptr.dtype.element_ty
    grad = tl.load(grad_ptr + row * stride_grad + cols, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + cols, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = down_cast(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    tl.store(up_grad_ptr + row * M + cols, down_cast(grad * silu, dtype), mask=inside)
    grad = down_cast(grad * up, dtype).to(tl.float32)
    # silu'(g) = s (1 + g (1 - s))
    grad *= sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(gate_grad_ptr + row * M + cols, down_cast(grad, dtype), mask=inside)


def swiglu_fwd(gate: Tensor, up: Tensor) -> Tensor:  # all [..., M], fp32 or 16 bits
    out = empty_like(gate)
    if size := out.numel():
        width = out.size(-1)
        (gate, stride_gate), (up, stride_up) = rows_of(gate), rows_of(up)
        with on_device(out):
            _swiglu_fwd_kernel[(size // width, -(-width // BLOCK_M))](
                gate, up, out, width, stride_gate, stride_up,
                BLOCK_M=BLOCK_M, num_warps=4, enable_fp_fusion=True,
            )
    return out


def swiglu_bwd(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:  # all [..., M]
    """Gradients of gate and up."""
    gate_grad, up_grad = empty_like(gate), empty_like(gate)
    if size := gate_grad.numel():
        width = gate_grad.size(-1)
        (grad, stride_grad), (gate, stride_gate) = rows_of(grad), rows_of(gate)
        up, stride_up = rows_of(up)
        with on_device(gate_grad):
            _swiglu_bwd_kernel[(size // width, -(-width // BLOCK_M))](
                grad, gate, up, gate_grad, up_grad, width, stride_grad, stride_gate, stride_up,
                BLOCK_M=BLOCK_M, num_warps=4, enable_fp_fusion=True,
            )
    return gate_grad, up_grad
