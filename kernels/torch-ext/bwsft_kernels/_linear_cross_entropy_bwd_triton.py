"""The input's gradient, logits' gradient [N, W] @ head [V, D]: by cuBLAS, or with V split.

Both end in fp32; _tuning.ROADS chooses.
At N 512 and D 4096 there are 128 tiles of 128 x 128 for the 108 SMs of an A100: 59 % of two waves.
Five splits of V fill 98.8 % of six. Splits meet in fp32, added in a fixed order by a second kernel.
Letters: N supervised rows, V vocabulary, W >= V columns of the gradient, D hidden size, K splits.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import close, on_device
from ._matmul import wide_product
from ._matmul_hopper_triton import fits_tma, grad_input_parts
from ._tuning import CUBLAS, TRITON, Tile, choose_splits, tuned, tuned_road

MERGE_BLOCK = 1024


@triton.jit(do_not_specialize=["N", "V"])
def _grad_input_bwd_kernel(
    g_ptr, w_ptr, out_ptr,  # [N, W], [V, D], [K, N, D]
    N, V, W, D, stride_g, stride_w, split_v,
    EVEN_W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # The row block runs fastest: programs side by side read the same columns of w.
    row_blocks = tl.cdiv(N, BLOCK_N)
    rows = tl.program_id(0) % row_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.program_id(0) // row_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.program_id(1)
    offs_v = tl.arange(0, BLOCK_V)
    g_rows = g_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * stride_g
    grad = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    for start in range(split * split_v, tl.minimum(W, (split + 1) * split_v), BLOCK_V):
        v = start + offs_v
        if EVEN_W:  # a mask at an odd width would make every load a scalar
            g = tl.load(g_rows + v[None, :])
        else:
            g = tl.load(g_rows + v[None, :], mask=v[None, :] < W, other=0.0)
        # Past the head's last row g is 0, so that row may stand in for those that don't exist.
        w_rows = w_ptr + tl.minimum(v, V - 1).to(tl.int64)[:, None] * stride_w
        w = tl.load(w_rows + cols[None, :], mask=cols[None, :] < D, other=0.0)
        grad = tl.dot(g, w, grad, input_precision="ieee")
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


def grad_input(
    g: Tensor,  # [N, W >= V], 0 in columns from V on
    weight: Tensor,  # [V, D]
) -> Tensor:  # [N, D] fp32
    """g[:, :V] @ weight, the same bits in every run."""
    g, weight = close(g), close(weight)
    if len(g) == 0:
        return g.new_zeros(0, weight.shape[1], dtype=torch.float32)
    runs = {
        CUBLAS: lambda: wide_product(g[:, : len(weight)], weight),
        TRITON: partial(split_product, g, weight),
    }
    return runs[tuned_road("grad_input", g, len(g), runs)]()


def split_product(g: Tensor, weight: Tensor) -> Tensor:  # as of grad_input
    """`grad_input` by Triton."""
    (size, width), (vocabulary, hidden) = g.shape, weight.shape

    def launch(tile: Tile) -> Tensor:
        tiles = triton.cdiv(size, tile.rows) * triton.cdiv(hidden, tile.cols)
        steps = triton.cdiv(width, tile.depth)
        steps_per_split = triton.cdiv(steps, choose_splits(tile, tiles, steps, g.device))
        splits = triton.cdiv(steps, steps_per_split)
        parts = torch.empty(splits, size, hidden, dtype=torch.float32, device=g.device)
        if tile.tma:
            grad_input_parts(g, weight, parts, steps_per_split, tile)
        else:
            _grad_input_bwd_kernel[(tiles, splits)](
                g, weight, parts, size, vocabulary, width, hidden, g.stride(0), weight.stride(0),
                steps_per_split * tile.depth, EVEN_W=width % tile.depth == 0,
                BLOCK_N=tile.rows, BLOCK_D=tile.cols, BLOCK_V=tile.depth,
                num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
            )
        if splits == 1:
            return parts[0]
        out = torch.empty(size, hidden, dtype=torch.float32, device=g.device)
        _grad_input_merge_kernel[(triton.cdiv(out.numel(), MERGE_BLOCK),)](
            parts, out, out.numel(), K=splits, BLOCK=MERGE_BLOCK, num_warps=4,
            enable_fp_fusion=True,
        )
        return out

    with on_device(g):
        return launch(tuned("grad_input", g, size, launch, fits_tma(g, weight)))
