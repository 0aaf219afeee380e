"""Backward of `range_attention` in Triton: dQ by the queries' ranges, dK and dV by the keys'.

Weights are made again from the scores and the kept log-sum-exp. A program of the second kernel
goes through all queries that see its keys, so every sum has one owner and one order: no atomics.
Letters: T query rows, N key rows, H query heads, K key heads, E head width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import down_cast, on_device
from ._range_attention_fwd_triton import (
    LOG2_E,
    interval,
    load_range,
    load_rows,
    near,
    start_of_tile,
    store_rows,
)
from ._range_plan import TILE
from ._range_tiles import RangeTile, head_width, range_tile


@triton.jit(do_not_specialize=["T", "parts"])
def _range_attention_dq_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,  # [T, H, E] or [N, K, E], [H, T]
    q_grad_ptr, delta_ptr,  # [T, H, E], [H, T]
    ranges_ptr, tiles_ptr,  # [4, T], [tiles, 2]
    T, H, E, scale, scale2, parts,
    stride_g, stride_gh, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh,
    GROUP: tl.constexpr, TILE: tl.constexpr, EVEN_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):
    part = parts - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    begin, end = start_of_tile(tiles_ptr, part, TILE, BLOCK_M)
    if begin < end:
        rows = begin + tl.arange(0, BLOCK_M)
        inside = rows < end
        grad = load_rows(
            grad_ptr + head * stride_gh, begin, end, stride_g, E, BLOCK_M, BLOCK_E, EVEN_E)
        out = load_rows(out_ptr + head * E, begin, end, H * E, E, BLOCK_M, BLOCK_E, EVEN_E)
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)
        tl.store(delta_ptr + head * T + rows, delta, mask=inside)
        q = load_rows(
            q_ptr + head * stride_qh, begin, end, stride_q, E, BLOCK_M, BLOCK_E, EVEN_E)
        lse = tl.load(lse_ptr + head * T + rows, mask=inside, other=0.0) * LOG2_E
        k_ptr += head // GROUP * stride_kh
        v_ptr += head // GROUP * stride_vh
        total = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
        for which in range(2):
            first, stop = load_range(ranges_ptr + which * 2 * T, rows, inside, T)
            low, high = interval(first, stop)
            for start in range(low, high, BLOCK_N):
                keys = start + tl.arange(0, BLOCK_N)
                k = load_rows(k_ptr, start, high, stride_k, E, BLOCK_N, BLOCK_E, EVEN_E)
                v = load_rows(v_ptr, start, high, stride_v, E, BLOCK_N, BLOCK_E, EVEN_E)
                score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
                seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < stop[:, None])
                weight = tl.where(seen, tl.exp2(score - lse[:, None]), 0.0)
                pull = tl.dot(grad, tl.trans(v), input_precision="ieee")
                score_grad = (weight * (pull - delta[:, None])).to(k.dtype)
                total = tl.dot(score_grad, k, total, input_precision="ieee")
        q_grad = down_cast(total * scale, q_grad_ptr.dtype.element_ty)
        store_rows(q_grad_ptr + head * E, q_grad, begin, end, H * E, E, BLOCK_M, BLOCK_E)


@triton.jit(do_not_specialize=["T", "N"])
def _range_attention_dkv_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr,  # as above
    k_grad_ptr, v_grad_ptr,  # [N, K, E]
    ranges_ptr, tiles_ptr,  # [4, N], [tiles, 2]
    T, N, K, E, scale, scale2,
    stride_g, stride_gh, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh,
    GROUP: tl.constexpr, TILE: tl.constexpr, EVEN_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):
    key_head = tl.program_id(1).to(tl.int64)
    begin, end = start_of_tile(tiles_ptr, tl.program_id(0), TILE, BLOCK_N)
    if begin < end:
        keys = begin + tl.arange(0, BLOCK_N)
        inside = keys < end
        k = load_rows(
            k_ptr + key_head * stride_kh, begin, end, stride_k, E, BLOCK_N, BLOCK_E, EVEN_E)
        v = load_rows(
            v_ptr + key_head * stride_vh, begin, end, stride_v, E, BLOCK_N, BLOCK_E, EVEN_E)
        k_total = tl.zeros((BLOCK_N, BLOCK_E), dtype=tl.float32)
        v_total = tl.zeros((BLOCK_N, BLOCK_E), dtype=tl.float32)
        for i in range(2 * GROUP):  # each of the two ranges for each head of the group
            head = key_head * GROUP + i // 2
            first, stop = load_range(ranges_ptr + i % 2 * 2 * N, keys, inside, N)
            low, high = interval(first, stop)
            for start in range(low, high, BLOCK_M):
                rows = start + tl.arange(0, BLOCK_M)
                there = rows < high
                q = load_rows(
                    q_ptr + head * stride_qh, start, high, stride_q, E, BLOCK_M, BLOCK_E, EVEN_E)
                grad = load_rows(
                    grad_ptr + head * stride_gh, start, high, stride_g, E, BLOCK_M, BLOCK_E, EVEN_E)
                lse = tl.load(lse_ptr + head * T + rows, mask=there, other=0.0) * LOG2_E
                delta = tl.load(delta_ptr + head * T + rows, mask=there, other=0.0)
                score = tl.dot(k, tl.trans(q), input_precision="ieee") * scale2  # [keys, rows]
                seen = (rows[None, :] >= first[:, None]) & (rows[None, :] < stop[:, None])
                weight = tl.where(seen, tl.exp2(score - lse[None, :]), 0.0)
                v_total = tl.dot(weight.to(grad.dtype), grad, v_total, input_precision="ieee")
                pull = tl.dot(v, tl.trans(grad), input_precision="ieee")
                score_grad = (weight * (pull - delta[None, :])).to(q.dtype)
                k_total = tl.dot(score_grad, q, k_total, input_precision="ieee")
        dtype: tl.constexpr = k_grad_ptr.dtype.element_ty
        k_grad, v_grad = down_cast(k_total * scale, dtype), down_cast(v_total, dtype)
        store_rows(k_grad_ptr + key_head * E, k_grad, begin, end, K * E, E, BLOCK_N, BLOCK_E)
        store_rows(v_grad_ptr + key_head * E, v_grad, begin, end, K * E, E, BLOCK_N, BLOCK_E)


def range_attention_bwd(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    queries: tuple[Tensor, Tensor],  # ranges [4, T], tiles [tiles, 2]
    keys: tuple[Tensor, Tensor],  # ranges [4, N], tiles [tiles, 2]
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if q.numel() == 0 or k.numel() == 0:
        return tuple(x.new_zeros(x.shape) for x in (q, k, v))
    grad, q, k, v = (near(x) for x in (grad, q, k, v))
    q_grad, delta = query_gradient(grad, q, k, v, out, lse, *queries, scale)
    return q_grad, *key_gradients(grad, q, k, v, lse, delta, *keys, scale)


def query_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    ranges: Tensor, tiles: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:
    """The gradient of q, and of each row the product of its output with its gradient [H, T]."""
    q_grad, delta, (rows, heads, width) = q.new_empty(q.shape), torch.empty_like(lse), q.shape
    tile = range_tile("dq", q)
    parts = len(tiles) * (TILE // tile.rows)
    with on_device(q):
        _range_attention_dq_kernel[(parts, heads)](
            grad, q, k, v, out, lse, q_grad, delta, ranges, tiles,
            rows, heads, width, scale, scale * LOG2_E.value, parts, *_strides(grad, q, k, v),
            BLOCK_M=tile.rows, BLOCK_N=tile.cols, **_options(tile, heads // k.size(1), width),
        )
    return q_grad, delta


def key_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    ranges: Tensor, tiles: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v."""
    k_grad, v_grad, (keys, heads, width) = k.new_empty(k.shape), v.new_empty(v.shape), k.shape
    tile = range_tile("dkv", q)
    parts = len(tiles) * (TILE // tile.rows)
    with on_device(q):
        _range_attention_dkv_kernel[(parts, heads)](
            grad, q, k, v, lse, delta, k_grad, v_grad, ranges, tiles,
            len(q), keys, heads, width, scale, scale * LOG2_E.value, *_strides(grad, q, k, v),
            BLOCK_M=tile.cols, BLOCK_N=tile.rows, **_options(tile, q.size(1) // heads, width),
        )
    return k_grad, v_grad


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _options(tile: RangeTile, group: int, width: int) -> dict[str, object]:
    block_e = head_width(width)
    return dict(GROUP=group, TILE=TILE, EVEN_E=block_e == width, BLOCK_E=block_e,
                num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True)
