"""RMSNorm, with the residual add before it, in one pass over the rows.

Letters: D features.
"""

import torch
from torch import Tensor

from . import torch_ops
from ._dispatch import check_float, plain_torch, triton_implementation
from ._operator import operator

# 16 numbers a thread: backward holds four of each (total, two gradients, weight, its sum) in fp32,
# and with 16 warps a thread has 128 registers.
MOST_D = 8192


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
    hidden = _check(x, weight, eps, residual)
    torch_alone = plain_torch(impl, x)
    if hidden > MOST_D and not torch_alone:
        if impl == "triton":
            raise ValueError(f'impl="triton" can\'t be used: x has {hidden} columns, more than '
                             f'{MOST_D}; use impl="auto" or "torch"')
        torch_alone = True
    if torch_alone:
        return torch_ops.rms_norm(x, weight, eps, residual)
    normed, total = _rms_norm(x, weight, residual, eps, impl)
    return normed if residual is None else (normed, total)


def _check(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> int:
    """D."""
    check_float(x=x, weight=weight, residual=residual)
    shape, features = x.shape, weight.shape
    if len(features) != 1 or features[0] == 0:
        raise ValueError(f"weight must be [D] and not empty, not {list(features)}")
    if not shape or shape[-1] != features[0]:
        raise ValueError(f"x {list(shape)} must end in the {features[0]} entries of weight")
    double = x.dtype == torch.float64
    mixed = (weight.dtype == torch.float64) != double
    if residual is not None:
        if residual.shape != shape:
            raise ValueError(f"residual must be {list(shape)} as x, not {list(residual.shape)}")
        mixed = mixed or (residual.dtype == torch.float64) != double
    if mixed:
        raise ValueError("x, weight and residual must be float64 all or none")
    if not eps >= 0:
        raise ValueError(f"eps must be 0 or more, not {eps}")
    return features[0]


def _fwd(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float,  # [..., D], [D], [..., D]
    impl: str,
) -> tuple[Tensor, Tensor | None]:  # [..., D] both
    """Normed, and x + residual where there is one."""
    if kernels := triton_implementation(impl, x, "_rms_norm_triton"):
        return kernels.rms_norm_fwd(x, weight, residual, eps)
    total = x if residual is None else (x + residual).contiguous()
    normed = torch_ops.rms_norm(total, weight, eps).contiguous()
    return normed, None if residual is None else total


def _fwd_fake(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, impl: str
) -> tuple[Tensor, Tensor | None]:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    normed = x.new_empty(x.shape, dtype=torch.promote_types(dtype, weight.dtype))
    return normed, None if residual is None else x.new_empty(x.shape, dtype=dtype)


def _bwd(
    grad: Tensor,  # [..., D] of normed
    total_grad: Tensor | None,  # [..., D] of total, where it is used elsewhere
    total: Tensor, weight: Tensor,  # [..., D], [D]
    eps: float, want_weight: bool, impl: str,
) -> tuple[Tensor, Tensor | None]:  # [..., D], [D]
    """Gradients of total, and of weight if wanted."""
    if kernels := triton_implementation(impl, total, "_rms_norm_triton"):
        return kernels.rms_norm_bwd(grad, total_grad, total, weight, eps, want_weight)
    unit, scale = torch_ops.unit_rows(total, eps)
    grad, weight_grad = grad.to(scale.dtype), None
    if want_weight:  # the rounded rows are what weight was multiplied with
        weight_grad = (grad * unit).reshape(-1, len(weight)).sum(0).to(weight.dtype)
    unit, grad = total.to(scale.dtype) * scale, grad * weight
    # u = x / rms(x) sends a gradient g back as (g - u mean(g u)) / rms(x).
    out = (grad - unit * (grad * unit).mean(-1, keepdim=True)) * scale
    out = out if total_grad is None else out + total_grad
    return out.to(total.dtype).contiguous(), weight_grad


def _bwd_fake(
    grad: Tensor, total_grad: Tensor | None, total: Tensor, weight: Tensor,
    eps: float, want_weight: bool, impl: str,
) -> tuple[Tensor, Tensor | None]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape) if want_weight else None


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    x, weight, residual, ctx.eps, ctx.impl = inputs
    total = x
    ctx.set_materialize_grads(False)
    if residual is not None:
        total = output[1]
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[2]):
            ctx.mark_non_differentiable(total)
    ctx.save_for_backward(total, weight)
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype


def _backward(ctx, grad: Tensor | None, total_grad: Tensor | None) -> tuple:
    want_x, want_weight, want_residual, _, _ = ctx.needs_input_grad
    x_dtype, residual_dtype = ctx.dtypes
    if residual_dtype is None:
        total_grad = None  # of no sum; some transforms give zeros for None
    out, weight_grad = total_grad, None
    if grad is not None:
        total, weight = ctx.saved_tensors
        out, weight_grad = _rms_norm_bwd(
            grad, total_grad, total, weight, ctx.eps, want_weight, ctx.impl)
    x_grad = out.to(x_dtype) if want_x and out is not None else None
    residual_grad = out.to(residual_dtype) if want_residual and out is not None else None
    return x_grad, weight_grad if want_weight else None, residual_grad, None, None


_rms_norm_bwd = operator(
    "rms_norm_bwd",
    "(Tensor grad, Tensor? total_grad, Tensor total, Tensor weight, float eps, bool want_weight, "
    "str impl) -> (Tensor, Tensor)",
    _bwd, _bwd_fake,
)
_rms_norm = operator(
    "rms_norm",
    "(Tensor x, Tensor weight, Tensor? residual, float eps, str impl) -> (Tensor, Tensor)",
    _fwd, _fwd_fake, _setup_context, _backward,
)
