"""Head statistics without logits in memory: x @ w.T stays in registers, one tile at a time.

Every program makes one tile of logits and reduces it to a few numbers per row; a second kernel
merges the tiles in a fixed order. No locks, no atomics: the same bits in every run.
Letters: N rows, D hidden size, V vocabulary, P vocabulary tiles.
"""

import torch
import triton
import triton.language as tl

from ._device_triton import gumbel_tile, logits_tile, round_bf16

# Slots of the partial results, fp32 [P, SLOTS, N]; TOP and SUM are the normaliser's, FIRST and
# SECOND the two best candidates without noise, BEST the winner with noise, RAW its logit.
TOP = tl.constexpr(0)
SUM = tl.constexpr(1)
BEST = tl.constexpr(2)
RAW = tl.constexpr(3)
FIRST = tl.constexpr(4)
SECOND = tl.constexpr(5)
MEAN = tl.constexpr(6)
SLOTS = tl.constexpr(7)


@triton.jit
def _first_max(values):
    """(max, its lowest index) per row; an index past the row where the row is NaN."""
    first = tl.max(values, axis=1)
    index = tl.arange(0, values.shape[1])[None, :]
    return first, tl.min(tl.where(values == first[:, None], index, values.shape[1]), axis=1)


@triton.jit
def _head_stats_fwd_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    banned_ptr,
    noise_ptr,
    partial_ptr,
    token_ptr,
    N,
    V,
    D,
    stride_x,
    stride_w,
    mask_id,
    temperature,
    NUM_BANNED: tl.constexpr,
    CAP: tl.constexpr,
    FLAGS: tl.constexpr,
    EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    HAS_BIAS: tl.constexpr = FLAGS[0]
    ROUND: tl.constexpr = FLAGS[1]
    NOISE: tl.constexpr = FLAGS[2]
    ENTROPY: tl.constexpr = FLAGS[3]
    MARGIN: tl.constexpr = FLAGS[4]
    BLOCK_N: tl.constexpr = BLOCK[0]
    BLOCK_V: tl.constexpr = BLOCK[1]
    # The row block runs fastest: its neighbours find the 1 MB tile of w in L2.
    row_blocks = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // row_blocks
    rows = tl.program_id(0) % row_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = logits_tile(
        x_ptr, w_ptr, bias_ptr, rows, cols, N, V, D, stride_x, stride_w,
        CAP, HAS_BIAS, EVEN_D, PRECISION, BLOCK[2],
    )
    if ROUND:
        logits = round_bf16(logits)
    allowed = cols < V
    for i in tl.static_range(NUM_BANNED):
        allowed = allowed & (cols != tl.load(banned_ptr + i))
    logits = tl.where(allowed[None, :], logits, float("-inf"))
    row_in = rows < N
    out = partial_ptr + tile.to(tl.int64) * SLOTS * N + rows

    # Finite, so that a tile without any allowed column sums to exp(-inf) = 0 and not to NaN.
    top = tl.maximum(tl.max(logits, axis=1), -3.0e38)
    shifted = tl.exp(logits - top[:, None])
    tl.store(out + TOP * N, top, mask=row_in)
    tl.store(out + SUM * N, tl.sum(shifted, axis=1), mask=row_in)
    if ENTROPY:
        # exp(-200) is 0 in fp32, so excluded columns add 0 * -200 and not 0 * -inf.
        weighted = shifted * tl.maximum(logits - top[:, None], -200.0)
        tl.store(out + MEAN * N, tl.sum(weighted, axis=1), mask=row_in)

    logits = tl.where((cols != mask_id)[None, :], logits, float("-inf"))
    first, index = _first_max(logits)
    if MARGIN:
        others = tl.where(tl.arange(0, BLOCK_V)[None, :] == index[:, None], float("-inf"), logits)
        tl.store(out + FIRST * N, first, mask=row_in)
        tl.store(out + SECOND * N, tl.max(others, axis=1), mask=row_in)
    if NOISE:
        noised = logits + temperature * gumbel_tile(noise_ptr, rows, tile, N, BLOCK_V)
        first, index = _first_max(noised)
        chosen = tl.arange(0, BLOCK_V)[None, :] == index[:, None]
        tl.store(out + RAW * N, tl.sum(tl.where(chosen, logits, 0.0), axis=1), mask=row_in)
    tl.store(out + BEST * N, first, mask=row_in)
    tl.store(token_ptr + tile.to(tl.int64) * N + rows, tile * BLOCK_V + index, mask=row_in)
