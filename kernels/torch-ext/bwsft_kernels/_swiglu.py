"""silu(gate) * up of a gated MLP in one pass; backward makes silu again instead of keeping it.

Letters: N rows, M features.
"""

import torch

from . import torch_ops as plain
from ._dispatch import check_floating, first_derivative_only, graph_break, triton_twin


@graph_break
def swiglu(gate, up, *, impl: str = "auto"):
    """silu(gate) * up, both [..., M] and of one dtype; silu is rounded to it before the product, as
    torch's two operators do. ValueError for tensors that don't fit together."""
    check_floating(gate=gate, up=up)
    if gate.dim() == 0 or gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate and up must be [..., M] of one shape and dtype, not {gate.dtype} "
            f"{list(gate.shape)} and {up.dtype} {list(up.shape)}"
        )
    twin = triton_twin(impl, gate, "_swiglu_triton")
    rows = [t.reshape(-1, t.shape[-1]) if t.numel() else t.reshape(0, 1) for t in (gate, up)]
    wants = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    out = _Swiglu.apply(*rows, twin) if wants else _forward(*rows, twin)
    return out.view(gate.shape)


def _forward(gate, up, twin):
    return plain.swiglu(gate, up) if twin is None else twin.swiglu_fwd(gate, up)


def swiglu_bwd(grad, gate, up):
    """Gradients of gate and up."""
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    with torch.enable_grad():
        out = plain.swiglu(gate, up)
    return torch.autograd.grad(out, (gate, up), grad)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, twin):
        ctx.save_for_backward(gate, up)
        ctx.twin = twin
        return _forward(gate, up, twin)

    @staticmethod
    @first_derivative_only("swiglu")
    def backward(ctx, grad):
        bwd = swiglu_bwd if ctx.twin is None else ctx.twin.swiglu_bwd
        gate_grad, up_grad = bwd(grad, *ctx.saved_tensors)
        wanted = ctx.needs_input_grad
        return gate_grad if wanted[0] else None, up_grad if wanted[1] else None, None
