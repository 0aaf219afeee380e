"""Cross-entropy of a linear head without gradient and without logits in memory.

As in _linear_argmax_triton.py: one tile of logits per program, tiles merged in a fixed order.
Letters: N supervised rows, D hidden size, V vocabulary, P vocabulary tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import join_sums, logits_tile, on_device
from ._tuning import Tile, tuned

MERGE_TILES = 128
MERGE_ROWS = 8


@triton.jit(do_not_specialize=["N"])
def _head_loss_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, target_ptr,  # [N, D], [V, D], [V], [N]
    picked_ptr, partial_ptr,  # [N] logit of the target, [P, 3, N]
    N, V, D, stride_x, stride_w,
    EXCLUDED: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    tile, rows, cols, logits = logits_tile(
        x_ptr, w_ptr, bias_ptr, N, V, D, stride_x, stride_w,
        CAP, HAS_BIAS, EVEN_D, BLOCK_N, BLOCK_V, BLOCK_D)
    row_in = rows < N
    target = tl.load(target_ptr + rows, mask=row_in, other=-1).to(tl.int32)
    # One tile owns the target's column; cols past V never match, targets lie in [0, V).
    is_target = cols[None, :] == target[:, None]
    picked = tl.sum(tl.where(is_target, logits, 0.0), axis=1)
    owner = (target >= tile * BLOCK_V) & (target < tile * BLOCK_V + BLOCK_V)
    tl.store(picked_ptr + rows, picked, mask=row_in & owner)

    out = partial_ptr + tile.to(tl.int64) * 3 * N + rows
    allowed = (cols < V) & (cols != EXCLUDED)
    if HAS_SMOOTHING:
        plain_sum = tl.sum(tl.where(allowed[None, :], logits, 0.0), axis=1)
        tl.store(out + 2 * N, plain_sum, mask=row_in)
    logits = tl.where(allowed[None, :], logits, float("-inf"))
    # Finite, so that a tile without any allowed column sums to exp(-inf) = 0 and not to NaN.
    top = tl.maximum(tl.max(logits, axis=1), -3.0e38)
    tl.store(out, top, mask=row_in)
    tl.store(out + N, tl.sum(tl.exp(logits - top[:, None]), axis=1), mask=row_in)


@triton.jit(do_not_specialize=["N"])
def _head_loss_merge_kernel(
    partial_ptr, picked_ptr, smoothing_ptr, loss_ptr,  # [P, 3, N], then [N]
    N, P, classes,
    HAS_SMOOTHING: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in = rows < N
    top = tl.full((BLOCK_N,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    plain_sum = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, P, BLOCK_P):
        tiles = start + tl.arange(0, BLOCK_P)
        inside = (tiles < P)[:, None] & row_in[None, :]
        part = partial_ptr + tiles.to(tl.int64)[:, None] * 3 * N + rows[None, :]
        tops = tl.load(part, mask=inside, other=-3.0e38)
        sums = tl.load(part + N, mask=inside, other=0.0)
        top, total, _ = join_sums(top, total, total, tops, sums, sums)
        if HAS_SMOOTHING:
            plain_sum += tl.sum(tl.load(part + 2 * N, mask=inside, other=0.0), axis=0)
    picked = tl.load(picked_ptr + rows, mask=row_in, other=0.0)
    loss = tl.log(tl.where(row_in, total, 1.0)) - (picked - top)
    if HAS_SMOOTHING:
        smoothing = tl.load(smoothing_ptr + rows, mask=row_in, other=0.0)
        loss += smoothing * (picked - plain_sum / classes)
    tl.store(loss_ptr + rows, loss, mask=row_in)


def head_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    target: Tensor,  # [N] in [0, V)
    smoothing: Tensor | float,  # [N] fp32
    softcap: float | None, excluded_id: int | None,
) -> Tensor:  # [N] fp32
    """The sums of _cross_entropy_torch.py, from unrounded fp32 logits."""
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    (size, hidden), vocabulary = x.shape, len(weight)
    loss = torch.empty(size, dtype=torch.float32, device=x.device)
    if size == 0:
        return loss
    has_smoothing = isinstance(smoothing, Tensor) or smoothing != 0
    if has_smoothing and not isinstance(smoothing, Tensor):
        smoothing = torch.full_like(loss, smoothing)
    excluded = -1 if excluded_id is None else excluded_id

    def launch(tile: Tile) -> None:
        tiles = triton.cdiv(vocabulary, tile.cols)
        partial, picked = loss.new_empty(tiles, 3, size), torch.empty_like(loss)
        _head_loss_fwd_kernel[(tiles * triton.cdiv(size, tile.rows),)](
            x, weight, x if bias is None else bias, target.contiguous(), picked, partial,
            size, vocabulary, hidden, x.stride(0), weight.stride(0),
            EXCLUDED=excluded, CAP=0.0 if softcap is None else softcap,
            HAS_BIAS=bias is not None, HAS_SMOOTHING=has_smoothing,
            EVEN_D=hidden % tile.depth == 0,
            BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.depth,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )
        _head_loss_merge_kernel[(triton.cdiv(size, MERGE_ROWS),)](
            partial, picked, smoothing.contiguous() if has_smoothing else loss, loss,
            size, tiles, float(vocabulary - (excluded >= 0)), HAS_SMOOTHING=has_smoothing,
            BLOCK_P=MERGE_TILES, BLOCK_N=MERGE_ROWS, num_warps=4, enable_fp_fusion=True,
        )

    with on_device(x):
        launch(tuned("loss", x, size, launch))
    return loss
