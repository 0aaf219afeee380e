"""Rotary position embedding of queries and keys in one launch, and its inverse for the gradient.

Letters: T tokens, H query heads, K key/value heads, E head width.
"""

import torch

from . import torch_ops as plain
from ._dispatch import check_floating, first_derivative_only, graph_break, triton_twin


@graph_break
def rotary(q, k, cos, sin, *, impl: str = "auto"):
    """q [..., H, E] and k [..., K, E] (or None) turned by the angles of each row: (q, k).

    Entry i is paired with i + E / 2. cos and sin [..., 1, E / 2] are those of each row's position,
    so packed rows need nothing else; they are fp32 (fp64 for fp64), the arithmetic runs in them,
    and they get no gradient. The gradient of q and k is turned back. ValueError for tensors that
    don't fit together.
    """
    _check(q, k, cos, sin)
    twin = triton_twin(impl, q, "_rotary_triton")
    q_rows, k_rows = (None if t is None else t.reshape(-1, *t.shape[-2:]) for t in (q, k))
    tables = [t.reshape(-1, q.shape[-1] // 2) for t in (cos, sin)]
    wants = any(t is not None and t.requires_grad for t in (q, k))
    function = _Rotary.apply if wants and torch.is_grad_enabled() else _turn
    q_out, k_out = function(q_rows, k_rows, *tables, False, twin)
    return q_out.view(q.shape), None if k is None else k_out.view(k.shape)


def _check(q, k, cos, sin) -> None:
    tensors = {"q": q, "cos": cos, "sin": sin} | ({} if k is None else {"k": k})
    check_floating(**tensors)
    if q.dim() < 2 or q.shape[-1] % 2 or 0 in q.shape[-2:]:
        raise ValueError(f"q must be [..., H, E] with heads and an even E, not {list(q.shape)}")
    if k is not None:
        fits = k.dim() == q.dim() and k.dtype == q.dtype and k.shape[-2] > 0
        if not fits or _but_heads(k) != _but_heads(q):
            raise ValueError(
                f"k must be {q.dtype} [..., K, E] with the rows and width of q {list(q.shape)}, "
                f"not {k.dtype} {list(k.shape)}"
            )
    table = (*q.shape[:-2], 1, q.shape[-1] // 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    for name, value in (("cos", cos), ("sin", sin)):
        if value.shape != table or value.dtype != wide:
            raise ValueError(
                f"{name} must be {wide} {list(table)}, not {value.dtype} {list(value.shape)}"
            )
        if value.requires_grad:
            raise ValueError(f"{name} gets no gradient: detach it")


def _but_heads(x) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-1])


def _turn(q, k, cos, sin, inverse: bool, twin):
    """q [T, H, E] and k [T, K, E], each may be None; cos and sin [T, E / 2] -> the two, turned."""
    if twin is not None:
        return twin.turn(q, k, cos, sin, inverse)
    sin = -sin if inverse else sin
    return tuple(
        None if t is None else plain.turned(t, cos[:, None], sin[:, None]) for t in (q, k)
    )


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, inverse, twin):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.inverse, ctx.twin = inverse, twin
        out = _turn(q, k, cos, sin, inverse, twin)
        fixed = [t for t, wanted in zip(out, ctx.needs_input_grad, strict=False) if not wanted]
        ctx.mark_non_differentiable(*[t for t in fixed if t is not None])
        return out

    @staticmethod
    @first_derivative_only("rotary")
    def backward(ctx, q_grad, k_grad):
        q_grad, k_grad = _turn(q_grad, k_grad, *ctx.saved_tensors, not ctx.inverse, ctx.twin)
        return q_grad, k_grad, None, None, None, None
