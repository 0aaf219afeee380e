"""Rotary position embedding of queries and keys in one launch, and its inverse for the gradient.

Letters: H query heads, K key/value heads, E head width.
"""

import torch
from torch import Tensor

from . import torch_ops
from ._dispatch import check_float, plain_torch, triton_implementation
from ._operator import operator


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
    if plain_torch(impl, q):
        return torch_ops.rotary(q, k, cos, sin)
    q_out, k_out = _rotary(q, k, cos, sin, impl)
    return q_out, None if k is None else k_out


def _check(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    check_float(q=q, cos=cos, sin=sin, k=k)
    shape, dtype = q.shape, q.dtype
    if len(shape) < 2 or shape[-1] % 2 or shape[-1] == 0 or shape[-2] == 0:
        raise ValueError(f"q must be [..., H, E] with heads and an even E, not {list(shape)}")
    *rows, _, width = shape
    if k is not None:
        *k_rows, heads, k_width = k.shape if k.dim() > 1 else (0, 0)
        if k.dtype != dtype or heads == 0 or k_rows != rows or k_width != width:
            raise ValueError(f"k must be {dtype} [..., K, E] with the rows and width of q "
                             f"{list(shape)}, not {k.dtype} {list(k.shape)}")
    table = (*rows, 1, width // 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for value in (cos, sin):
        if value.shape != table or value.dtype != wide or value.requires_grad:
            _complain("cos" if value is cos else "sin", value, wide, table)


def _complain(name: str, value: Tensor, dtype: torch.dtype, table: tuple[int, ...]) -> None:
    if value.shape != table or value.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype} {list(table)}, not {value.dtype} {list(value.shape)}")
    raise ValueError(f"{name} gets no gradient: detach it")


def _rotate(
    q: Tensor | None, k: Tensor | None,  # [..., H, E], [..., K, E]
    cos: Tensor, sin: Tensor,  # [..., 1, E / 2]
    impl: str, inverse: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Both rotated, or rotated back."""
    if kernels := triton_implementation(impl, cos if q is None else q, "_rotary_triton"):
        return kernels.rotate(q, k, cos, sin, inverse)
    sin = -sin if inverse else sin
    return tuple(
        None if t is None else torch_ops.rotated(t, cos, sin).contiguous() for t in (q, k))


def _rotate_fake(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, impl: str, inverse: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    return tuple(None if t is None else t.new_empty(t.shape) for t in (q, k))


def _fwd(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, impl: str
) -> tuple[Tensor, Tensor | None]:
    return _rotate(q, k, cos, sin, impl, False)


def _bwd(
    q_grad: Tensor | None, k_grad: Tensor | None, cos: Tensor, sin: Tensor, impl: str
) -> tuple[Tensor | None, Tensor | None]:
    return _rotate(q_grad, k_grad, cos, sin, impl, True)


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    q, k, cos, sin, ctx.impl = inputs
    ctx.alone = k is None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin)
    if k is not None and not ctx.needs_input_grad[1]:
        ctx.mark_non_differentiable(output[1])
    elif not ctx.needs_input_grad[0]:
        ctx.mark_non_differentiable(output[0])


def _backward(ctx, q_grad: Tensor | None, k_grad: Tensor | None) -> tuple:
    if ctx.alone:
        k_grad = None  # some transforms give zeros for None
    if q_grad is None and k_grad is None:
        return (None,) * 5
    cos, sin = ctx.saved_tensors
    grads = _rotary_bwd(q_grad, k_grad, cos, sin, ctx.impl)
    return (
        None if q_grad is None else grads[0], None if k_grad is None else grads[1],
        None, None, None,
    )


_OUTPUTS = "Tensor cos, Tensor sin, str impl) -> (Tensor, Tensor)"
_rotary_bwd = operator(
    "rotary_bwd", f"(Tensor? q_grad, Tensor? k_grad, {_OUTPUTS}", _bwd, _rotate_fake)
_rotary = operator(
    "rotary", f"(Tensor q, Tensor? k, {_OUTPUTS}", _fwd, _rotate_fake, _setup_context, _backward)
