"""The two products of the fused loss on Hopper: tensor descriptors (TMA) and persistent programs.

The same results in the same places as the products of _linear_cross_entropy_fwd_triton.py and
_linear_cross_entropy_bwd_triton.py, which come here for a tile with `tma`. As many programs as run
at once take tile after tile; TMA brings the operands to shared memory, where WGMMA reads them, and
clips what is past the end of a matrix to 0: no masks, no pointers per thread. Descriptors come
from the host: made on the device they would need `triton.set_allocator`, which is the user's.

Sums over V are split as in the other file: at N 512 two splits make 128 programs for 132 SMs.
Tried and lost; all compiled for sm_90 by Triton 3.9, none timed:
- gradient: 128 x 256 with 4 warps spills 1040 bytes a thread, 64 x 256 with 4 warps 72; 256 x 128
  takes 242 registers, 128 x 256 with 8 warps 180;
- logits: an epilogue of the whole 128 x 256 or 256 x 128 tile spills 16 to 750 bytes, of halves up
  to 40; of quarters none (227 to 249 registers). 128 x 128 is bound by L2: twice the bytes for
  each product. 64 x 256 with 8 warps moves its quarters through 64 KB of shared memory;
- warp specialization: ignored with 8 warps; with 4 it compiles at 64 x 128 alone, at one program
  per SM instead of two;
- stream-K (equal shares of all steps, pieces added afterwards): fewer parts than splits leave, but
  programs that read the same rows of the head drift apart by up to 190 MB of it; L2 holds 50.
Letters: N supervised rows, D hidden size, V vocabulary, W columns of the logits' buffer, K splits,
P pieces of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._cross_entropy_triton import piece_sums
from ._tuning import Tile, processors


def fits_tma(*matrices: Tensor) -> bool:
    """Whether TMA and WGMMA can read these: 16-bit, rows dense and 16-byte aligned."""
    return all(
        m.element_size() == 2 and m.stride(1) == 1 and m.stride(0) % 8 == 0
        and m.data_ptr() % 16 == 0 and m.numel() > 0
        for m in matrices
    )


def _descriptor(matrix: Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _programs(items: int, tile: Tile, device: torch.device) -> int:
    """As many as run at once, counted as `choose_splits` does."""
    return min(items, processors(device) * max(1, 8 // tile.warps))


@triton.jit(do_not_specialize=["N", "V", "steps_per_split", "items"])
def _grad_input_hopper_kernel(
    g_desc, w_desc, out_ptr,  # [N, V], [V, D], [K, N, D]
    N, V, D, steps_per_split, items,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # Rows fastest, splits slowest: programs side by side read the same rows of the head.
    row_blocks = tl.cdiv(N, BLOCK_N)
    col_blocks = tl.cdiv(D, BLOCK_D)
    steps = tl.cdiv(V, BLOCK_V)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        row = item % row_blocks * BLOCK_N
        col = item // row_blocks % col_blocks * BLOCK_D
        split = item // (row_blocks * col_blocks)
        first = split * steps_per_split
        grad = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
        for step in range(first, tl.minimum(steps, first + steps_per_split)):
            g = g_desc.load([row, step * BLOCK_V])
            w = w_desc.load([step * BLOCK_V, col])
            grad = tl.dot(g, w, grad)
        rows = row + tl.arange(0, BLOCK_N)
        cols = col + tl.arange(0, BLOCK_D)
        out = out_ptr + (split.to(tl.int64) * N + rows)[:, None] * D + cols[None, :]
        tl.store(out, grad, mask=(rows[:, None] < N) & (cols[None, :] < D))


def grad_input_parts(
    g: Tensor, weight: Tensor,  # [N, W], [V, D]
    parts: Tensor,  # [K, N, D] fp32, gets the sums over K shares of the vocabulary
    steps_per_split: int,  # of tile.depth columns of g
    tile: Tile,
) -> None:
    """What _grad_input_bwd_kernel makes."""
    (vocabulary, hidden), (splits, size, _) = weight.shape, parts.shape
    items = splits * triton.cdiv(size, tile.rows) * triton.cdiv(hidden, tile.cols)
    _grad_input_hopper_kernel[(_programs(items, tile, g.device),)](
        _descriptor(g[:, :vocabulary], tile.rows, tile.depth),
        _descriptor(weight, tile.depth, tile.cols), parts,
        size, vocabulary, hidden, steps_per_split, items,
        BLOCK_N=tile.rows, BLOCK_D=tile.cols, BLOCK_V=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )


@triton.jit
def _left_right(x):
    """The halves of the columns of x, which stay in their threads."""
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit(do_not_specialize=["N", "V", "P", "items"])
def _logits_hopper_kernel(
    x_desc, w_desc, e_desc,  # [N, D], [V, D], [N, W]
    bias_ptr, target_ptr, part_ptr,  # [W], [N], [N, SLOTS * P + 1]
    N, V, W, D, P, stride_part, items,
    EXCLUDED: tl.constexpr, CAP: tl.constexpr, E_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, WANT_GRAD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    row_blocks = tl.cdiv(N, BLOCK_N)
    PIECE: tl.constexpr = BLOCK_V // 4
    # Flat: the next tile's first loads are on their way while this one's epilogue runs.
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=True):
        row = item % row_blocks * BLOCK_N
        tile = item // row_blocks
        logits = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        for step in range(tl.cdiv(D, BLOCK_D)):
            x = x_desc.load([row, step * BLOCK_D])
            w = w_desc.load([tile * BLOCK_V, step * BLOCK_D])
            logits = tl.dot(x, w.T, logits)
        rows = row + tl.arange(0, BLOCK_N)
        left, right = _left_right(logits)
        for half in tl.static_range(2):
            pieces = _left_right(left if half == 0 else right)
            for quarter in tl.static_range(2):
                piece = tile * 4 + half * 2 + quarter
                cols = piece * PIECE + tl.arange(0, PIECE)
                e = piece_sums(
                    pieces[quarter], bias_ptr, target_ptr, part_ptr, rows, cols, piece,
                    N, V, W, P, stride_part,
                    EXCLUDED, CAP, HAS_BIAS, HAS_SMOOTHING, WANT_GRAD, PIECE)
                if WANT_GRAD:
                    e_desc.store([row, piece * PIECE], (e * E_SCALE).to(e_desc.dtype))


def logits_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [W]
    target: Tensor,  # [N]
    e: Tensor | None, parts: Tensor,  # [N, W], [N, SLOTS * P + 1]
    tile: Tile, options: dict,  # the constants EXCLUDED to WANT_GRAD
) -> None:
    """What _logits_fwd_kernel makes, with parts of tile.part_cols columns."""
    (size, hidden), vocabulary = x.shape, len(weight)
    items = triton.cdiv(size, tile.rows) * triton.cdiv(vocabulary, tile.cols)
    e_desc = _descriptor(x, tile.rows, tile.depth) if e is None else _descriptor(
        e, tile.rows, tile.part_cols)
    _logits_hopper_kernel[(_programs(items, tile, x.device),)](
        _descriptor(x, tile.rows, tile.depth), _descriptor(weight, tile.cols, tile.depth), e_desc,
        x if bias is None else bias, target, parts,
        size, vocabulary, triton.cdiv(vocabulary, 64) * 64, hidden,
        triton.cdiv(vocabulary, tile.part_cols), parts.stride(0), items, **options,
        BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )
