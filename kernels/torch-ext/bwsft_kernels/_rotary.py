"""Rotary position embedding of queries and keys in one launch, and its inverse for the gradient.

Letters: T tokens, H query heads, K key/value heads, E head width.
"""

from types import ModuleType

import torch
from torch import Tensor

from . import torch_ops
from ._dispatch import check_float, graph_break, once_differentiable, tracked, triton_implementation


@graph_break
def rotary(
    q: Tensor,  # [..., H, E] fp32, fp16, bf16 or fp64
    k: Tensor | None,  # [..., K, E] as q
    cos: Tensor,  # [..., 1, E / 2] fp32 (fp64 for fp64), of each token's position
    sin: Tensor,  # [..., 1, E / 2] as cos
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # [..., H, E], [..., K, E]
    """Rotate queries and keys by the angles of their positions (RoPE).

    Entry i is paired with i + E / 2. The tables belong to tokens, so packed sequences need nothing
    else; the arithmetic runs in their dtype, and they get no gradient. The gradients of q and k are
    rotated back. ValueError for tensors that don't fit together.
    """
    _check(q, k, cos, sin)
    kernels = triton_implementation(impl, q, "_rotary_triton")
    if kernels is None:
        return torch_ops.rotary(q, k, cos, sin)
    q_tokens, k_tokens = (None if t is None else t.reshape(-1, *t.shape[-2:]) for t in (q, k))
    tables = [t.reshape(-1, q.shape[-1] // 2) for t in (cos, sin)]
    if tracked(q, k):
        q_out, k_out = _Rotary.apply(q_tokens, k_tokens, *tables, False, kernels)
    else:
        q_out, k_out = kernels.rotate(q_tokens, k_tokens, *tables, False)
    return q_out.view(q.shape), None if k is None else k_out.view(k.shape)


def _check(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    check_float(q=q, cos=cos, sin=sin, k=k)
    if q.dim() < 2 or q.shape[-1] % 2 or 0 in q.shape[-2:]:
        raise ValueError(f"q must be [..., H, E] with heads and an even E, not {list(q.shape)}")
    if k is not None:
        fits = k.dim() == q.dim() and k.dtype == q.dtype and k.shape[-2] > 0
        if not fits or _but_heads(k) != _but_heads(q):
            raise ValueError(f"k must be {q.dtype} [..., K, E] with the rows and width of q "
                             f"{list(q.shape)}, not {k.dtype} {list(k.shape)}")
    table = (*q.shape[:-2], 1, q.shape[-1] // 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    for name, value in (("cos", cos), ("sin", sin)):
        if value.shape != table or value.dtype != wide:
            raise ValueError(
                f"{name} must be {wide} {list(table)}, not {value.dtype} {list(value.shape)}")
        if value.requires_grad:
            raise ValueError(f"{name} gets no gradient: detach it")


def _but_heads(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-1])


class _Rotary(torch.autograd.Function):
    """The Triton kernel, whose gradient is the inverse rotation."""

    @staticmethod
    def forward(
        ctx, q: Tensor | None, k: Tensor | None,  # [T, H, E], [T, K, E]
        cos: Tensor, sin: Tensor,  # [T, E / 2]
        inverse: bool, kernels: ModuleType,
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.inverse, ctx.kernels = inverse, kernels
        out = kernels.rotate(q, k, cos, sin, inverse)
        fixed = [t for t, wanted in zip(out, ctx.needs_input_grad, strict=False) if not wanted]
        ctx.mark_non_differentiable(*[t for t in fixed if t is not None])
        return out

    @staticmethod
    @once_differentiable("rotary")
    def backward(ctx, q_grad: Tensor | None, k_grad: Tensor | None):  # [T, H, E], [T, K, E]
        grads = ctx.kernels.rotate(q_grad, k_grad, *ctx.saved_tensors, not ctx.inverse)
        return *grads, None, None, None, None
