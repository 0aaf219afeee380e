"""Losses under a frozen head on a CPU, and the input's gradient, without logits in memory.

As attention over its keys: of a row's logits z_j and their vectors w_j only sum_j e^(z_j - r) and
sum_j e^(z_j - r) w_j are kept, over tiles of the vocabulary, with a reference r near the largest
logit so far. So a tile of the head is read once for both products, and its logits stay in cache.
Letters: N rows, n of them at a time, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._cross_entropy_torch import NEVER, PICKED_ROWS, loss_and_miss, target_logits
from ._linear_cross_entropy_args import LossOptions
from ._matmul import multiplies_wide, no_autocast

LOGITS_BYTES = 4 << 20  # of a tile's logits; half of it is as fast at 128 rows, slower at 512
ROWS = 1024  # at a time: each time the head is read again
NARROWEST = 256  # columns of a tile
HEAD_BYTES = 2 << 20  # of a tile of a 16-bit head in fp32
SLACK = 30.0  # nats that a logit may be above the reference: e^30 squared is a small fp32 number


def can_stream(x: Tensor, options: LossOptions, needs: Sequence[bool]) -> bool:
    """Whether the loss is made here: a plain softmax, no gradient of the head, and a CPU that
    multiplies in the accumulator's dtype."""
    plain = options.smooth == 0 and options.softcap is None and options.confidence == 0
    return (plain and not (needs[1] or needs[2]) and x.device.type == "cpu"
            and multiplies_wide(x.new_empty(0, dtype=options.dtype)))


def loss_and_grad_x(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    target: Tensor, row_weight: Tensor,  # [N]
    options: LossOptions, need_x: bool,
) -> tuple[Tensor, Tensor | None]:  # [N], [N, D] in the accumulator's dtype
    """(unweighted loss, 0 where the weight is; the input's gradient of sum(weight * loss))."""
    loss = x.new_empty(len(x), dtype=options.wide)
    grad_x = x.new_empty(x.shape, dtype=options.wide) if need_x else None
    step, tile = _tile(len(x), *weight.shape, options)
    scratch = loss.new_empty(step * tile)
    with no_autocast(x.device):
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            part, of = x[rows].to(options.dtype), target[rows]
            picked = target_logits(part, weight, bias, of, options.wide)
            grad = grad_x[rows] if need_x else None
            top, total = _sum_tiles(
                part.to(options.wide), weight, bias, of, options, scratch, tile, grad)
            loss[rows], miss = loss_and_miss((top - picked) + total.log(), picked)
            if need_x:
                grad.div_(total[:, None])
                for some, ids in zip(grad.split(PICKED_ROWS), of.split(PICKED_ROWS), strict=True):
                    some -= weight[ids].to(options.dtype)
                grad *= (row_weight[rows] * miss)[:, None]
    return loss.masked_fill_(row_weight == 0, 0), grad_x


def _tile(size: int, vocabulary: int, hidden: int, options: LossOptions) -> tuple[int, int]:
    """(rows at a time, columns of a tile)."""
    wide = options.wide.itemsize
    logits = min(LOGITS_BYTES, options.chunk_bytes or LOGITS_BYTES) // wide
    least = min(vocabulary, NARROWEST)
    rows = max(1, min(size, ROWS, logits // least))
    columns = min(vocabulary, max(least, logits // rows))
    if options.dtype != options.wide:
        columns = min(columns, max(1, HEAD_BYTES // (wide * max(1, hidden))))
    return rows, columns


def _sum_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [n, D] wide, [V, D], [V]
    target: Tensor,  # [n]
    options: LossOptions,
    scratch: Tensor, tile: int,  # [n * tile or more]
    grad: Tensor | None,  # [n, D]
) -> tuple[Tensor, Tensor]:  # [n]
    """(reference r, sum of e^(z_j - r)) over the other classes than the target; grad becomes the
    sum of e^(z_j - r) w_j."""
    vocabulary, size, excluded = len(weight), len(x), options.excluded_id
    starts = range(0, vocabulary, tile)
    order = target.argsort()
    edges = torch.tensor([*starts, vocabulary], dtype=target.dtype)
    cuts = torch.searchsorted(target[order], edges).tolist()
    top = total = None
    for number, start in enumerate(starts):
        part = weight[start : start + tile].to(options.dtype).to(x.dtype)
        values = scratch[: size * len(part)].view(size, len(part))
        if bias is None:
            torch.mm(x, part.t(), out=values)
        else:
            shift = bias[start : start + tile].to(options.dtype).to(x.dtype)
            torch.addmm(shift, x, part.t(), out=values)
        if excluded is not None and start <= excluded < start + len(part):
            values[:, excluded - start] = NEVER
        here = order[cuts[number] : cuts[number + 1]]
        if len(here):
            values[here, target[here] - start] = NEVER
        most = values.amax(1)
        if top is None:
            top = most.clamp_(min=NEVER)  # all -inf: no NaN
            total = torch.zeros_like(top)
        elif bool((most > top + SLACK).any()):
            lower, top = top, torch.maximum(top, most)
            shrink = (lower - top).exp_()
            total *= shrink
            if grad is not None:
                grad *= shrink[:, None]
        total += values.sub_(top[:, None]).exp_().sum(1)
        if grad is not None:
            torch.addmm(grad, values, part, beta=min(start, 1), out=grad)
    return top, total
