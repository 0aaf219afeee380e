"""Cross-entropy of a linear head that multiplies only the supervised rows.

Ignored rows leave before the matmul, so time and memory follow the N supervised rows and not the
batch. A chunk of logits becomes its own gradient in place. For "mean" and "sum" the gradients of
input and bias are made in the forward pass, from logits that exist anyway, and the head's in
backward, where the upstream factor is known; "none" makes all of them in backward, because there
each row's upstream gradient must be known before the projection.
Letters: T rows of the input, N supervised rows, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._linear_cross_entropy_args import (
    LossOptions,
    check_head,
    check_options,
    check_target,
    matmul_dtype,
    per_row,
    rows_to_multiply,
    select_rows,
)
from ._linear_cross_entropy_sweep import Swept, finish, head_bytes, losses, sweep
from ._operators import differentiated, no_second_derivative, no_vmap
from ._ops import add_op_namespace_prefix, ops


def linear_cross_entropy(
    input: Tensor,  # [..., D] fp32, fp16, bf16 or fp64
    linear_weight: Tensor,  # [V, D]; input's dtype, or any inside autocast
    target: Tensor,  # [...] integers
    *,
    linear_bias: Tensor | None = None,  # [V]
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float | Tensor = 0.0,  # [...]
    options: object = None,
    row_weight: Tensor | None = None,  # [...]
    softcap: float | None = None, excluded_id: int | None = None,
    num_rows: int | None = None, chunk_bytes: int | None = None, impl: str = "auto",
) -> Tensor:  # fp32 (fp64 for fp64): a scalar, or [...] with reduction "none"
    """torch.nn.functional.linear_cross_entropy, at the cost of the rows that aren't ignored.

    row_weight multiplies the loss of each row; "mean" divides by its sum over kept rows, and is 0,
    with zero gradients, if no row is kept. softcap c: logits become c * tanh(logits / c).
    excluded_id: this column leaves the softmax (SUBS of MDLM, arXiv:2406.07524).
    num_rows: host integer; rows after the first num_rows are not supervised, so a GPU needn't be
    synchronized to count them. chunk_bytes: most bytes of logits at a time, 512 MiB on a GPU and
    128 MiB on a CPU where it isn't given. `weight` and `options` are torch's and unsupported.
    ValueError for what is unsupported or doesn't fit; a target outside [0, V) too (on a GPU a
    device-side assertion, or ValueError with BWSFT_DEBUG=1).
    """
    if weight is not None or options is not None:
        raise ValueError("weight (per class) and options are unsupported; see row_weight")
    check_head(input, linear_weight, linear_bias)
    check_target(target, input)
    check_options(
        reduction, softcap, excluded_id, chunk_bytes, label_smoothing, num_rows, impl,
        target.numel(), len(linear_weight))
    dtype = matmul_dtype(input, linear_weight, linear_bias)
    wide = torch.promote_types(dtype, torch.float32)
    smoothing = per_row(label_smoothing, "label_smoothing", target, wide)
    tensors = input.reshape(-1, input.shape[-1]), linear_weight, linear_bias
    loss, *_ = ops.linear_cross_entropy_fwd(
        *tensors, target.reshape(-1), per_row(row_weight, "row_weight", target, wide), smoothing,
        0.0 if smoothing is not None else float(label_smoothing), reduction,
        -100 if ignore_index is None else ignore_index, softcap, excluded_id, num_rows,
        chunk_bytes, impl, dtype, [differentiated(tensor) for tensor in tensors])
    return loss.view(target.shape) if reduction == "none" else loss


@torch.library.custom_op(add_op_namespace_prefix("linear_cross_entropy_fwd"), mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [T, D], [V, D], [V]
    target: Tensor, row_weight: Tensor | None, smoothing: Tensor | None,  # [T]
    smooth: float, reduction: str, ignore_index: int, softcap: float | None,
    excluded_id: int | None, num_rows: int | None, chunk_bytes: int | None, impl: str,
    dtype: torch.dtype,
    needs: Sequence[bool],  # gradients of x, weight, bias
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, then the fields of `Swept`, empty where no gradient is made)."""
    options = LossOptions(
        reduction, smooth, ignore_index, softcap, excluded_id, num_rows, chunk_bytes, impl, dtype)
    rows = select_rows(target, row_weight, smoothing, options, len(weight))
    if reduction == "none" or not any(needs):
        loss = losses(x, weight, bias, rows, options)
        kept = [loss.new_empty(0) for _ in Swept._fields]
    else:
        loss, kept = sweep(x, weight, bias, rows, options, needs)
    # A row without weight adds 0, even if its loss isn't finite.
    loss = torch.where(rows.weight == 0, 0, loss * rows.weight)
    if reduction != "none":
        return loss.sum(), *kept
    return rows.spread(loss, len(target)), *kept


@_forward.register_fake
def _(
    x, weight, bias, target, row_weight, smoothing, smooth, reduction, ignore_index, softcap,
    excluded_id, num_rows, chunk_bytes, impl, dtype, needs,
):
    wide = torch.promote_types(dtype, torch.float32)
    loss = x.new_empty(target.shape if reduction == "none" else (), dtype=wide)
    if reduction == "none" or not any(needs):
        return loss, *(loss.new_empty(0) for _ in Swept._fields)
    if num_rows is None:  # the rows are counted on the device
        dynamic = torch.library.get_ctx().new_dynamic_size
        size = dynamic()
        index, head = size, dynamic() if needs[1] else 0
    else:
        size, index = rows_to_multiply(target.shape[0], num_rows), 0
        head = head_bytes(size, weight, dtype, chunk_bytes, impl) if needs[1] else 0
    return (
        loss, loss.new_empty(index, dtype=torch.int64),
        loss.new_empty(size, x.shape[1] if needs[0] else 0), loss.new_empty(size),
        loss.new_empty(head, dtype=torch.uint8), loss.new_empty(len(weight) if needs[2] else 0),
    )


def _setup(ctx, inputs: tuple, output: tuple) -> None:
    x, weight, bias, target, row_weight, smoothing, *ctx.options = inputs
    ctx.save_for_backward(x, weight, bias, target, row_weight, smoothing, *output[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, upstream: Tensor | None, *_: None):
    """Gradients of x, weight and bias; upstream is a scalar, or [T] for "none"."""
    grads = [None] * 3
    if upstream is not None:
        x, weight, bias, *of_rows, index, grad_x, scale, head, grad_bias = ctx.saved_tensors
        *options, needs = ctx.options
        if options[1] == "none":
            grads = ops.linear_cross_entropy_none_bwd(
                upstream, x, weight, bias, *of_rows, *options, needs)
        else:
            grads = ops.linear_cross_entropy_bwd(
                upstream, x, weight, bias, index, grad_x, scale, head, grad_bias,
                *options[-3:], needs)
        grads = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return *grads, *[None] * 13


_forward.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op(add_op_namespace_prefix("linear_cross_entropy_bwd"), mutates_args=())
def _finish(
    upstream: Tensor,  # a scalar
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [T, D], [V, D], [V]
    index: Tensor, grad_x: Tensor, scale: Tensor, head: Tensor, grad_bias: Tensor,  # as in Swept
    chunk_bytes: int | None, impl: str, dtype: torch.dtype, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # [T, D], [V, D], [V], empty where not needed
    options = LossOptions(chunk_bytes=chunk_bytes, impl=impl, dtype=dtype)
    swept = Swept(index, grad_x, scale, head, grad_bias)
    return finish(upstream, x, weight, bias, swept, options, needs)


@torch.library.custom_op(add_op_namespace_prefix("linear_cross_entropy_none_bwd"), mutates_args=())
def _none_backward(
    upstream: Tensor,  # [T]
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [T, D], [V, D], [V]
    target: Tensor, row_weight: Tensor | None, smoothing: Tensor | None,  # [T]
    smooth: float, reduction: str, ignore_index: int, softcap: float | None,
    excluded_id: int | None, num_rows: int | None, chunk_bytes: int | None, impl: str,
    dtype: torch.dtype, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # [T, D], [V, D], [V], empty where not needed
    options = LossOptions(
        reduction, smooth, ignore_index, softcap, excluded_id, num_rows, chunk_bytes, impl, dtype)
    upstream = upstream.to(options.wide)
    upstream = upstream if row_weight is None else row_weight * upstream
    rows = select_rows(target, upstream, smoothing, options, len(weight))
    _, swept = sweep(x, weight, bias, rows, options, needs)
    return finish(upstream.new_ones(()), x, weight, bias, swept, options, needs)


@_finish.register_fake
@_none_backward.register_fake
def _(upstream, x, weight, bias, *rest):
    needed = zip((x, weight, bias), rest[-1], strict=True)
    return tuple(t.new_empty(t.shape if need else 0) if t is not None else x.new_empty(0)
                 for t, need in needed)


for _op in (_forward, _finish, _none_backward):
    no_vmap(_op, "linear_cross_entropy takes any leading shape: call it without vmap")
for _op in (_finish, _none_backward):
    no_second_derivative(_op, "linear_cross_entropy")
