"""The input's gradient, logits' gradient [N, V] @ head [V, D], with V split over programs.

At N 512 and D 4096 there are 128 tiles of 128 x 128 for the 108 SMs of an A100: 59 % of two waves.
Five splits of V fill 98.8 % of six. Splits meet in fp32, added in a fixed order by a second kernel.
Letters: N loss rows, V vocabulary, D hidden size, K splits.
"""

import torch
import triton
import triton.language as tl

from ._device_triton import on_device
from ._tuning import Tile, choose_splits, precision, tuned

MERGE_BLOCK = 1024


@triton.jit
def _grad_input_bwd_kernel(
    g_ptr,
    w_ptr,
    out_ptr,
    N,
    V,
    D,
    stride_g,
    stride_w,
    split_v,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # The row block runs fastest: programs side by side read the same columns of w.
    row_blocks = tl.cdiv(N, BLOCK_N)
    rows = tl.program_id(0) % row_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.program_id(0) // row_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.program_id(1)
    offs_v = tl.arange(0, BLOCK_V)
    g_rows = g_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * stride_g
    grad = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    for start in range(split * split_v, tl.minimum(V, (split + 1) * split_v), BLOCK_V):
        v = start + offs_v
        g = tl.load(g_rows + v[None, :], mask=v[None, :] < V, other=0.0)
        w_rows = w_ptr + v.to(tl.int64)[:, None] * stride_w
        w = tl.load(w_rows + cols[None, :], mask=(v[:, None] < V) & (cols[None, :] < D), other=0.0)
        grad = tl.dot(g, w, grad, input_precision=PRECISION)
    out = out_ptr + (split.to(tl.int64) * N + rows)[:, None] * D + cols[None, :]
    tl.store(out, grad, mask=(rows[:, None] < N) & (cols[None, :] < D))


@triton.jit
def _grad_input_merge_kernel(parts_ptr, out_ptr, numel, K: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(K):
        total += tl.load(parts_ptr + offs, mask=inside, other=0.0)
        parts_ptr += numel
    tl.store(out_ptr + offs, total, mask=inside)
