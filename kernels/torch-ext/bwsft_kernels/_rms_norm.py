"""RMSNorm, with the residual add before it, in one pass over the rows.

Letters: N rows, D features.
"""

import torch

from ._dispatch import check_floating, first_derivative_only, graph_break, triton_twin
from .torch_ops import unit_rows


@graph_break
def rms_norm(x, weight, eps: float, residual=None, *, impl: str = "auto"):
    """x [..., D] / rms(x) * weight [D], or with residual [..., D] the pair (normed, x + residual).

    The sum is rounded to its dtype (torch's, where the two differ) before it is normalised. Rows
    are normalised in fp32 (fp64 for fp64), cast back, then scaled, as LLaDA's code does. Gradients
    reach x, residual, and weight if it requires one; they are the same bits in every run.
    ValueError for tensors that don't fit together.
    """
    _check(x, weight, eps, residual)
    twin = triton_twin(impl, x, "_rms_norm_triton")
    if twin is not None and len(weight) > twin.MOST_D:
        if impl == "triton":
            raise ValueError(
                f'impl="triton" can\'t be used: x has {len(weight)} columns, more than '
                f'{twin.MOST_D}; use impl="auto" or "torch"'
            )
        twin = None
    rows = x.reshape(-1, len(weight))
    other = None if residual is None else residual.reshape(rows.shape)
    wants = any(t is not None and t.requires_grad for t in (x, weight, residual))
    if wants and torch.is_grad_enabled():
        normed, *total = _RmsNorm.apply(rows, weight, eps, other, twin)
    else:
        normed, *total, _ = _forward(rows, weight, eps, other, twin)
    if residual is None:
        return normed.view(x.shape)
    return normed.view(x.shape), total[0].view(x.shape)


def _check(x, weight, eps, residual) -> None:
    named = {"x": x, "weight": weight, "residual": residual}
    check_floating(**{name: t for name, t in named.items() if t is not None})
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


def _forward(x, weight, eps, residual, twin):
    """x [N, D] -> normed, x + residual where there is one, 1 / rms [N, 1] in fp32 or fp64."""
    if twin is not None:
        return twin.rms_norm_fwd(x, weight, eps, residual)
    total = x if residual is None else x + residual
    unit, scale = unit_rows(total, eps)
    return (weight * unit, scale) if residual is None else (weight * unit, total, scale)


def rms_norm_bwd(grad, total_grad, total, weight, scale, want_weight: bool):
    """(gradient of total, of weight or None): grad and total_grad are those of normed and of total,
    the latter None or [N, D]; scale [N, 1] is 1 / rms of total's rows."""
    wide = scale.dtype
    unit = total.to(wide) * scale
    each = grad.to(wide) * weight.to(wide)
    out = each.sub_(unit * (each * unit).mean(-1, keepdim=True)).mul_(scale)
    if total_grad is not None:
        out += total_grad
    weight_grad = None
    if want_weight:
        # The rounded rows are what weight was multiplied with.
        weight_grad = (grad.to(wide) * unit.to(total.dtype)).sum(0).to(weight.dtype)
    return out.to(total.dtype), weight_grad


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, residual, twin):
        ctx.set_materialize_grads(False)
        normed, *total, scale = _forward(x, weight, eps, residual, twin)
        ctx.save_for_backward(total[0] if total else x, weight, scale)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(*total)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.bwd = rms_norm_bwd if twin is None else twin.rms_norm_bwd
        return normed, *total

    @staticmethod
    @first_derivative_only("rms_norm")
    def backward(ctx, grad, total_grad=None):
        want_x, want_weight, _, want_residual, _ = ctx.needs_input_grad
        out, weight_grad = total_grad, None
        if grad is not None:
            out, weight_grad = ctx.bwd(grad, total_grad, *ctx.saved_tensors, want_weight)
        x_grad, residual_grad = (
            out.to(dtype) if wanted and out is not None else None
            for wanted, dtype in zip((want_x, want_residual), ctx.dtypes, strict=True)
        )
        return x_grad, weight_grad, None, residual_grad, None
