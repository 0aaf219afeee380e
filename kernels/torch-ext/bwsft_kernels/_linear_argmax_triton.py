"""`linear_argmax` without logits in memory: x @ w.T stays in registers, one tile at a time.

Every program makes one tile of logits and reduces it to a few numbers per row; a second kernel
merges the tiles in a fixed order. No locks, no atomics: the same bits in every run.
Letters: N rows, D hidden size, V vocabulary, P vocabulary tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import gumbel_tile, join_sums, logits_tile, on_device, round_bf16
from ._linear_argmax import ArgmaxOptions
from ._tuning import Tile, tuned

# Slots of the partial results, fp32 [P, SLOTS, N]. TOP, SUM and MEAN belong to the softmax, FIRST
# and SECOND are the two best candidates, BEST the one chosen (with noise) and RAW its logit.
TOP, SUM, MEAN, FIRST, SECOND, BEST, RAW, SLOTS = map(tl.constexpr, range(8))

MERGE_TILES = 128
MERGE_ROWS = 8


@triton.jit
def _first_max(values, AXIS: tl.constexpr):
    """(max, its lowest index) along AXIS; where all is NaN the index is one past the end.

    Two plain reductions: tl.argmax carries an index for every value, which spills in a full tile,
    and raises on NaN in the interpreter.
    """
    first = tl.max(values, axis=AXIS)
    index = tl.expand_dims(tl.arange(0, values.shape[AXIS]), 1 - AXIS)
    same = values == tl.expand_dims(first, AXIS)
    return first, tl.min(tl.where(same, index, values.shape[AXIS]), axis=AXIS)


@triton.jit(do_not_specialize=["N", "V"])  # rows come in any number; compile once
def _head_stats_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, noise_ptr,  # [N, D], [V, D], [V], [5, N]
    partial_ptr, token_ptr,  # [P, SLOTS, N], [P, N]
    N, V, D, stride_x, stride_w, temperature,
    PLAN: tl.constexpr, HAS_NOISE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    tile, rows, cols, logits = logits_tile(
        x_ptr, w_ptr, bias_ptr, N, V, D, stride_x, stride_w,
        PLAN.softcap, HAS_BIAS, EVEN_D, BLOCK_N, BLOCK_V, BLOCK_D)
    if PLAN.round_bf16:
        logits = round_bf16(logits)
    allowed = cols < V
    for i in tl.static_range(len(PLAN.banned)):
        allowed = allowed & (cols != PLAN.banned[i])
    logits = tl.where(allowed[None, :], logits, float("-inf"))
    row_in = rows < N
    out = partial_ptr + tile.to(tl.int64) * SLOTS * N + rows

    # Finite, so that a tile without any allowed column sums to exp(-inf) = 0 and not to NaN.
    top = tl.maximum(tl.max(logits, axis=1), -3.0e38)
    # exp(-200) is 0 in fp32, so excluded columns add 0 * -200 and not 0 * -inf to the mean.
    gap = tl.maximum(logits - top[:, None], -200.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = tl.exp(gap)
    tl.store(out + TOP * N, top, mask=row_in)
    tl.store(out + SUM * N, tl.sum(shifted, axis=1), mask=row_in)
    if PLAN.entropy:
        tl.store(out + MEAN * N, tl.sum(shifted * gap, axis=1), mask=row_in)

    if PLAN.hidden_id >= 0:
        logits = tl.where((cols != PLAN.hidden_id)[None, :], logits, float("-inf"))
    best, index = _first_max(logits, 1)
    if PLAN.margin:
        is_first = tl.arange(0, BLOCK_V)[None, :] == index[:, None]
        second = tl.max(tl.where(is_first, float("-inf"), logits), axis=1)
        tl.store(out + FIRST * N, best, mask=row_in)
        tl.store(out + SECOND * N, second, mask=row_in)
    if HAS_NOISE:
        noised = logits + temperature * gumbel_tile(noise_ptr, rows, tile, N, BLOCK_V)
        best, index = _first_max(noised, 1)
        is_best = tl.arange(0, BLOCK_V)[None, :] == index[:, None]
        raw = tl.sum(tl.where(is_best, logits, 0.0), axis=1)
        tl.store(out + RAW * N, raw, mask=row_in)
    tl.store(out + BEST * N, best, mask=row_in)
    tl.store(token_ptr + tile.to(tl.int64) * N + rows, tile * BLOCK_V + index, mask=row_in)


@triton.jit(do_not_specialize=["N", "P"])
def _head_stats_merge_kernel(
    partial_ptr, part_token_ptr,  # [P, SLOTS, N], [P, N]
    token_ptr, numbers_ptr,  # [N], [3, N]
    N, P,
    PLAN: tl.constexpr, HAS_NOISE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in = rows < N
    top = tl.full((BLOCK_N,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    mean = tl.zeros((BLOCK_N,), tl.float32)
    first = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    second = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    best = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    raw = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    token = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, P, BLOCK_P):
        tiles = start + tl.arange(0, BLOCK_P)
        inside = (tiles < P)[:, None] & row_in[None, :]
        part = partial_ptr + tiles.to(tl.int64)[:, None] * SLOTS * N + rows[None, :]
        tops = tl.load(part + TOP * N, mask=inside, other=-3.0e38)
        sums = tl.load(part + SUM * N, mask=inside, other=0.0)
        means = sums
        if PLAN.entropy:
            means = tl.load(part + MEAN * N, mask=inside, other=0.0)
        top, total, mean = join_sums(top, total, mean, tops, sums, means)
        if PLAN.margin:
            firsts = tl.load(part + FIRST * N, mask=inside, other=float("-inf"))
            seconds = tl.load(part + SECOND * N, mask=inside, other=float("-inf"))
            new, index = _first_max(firsts, 0)
            # The runner-up of the winning tile stands in for its winner in the second round.
            is_first = tl.arange(0, BLOCK_P)[:, None] == index[None, :]
            second = tl.maximum(second, tl.minimum(first, new))
            second = tl.maximum(second, tl.max(tl.where(is_first, seconds, firsts), axis=0))
            first = tl.maximum(first, new)
        bests = tl.load(part + BEST * N, mask=inside, other=float("-inf"))
        new, index = _first_max(bests, 0)
        is_best = tl.arange(0, BLOCK_P)[:, None] == index[None, :]
        tokens = part_token_ptr + tiles.to(tl.int64)[:, None] * N + rows[None, :]
        new_token = tl.sum(tl.where(is_best, tl.load(tokens, mask=inside, other=0), 0), axis=0)
        better = new > best  # not >=: the lower tile keeps a tie
        token = tl.where(better, new_token, token)
        new_raw = new
        if HAS_NOISE:
            raws = tl.load(part + RAW * N, mask=inside, other=0.0)
            new_raw = tl.sum(tl.where(is_best, raws, 0.0), axis=0)
        raw = tl.where(better, new_raw, raw)
        best = tl.where(better, new, best)
    total = tl.where(row_in, total, 1.0)
    tl.store(token_ptr + rows, token.to(tl.int64), mask=row_in)
    tl.store(numbers_ptr + rows, tl.exp(raw - top) / total, mask=row_in)
    if PLAN.entropy:
        tl.store(numbers_ptr + N + rows, tl.log(total) - mean / total, mask=row_in)
    if PLAN.margin:
        margin = (tl.exp(first - top) - tl.exp(second - top)) / total
        tl.store(numbers_ptr + 2 * N + rows, margin, mask=row_in)


def head_argmax(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    options: ArgmaxOptions,
    noise: Tensor | None,  # [5, N]
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # [N] int64, then fp32
    """(token, confidence, entropy or None, margin or None)."""
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    bias = None if bias is None else bias.contiguous()
    (size, hidden), vocabulary = x.shape, len(weight)
    numbers = x.new_empty(3, size, dtype=torch.float32)
    token = torch.empty(size, dtype=torch.int64, device=x.device)
    has_noise = noise is not None

    def launch(tile: Tile) -> None:
        tiles = triton.cdiv(vocabulary, tile.cols)
        partial = numbers.new_empty(tiles, SLOTS.value, size)
        part_token = token.new_empty(tiles, size, dtype=torch.int32)
        _head_stats_fwd_kernel[(tiles * triton.cdiv(size, tile.rows),)](
            x, weight, x if bias is None else bias, noise.contiguous() if has_noise else token,
            partial, part_token, size, vocabulary, hidden, x.stride(0), weight.stride(0),
            temperature, PLAN=options, HAS_NOISE=has_noise, HAS_BIAS=bias is not None,
            EVEN_D=hidden % tile.depth == 0,
            BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.depth,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )
        _head_stats_merge_kernel[(triton.cdiv(size, MERGE_ROWS),)](
            partial, part_token, token, numbers, size, tiles,
            PLAN=options, HAS_NOISE=has_noise, BLOCK_P=MERGE_TILES, BLOCK_N=MERGE_ROWS,
            num_warps=4, enable_fp_fusion=True,
        )

    if size > 0:
        with on_device(x):
            launch(tuned("noise" if has_noise else "stats", x, size, launch))
    entropy, margin = (n if on else None for n, on in zip(
        numbers[1:], (options.entropy, options.margin), strict=True))
    return token, numbers[0], entropy, margin
