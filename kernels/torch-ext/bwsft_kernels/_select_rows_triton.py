"""The supervised rows of a loss in one launch: their choice, the checks and the weights.

The Triton implementation of _select_rows.py. Letters: T rows of the
target, N rows that are multiplied, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import on_device
from ._dispatch import checking
from ._select_rows import rows_to_multiply

# One program reads all rows, a block at a time: 8,192 rows are 4 blocks, and no other program has
# to be waited for.
BLOCK_T = 2048


@triton.jit
def _rows_of(
    target_ptr, weight_ptr, first, T, stride_target, stride_weight, ignore_index,
    HAS_WEIGHT: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """(row, target, weight, which are supervised) of the block that begins at row `first`."""
    row = first + tl.arange(0, BLOCK_T).to(tl.int64)
    inside = row < T
    target = tl.load(target_ptr + row * stride_target, mask=inside, other=0).to(tl.int64)
    weight = tl.full((BLOCK_T,), 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + row * stride_weight, mask=inside, other=0.0)
    return row, target, weight, inside & (target != ignore_index) & (weight != 0.0)


@triton.jit(do_not_specialize=["T", "N", "listed"])  # rows come in any number; compile once
def _select_rows_kernel(
    target_ptr, weight_ptr,  # [T], [T] fp32
    index_out, target_out, weight_out, status_out,  # [N] int64, [N] int64, [N] fp32, [2] int64
    T, N, listed, stride_target, stride_weight, ignore_index, V, excluded_id,
    HAS_WEIGHT: tl.constexpr, COMPACT: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    divisor = 1.0
    if NORMALIZE:
        total = tl.zeros((), tl.float32)
        for first in range(0, T, BLOCK_T):
            row, _, weight, kept = _rows_of(
                target_ptr, weight_ptr, first, T, stride_target, stride_weight, ignore_index,
                HAS_WEIGHT, BLOCK_T)
            total += tl.sum(tl.where(kept & (row < N), weight, 0.0), axis=0)
        divisor = tl.where(total == 0.0, 1.0, total)
    found = tl.zeros((), tl.int64)
    wrong = tl.zeros((), tl.int64)
    for first in range(0, T, BLOCK_T):
        row, target, weight, kept = _rows_of(
            target_ptr, weight_ptr, first, T, stride_target, stride_weight, ignore_index,
            HAS_WEIGHT, BLOCK_T)
        valid = (target >= 0) & (target < V) & (target != excluded_id) & (row < listed)
        wrong += tl.sum((kept & ~valid).to(tl.int64), axis=0)
        weight = tl.div_rn(weight, tl.zeros_like(weight) + divisor)
        if COMPACT:
            ones = kept.to(tl.int64)
            slot = found + tl.cumsum(ones, axis=0) - ones
            tl.store(index_out + slot, row, mask=kept)
            tl.store(target_out + slot, target, mask=kept)
            tl.store(weight_out + slot, weight, mask=kept)
        else:
            free = (excluded_id == 0).to(tl.int64)  # any id that has a logit
            tl.store(target_out + row, tl.where(kept, target, free), mask=row < N)
            tl.store(weight_out + row, tl.where(kept, weight, 0.0), mask=row < N)
        found += tl.sum((kept & (row < N)).to(tl.int64), axis=0)
    tl.store(status_out, found)
    tl.store(status_out + 1, (wrong == 0).to(tl.int64))


def select_rows(
    target: Tensor,  # [T] integers
    row_weight: Tensor | None,  # [T] fp32
    ignore_index: int, vocabulary: int, excluded_id: int | None, normalize: bool,
    num_rows: int | None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:  # [N] int64, [N] int64, [N] fp32, [] int64
    """(index into the T rows, target, weight, number of supervised rows).

    Supervised are rows with a target but ignore_index and a weight but 0. With num_rows: the first
    num_rows, rounded up to 8, without an index (None); those not supervised get weight 0. Without
    num_rows: the supervised ones in their order, which reads their number from the device, the one
    synchronization. normalize divides the weights by their sum, unless it is 0. A target outside
    [0, V) or equal to excluded_id, and a supervised row after the first num_rows, are device-side
    assertions, and ValueError with BWSFT_DEBUG=1.
    """
    most = len(target) if num_rows is None else rows_to_multiply(target, num_rows)
    index, kept_target, weight, (count, fine) = launch(
        target, row_weight, ignore_index, vocabulary, excluded_id, normalize, most,
        len(target) if num_rows is None else num_rows, compact=num_rows is None)
    if checking(target):
        if not fine:
            raise ValueError(_complaint(
                target, row_weight, ignore_index, vocabulary, excluded_id, num_rows))
    else:
        torch._assert_async(fine, "bwsft_kernels: bad input, rerun with BWSFT_DEBUG=1")
    if num_rows is not None:
        return None, kept_target, weight, count
    found = int(count)
    return index[:found], kept_target[:found], weight[:found], count


def launch(
    target: Tensor, row_weight: Tensor | None,  # [T] integers, [T] fp32
    ignore_index: int, vocabulary: int, excluded_id: int | None, normalize: bool,
    most: int, listed: int, compact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [N], [N], [N], [2]
    """(index, target, weight, (supervised rows among the first `most`, whether all is well, and
    none after the first `listed`))."""
    numbers = torch.empty(2 * most + 2, dtype=torch.int64, device=target.device)
    status, index, kept_target = numbers.split((2, most, most))
    weight = torch.empty(most, dtype=torch.float32, device=target.device)
    with on_device(target):
        _select_rows_kernel[(1,)](
            target, weight if row_weight is None else row_weight, index, kept_target, weight,
            status, len(target), most, listed, target.stride(0),
            0 if row_weight is None else row_weight.stride(0), ignore_index, vocabulary,
            -1 if excluded_id is None else excluded_id,
            HAS_WEIGHT=row_weight is not None, COMPACT=compact, NORMALIZE=normalize,
            BLOCK_T=BLOCK_T, num_warps=8, enable_fp_fusion=True,
        )
    return index, kept_target, weight, status


def _complaint(
    target: Tensor, row_weight: Tensor | None,  # [T] both
    ignore_index: int, vocabulary: int, excluded_id: int | None, num_rows: int | None,
) -> str:
    """What is wrong with the first bad row."""
    kept = target != ignore_index
    if row_weight is not None:
        kept &= row_weight != 0
    if num_rows is not None and kept[num_rows:].any():
        return f"rows after num_rows={num_rows} are supervised"
    bad = kept & ((target < 0) | (target >= vocabulary))
    what = f"outside [0, {vocabulary})"
    if not bad.any():
        bad, what = kept & (target == excluded_id), "the excluded_id"
    row = int(bad.nonzero()[0, 0])
    return f"target {int(target[row])} of row {row} is {what}"
