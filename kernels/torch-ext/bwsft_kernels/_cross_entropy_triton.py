"""Loss and gradient of rows, in Triton: the second half of _linear_cross_entropy_fwd_triton.py.

Two kernels, one program per row each. `cross_entropy_rows` reads fp32 logits twice, since a row of
LLaDA is 506 KB and doesn't fit in shared memory, and writes the gradient over them. `merge_rows`
gets exponentials and partial sums of tiles, and reads and writes the row once.
Letters: N rows, V vocabulary, W = V rounded up to 64, P vocabulary tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import down_cast, on_device, soft_cap

# 8 warps hold 16 elements a thread: four 16-byte loads of fp32, two of bf16.
BLOCK_V = 4096
WARPS = 8
MERGE_TILES = 1024

# What a tile leaves of a row's logits but the target's, fp32 [SLOTS, P]: the largest, the sum of
# exp(logit - largest), the plain sum. The target's logit, before a soft-cap, comes after them.
TOP, REST, PLAIN, SLOTS = map(tl.constexpr, range(4))


@triton.jit
def piece_sums(
    logits,  # fp32 [rows, BLOCK_V], a piece of columns without bias and soft-cap
    bias_ptr, target_ptr, part_ptr,  # [W], [N], [N, SLOTS * P + 1]
    rows, cols, piece, N, V, W, P, stride_part,
    EXCLUDED: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, WANT_GRAD: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Store a piece's sums; exp(logit - largest), times the soft-cap's slope if a gradient is
    wanted, and 0 in columns that don't count. A piece past the end, P or later, stores nothing."""
    if HAS_BIAS:
        logits += tl.load(bias_ptr + cols, mask=cols < W, other=0.0).to(tl.float32)[None, :]
    row_in = rows < tl.where(piece < P, N, 0)
    part = part_ptr + rows.to(tl.int64) * stride_part
    target = tl.load(target_ptr + rows, mask=row_in, other=-1).to(tl.int32)
    # One piece owns the target's column; cols past V never match, targets are in [0, V).
    is_target = cols[None, :] == target[:, None]
    picked = tl.sum(tl.where(is_target, logits, 0.0), axis=1)
    owner = (target >= piece * BLOCK_V) & (target < piece * BLOCK_V + BLOCK_V)
    tl.store(part + SLOTS * P, picked, mask=row_in & owner)

    logits = soft_cap(logits, CAP)
    # From here without the target: 1 - p of a sure row becomes a sum and not a cancellation, and
    # the others' exponentials keep their digits next to it.
    others = (cols < V)[None, :] & (cols != EXCLUDED)[None, :] & (cols[None, :] != target[:, None])
    if HAS_SMOOTHING:
        plain_sum = tl.sum(tl.where(others, logits, 0.0), axis=1)
        tl.store(part + PLAIN * P + piece, plain_sum, mask=row_in)
    logits = tl.where(others, logits, float("-inf"))
    # Finite, so that a piece without any such column sums to exp(-inf) = 0 and not to NaN.
    top = tl.maximum(tl.max(logits, axis=1), -3.0e38)
    e = tl.exp(logits - top[:, None])
    tl.store(part + TOP * P + piece, top, mask=row_in)
    tl.store(part + REST * P + piece, tl.sum(e, axis=1), mask=row_in)
    if WANT_GRAD and CAP > 0.0:
        capped = logits * (1.0 / CAP)
        slope = (1.0 - capped) * (1.0 + capped)
        e *= tl.where(others, slope, 0.0)  # -inf has none
    return e


@triton.jit
def _numbers(rest, picked, top, plain_sum, smoothing, classes, HAS_SMOOTHING: tl.constexpr):
    """(loss, norm, what smoothing takes from every column, the target's gradient) of a row."""
    norm = rest + tl.exp(picked - top)
    loss = tl.log(norm) - (picked - top)
    # p - 1 as a quotient keeps its digits where the model is sure of the target.
    at_target = -rest / norm
    share = 0.0
    if HAS_SMOOTHING:
        share = smoothing / classes
        loss += smoothing * (picked - plain_sum / classes)
        at_target += smoothing - share
    return loss, norm, share, at_target


@triton.jit
def _entropy(moment, picked, norm):
    """Of a row: the first moment of the others' exponentials, and the target's logit, all with
    the largest logit taken off; norm: the sum of all exponentials."""
    return tl.log(norm) - (moment + picked * tl.exp(picked)) / norm


@triton.jit
def _cap_slope(raw, CAP: tl.constexpr):
    """d soft_cap / d raw = 1 - tanh^2, without its cancellation."""
    decay = tl.exp(tl.abs(raw) * (-2.0 / CAP))
    return 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def _zero_row(grad_ptr, loss_ptr, W, BLOCK_V: tl.constexpr):
    """A row that doesn't count, e.g. the tail of a batch: exact zeros, whatever its logits are."""
    tl.store(loss_ptr, 0.0)
    offs_v = tl.arange(0, BLOCK_V)
    zeros = tl.zeros((BLOCK_V,), tl.float32).to(grad_ptr.dtype.element_ty)
    for start in range(0, W, BLOCK_V):
        tl.store(grad_ptr + start + offs_v, zeros, mask=start + offs_v < W)


@triton.jit
def _load_logits(logits_ptr, bias_ptr, cols, W, HAS_BIAS: tl.constexpr):
    values = tl.load(logits_ptr + cols, mask=cols < W, other=0.0)
    if HAS_BIAS:
        values += tl.load(bias_ptr + cols, mask=cols < W, other=0.0).to(tl.float32)
    return values


@triton.jit(do_not_specialize=["V"])
def _cross_entropy_rows_kernel(
    logits_ptr, bias_ptr, grad_ptr,  # [N, W] fp32, [W], [N, W], which starts where logits do
    target_ptr, weight_ptr, smoothing_ptr, loss_ptr,  # [N]
    V, W, stride_logits, stride_grad,
    EXCLUDED: tl.constexpr, CAP: tl.constexpr, CONFIDENCE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, WANT_GRAD: tl.constexpr, BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    grad_ptr += row * stride_grad
    target = tl.load(target_ptr + row)
    offs_v = tl.arange(0, BLOCK_V)
    if WANT_GRAD:
        weight = tl.load(weight_ptr + row)
        if weight == 0.0:
            _zero_row(grad_ptr, loss_ptr + row, W, BLOCK_V)
            return

    # Every lane keeps its own maximum and sum: one reduction in the end instead of one per tile.
    # They leave the target out, so that 1 - p of a sure row is a sum and not a cancellation.
    top = tl.full((BLOCK_V,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_V,), tl.float32)
    plain_sum = tl.zeros((BLOCK_V,), tl.float32)
    moment = tl.zeros((BLOCK_V,), tl.float32)  # of logit - top under the exponentials
    for start in range(0, W, BLOCK_V):
        cols = start + offs_v
        values = soft_cap(_load_logits(logits_ptr, bias_ptr, cols, W, HAS_BIAS), CAP)
        allowed = (cols < V) & (cols != EXCLUDED)
        others = tl.where(allowed & (cols != target), values, float("-inf"))
        new_top = tl.maximum(top, others)
        if CONFIDENCE > 0.0:
            below = tl.where(allowed & (cols != target), values - new_top, 0.0)
            moment = (moment + total * (top - new_top)) * tl.exp(top - new_top)
            moment += below * tl.exp(others - new_top)
        total = total * tl.exp(top - new_top) + tl.exp(others - new_top)
        top = new_top
        if HAS_SMOOTHING:
            plain_sum += tl.where(allowed, values, 0.0)
    picked = tl.load(logits_ptr + target)
    if HAS_BIAS:
        picked += tl.load(bias_ptr + target).to(tl.float32)
    raw_picked = picked
    picked = soft_cap(picked, CAP)
    row_top = tl.maximum(tl.max(top, axis=0), picked)
    rest = tl.sum(total * tl.exp(top - row_top), axis=0)
    smoothing = tl.load(smoothing_ptr + row) if HAS_SMOOTHING else 0.0
    loss, norm, share, at_target = _numbers(
        rest, picked, row_top, tl.sum(plain_sum, axis=0), smoothing,
        V - (1.0 if EXCLUDED >= 0 else 0.0), HAS_SMOOTHING)
    factor, entropy = 0.0, 0.0
    if CONFIDENCE > 0.0:
        best = tl.max(top, axis=0)
        factor = tl.where(picked >= best, CONFIDENCE, 0.0)
        moment = (moment + total * (top - row_top)) * tl.exp(top - row_top)
        entropy = _entropy(tl.sum(moment, axis=0), picked - row_top, norm)
        loss += factor * entropy
        p_target = tl.exp(picked - row_top) / norm
        at_target -= factor * p_target * (picked - row_top - tl.log(norm) + entropy)
    tl.store(loss_ptr + row, loss)

    if WANT_GRAD:
        scale = weight / norm
        share *= weight
        at_target *= weight
        if CAP > 0.0:
            at_target *= _cap_slope(raw_picked, CAP)
        for start in range(0, W, BLOCK_V):
            cols = start + offs_v
            raw = _load_logits(logits_ptr, bias_ptr, cols, W, HAS_BIAS)
            below = soft_cap(raw, CAP) - row_top
            grad = tl.exp(below) * scale
            if CONFIDENCE > 0.0:
                grad *= 1.0 - factor * (below - tl.log(norm) + entropy)
            grad -= share
            if CAP > 0.0:
                grad *= _cap_slope(raw, CAP)
            grad = tl.where((cols < V) & (cols != EXCLUDED), grad, 0.0)
            grad = tl.where(cols == target, at_target, grad)
            # A narrow gradient lands on logits of this and earlier iterations, which other threads
            # may still have to read: all of them read before any of them writes.
            tl.debug_barrier()
            narrow = down_cast(grad, grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + cols, narrow, mask=cols < W)


@triton.jit(do_not_specialize=["V", "P"])
def _merge_rows_kernel(
    e_ptr,  # [N, W] exp(logit - largest of its tile) * E_SCALE, times the soft-cap's slope
    part_ptr,  # [N, SLOTS * P + 1] fp32
    target_ptr, weight_ptr, smoothing_ptr, loss_ptr,  # [N]
    V, W, P, stride_e, stride_part,
    EXCLUDED: tl.constexpr, CAP: tl.constexpr, E_SCALE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, WANT_GRAD: tl.constexpr,
    MERGE_TILES: tl.constexpr, BLOCK_P: tl.constexpr, TILE_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    e_ptr += row * stride_e
    part_ptr += row * stride_part
    target = tl.load(target_ptr + row)
    if WANT_GRAD:
        weight = tl.load(weight_ptr + row)
        if weight == 0.0:
            _zero_row(e_ptr, loss_ptr + row, W, BLOCK_P * TILE_V)
            return

    offs_p = tl.arange(0, MERGE_TILES)
    top = tl.full((MERGE_TILES,), -3.0e38, tl.float32)
    for start in range(0, P, MERGE_TILES):
        tiles = start + offs_p
        top = tl.maximum(top, tl.load(part_ptr + TOP * P + tiles, mask=tiles < P, other=-3.0e38))
    raw_picked = tl.load(part_ptr + SLOTS * P)
    picked = soft_cap(raw_picked, CAP)
    row_top = tl.maximum(tl.max(top, axis=0), picked)
    rest = tl.zeros((MERGE_TILES,), tl.float32)
    plain_sum = tl.zeros((MERGE_TILES,), tl.float32)
    for start in range(0, P, MERGE_TILES):
        tiles = start + offs_p
        tops = tl.load(part_ptr + TOP * P + tiles, mask=tiles < P, other=-3.0e38)
        rests = tl.load(part_ptr + REST * P + tiles, mask=tiles < P, other=0.0)
        rest += rests * tl.exp(tops - row_top)
        if HAS_SMOOTHING:
            plain_sum += tl.load(part_ptr + PLAIN * P + tiles, mask=tiles < P, other=0.0)
    smoothing = tl.load(smoothing_ptr + row) if HAS_SMOOTHING else 0.0
    loss, norm, share, at_target = _numbers(
        tl.sum(rest, axis=0), picked, row_top, tl.sum(plain_sum, axis=0) + picked,
        smoothing, V - (1.0 if EXCLUDED >= 0 else 0.0), HAS_SMOOTHING)
    tl.store(loss_ptr + row, loss)

    if WANT_GRAD:
        share *= weight
        at_target *= weight
        if CAP > 0.0:
            at_target *= _cap_slope(raw_picked, CAP)
        for start in range(0, P, BLOCK_P):
            tiles = start + tl.arange(0, BLOCK_P)
            tops = tl.load(part_ptr + TOP * P + tiles, mask=tiles < P, other=-3.0e38)
            # From the difference of two logits: their own log-sum-exp would round a large one.
            scale = tl.exp(tops - row_top) * (weight / norm / E_SCALE)
            cols = tiles[:, None] * TILE_V + tl.arange(0, TILE_V)[None, :]
            e = tl.load(e_ptr + cols, mask=cols < W, other=0.0).to(tl.float32)
            grad = e * scale[:, None] - share
            grad = tl.where((cols < V) & (cols != EXCLUDED), grad, 0.0)
            grad = tl.where(cols == target, at_target, grad)
            tl.store(e_ptr + cols, down_cast(grad, e_ptr.dtype.element_ty), mask=cols < W)


def cross_entropy_rows(
    logits: Tensor,  # [N, W] fp32, scratch: columns from V on may hold anything
    bias: Tensor | None,  # [W]
    grad: Tensor | None,  # [N, W]: the same memory as logits, row by row, in any dtype
    vocabulary: int,
    target: Tensor, row_weight: Tensor | None, smoothing: Tensor | None,  # [N]
    softcap: float | None, excluded_id: int | None, confidence: float = 0.0,
) -> Tensor:  # [N] fp32
    """The unweighted loss of each row, 0 where row_weight is 0; grad gets row_weight * (d loss /
    d logits), if wanted, and 0 in columns from V on."""
    loss = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    want_grad = grad is not None
    grad = grad if want_grad else logits
    with on_device(logits):
        _cross_entropy_rows_kernel[(len(logits),)](
            logits, loss if bias is None else bias, grad, target,
            row_weight if want_grad else loss, loss if smoothing is None else smoothing, loss,
            vocabulary, logits.shape[1], logits.stride(0), grad.stride(0),
            EXCLUDED=-1 if excluded_id is None else excluded_id,
            CAP=0.0 if softcap is None else softcap, CONFIDENCE=confidence,
            HAS_BIAS=bias is not None,
            HAS_SMOOTHING=smoothing is not None, WANT_GRAD=want_grad, BLOCK_V=BLOCK_V,
            # One stage: no load may move before the stores of an earlier iteration.
            num_warps=WARPS, num_stages=1, enable_fp_fusion=True,
        )
    return loss


def merge_rows(
    e: Tensor | None,  # [N, W], becomes the gradient; None if it isn't wanted
    parts: Tensor,  # [N, SLOTS * P + 1]
    vocabulary: int, tile_cols: int, e_scale: float,
    target: Tensor, row_weight: Tensor | None, smoothing: Tensor | None,  # [N]
    softcap: float | None, excluded_id: int | None,
) -> Tensor:  # [N] fp32
    """As `cross_entropy_rows`, from what _logits_fwd_kernel leaves."""
    loss = torch.empty(len(parts), dtype=torch.float32, device=parts.device)
    want_grad = e is not None
    with on_device(parts):
        _merge_rows_kernel[(len(parts),)](
            e if want_grad else parts, parts, target, row_weight if want_grad else loss,
            loss if smoothing is None else smoothing, loss,
            vocabulary, e.shape[1] if want_grad else 0, triton.cdiv(vocabulary, tile_cols),
            e.stride(0) if want_grad else 0, parts.stride(0),
            EXCLUDED=-1 if excluded_id is None else excluded_id,
            CAP=0.0 if softcap is None else softcap, E_SCALE=e_scale,
            HAS_SMOOTHING=smoothing is not None, WANT_GRAD=want_grad,
            MERGE_TILES=MERGE_TILES, BLOCK_P=max(1, BLOCK_V // tile_cols), TILE_V=tile_cols,
            num_warps=WARPS if want_grad else 4, num_stages=1, enable_fp_fusion=True,
        )
    return loss
