"""RMSNorm, with the residual add before it, in one pass over the rows.

Letters: N rows, D features.
"""

from types import ModuleType

import torch
from torch import Tensor

from . import torch_ops
from ._dispatch import check_float, graph_break, once_differentiable, tracked, triton_implementation


@graph_break
def rms_norm(
    x: Tensor,  # [..., D] fp32, fp16, bf16 or fp64
    weight: Tensor,  # [D]
    eps: float,
    residual: Tensor | None = None,  # [..., D], added to x first
    *,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # normed [..., D], or (normed, x + residual)
    """Normalize x to a root mean square of 1 and scale it by weight, the residual added first.

    The sum is rounded to its dtype (torch's, where the two differ) before it is normalized. Rows
    are normalized in fp32 (fp64 for fp64), cast back, then scaled, as LLaDA's code does. Gradients
    reach x, residual, and weight if it requires one; they are the same bits in every run.
    ValueError for tensors that don't fit together.
    """
    _check(x, weight, eps, residual)
    kernels = triton_implementation(impl, x, "_rms_norm_triton")
    if kernels is not None and len(weight) > kernels.MOST_D:
        if impl == "triton":
            raise ValueError(f'impl="triton" can\'t be used: x has {len(weight)} columns, more '
                             f'than {kernels.MOST_D}; use impl="auto" or "torch"')
        kernels = None
    if kernels is None:
        return torch_ops.rms_norm(x, weight, eps, residual)
    rows = x.reshape(-1, len(weight))
    other = None if residual is None else residual.reshape(rows.shape)
    if tracked(x, weight, residual):
        normed, *total = _RmsNorm.apply(rows, weight, eps, other, kernels)
    else:
        normed, *total, _ = kernels.rms_norm_fwd(rows, weight, eps, other)
    normed = normed.view(x.shape)
    return normed if residual is None else (normed, total[0].view(x.shape))


def _check(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> None:
    named = {"x": x, "weight": weight, "residual": residual}
    check_float(**named)
    if weight.dim() != 1 or len(weight) == 0:
        raise ValueError(f"weight must be [D] and not empty, not {list(weight.shape)}")
    if x.dim() == 0 or x.shape[-1] != len(weight):
        raise ValueError(f"x {list(x.shape)} must end in the {len(weight)} entries of weight")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must be {list(x.shape)} as x, not {list(residual.shape)}")
    if len({t.dtype == torch.float64 for t in named.values() if t is not None}) > 1:
        raise ValueError("x, weight and residual must be float64 all or none")
    if not eps >= 0:
        raise ValueError(f"eps must be 0 or more, not {eps}")


class _RmsNorm(torch.autograd.Function):
    """The Triton kernels with their gradients; the arguments of rms_norm_fwd and its file."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, eps: float,  # [N, D], [D]
        residual: Tensor | None, kernels: ModuleType,  # [N, D]
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        normed, *total, scale = kernels.rms_norm_fwd(x, weight, eps, residual)
        ctx.save_for_backward(total[0] if total else x, weight, scale)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(*total)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.kernels = kernels
        return normed, *total

    @staticmethod
    @once_differentiable("rms_norm")
    def backward(ctx, grad: Tensor | None, total_grad: Tensor | None = None):  # each [N, D]
        want_x, want_weight, _, want_residual, _ = ctx.needs_input_grad
        out, weight_grad, bwd = total_grad, None, ctx.kernels.rms_norm_bwd
        if grad is not None:
            out, weight_grad = bwd(grad, total_grad, *ctx.saved_tensors, want_weight)
        x_grad, residual_grad = (
            out.to(dtype) if wanted and out is not None else None
            for wanted, dtype in zip((want_x, want_residual), ctx.dtypes, strict=True)
        )
        return x_grad, weight_grad, None, residual_grad, None
