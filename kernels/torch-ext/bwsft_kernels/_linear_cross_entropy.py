"""Cross-entropy of a linear head that multiplies only the supervised rows.

Ignored rows leave before the matmul, so time and memory follow the N supervised rows and not the
batch. A chunk of logits becomes its own gradient in place; on a CPU a frozen head's are made and
summed tile by tile, and never stored. For "mean" and "sum" the gradients of
input and bias are made in the forward pass, from logits that exist anyway, and the head's in
backward, where the upstream factor is known; "none" makes all of them in backward, because there
each row's upstream gradient must be known before the projection.
Letters: T rows of the input, N supervised rows, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from ._dispatch import tracked
from ._linear_cross_entropy_args import (
    LossOptions,
    check_head,
    check_options,
    check_target,
    matmul_dtype,
    per_row,
)
from ._linear_cross_entropy_sweep import Swept, finish, head_bytes, losses, sweep
from ._operator import operator
from ._select_rows import select_rows


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
    confidence: float = 0.0,
    num_rows: int | None = None, chunk_bytes: int | None = None, impl: str = "auto",
) -> Tensor:  # fp32 (fp64 for fp64): a scalar, or [...] with reduction "none"
    """torch.nn.functional.linear_cross_entropy, at the cost of the rows that aren't ignored.

    row_weight multiplies the loss of each row; "mean" divides by its sum over kept rows, and is 0,
    with zero gradients, if no row is kept. softcap c: logits become c * tanh(logits / c).
    excluded_id: this column leaves the softmax (SUBS of MDLM, arXiv:2406.07524). confidence: rows
    whose target is the likeliest class add this times their entropy (CAP of LLaDA2.0,
    arXiv:2512.15745).
    num_rows: host integer; rows after the first num_rows are not supervised, so a GPU needn't be
    synchronized to count them. chunk_bytes: most bytes of logits at a time; where it isn't given,
    512 MiB on a GPU, on a CPU 8 Mi logits, or half of the rows or 256; 4 MiB where it keeps none
    (frozen head, plain softmax, fp32 products). `weight` and `options` are torch's and unsupported.
    ValueError for what is unsupported or doesn't fit; a target outside [0, V) too (on a GPU a
    device-side assertion, or ValueError with BWSFT_DEBUG=1).
    """
    if weight is not None or options is not None:
        raise ValueError("weight (per class) and options are unsupported; see row_weight")
    check_head(input, linear_weight, linear_bias)
    check_target(target, input)
    check_options(
        reduction, softcap, excluded_id, chunk_bytes, label_smoothing, num_rows, confidence, impl,
        target.numel(), len(linear_weight))
    dtype = matmul_dtype(input, linear_weight, linear_bias)
    wide = torch.promote_types(dtype, torch.float32)
    smoothing = label_smoothing if isinstance(label_smoothing, Tensor) else None
    smoothing = per_row(smoothing, "label_smoothing", target, wide)
    flat = target.reshape(-1)
    rows = select_rows(
        flat, per_row(row_weight, "row_weight", target, wide), smoothing, len(linear_weight),
        -100 if ignore_index is None else ignore_index, excluded_id, reduction == "mean", num_rows,
        wide, impl)
    head = rows.of(input.reshape(-1, input.shape[-1])), linear_weight, linear_bias
    loss, *_ = _linear_cross_entropy(
        *head, rows.target, rows.weight, rows.of(smoothing), reduction == "none",
        1.0 if smoothing is not None else float(label_smoothing), softcap, excluded_id,
        chunk_bytes, impl, dtype, float(confidence),
        [tracked(tensor) for tensor in (input, *head[1:])])
    return rows.spread(loss, flat.shape[0]).view(target.shape) if reduction == "none" else loss


Outputs = tuple[Tensor | None, ...]


def _fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    target: Tensor, row_weight: Tensor, smoothing: Tensor | None,  # [N]
    *settings: object,
) -> Outputs:
    """(loss, then the fields of `Swept`); settings are LossOptions and which of x, weight and bias
    need a gradient."""
    options, needs = LossOptions(*settings[:-1]), settings[-1]
    rows, kept = (target, row_weight, smoothing), [None] * len(Swept._fields)
    if options.by_row or not any(needs):
        loss = losses(x, weight, bias, *rows, options)
    else:
        loss, kept = sweep(x, weight, bias, *rows, options, needs)
    loss = loss * row_weight
    return loss if options.by_row else loss.sum(), *kept


def _fwd_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    target: Tensor, row_weight: Tensor, smoothing: Tensor | None, *settings: object,
) -> Outputs:
    options, (need_x, need_weight, need_bias) = LossOptions(*settings[:-1]), settings[-1]
    size, head = x.shape[0], None
    loss = x.new_empty(target.shape if options.by_row else (), dtype=options.wide)
    if options.by_row or not (need_x or need_weight or need_bias):
        return loss, *[None] * len(Swept._fields)
    if need_weight:
        head = (head_bytes(size, weight, options) if isinstance(size, int)
                else torch.library.get_ctx().new_dynamic_size())
    return (
        loss, loss.new_empty(x.shape) if need_x else None, loss.new_empty(size),
        None if head is None else loss.new_empty(head, dtype=torch.uint8),
        loss.new_empty(len(weight)) if need_bias else None,
    )


def _setup_context(ctx, inputs: tuple, output: Outputs) -> None:
    ctx.settings = inputs[6:]
    ctx.save_for_backward(*inputs[:6], *output[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*[tensor for tensor in output[1:] if tensor is not None])


def _backward(ctx, upstream: Tensor | None, *_: None) -> tuple:
    """Gradients of x, weight and bias; upstream is a scalar, or [N] for "none"."""
    needs, grads = ctx.settings[-1], [None] * 3
    if upstream is not None:
        saved = ctx.saved_tensors  # read once: a checkpoint recomputes them for one reading
        inputs, kept = saved[:6], Swept(*saved[6:])
        options = LossOptions(*ctx.settings[:-1])
        if options.by_row:
            grads = _none_bwd(upstream, *inputs, *ctx.settings)
        else:  # an operator returns empty tensors for None
            here = needs[0], True, *needs[1:]
            kept = [t if there else None for t, there in zip(kept, here, strict=True)]
            grads = _bwd(upstream, *inputs[:3], *kept, *ctx.settings)
        grads = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return *grads, *[None] * (3 + len(ctx.settings))


def _finish(
    upstream: Tensor,  # a scalar
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    grad_x: Tensor | None, scale: Tensor, head: Tensor | None, grad_bias: Tensor | None,  # Swept
    *settings: object, last: bool = False,
) -> Outputs:  # gradients of x, weight and bias
    swept = Swept(grad_x, scale, head, grad_bias)
    return finish(
        upstream, x, weight, bias, swept, LossOptions(*settings[:-1]), settings[-1], last)


def _finish_eagerly(*args: object) -> Outputs:
    """As `_finish`; a graph that isn't kept gives up what was saved, which needn't be copied."""
    return _finish(*args, last=not torch._C._autograd._get_current_graph_task_keep_graph())


def _sweep_with_upstream(
    upstream: Tensor,  # [N]
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    target: Tensor, row_weight: Tensor, smoothing: Tensor | None,  # [N]
    *settings: object,
) -> Outputs:  # gradients of x, weight and bias
    options, needs = LossOptions(*settings[:-1]), settings[-1]
    row_weight = row_weight * upstream
    _, swept = sweep(x, weight, bias, target, row_weight, smoothing, options, needs)
    return finish(row_weight.new_ones(()), x, weight, bias, swept, options, needs, last=True)


def _bwd_fake(
    upstream: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: object
) -> Outputs:
    needed = zip((x, weight, bias), rest[-1], strict=True)
    return tuple(t.new_empty(t.shape) if need else None for t, need in needed)


HEAD = "Tensor x, Tensor weight, Tensor? bias"
ROWS = "Tensor target, Tensor row_weight, Tensor? smoothing"
SETTINGS = (
    "bool by_row, float smooth, float? softcap, int? excluded_id, int? chunk_bytes, str impl, "
    "ScalarType dtype, float confidence, bool[] needs")
_none_bwd = operator(
    "linear_cross_entropy_none_bwd",
    f"(Tensor upstream, {HEAD}, {ROWS}, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _sweep_with_upstream, _bwd_fake,
)
_bwd = operator(
    "linear_cross_entropy_bwd",
    f"(Tensor upstream, {HEAD}, Tensor? grad_x, Tensor scale, Tensor? head, "
    f"Tensor? grad_bias, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _finish, _bwd_fake, eager=_finish_eagerly,
)
_linear_cross_entropy = operator(
    "linear_cross_entropy",
    f"({HEAD}, {ROWS}, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fwd, _fwd_fake, _setup_context, _backward,
)
