"""Cross-entropy of rows of logits that become their own gradient, in torch.

The reference implementation of the Triton kernel of the same name.
Letters: N rows of logits, n of them handled at a time, V vocabulary.
"""

import torch
from torch import Tensor

# Bounds the fp32 copies of 16-bit logits. Not smaller: a block is a dozen parallel regions, each of
# which waits for the thread that a busy machine took away (16 blocks: 1.9 s, one block: 0.7 s).
ROW_BLOCK_BYTES = 64 << 20


def cross_entropy_rows_(
    logits: Tensor,  # [N, V] of any float dtype, scratch
    target: Tensor,  # [N] int64 in [0, V)
    row_weight: Tensor,  # [N] fp32
    smoothing: Tensor | float,  # [N] fp32
    softcap: float | None, excluded_id: int | None, want_grad: bool,
) -> Tensor:  # [N] fp32 (fp64 for fp64)
    """The unweighted loss of each row; with want_grad, logits end as row_weight * (d loss / d
    logits), else undefined."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss = torch.empty(len(logits), dtype=wide, device=logits.device)
    step = max(1, ROW_BLOCK_BYTES // (logits.shape[1] * wide.itemsize))
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        weight = row_weight[part] if want_grad else None
        smooth = smoothing[part] if isinstance(smoothing, Tensor) else smoothing
        values = logits[part].to(wide)
        loss[part] = _block_(values, target[part, None], weight, smooth, softcap, excluded_id)
        if want_grad and values.dtype != logits.dtype:
            logits[part] = values
    return loss


def _block_(
    values: Tensor,  # [n, V] fp32 or fp64
    target: Tensor, weight: Tensor | None, smoothing: Tensor | float,  # [n, 1], [n], [n]
    softcap: float | None, excluded_id: int | None,
) -> Tensor:  # [n]
    """A block of `cross_entropy_rows_`; no weight: no gradient."""
    want_grad, smooth = weight is not None, isinstance(smoothing, Tensor) or smoothing > 0
    slope = None
    if softcap is not None:
        values.div_(softcap).tanh_()
        slope = 1 - values * values if want_grad else None
        values.mul_(softcap)
    picked = values.gather(1, target)[:, 0]
    classes = values.shape[1] - (excluded_id is not None)
    if smooth:
        if excluded_id is not None:
            values[:, excluded_id] = 0
        mean = values.sum(1) / classes
    if excluded_id is not None:
        values[:, excluded_id] = float("-inf")
    top = values.amax(1)
    values.sub_(top[:, None]).exp_().scatter_(1, target, 0)
    rest = values.sum(1)
    norm = rest + (picked - top).exp()
    plain = norm.log() - (picked - top)
    # (1 - s) (lse - z_y) + s (lse - mean z)
    loss = plain + smoothing * (picked - mean) if smooth else plain
    if want_grad:
        values.mul_((weight / norm)[:, None])
        # p - 1 as a quotient keeps its digits where the model is sure of the target.
        at_target = -weight * rest / norm
        if smooth:
            share = smoothing / classes
            values.sub_((weight * share)[:, None])
            at_target += weight * (smoothing - share)
            if excluded_id is not None:
                values[:, excluded_id] = 0
        values.scatter_(1, target, at_target[:, None])
        if slope is not None:
            values.mul_(slope)
    return loss
