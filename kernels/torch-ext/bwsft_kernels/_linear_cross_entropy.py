"""Cross-entropy of a linear head that multiplies only the supervised rows.

Ignored rows leave before the matmul, so time and memory follow the N supervised rows and not the
batch. A chunk of logits becomes its own gradient in place. For "mean" and "sum" the gradients are
made in the forward pass, from logits that exist anyway; "none" makes them in backward, because
there each row's upstream gradient must be known before the projection.
Letters: T rows of the input, N supervised rows, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from ._cross_entropy_torch import cross_entropy_rows_
from ._dispatch import graph_break, once_differentiable, tracked, triton_implementation
from ._linear_cross_entropy_args import (
    LossOptions,
    SelectedRows,
    check_head,
    check_options,
    check_target,
    matmul_dtype,
    per_row,
    select_rows,
)
from ._matmul import add_product_, no_autocast, plan_chunks, product


@graph_break
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
    num_rows: int | None = None, chunk_bytes: int = 512 << 20, impl: str = "auto",
) -> Tensor:  # fp32 (fp64 for fp64): a scalar, or [...] with reduction "none"
    """torch.nn.functional.linear_cross_entropy, at the cost of the rows that aren't ignored.

    row_weight multiplies the loss of each row; "mean" divides by its sum over kept rows, and is 0,
    with zero gradients, if no row is kept. softcap c: logits become c * tanh(logits / c).
    excluded_id: this column leaves the softmax (SUBS of MDLM, arXiv:2406.07524).
    num_rows: host integer; rows after the first num_rows are not supervised, so a GPU needn't be
    synchronized to count them. chunk_bytes: most bytes of logits at a time. `weight` and `options`
    are torch's and unsupported. ValueError for what is unsupported or doesn't fit; a target outside
    [0, V) too (on a GPU a device-side assertion, or ValueError with BWSFT_DEBUG=1).
    """
    if weight is not None or options is not None:
        raise ValueError("weight (per class) and options are unsupported; see row_weight")
    check_head(input, linear_weight, linear_bias)
    check_target(target, input)
    vocabulary = len(linear_weight)
    check_options(reduction, softcap, excluded_id, chunk_bytes, label_smoothing, vocabulary)
    dtype = matmul_dtype(input, linear_weight, linear_bias)
    options = LossOptions(reduction, softcap, excluded_id, chunk_bytes, impl, dtype)
    ignore_index = -100 if ignore_index is None else ignore_index
    with torch.no_grad():
        row_weight = per_row(row_weight, "row_weight", target, options.wide)
        smoothing = per_row(label_smoothing, "label_smoothing", target, options.wide)
        rows = select_rows(
            target, row_weight, smoothing, ignore_index, num_rows, options, vocabulary)
    tensors = input.reshape(-1, input.shape[-1]), linear_weight, linear_bias
    if tracked(*tensors):
        return _LinearCrossEntropy.apply(*tensors, rows, options, target.shape)
    return _reduce(_losses(*tensors, rows, options), rows, options, target.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss with gradients of input, weight and bias."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None,  # [T, D], [V, D], [V]
        rows: SelectedRows, options: LossOptions, shape: torch.Size,  # of the target
    ) -> Tensor:
        ctx.rows, ctx.options = rows, options
        ctx.like = [None if t is None else (t.shape, t.dtype) for t in (x, weight, bias)]
        if options.reduction == "none":
            loss, saved = _losses(x, weight, bias, rows, options), (x, weight, bias)
        else:
            needs = ctx.needs_input_grad[:3]
            loss, *saved = _sweep(x, weight, bias, rows, rows.weight, options, needs)
        ctx.save_for_backward(*saved)
        return _reduce(loss, rows, options, shape)

    @staticmethod
    @once_differentiable("linear_cross_entropy")
    def backward(ctx, upstream: Tensor):  # a scalar, or shaped as the target
        rows, options = ctx.rows, ctx.options
        if options.reduction == "none":
            upstream = upstream.reshape(-1).index_select(0, rows.index).to(options.wide)
            needs = ctx.needs_input_grad[:3]
            _, *grads = _sweep(*ctx.saved_tensors, rows, rows.weight * upstream, options, needs)
        else:
            # Out of place: a second backward must find the saved gradients as they were.
            grads = [None if grad is None else grad * upstream for grad in ctx.saved_tensors]
        pairs = zip(grads, ctx.like, strict=True)
        grads = [None if grad is None else grad.to(like[1]) for grad, like in pairs]
        if grads[0] is not None:
            full = grads[0].new_zeros(ctx.like[0][0])
            grads[0] = full.index_copy_(0, rows.index, grads[0])
        return *grads, None, None, None


def _reduce(
    loss: Tensor,  # [N] unweighted
    rows: SelectedRows, options: LossOptions, shape: torch.Size,
) -> Tensor:  # a scalar, or of `shape`
    # A row without weight adds 0, even if its loss isn't finite.
    loss = torch.where(rows.weight == 0, 0, loss * rows.weight)
    if options.reduction != "none":
        return loss.sum()
    out = loss.new_zeros(shape)
    out.view(-1).index_copy_(0, rows.index, loss)
    return out


def _losses(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [T, D], [V, D], [V]
    rows: SelectedRows, options: LossOptions,
) -> Tensor:  # [N]
    """Unweighted loss where no gradient is wanted: on a GPU without logits in memory."""
    kernels = triton_implementation(options.impl, x, "_linear_cross_entropy_fwd_triton")
    if kernels is None:
        return _sweep(x, weight, bias, rows, rows.weight, options, (False, False, False))[0]
    x, weight = x.index_select(0, rows.index).to(options.dtype), weight.to(options.dtype)
    bias = None if bias is None else bias.to(options.dtype)
    return kernels.head_loss(
        x, weight, bias, rows.target, rows.smoothing, options.softcap, options.excluded_id,
        options.chunk_bytes)


def _sweep(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [T, D], [V, D], [V]
    rows: SelectedRows,
    row_weight: Tensor,  # [N]
    options: LossOptions,
    needs: tuple[bool, bool, bool],  # gradients of x, weight, bias
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # [N], [N, D], [V, D], [V]
    """Unweighted loss and the gradients of sum(row_weight * loss), in options.wide."""
    by_row, split = (
        triton_implementation(options.impl, x, name)
        for name in ("_linear_cross_entropy_fwd_triton", "_linear_cross_entropy_bwd_triton")
    )
    grad_input = split.grad_input if split else product
    need_x, need_weight, need_bias = needs
    size, vocabulary = len(rows.target), len(weight)
    loss = torch.empty(size, dtype=options.wide, device=x.device)
    grad_x = loss.new_empty(size, x.shape[1]) if need_x else None
    grad_weight = loss.new_zeros(weight.shape) if need_weight else None
    grad_bias = loss.new_zeros(vocabulary) if need_bias else None
    row_weight, scale = _fit_range(row_weight, options.dtype)
    with no_autocast(x.device):
        weight = weight.to(options.dtype)
        bias = None if bias is None else bias.to(options.dtype)
        row_bytes = vocabulary * options.dtype.itemsize
        if by_row:
            row_bytes = by_row.row_bytes(
                vocabulary, options.dtype, size, x.device, options.softcap, rows.smoothing)
        chunks = plan_chunks(size, row_bytes, options.chunk_bytes)
        scratch = torch.empty(
            (chunks[0][1] if chunks else 0) * row_bytes, dtype=torch.uint8, device=x.device)
        for start, stop in chunks:
            chunk = x.index_select(0, rows.index[start:stop]).to(options.dtype)
            smoothing = rows.smoothing
            if isinstance(smoothing, Tensor):
                smoothing = smoothing[start:stop]
            per_row = (rows.target[start:stop], row_weight[start:stop], smoothing, options.softcap,
                       options.excluded_id)
            if by_row:
                loss[start:stop], logits = by_row.loss_and_grad(
                    chunk, weight, bias, *per_row, scratch)
            else:
                logits = scratch[: (stop - start) * row_bytes].view(options.dtype)
                logits = logits.view(stop - start, vocabulary)
                if bias is None:
                    torch.mm(chunk, weight.t(), out=logits)
                else:
                    torch.addmm(bias, chunk, weight.t(), out=logits)
                loss[start:stop] = cross_entropy_rows_(logits, *per_row, any(needs))
            # logits now hold d sum(row_weight * loss) / d logits.
            if need_x:
                grad_x[start:stop] = grad_input(logits, weight)
            if need_weight:
                add_product_(grad_weight, logits[:, :vocabulary].t(), chunk)
            if need_bias:
                grad_bias += logits[:, :vocabulary].sum(0, dtype=options.wide)
    if scale is not None:
        for grad in (grad_x, grad_weight, grad_bias):
            if grad is not None:
                grad *= scale
    return loss, grad_x, grad_weight, grad_bias




def _fit_range(row_weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:  # [N], []
    """(row weights for the row kernel, factor that undoes the change or None).

    In fp16, w * p of a typical row is below the smallest number, 6e-8, and a loss scale may come as
    row weight 65536, above the largest. So there the largest weight becomes 128 to 256, by a power
    of two, which is exact.
    """
    if dtype != torch.float16 or len(row_weight) == 0:
        return row_weight, None
    exponent = torch.frexp(row_weight.abs().max()).exponent - 8
    return torch.ldexp(row_weight, -exponent), torch.ldexp(row_weight.new_ones(()), exponent)
