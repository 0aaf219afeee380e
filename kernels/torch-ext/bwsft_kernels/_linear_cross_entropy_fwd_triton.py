"""The fused loss on a GPU: logits of some rows, their loss, and the logits' gradient.

Two roads, by _tuning.ROADS, with the same results but for the order of sums:
- "cublas": fp32 logits in scratch, then a row kernel that writes the gradient over them.
- "triton": a product whose epilogue has the fp32 accumulators. It keeps exp(z - top of this row in
  this tile) in the matmul's dtype, which is off by 2^-9 of itself in bf16 for any size of z, where
  z rounded to bf16 would be off by a factor e^(2^-9 z), and fp32 partial sums. A row kernel merges
  the sums in a fixed order and turns the exponentials into the gradient in one pass. Without a
  gradient nothing but the partial sums is stored.
Either way the loss comes from fp32 accumulators. No locks, no atomics: the same bits in every run.
Letters: N rows, D hidden size, V vocabulary, W = V rounded up to 64, so that every access to a row
is a 16-byte vector at any V, P vocabulary tiles.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._cross_entropy_triton import SLOTS, cross_entropy_rows, merge_rows, piece_sums
from ._device_triton import close, logits_tile, on_device
from ._matmul import plan_chunks, wide_product
from ._matmul_hopper_triton import fits_tma, logits_parts
from ._tuning import CUBLAS, TRITON, Tile, fewest_cols, possible_roads, tuned, tuned_road

# fp16 ends at 6e-8: exponentials, at most 1, start at 2^15, so that 2e-12 is still there.
E_SCALES = {torch.float16: 2.0**15, torch.bfloat16: 1.0, torch.float32: 1.0}


@triton.jit(do_not_specialize=["N", "V", "P"])  # the same code at any vocabulary
def _logits_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, target_ptr,  # [N, D], [V, D], [W], [N]
    e_ptr, part_ptr,  # [N, W], [N, SLOTS * P + 1]
    N, V, W, D, P, stride_x, stride_w, stride_e, stride_part,
    EXCLUDED: tl.constexpr, CAP: tl.constexpr, E_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, WANT_GRAD: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    tile, rows, cols, logits = logits_tile(
        x_ptr, w_ptr, bias_ptr, N, V, D, stride_x, stride_w,
        0.0, False, EVEN_D, BLOCK_N, BLOCK_V, BLOCK_D)
    e = piece_sums(
        logits, bias_ptr, target_ptr, part_ptr, rows, cols, tile, N, V, W, P, stride_part,
        EXCLUDED, CAP, HAS_BIAS, HAS_SMOOTHING, WANT_GRAD, BLOCK_V)
    if WANT_GRAD:
        e_rows = e_ptr + rows.to(tl.int64)[:, None] * stride_e
        kept = (e * E_SCALE).to(e_ptr.dtype.element_ty)
        tl.store(e_rows + cols[None, :], kept, mask=(rows < N)[:, None] & (cols < W)[None, :])


def row_bytes(
    vocabulary: int, dtype: torch.dtype, rows: int, device: torch.device,
    softcap: float | None = None, smooth: bool = False, confidence: float = 0.0,
) -> int:
    """Bytes of scratch that a row takes in `loss_and_grad`, called with up to `rows` of them."""
    roads = possible_roads("logits", dtype, rows, device)
    if _needs_logits(softcap, smooth, confidence):
        roads = {CUBLAS}
    return max(_row_bytes(vocabulary, dtype, device, road, True) for road in roads)


def loss_and_grad(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    target: Tensor,  # [N] in [0, V)
    row_weight: Tensor, smoothing: Tensor | float,  # [N] fp32
    softcap: float | None, excluded_id: int | None,
    scratch: Tensor,  # uint8 [N or more, row_bytes or more], 16-byte aligned
    confidence: float = 0.0,
) -> tuple[Tensor, Tensor, None]:  # [N] fp32, [N, W]
    """(unweighted loss, 0 where row_weight is; row_weight * d loss / d logits, in x's dtype, 0 in
    columns from V on; None: g is scaled). The gradient of a row begins where its scratch does."""
    size, smooth = len(x), isinstance(smoothing, Tensor) or smoothing != 0
    need = size, row_bytes(len(weight), x.dtype, size, x.device, softcap, smooth, confidence)
    if any(there < least for there, least in zip(scratch.shape, need, strict=True)):
        raise ValueError(f"scratch must be {list(need)} or more, not {list(scratch.shape)}")
    if size == 0:
        return row_weight.new_empty(0), x.new_empty(0, _width(len(weight))), None
    head, smoothing = _prepare(x, weight, bias, smoothing)
    rows = target.contiguous(), row_weight.contiguous(), smoothing, softcap, excluded_id, scratch
    if _needs_logits(softcap, smooth, confidence):
        return *by_cublas(*head, *rows, confidence), None
    runs = {road: partial(run, *head, *rows) for road, run in _RUNS.items()}
    return *runs[tuned_road("logits", x, size, runs)](), None


def head_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    target: Tensor,  # [N] in [0, V)
    smoothing: Tensor | float,  # [N] fp32
    softcap: float | None, excluded_id: int | None,
    chunk_bytes: int,  # most bytes of partial sums or logits at a time
    confidence: float = 0.0,
) -> Tensor:  # [N] fp32
    """The loss of `loss_and_grad`, without weights and without the gradient."""
    (x, *head), smoothing = _prepare(x, weight, bias, smoothing)
    target = target.contiguous()

    def sweep(road: str) -> Tensor:
        loss = torch.empty(len(x), dtype=torch.float32, device=x.device)
        need = _row_bytes(len(weight), x.dtype, x.device, road, False)
        chunks = plan_chunks(len(x), need, chunk_bytes)
        scratch = loss.new_empty(chunks[0][1] if chunks else 0, need, dtype=torch.uint8)
        for start, stop in chunks:
            part = slice(start, stop)
            smooth = None if smoothing is None else smoothing[part]
            rows = target[part], None, smooth, softcap, excluded_id, scratch
            more = (confidence,) if road == CUBLAS else ()
            loss[part], _ = _RUNS[road](x[part], *head, *rows, *more)
        return loss

    if confidence:
        return sweep(CUBLAS)
    runs = {road: partial(sweep, road) for road in _RUNS}
    return runs[tuned_road("loss", x, len(x), runs)]()


def by_cublas(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [W]
    target: Tensor, row_weight: Tensor | None, smoothing: Tensor | None,  # [N]
    softcap: float | None, excluded_id: int | None,
    scratch: Tensor, confidence: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """`loss_and_grad` by fp32 logits; without row_weight the loss alone."""
    (size, _), vocabulary, width = x.shape, len(weight), _width(len(weight))
    scratch = scratch[:size]
    logits = scratch.view(torch.float32)[:, :width]
    wide_product(x, weight.t(), logits[:, :vocabulary])
    grad = None if row_weight is None else scratch.view(x.dtype)[:, :width]
    loss = cross_entropy_rows(
        logits, bias, grad, vocabulary, target, row_weight, smoothing, softcap, excluded_id,
        confidence)
    return loss, grad


def by_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [W]
    target: Tensor, row_weight: Tensor | None, smoothing: Tensor | None,  # [N]
    softcap: float | None, excluded_id: int | None,
    scratch: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """`loss_and_grad` by exponentials of tiles; without row_weight the loss alone."""
    (size, hidden), vocabulary, width = x.shape, len(weight), _width(len(weight))
    want_grad = row_weight is not None
    kernel = "capped" if softcap is not None else "logits" if want_grad else "loss"
    options = dict(
        EXCLUDED=-1 if excluded_id is None else excluded_id,
        CAP=0.0 if softcap is None else softcap, E_SCALE=E_SCALES[x.dtype],
        HAS_BIAS=bias is not None, HAS_SMOOTHING=smoothing is not None, WANT_GRAD=want_grad,
    )  # fmt: skip

    def launch(tile: Tile) -> tuple[Tensor, Tensor | None]:
        # A row of scratch: its exponentials, then its partial sums.
        buffer, e_bytes = scratch[:size], width * x.element_size() if want_grad else 0
        end = e_bytes + _part_bytes(vocabulary, tile.part_cols)
        parts = buffer.view(torch.float32)[:, e_bytes // 4 : end // 4]
        e = buffer.view(x.dtype)[:, :width] if want_grad else None
        if tile.tma:
            logits_parts(x, weight, bias, target, e, parts, tile, options)
        else:
            tiles = triton.cdiv(vocabulary, tile.cols)
            _logits_fwd_kernel[(tiles * triton.cdiv(size, tile.rows),)](
                x, weight, x if bias is None else bias, target, parts if e is None else e, parts,
                size, vocabulary, width, hidden, tiles, x.stride(0), weight.stride(0),
                0 if e is None else e.stride(0), parts.stride(0), **options,
                EVEN_D=hidden % tile.depth == 0,
                BLOCK_N=tile.rows, BLOCK_V=tile.cols, BLOCK_D=tile.depth,
                num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
            )
        loss = merge_rows(
            e, parts, vocabulary, tile.part_cols, E_SCALES[x.dtype],
            target, row_weight, smoothing, softcap, excluded_id,
        )
        return loss, e

    with on_device(x):
        return launch(tuned(kernel, x, size, launch, fits_tma(x, weight)))


_RUNS = {CUBLAS: by_cublas, TRITON: by_triton}


def _needs_logits(softcap: float | None, smooth: bool, confidence: float) -> bool:
    """Soft-cap and smoothing together, or entropy: their gradient needs two numbers of each logit,
    and a tile keeps one, exponential times slope."""
    return softcap is not None and smooth or confidence > 0


def _width(vocabulary: int) -> int:
    return triton.cdiv(vocabulary, 64) * 64


def _part_bytes(vocabulary: int, part_cols: int) -> int:
    """Of the fp32 [SLOTS * P + 1] of a row, rounded up: Triton must know that 16 numbers divide the
    strides of rows, or it loads one number at a time."""
    return triton.cdiv(SLOTS.value * triton.cdiv(vocabulary, part_cols) + 1, 32) * 128


def _row_bytes(
    vocabulary: int, dtype: torch.dtype, device: torch.device, road: str, want_grad: bool
) -> int:
    if road == CUBLAS:
        return _width(vocabulary) * 4
    cols = fewest_cols(("logits" if want_grad else "loss", "capped"), dtype, device)
    return (_width(vocabulary) * dtype.itemsize if want_grad else 0) + _part_bytes(vocabulary, cols)


def _prepare(
    x: Tensor, weight: Tensor, bias: Tensor | None, smoothing: Tensor | float
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor | None]:
    """((x, weight, bias [W]), smoothing [N] or None), laid out as the kernels want them."""
    if bias is not None and len(weight) % 64:
        bias = torch.nn.functional.pad(bias, (0, _width(len(weight)) - len(weight)))
    if isinstance(smoothing, Tensor):
        smoothing = smoothing.contiguous()
    else:
        smoothing = x.new_full((len(x),), smoothing, dtype=torch.float32) if smoothing else None
    bias = None if bias is None else bias.contiguous()
    return (close(x), close(weight), bias), smoothing
