"""Forward of `range_attention` in Triton: online softmax over the keys of a tile's two intervals.

A program takes some neighboring rows of one head. Keys that all its rows see need no comparison;
of the others each row's range decides; keys that none of its rows sees aren't read.
Letters: T query rows, N key rows, H query heads, K key heads, E head width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import close, down_cast, on_device
from ._range_plan import TILE
from ._range_tiles import head_width, range_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NOWHERE = tl.constexpr(1 << 30)


def near(x: Tensor) -> Tensor:
    """The same values with neighboring entries, and rows of a tile at distances of 32 bits."""
    x = close(x)
    return x if TILE * x.stride(0) < 1 << 31 else x.contiguous()


@triton.jit
def start_of_tile(tiles_ptr, part, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """(first row, one past the last row) of part number `part` of the plan's tiles."""
    tile = tiles_ptr + 2 * (part // (TILE // BLOCK))
    return tl.load(tile) + part % (TILE // BLOCK) * BLOCK, tl.load(tile + 1)


@triton.jit
def load_range(ranges_ptr, rows, inside, T):
    """(first, stop) [rows] of the ranges; [0, 0) where a row doesn't exist."""
    first = tl.load(ranges_ptr + rows, mask=inside, other=0)
    return first, tl.load(ranges_ptr + T + rows, mask=inside, other=0)


@triton.jit
def interval(first, stop):
    """(low, high): the least interval that holds all ranges that aren't empty."""
    filled = stop > first
    low = tl.min(tl.where(filled, first, NOWHERE), axis=0)
    return low, tl.max(tl.where(filled, stop, 0), axis=0)


@triton.jit
def load_rows(
    x_ptr, start, stop, stride, E,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, EVEN_E: tl.constexpr, WHOLE: tl.constexpr = False,
):
    """x [BLOCK, BLOCK_E] from row `start` on, zeros from row `stop` on (WHOLE: it isn't in the
    tile) and beyond E."""
    # 64 bits for the tile's start alone: addresses of 64 bits for all entries would spill.
    row, e = tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    at = x_ptr + tl.cast(start, tl.int64) * stride + (row[:, None] * stride + e[None, :])
    if WHOLE and EVEN_E:
        return tl.load(at)
    elif WHOLE:
        return tl.load(at, mask=(e < E)[None, :], other=0.0)
    elif EVEN_E:
        return tl.load(at, mask=(row < stop - start)[:, None], other=0.0)
    else:
        return tl.load(at, mask=(row < stop - start)[:, None] & (e < E)[None, :], other=0.0)


@triton.jit
def store_rows(
    x_ptr, x, start, stop, stride, E, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):
    row, e = tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    at = x_ptr + tl.cast(start, tl.int64) * stride + (row[:, None] * stride + e[None, :])
    tl.store(at, x, mask=(row < stop - start)[:, None] & (e < E)[None, :])


@triton.jit
def _fold(
    total, top, norm, q, k_ptr, v_ptr, low, high, first, stop, stride_k, stride_v, E, scale2,
    MASKED: tl.constexpr, EVEN_E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Take the keys [low, high) into the running (sum of values, largest score, norm)."""
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, start, high, stride_k, E, BLOCK_N, BLOCK_E, EVEN_E, not MASKED)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
        if MASKED:
            seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < stop[:, None])
            score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row that has seen no key yet: exp2(-inf - 0) is 0, -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        norm = norm * shrink + tl.sum(weight, axis=1)
        v = load_rows(v_ptr, start, high, stride_v, E, BLOCK_N, BLOCK_E, EVEN_E, not MASKED)
        total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
        top = new_top
    return total, top, norm


@triton.jit(do_not_specialize=["T", "parts"])
def _range_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,  # [T, H, E], [N, K, E] twice, [T, H, E], [H, T]
    ranges_ptr, tiles_ptr,  # [4, T], [tiles, 2]
    T, H, E, scale2, parts,
    stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh,
    GROUP: tl.constexpr, TILE: tl.constexpr, EVEN_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):
    # Of each sequence the last rows see most: they start first.
    part = parts - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    begin, end = start_of_tile(tiles_ptr, part, TILE, BLOCK_M)
    if begin < end:
        rows = begin + tl.arange(0, BLOCK_M)
        inside = rows < end
        q = load_rows(
            q_ptr + head * stride_qh, begin, end, stride_q, E, BLOCK_M, BLOCK_E, EVEN_E)
        k_ptr += head // GROUP * stride_kh
        v_ptr += head // GROUP * stride_vh
        total = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        norm = tl.zeros((BLOCK_M,), dtype=tl.float32)
        first, stop = load_range(ranges_ptr, rows, inside, T)
        low, high = interval(first, stop)
        # All rows see [low, common): those are whole tiles without a comparison.
        common = tl.min(tl.where(inside, stop, NOWHERE), axis=0)
        whole = tl.max(tl.where(inside, first, 0), axis=0) == low
        low_masked = low + tl.where(whole, tl.maximum(common - low, 0), 0) // BLOCK_N * BLOCK_N
        total, top, norm = _fold(
            total, top, norm, q, k_ptr, v_ptr, low, low_masked, first, stop, stride_k, stride_v,
            E, scale2, False, EVEN_E, BLOCK_E, BLOCK_N)
        for own in range(2):
            if own == 1:
                first, stop = load_range(ranges_ptr + 2 * T, rows, inside, T)
                low_masked, high = interval(first, stop)
            total, top, norm = _fold(
                total, top, norm, q, k_ptr, v_ptr, low_masked, high, first, stop, stride_k,
                stride_v, E, scale2, True, EVEN_E, BLOCK_E, BLOCK_N)
        some = norm > 0.0
        lse = tl.where(some, (top + tl.log2(tl.where(some, norm, 1.0))) * LN_2, float("-inf"))
        tl.store(lse_ptr + head * T + rows, lse, mask=inside)
        total = total / tl.where(some, norm, 1.0)[:, None]
        out = down_cast(total, out_ptr.dtype.element_ty)
        store_rows(out_ptr + head * E, out, begin, end, H * E, E, BLOCK_M, BLOCK_E)


def range_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor,  # [T, H, E], [N, K, E] twice
    query_ranges: Tensor, query_tiles: Tensor,  # [4, T], [tiles, 2]
    scale: float,
) -> tuple[Tensor, Tensor]:  # [T, H, E], log-sum-exp [H, T]
    rows, heads, width = q.shape
    q, k, v = near(q), near(k), near(v)
    out, lse = q.new_empty(q.shape), q.new_empty((heads, rows), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    tile = range_tile("fwd", q)
    block_e = head_width(width)
    parts = len(query_tiles) * (TILE // tile.rows)
    with on_device(q):
        _range_attention_fwd_kernel[(parts, heads)](
            q, k, v, out, lse, query_ranges, query_tiles,
            rows, heads, width, scale * LOG2_E.value, parts,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            GROUP=heads // k.size(1), TILE=TILE, EVEN_E=block_e == width,
            BLOCK_M=tile.rows, BLOCK_N=tile.cols, BLOCK_E=block_e,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )
    return out, lse
