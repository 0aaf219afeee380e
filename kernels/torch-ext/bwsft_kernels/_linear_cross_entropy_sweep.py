"""The loop over chunks of rows behind `linear_cross_entropy`: losses, and gradients by the way.

Letters: T rows of the input, N supervised rows, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import _cross_entropy_torch
from ._dispatch import triton_implementation
from ._linear_cross_entropy_args import LossOptions, SelectedRows
from ._matmul import add_product_, no_autocast, plan_chunks, product


class Swept(NamedTuple):
    """The gradients, as far as the forward pass makes them. With row_weight w, loss l and logits z,
    scale * g is d sum(w * l) / dz of each row."""

    index: Tensor  # [N] into the T rows; empty: the first N rows
    grad_x: Tensor  # [N, D]
    scale: Tensor  # [N]
    head: Tensor  # uint8: g of the one chunk, else the head's gradient summed over the chunks
    grad_bias: Tensor  # [V]


def head_bytes(
    size: int, weight: Tensor, dtype: torch.dtype, chunk_bytes: int | None, impl: str
) -> int:
    """Bytes of `Swept.head` for `size` rows."""
    options = LossOptions(chunk_bytes=chunk_bytes, impl=impl, dtype=dtype)
    per_row, chunks = _plan(size, weight, options)
    if len(chunks) <= 1:
        return size * per_row
    return weight.numel() * options.wide.itemsize


def losses(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [T, D], [V, D], [V]
    rows: SelectedRows, options: LossOptions,
) -> Tensor:  # [N]
    """Unweighted loss where no gradient is wanted: on a GPU without logits in memory."""
    kernels = triton_implementation(options.impl, x, "_linear_cross_entropy_fwd_triton")
    if kernels is None:
        return sweep(x, weight, bias, rows, options, (False, False, False))[0]
    x, weight, bias = _cast(options.dtype, rows.of(x), weight, bias)
    return kernels.head_loss(
        x, weight, bias, rows.target, rows.smoothing, options.softcap, options.excluded_id,
        options.budget(x))


def sweep(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [T, D], [V, D], [V]
    rows: SelectedRows, options: LossOptions,
    needs: Sequence[bool],  # gradients of x, weight, bias
) -> tuple[Tensor, Swept]:  # unweighted loss [N]
    """The loss, and the gradients of sum(weight * loss) in at least fp32.

    One chunk keeps g, and `finish` makes the head's gradient of it, written once in the head's
    dtype. Of several chunks it is summed here in fp32, because g of all doesn't fit the budget.
    """
    need_x, need_weight, need_bias = needs
    road, split = _road(options.impl, x), triton_implementation(
        options.impl, x, "_linear_cross_entropy_bwd_triton")
    grad_input = split.grad_input if split else product
    size, (vocabulary, hidden) = len(rows.target), weight.shape
    loss = torch.empty(size, dtype=options.wide, device=x.device)
    scale = torch.ones_like(loss)
    grad_x = loss.new_empty(size, hidden if need_x else 0)
    grad_bias = loss.new_zeros(vocabulary if need_bias else 0)
    row_weight, factor = _fit_range(rows.weight, options.dtype)
    with no_autocast(x.device):
        weight, bias = _cast(options.dtype, weight, bias)
        per_row, chunks = _plan(size, weight, options)
        total = loss.new_zeros(weight.shape) if need_weight and len(chunks) > 1 else None
        scratch = torch.empty(
            chunks[0][1] * per_row if chunks else 0, dtype=torch.uint8, device=x.device)
        for start, stop in chunks:
            part = slice(start, stop)
            (chunk,) = _cast(options.dtype, rows.of(x, part))
            loss[part], g, by_row = road.loss_and_grad(
                chunk, weight, bias, rows.target[part], row_weight[part], rows.smooth(part),
                options.softcap, options.excluded_id, scratch)
            scale[part] = by_row
            if need_x:
                grad_x[part] = grad_input(g, weight) * by_row[:, None]
            if need_bias:
                grad_bias += product(by_row[None].to(g.dtype), g)[0]
            if total is not None:
                add_product_(total, g.t(), _scaled(chunk, by_row))
    if factor is not None:
        for grad in (grad_x, grad_bias, scale, *([] if total is None else [total])):
            grad *= factor
    if total is not None:
        scratch = total.view(torch.uint8).view(-1)
    head = scratch if need_weight else scratch.new_empty(0)
    index = rows.target.new_empty(0) if rows.index is None else rows.index
    return loss, Swept(index, grad_x, scale, head, grad_bias)


def finish(
    upstream: Tensor,  # a scalar
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [T, D], [V, D], [V]
    swept: Swept, options: LossOptions, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # [T, D], [V, D], [V], empty where not needed
    """The gradients times `upstream`, in the dtypes of what they belong to.

    Out of place: a second backward must find what was saved as it was.
    """
    need_x, need_weight, need_bias = needs
    size, upstream = len(swept.scale), upstream.to(options.wide)
    index = swept.index if len(swept.index) else None
    full = x.new_zeros(x.shape) if need_x else x.new_empty(0)
    if need_x and index is None:
        full[:size] = swept.grad_x * upstream
    elif need_x:
        full.index_copy_(0, index, (swept.grad_x * upstream).to(x.dtype))
    grad_bias = x.new_empty(0)
    if need_bias:
        grad_bias = (swept.grad_bias * upstream).to(bias.dtype)
    grad_weight = weight.new_empty(0)
    if need_weight:
        with no_autocast(x.device):
            chunk = x[:size] if index is None else x.index_select(0, index)
            grad_weight = _grad_weight(upstream, chunk, weight, swept, options)
    return full, grad_weight, grad_bias


def _grad_weight(
    upstream: Tensor,  # a scalar
    x: Tensor, weight: Tensor,  # [N, D], [V, D]
    swept: Swept, options: LossOptions,
) -> Tensor:  # [V, D] in the dtype of weight
    per_row, chunks = _plan(len(x), weight, options)
    if len(chunks) > 1:
        total = swept.head.view(options.wide).view(weight.shape)
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
        return torch.mul(total, upstream, out=out)
    if not chunks:
        return torch.zeros_like(weight)
    g = swept.head.view(options.dtype).view(len(x), -1)[:, : len(weight)]
    (x,) = _cast(options.dtype, x)
    if options.dtype == torch.float16:  # sums of many rows can exceed 65504 before they are scaled
        return (product(g.t(), x) * (swept.scale[0] * upstream)).to(weight.dtype)
    x = _scaled(x, swept.scale * upstream)
    if options.dtype == weight.dtype:
        return torch.mm(g.t(), x)
    return product(g.t(), x).to(weight.dtype)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:  # [N, D], [N]
    return (x.to(scale.dtype) * scale[:, None]).to(x.dtype)


def _road(impl: str, x: Tensor) -> ModuleType:
    """The module whose loss_and_grad serves the tensor."""
    return (triton_implementation(impl, x, "_linear_cross_entropy_fwd_triton")
            or _cross_entropy_torch)


def _plan(size: int, weight: Tensor, options: LossOptions) -> tuple[int, list[tuple[int, int]]]:
    """(scratch bytes of a row, chunks of rows)."""
    road = _road(options.impl, weight)
    per_row = road.row_bytes(len(weight), options.dtype, size, weight.device)
    return per_row, plan_chunks(size, per_row, options.budget(weight))


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _fit_range(row_weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:  # [N], []
    """(row weights for loss_and_grad, factor that undoes the change or None).

    In fp16, w * p of a typical row is below the smallest number, 6e-8, and a loss scale may come as
    row weight 65536, above the largest. So there the largest weight becomes 128 to 256, by a power
    of two, which is exact.
    """
    if dtype != torch.float16 or len(row_weight) == 0:
        return row_weight, None
    exponent = torch.frexp(row_weight.abs().max()).exponent - 8
    return torch.ldexp(row_weight, -exponent), torch.ldexp(row_weight.new_ones(()), exponent)
