"""Losses of rows under a linear head, and logits that become their own gradient, in torch.

The reference implementation of the Triton kernels in _linear_cross_entropy_fwd_triton.py.
Letters: N rows of a chunk, n of them handled at a time, D hidden size, V vocabulary.

A row's softmax is taken over the other classes than its target y: with L their log-sum-exp,
d = L - z_y and q their softmax, the loss is log(1 + e^d) and its gradient sigmoid(d) * (q_j for the
others, -1 for y). Both keep their digits where the model is sure of the target, and sigmoid(d)
times the row's weight is one number a row: on a GPU the matrix products after it take it; on a CPU
g does while it is in cache, so that no factor of a product is copied.
"""

import torch
from torch import Tensor

from ._matmul import logits_into

# The fp32 copies of 16-bit logits. One thread: what its cache holds. More: larger, because a block
# is a handful of parallel regions, each of which waits for the thread that a busy machine took away
# (16 blocks: 1.9 s, one block: 0.7 s).
CACHE_BYTES, SHARED_BYTES = 1 << 19, 64 << 20
PICKED_ROWS = 16  # whose copies in fp32 are small beside the logits
NEVER = -3.0e38  # a logit whose probability is 0; -inf would make NaN of a row without others


def row_bytes(
    vocabulary: int, dtype: torch.dtype, rows: int, device: torch.device, softcap: float | None,
    smooth: bool, confidence: float = 0.0,
) -> int:
    """Bytes of scratch that one row of `loss_and_grad` takes."""
    return vocabulary * dtype.itemsize


def loss_and_grad(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V] of one dtype
    target: Tensor,  # [N] int64 in [0, V)
    row_weight: Tensor,  # [N] fp32 (fp64 for fp64)
    smoothing: Tensor | float,  # [N] as row_weight
    softcap: float | None, excluded_id: int | None,
    scratch: Tensor,  # uint8 [N or more, row_bytes]
    confidence: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # [N], [N, V], [N]
    """(unweighted loss, 0 where row_weight is; g in the dtype of x, inside `scratch`; s): the
    gradient of the logits, times row_weight, is g * s[:, None], or g where s is None."""
    size, vocabulary = len(x), len(weight)
    logits, wide = scratch[:size].view(x.dtype), row_weight.dtype
    # The product below rounds 16-bit logits; the target's is made in fp32 besides.
    picked = target_logits(x, weight, bias, target, wide)
    logits_into(logits, x, weight, bias)
    loss, scale = torch.empty_like(row_weight), torch.empty_like(row_weight)
    # Where g holds s: fp16 can't hold small q.
    expand = x.device.type == "cpu" or x.dtype == torch.float16
    step = _block_rows(size, vocabulary, wide, in_place=wide == x.dtype)
    copy = logits if wide == x.dtype else x.new_empty(step, vocabulary, dtype=wide)
    for start in range(0, size, step):
        rows = slice(start, start + step)
        values = logits[rows]
        if wide != x.dtype:
            values = copy[: len(values)].copy_(values)
        part = smoothing[rows] if isinstance(smoothing, Tensor) else smoothing
        loss[rows], scale[rows] = _become_gradient_(
            values, picked[rows], target[rows], row_weight[rows], part, softcap, excluded_id,
            confidence, expand,
        )
        if wide != x.dtype:
            logits[rows] = values
    # A row without weight adds 0, even if its loss isn't finite.
    return loss.masked_fill_(row_weight == 0, 0), logits, None if expand else scale


def target_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    target: Tensor, wide: torch.dtype,  # [N]
) -> Tensor:  # [N] in `wide`
    """The logits of the targets, of factors in the dtype of x."""
    few = len(x) if x.is_cuda else PICKED_ROWS
    picked = torch.cat([
        (rows.to(wide) * weight[of].to(x.dtype)).sum(1)
        for rows, of in zip(x.split(few), target.split(few), strict=True)])
    if bias is not None:
        picked += bias[target].to(x.dtype)
    return picked


def loss_and_miss(gap: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:  # [n] each
    """(loss, sigmoid(d)) of d = L - z_y and the target's logit."""
    loss = torch.logaddexp(gap, torch.zeros_like(gap))
    # An infinite logit isn't a loss of 0: inf - inf is NaN, as torch's own loss.
    return torch.where(picked == torch.inf, torch.nan, loss), gap.sigmoid()


def _block_rows(size: int, vocabulary: int, wide: torch.dtype, in_place: bool) -> int:
    alone = torch.get_num_threads() == 1
    if in_place and not alone:
        return max(1, size)
    budget = CACHE_BYTES if alone else SHARED_BYTES
    if in_place:
        budget *= 4  # no copy beside it: fewer blocks
    return max(1, min(size, budget // (vocabulary * wide.itemsize)))


def _become_gradient_(
    values: Tensor,  # [n, V] logits, of which g is made in place
    picked: Tensor, target: Tensor, weight: Tensor,  # [n]
    smoothing: Tensor | float,  # [n]
    softcap: float | None, excluded_id: int | None, confidence: float,
    expand: bool,  # g holds s already
) -> tuple[Tensor, Tensor]:  # loss [n], s [n]
    (size, classes), slope = values.shape, None
    smooth = isinstance(smoothing, Tensor) or smoothing > 0
    if softcap is not None:
        values.div_(softcap).tanh_()
        slope = 1 - values * values
        values.mul_(softcap)
        picked = softcap * (picked / softcap).tanh()
    rows = torch.arange(size, device=values.device)
    if excluded_id is not None:
        classes -= 1
        values[:, excluded_id] = 0
    mean = values.sum(1) / classes if smooth else 0
    if excluded_id is not None:
        values[:, excluded_id] = NEVER
    values[rows, target] = NEVER
    top = values.amax(1)
    torch.softmax(values, 1, out=values)
    gap = (top - picked) - values.amax(1).log()  # a difference first: logits may be large
    loss, miss = loss_and_miss(gap, picked)
    scale, at_target = weight * miss, -weight * miss
    plain = loss
    if confidence:
        loss, at_target = _sharpen_(values, gap, plain, at_target, weight, confidence)
    elif not (smooth or softcap is not None or expand):
        values[rows, target] = -1
        return loss, scale
    values.mul_(scale[:, None])
    if smooth:
        loss = loss + smoothing * (picked - mean)
        share = smoothing / classes
        values.sub_((weight * share)[:, None])
        at_target += weight * (smoothing - share)
        if excluded_id is not None:
            values[:, excluded_id] = 0
    values[rows, target] = at_target
    if slope is not None:
        values.mul_(slope)
    return loss, torch.ones_like(scale)


def _sharpen_(
    q: Tensor,  # [n, V] softmax over the others, becomes their gradient over scale
    gap: Tensor, loss: Tensor, at_target: Tensor, weight: Tensor,  # [n]
    confidence: float,
) -> tuple[Tensor, Tensor]:  # [n], [n]
    """(loss, gradient of the target's logit) with confidence * entropy where the target leads.

    d entropy / d z_j = -p_j (log p_j + entropy), with p = (1 - sigmoid(d)) for y and sigmoid(d) q
    for the others, whose logarithms are -loss and d - loss + log q.
    """
    # A tie leads too: the largest of the others has the target's logit.
    leads = (gap + q.amax(1).log()) <= 0
    q_log_q = torch.special.xlogy(q, q)
    hit, miss, log_miss = torch.exp(-loss), gap.sigmoid(), gap - loss
    entropy = hit * loss - miss * (log_miss + q_log_q.sum(1))

    def leading(values: Tensor) -> Tensor:  # 0 elsewhere, where they may be NaN
        return torch.where(leads, confidence * values, 0)

    q.mul_((1 - leading(log_miss + entropy))[:, None])
    q.sub_(q_log_q.mul_(leads[:, None]).mul_(confidence))
    at_target = at_target - weight * leading(hit * (entropy - loss))
    return loss + leading(entropy), at_target
