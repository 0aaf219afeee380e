"""silu(gate) * up of a gated MLP in one pass; backward makes silu again instead of keeping it.

Letters: N rows, M features.
"""

from types import ModuleType

import torch
from torch import Tensor

from . import torch_ops
from ._dispatch import check_float, graph_break, once_differentiable, tracked, triton_implementation


@graph_break
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
    kernels = triton_implementation(impl, gate, "_swiglu_triton")
    if kernels is None:
        return torch_ops.swiglu(gate, up)
    rows = [t.reshape(-1, t.shape[-1]) if t.numel() else t.reshape(0, 1) for t in (gate, up)]
    if tracked(gate, up):
        return _Swiglu.apply(*rows, kernels).view(gate.shape)
    return kernels.swiglu_fwd(*rows).view(gate.shape)


class _Swiglu(torch.autograd.Function):
    """The Triton kernels; only their inputs are kept for backward."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, kernels: ModuleType) -> Tensor:  # all [N, M]
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.swiglu_fwd(gate, up)

    @staticmethod
    @once_differentiable("swiglu")
    def backward(ctx, grad: Tensor):  # [N, M]
        gate_grad, up_grad = ctx.kernels.swiglu_bwd(grad, *ctx.saved_tensors)
        wanted = ctx.needs_input_grad
        return gate_grad if wanted[0] else None, up_grad if wanted[1] else None, None
