"""Chunks of rows, and products that accumulate in fp32 (fp64 for fp64).

Letters: N rows, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

VOCABULARY_TILE, CPU_TILE = 8192, 2048  # rows of a head


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of an enclosing autocast; None outside, and on the meta device."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def no_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which matmuls keep the dtypes they are given."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def plan_chunks(size: int, row_bytes: int, budget: int) -> list[tuple[int, int]]:
    """Equal chunks of at most `budget` bytes, but at least one row, that cover range(size).

    As few as the budget allows: every chunk reads the whole head twice, and below some 256 rows
    that traffic and not the arithmetic sets the time (32 chunks of 16 rows take 9x one of 512).
    """
    if size == 0:
        return []
    count = -(-size // max(1, budget // row_bytes))
    step = -(-size // count)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def product(a: Tensor, b: Tensor) -> Tensor:  # [N, V], [V, D] -> [N, D]
    """a @ b in fp32 (fp64 for fp64). On a CPU, bf16 factors round the result once; fp16 factors
    are widened first, because the rounded sum of many rows can exceed 65504."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != wide:
        return wide_product(a, b)
    if a.dtype == torch.float16:
        a, b = a.to(wide), b.to(wide)
    return torch.mm(a, b).to(wide)


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b in fp32, without TF32 for fp32 factors whatever torch's switches say; into `out`, rows
    of which may be apart."""
    if not a.is_cuda:  # in Triton's interpreter; torch on a CPU knows no out_dtype
        return torch.mm(a.float(), b.float(), out=out)
    if a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    switches = torch.backends.cuda.matmul
    kept, switches.fp32_precision = switches.fp32_precision, "ieee"
    try:
        return torch.mm(a, b, out=out)
    finally:
        switches.fp32_precision = kept


def product_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:  # [V, D], [V, N], [N, D]
    """out = a @ b, summed in fp32 (fp64 for fp64) and rounded to the dtype of out."""
    for part, rows in _tiles(out, a, len(a)):
        if a.dtype == out.dtype:
            torch.mm(rows, b, out=part)
        elif a.is_cuda and out.dtype == torch.float32:
            wide_product(rows, b, out=part)
        else:
            part.copy_(product(rows, b))
    return out


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:  # [V, D], [V, N], [N, D]
    """total += a @ b; total is fp32, or fp64 for fp64 factors."""
    if a.dtype == total.dtype:
        return torch.addmm(total, a, b, out=total)  # FlopCounterMode doesn't know addmm_
    # A product of all of a would be as large as total; a tile of it is still in cache when added.
    for part, rows in _tiles(total, a, VOCABULARY_TILE):
        part += product(rows, b)
    return total


def _tiles(out: Tensor, a: Tensor, tile: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of `out` [V, D] and the rows of `a` [V, N] that make them; `a` is a transposed [N, V].

    On a CPU a 16-bit product keeps fp32 sums, which are small for a tile, and reads strided factors
    slowly: there the tiles are smaller, and copied, which takes 0.4 of the time.
    """
    if not a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        for part, rows in zip(out.split(CPU_TILE), a.split(CPU_TILE), strict=True):
            yield part, rows.t().contiguous().t()
        return
    yield from zip(out.split(tile), a.split(tile), strict=True)


def wide_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
) -> Tensor:  # [N, V]
    """x @ weight.T + bias in fp32 (fp64 for fp64), never rounded to 16 bits.

    Rounded to bf16, 4 % of rows tie at the top and 2 % change their argmax.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.is_cuda or x.dtype == wide:
        logits = product(x, weight.t())
    else:
        x = x.to(wide)
        tiles = [torch.mm(x, tile.to(wide).t()) for tile in weight.split(VOCABULARY_TILE)]
        logits = torch.cat(tiles, dim=1)
    return logits if bias is None else logits.add_(bias.to(wide))
