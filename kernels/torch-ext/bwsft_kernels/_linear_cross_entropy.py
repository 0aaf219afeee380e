"""Cross-entropy of a linear head that multiplies only the rows that bear loss.

Ignored rows leave before the matmul, so time and memory follow the N loss rows and not the batch.
A chunk of logits becomes its own gradient in place. For "mean" and "sum" the gradients are made in
the forward pass, from logits that exist anyway; "none" makes them in backward, because there each
row's upstream gradient must be known before the projection.
Letters: T tokens of the batch, N loss rows, D hidden size, V vocabulary.
"""

import torch

from ._cross_entropy_torch import cross_entropy_rows_
from ._dispatch import first_derivative_only, graph_break, triton_twin
from ._linear_cross_entropy_args import (
    LossOptions,
    LossRows,
    check_head,
    check_options,
    check_smoothing,
    check_target,
    matmul_dtype,
    per_row,
    select_rows,
)
from ._matmul import add_product_, no_autocast, plan_chunks, product


@graph_break
def linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing=0.0,
    options=None,
    row_weight=None,
    softcap: float | None = None,
    excluded_id: int | None = None,
    num_rows: int | None = None,
    chunk_bytes: int = 512 << 20,
    impl: str = "auto",
) -> torch.Tensor:
    """torch.nn.functional.linear_cross_entropy, at the cost of the rows that aren't ignored.

    input [..., D], linear_weight [V, D], target [...] integers, linear_bias [V]; one dtype, or any
    inside autocast. Returns fp32 (fp64 for fp64 input): a scalar, or [...] with reduction "none".
    row_weight [...] multiplies the loss of each row; "mean" divides by its sum over kept rows, and
    is 0, with zero gradients, if no row is kept. label_smoothing: float or [...]. softcap c: logits
    become c * tanh(logits / c). excluded_id: this column leaves the softmax (SUBS of MDLM,
    arXiv:2406.07524).
    num_rows: host integer; rows behind the first num_rows bear no loss, so a GPU needn't be
    synchronised to count them. chunk_bytes: most bytes of logits at a time. `weight` and `options`
    are torch's and unsupported. ValueError for what is unsupported or doesn't fit; a target outside
    [0, V) too (on a GPU a device-side assertion, or ValueError with BWSFT_DEBUG=1).
    """
    if weight is not None or options is not None:
        raise ValueError("weight (per class) and options are unsupported; see row_weight")
    check_head(input, linear_weight, linear_bias)
    check_target(target, input)
    check_options(reduction, softcap, excluded_id, chunk_bytes, len(linear_weight))
    check_smoothing(label_smoothing)
    dtype = matmul_dtype(input, linear_weight, linear_bias)
    job = LossOptions(reduction, softcap, excluded_id, chunk_bytes, impl, dtype)
    ignore_index = -100 if ignore_index is None else ignore_index
    with torch.no_grad():
        row_weight = per_row(row_weight, "row_weight", target, job.wide)
        smoothing = per_row(label_smoothing, "label_smoothing", target, job.wide)
        rows = select_rows(
            target, row_weight, smoothing, ignore_index, num_rows, job, len(linear_weight)
        )
    tensors = input.reshape(-1, input.shape[-1]), linear_weight, linear_bias
    wants_grad = [tensor is not None and tensor.requires_grad for tensor in tensors]
    if torch.is_grad_enabled() and any(wants_grad):
        return _LinearCrossEntropy.apply(*tensors, rows, job, target.shape)
    return _reduce(_losses(*tensors, rows, job), rows, job, target.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, rows, job, shape):
        ctx.rows, ctx.job = rows, job
        ctx.like = [None if t is None else (t.shape, t.dtype) for t in (x, weight, bias)]
        if job.reduction == "none":
            loss, saved = _losses(x, weight, bias, rows, job), (x, weight, bias)
        else:
            needs = ctx.needs_input_grad[:3]
            loss, *saved = _sweep(x, weight, bias, rows, rows.weight, job, needs)
        ctx.save_for_backward(*saved)
        return _reduce(loss, rows, job, shape)

    @staticmethod
    @first_derivative_only("linear_cross_entropy")
    def backward(ctx, upstream):
        return *_gradients(ctx, upstream), None, None, None


def _gradients(ctx, upstream):
    """Gradients of input, weight and bias in their dtypes, None where not needed."""
    rows, job = ctx.rows, ctx.job
    if job.reduction == "none":
        upstream = upstream.reshape(-1).index_select(0, rows.index).to(job.wide)
        needs = ctx.needs_input_grad[:3]
        _, *grads = _sweep(*ctx.saved_tensors, rows, rows.weight * upstream, job, needs)
    else:
        # Out of place: a second backward must find the saved gradients as they were.
        grads = [None if grad is None else grad * upstream for grad in ctx.saved_tensors]
    grads = [None if g is None else g.to(like[1]) for g, like in zip(grads, ctx.like, strict=True)]
    if grads[0] is not None:
        full = grads[0].new_zeros(ctx.like[0][0])
        grads[0] = full.index_copy_(0, rows.index, grads[0])
    return grads


def _reduce(loss, rows: LossRows, job: LossOptions, shape):
    # A row without weight adds 0, even if its loss isn't finite.
    loss = torch.where(rows.weight == 0, 0, loss * rows.weight)
    if job.reduction != "none":
        return loss.sum()
    out = loss.new_zeros(shape)
    out.view(-1).index_copy_(0, rows.index, loss)
    return out


def _losses(x, weight, bias, rows: LossRows, job: LossOptions):
    """Unweighted loss [N] where no gradient is wanted: on a GPU without logits in memory."""
    twin = triton_twin(job.impl, x, "_linear_cross_entropy_fwd_triton")
    if twin is None:
        return _sweep(x, weight, bias, rows, rows.weight, job, (False, False, False))[0]
    x, weight = x.index_select(0, rows.index).to(job.dtype), weight.to(job.dtype)
    bias = None if bias is None else bias.to(job.dtype)
    return twin.head_loss(
        x, weight, bias, rows.target, rows.smoothing, job.softcap, job.excluded_id
    )


def _sweep(x, weight, bias, rows: LossRows, row_weight, job: LossOptions, needs):
    """Unweighted loss [N] and the gradients of sum(row_weight * loss) that `needs` asks for.

    x [T, D] -> loss [N], grad_x [N, D], grad_weight [V, D], grad_bias [V], in job.wide.
    """
    row_kernel, grad_input = _kernels(job.impl, x)
    need_x, need_weight, need_bias = needs
    size, vocabulary = len(rows.target), len(weight)
    loss = torch.empty(size, dtype=job.wide, device=x.device)
    grad_x = loss.new_empty(size, x.shape[1]) if need_x else None
    grad_weight = loss.new_zeros(weight.shape) if need_weight else None
    grad_bias = loss.new_zeros(vocabulary) if need_bias else None
    row_weight, scale = _fit_range(row_weight, job.dtype)
    with no_autocast(x.device):
        weight = weight.to(job.dtype)
        bias = None if bias is None else bias.to(job.dtype)
        chunks = plan_chunks(size, vocabulary * job.dtype.itemsize, job.chunk_bytes)
        buffer = weight.new_empty(chunks[0][1] if chunks else 0, vocabulary)
        for start, stop in chunks:
            chunk = x.index_select(0, rows.index[start:stop]).to(job.dtype)
            logits = buffer[: stop - start]
            if bias is None:
                torch.mm(chunk, weight.t(), out=logits)
            else:
                torch.addmm(bias, chunk, weight.t(), out=logits)
            smoothing = rows.smoothing
            if isinstance(smoothing, torch.Tensor):
                smoothing = smoothing[start:stop]
            loss[start:stop] = row_kernel(
                logits, rows.target[start:stop], row_weight[start:stop],
                smoothing, job.softcap, job.excluded_id, any(needs),
            )
            if need_x:
                grad_x[start:stop] = grad_input(logits, weight)
            if need_weight:
                add_product_(grad_weight, logits.t(), chunk)
            if need_bias:
                grad_bias += logits.sum(0, dtype=job.wide)
    if scale is not None:
        for grad in (grad_x, grad_weight, grad_bias):
            if grad is not None:
                grad *= scale
    return loss, grad_x, grad_weight, grad_bias


def _kernels(impl: str, x):
    """(row kernel, function for the input's gradient)."""
    rows_twin = triton_twin(impl, x, "_cross_entropy_triton")
    split_twin = triton_twin(impl, x, "_linear_cross_entropy_bwd_triton")
    return (
        rows_twin.cross_entropy_rows_ if rows_twin else cross_entropy_rows_,
        split_twin.grad_input if split_twin else product,
    )


def _fit_range(row_weight, dtype):
    """(row weights for the row kernel, factor that undoes the change or None).

    In fp16, w * p of a typical row is below the smallest number, 6e-8, and a loss scale may come as
    row weight 65536, above the largest. So there the largest weight becomes 128 to 256, by a power
    of two, which is exact.
    """
    if dtype != torch.float16 or len(row_weight) == 0:
        return row_weight, None
    exponent = torch.frexp(row_weight.abs().max()).exponent - 8
    return torch.ldexp(row_weight, -exponent), torch.ldexp(row_weight.new_ones(()), exponent)
