"""The loop of `linear_cross_entropy` over chunks of rows: losses, and gradients by the way.

Letters: N supervised rows, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import _cross_entropy_torch
from ._cross_entropy_streamed import can_stream, loss_and_grad_x
from ._dispatch import triton_implementation
from ._linear_cross_entropy_args import LossOptions
from ._matmul import add_product_, no_autocast, plan_chunks, product, product_into


class Swept(NamedTuple):
    """The gradients, as far as the forward pass makes them. With row_weight w, loss l and logits z,
    scale * g is d sum(w * l) / dz of each row."""

    grad_x: Tensor | None  # [N, D]
    scale: Tensor  # [N]
    head: Tensor | None  # uint8: g of the one chunk, else the head's gradient, summed over chunks
    grad_bias: Tensor | None  # [V]


def head_bytes(size: int, weight: Tensor, options: LossOptions) -> int:
    """Bytes of `Swept.head` for `size` rows."""
    per_row, chunks = _plan(size, weight, options)
    if len(chunks) <= 1:
        return size * per_row
    return weight.numel() * options.wide.itemsize


def losses(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    target: Tensor, row_weight: Tensor, smoothing: Tensor | None,  # [N]
    options: LossOptions,
) -> Tensor:  # [N]
    """Unweighted loss where no gradient is wanted: on a GPU without logits in memory."""
    kernels = triton_implementation(options.impl, x, "_linear_cross_entropy_fwd_triton")
    if kernels is None:
        none = False, False, False
        return sweep(x, weight, bias, target, row_weight, smoothing, options, none)[0]
    x, weight, bias = _cast(options.dtype, x, weight, bias)
    smooth = options.smooth if smoothing is None else smoothing
    loss = kernels.head_loss(
        x, weight, bias, target, smooth, options.softcap, options.excluded_id,
        options.budget(x.device, len(x), weight.shape), options.confidence)
    return loss.masked_fill_(row_weight == 0, 0)


def sweep(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    target: Tensor, row_weight: Tensor, smoothing: Tensor | None,  # [N]
    options: LossOptions,
    needs: Sequence[bool],  # gradients of x, weight, bias
) -> tuple[Tensor, Swept]:  # [N]
    """(unweighted loss, 0 where the weight is; the gradients of sum(weight * loss)).

    One chunk keeps g, and `finish` makes the head's gradient of it, written once in the head's
    dtype. Of several chunks it is summed here in fp32, because g of all doesn't fit the budget.
    """
    need_x, need_weight, need_bias = needs
    road, split = _road(options.impl, x), triton_implementation(
        options.impl, x, "_linear_cross_entropy_bwd_triton")
    if len(x) and road is _cross_entropy_torch and can_stream(x, options, needs):
        loss, grad_x = loss_and_grad_x(x, weight, bias, target, row_weight, options, need_x)
        return loss, Swept(grad_x, torch.ones_like(loss), None, None)
    grad_input = split.grad_input if split else product
    size, vocabulary = len(x), len(weight)
    total = grad_bias = None
    with no_autocast(x.device):
        weight, bias = _cast(options.dtype, weight, bias)
        per_row, chunks = _plan(size, weight, options)
        empty = x.new_empty(0, dtype=options.wide)
        if need_weight and len(chunks) > 1:
            total = empty.new_empty(weight.shape)
        if need_bias:
            grad_bias = empty.new_zeros(vocabulary)
        scratch = x.new_empty(chunks[0][1] if chunks else 0, per_row, dtype=torch.uint8)
        row_weight, factor = _fit_range(row_weight, options.dtype)
        parts = []  # (loss, grad_x, scale) of each chunk
        for start, stop in chunks:
            part = slice(start, stop)
            (chunk,) = _cast(options.dtype, x[part])
            smooth = options.smooth if smoothing is None else smoothing[part]
            loss, g, scale = road.loss_and_grad(
                chunk, weight, bias, target[part], row_weight[part], smooth, options.softcap,
                options.excluded_id, scratch, options.confidence)
            grad_x = grad_input(g, weight) if need_x else empty
            if need_x and scale is not None:
                grad_x *= scale[:, None]
            parts.append((loss, grad_x, scale))
            if need_bias:
                grad_bias += _weighted_sum(g[:, :vocabulary], scale)
            if total is not None:
                add_product_(
                    total, g[:, :vocabulary].t(), _scaled(chunk, scale), first=start == 0)
    if not parts:
        parts = [(empty, empty.new_zeros(0, x.shape[1]), None)]
    loss, grad_x, scale = map(_joined, zip(*parts, strict=True))
    if scale is None:
        scale = torch.ones_like(loss)
    if factor is not None:
        for grad in (grad_x, grad_bias, total, scale):
            if grad is not None:
                grad *= factor
    head = None
    if need_weight:
        head = (scratch if total is None else total.view(torch.uint8)).view(-1)
    return loss, Swept(grad_x if need_x else None, scale, head, grad_bias)


def finish(
    upstream: Tensor,  # a scalar
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    swept: Swept, options: LossOptions, needs: Sequence[bool], last: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # [N, D], [V, D], [V]
    """The gradients times `upstream`, in the dtypes of what they belong to, or None.

    last: nobody needs `swept` after this, whose tensors may become the gradients.
    """
    upstream = upstream.to(options.wide)
    times = Tensor.mul_ if last else Tensor.mul
    grad_x = grad_weight = grad_bias = None
    if needs[0]:
        grad_x = times(swept.grad_x, upstream).to(x.dtype)
    if needs[1]:
        with no_autocast(x.device):
            grad_weight = _grad_weight(upstream, x, weight, swept, options, last)
    if needs[2]:
        grad_bias = times(swept.grad_bias, upstream).to(bias.dtype)
    return grad_x, grad_weight, grad_bias


def _grad_weight(
    upstream: Tensor,  # a scalar
    x: Tensor, weight: Tensor,  # [N, D], [V, D]
    swept: Swept, options: LossOptions, last: bool,
) -> Tensor:  # [V, D] in the dtype of weight
    per_row, chunks = _plan(len(x), weight, options)
    if len(chunks) > 1:
        total = swept.head.view(options.wide).view(weight.shape)
        if last and total.device.type == "cpu":  # a GPU casts on the way
            return (total if upstream == 1 else total.mul_(upstream)).to(weight.dtype)
        out = total if last and weight.dtype == options.wide else torch.empty_like(
            weight, memory_format=torch.contiguous_format)
        return torch.mul(total, upstream, out=out)
    if not chunks:
        return torch.zeros_like(weight)
    g = swept.head.view(len(x), per_row).view(options.dtype)[:, : len(weight)]
    (x,) = _cast(options.dtype, x)
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if _road(options.impl, x) is _cross_entropy_torch and x.device.type == "cpu":
        # g holds the rows' scales, and scale what undoes the range of fp16.
        return product_into(out, g.t(), x, float(swept.scale[0] * upstream))
    if options.dtype == torch.float16:  # sums of many rows can exceed 65504 before they are scaled
        return out.copy_(product(g.t(), x) * (swept.scale[0] * upstream))
    return product_into(out, g.t(), _scaled(x, swept.scale * upstream))


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """The results of the chunks, one after another."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:  # [N, D], [N]
    return x if scale is None else (x.to(scale.dtype) * scale[:, None]).to(x.dtype)


def _weighted_sum(g: Tensor, scale: Tensor | None) -> Tensor:  # [N, V], [N] -> [V]
    if scale is None:
        return g.sum(0, dtype=torch.promote_types(g.dtype, torch.float32))
    return product(scale[None].to(g.dtype), g)[0]


def _road(impl: str, x: Tensor) -> ModuleType:
    """The module whose loss_and_grad serves the tensor."""
    return (triton_implementation(impl, x, "_linear_cross_entropy_fwd_triton")
            or _cross_entropy_torch)


def _plan(
    size: int, weight: Tensor, options: LossOptions
) -> tuple[int, list[tuple[int, int]]]:
    """(scratch bytes of a row, chunks of rows)."""
    road, device = _road(options.impl, weight), weight.device
    per_row = road.row_bytes(
        len(weight), options.dtype, size, device, options.softcap, options.smooth != 0,
        options.confidence)
    return per_row, plan_chunks(size, per_row, options.budget(device, size, weight.shape))


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
