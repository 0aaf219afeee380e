"""silu(gate) * up of a gated MLP in one pass; backward makes silu again instead of keeping it.

Letters: M features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import torch_ops
from ._dispatch import check_float, plain_torch, triton_implementation
from ._operator import operator


def swiglu(
    gate: Tensor,  # [..., M] fp32, fp16, bf16 or fp64
    up: Tensor,  # [..., M] as gate
    *,
    impl: str = "auto",
) -> Tensor:  # [..., M]
    """Multiply up by silu(gate), which is rounded to its dtype before the product, as torch's two
    operators do. ValueError for tensors that don't fit together."""
    check_float(gate=gate, up=up)
    if gate.dim() == 0 or gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate and up must be [..., M] of one shape and dtype, not {gate.dtype} "
                         f"{list(gate.shape)} and {up.dtype} {list(up.shape)}")
    return torch_ops.swiglu(gate, up) if plain_torch(impl, gate) else _swiglu(gate, up, impl)


def _fwd(gate: Tensor, up: Tensor, impl: str) -> Tensor:  # all [..., M]
    if kernels := triton_implementation(impl, gate, "_swiglu_triton"):
        return kernels.swiglu_fwd(gate, up)
    return torch_ops.swiglu(gate, up).contiguous()


def _fwd_fake(gate: Tensor, up: Tensor, impl: str) -> Tensor:
    return gate.new_empty(gate.shape)


def _bwd(
    grad: Tensor, gate: Tensor, up: Tensor, impl: str,  # all [..., M]
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    if kernels := triton_implementation(impl, gate, "_swiglu_triton"):
        return kernels.swiglu_bwd(grad, gate, up)
    gate_grad = torch.ops.aten.silu_backward(grad * up, gate)
    return gate_grad.contiguous(), (grad * F.silu(gate)).contiguous()


def _bwd_fake(grad: Tensor, gate: Tensor, up: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    gate, up, ctx.impl = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, grad: Tensor) -> tuple:
    gate_grad, up_grad = _swiglu_bwd(grad, *ctx.saved_tensors, ctx.impl)
    wanted = ctx.needs_input_grad
    return gate_grad if wanted[0] else None, up_grad if wanted[1] else None, None


_swiglu_bwd = operator(
    "swiglu_bwd", "(Tensor grad, Tensor gate, Tensor up, str impl) -> (Tensor, Tensor)",
    _bwd, _bwd_fake,
)
_swiglu = operator(
    "swiglu", "(Tensor gate, Tensor up, str impl) -> Tensor", _fwd, _fwd_fake,
    _setup_context, _backward,
)
