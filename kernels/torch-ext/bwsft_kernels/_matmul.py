"""Chunks of rows, and products that accumulate in fp32 (fp64 for fp64).

Without AVX-512 torch multiplies bf16 on a CPU by scalar code (measured on AVX2: 7 to 80 times the
time of fp32). There the factors are widened in tiles that stay in its cache.

Letters: N rows, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

VOCABULARY_TILE = 8192  # rows of a head
WIDENED_BYTES = 1 << 18  # of a widened tile, per thread; up to 2 MiB is no faster


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


def _is_widened(factor: Tensor) -> bool:
    """Whether the factors of a 16-bit product are made fp32 first: on CPUs without AVX-512; fp16
    always, whose sums of many rows can exceed 65504."""
    if factor.is_cuda or factor.dtype not in (torch.bfloat16, torch.float16):
        return False
    fast = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return factor.dtype == torch.float16 or not (fast and torch.backends.mkldnn.is_available())


def multiplies_wide(factor: Tensor) -> bool:
    """Whether a product of such factors on a CPU is one of fp32 (fp64) factors in effect."""
    return factor.dtype in (torch.float32, torch.float64) or _is_widened(factor)


def _widened_parts(size: int, width: int) -> Iterator[slice]:
    """Parts of range(size), each of WIDENED_BYTES in fp32 at `width` values an item."""
    step = max(1, WIDENED_BYTES * torch.get_num_threads() // (4 * max(1, width)))
    for start in range(0, size, step):
        yield slice(start, start + step)


def product(a: Tensor, b: Tensor) -> Tensor:  # [N, V], [V, D] -> [N, D]
    """a @ b in fp32 (fp64 for fp64). Where a CPU has bf16 products, these round the result once."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != wide:
        return wide_product(a, b)
    if not _is_widened(a):
        return torch.mm(a, b).to(wide)
    total = a.new_zeros(len(a), b.shape[1], dtype=wide)
    for part in _widened_parts(len(b), b.shape[1]):
        torch.addmm(total, a[:, part].to(wide), b[part].to(wide), out=total)
    return total


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


def product_into(
    out: Tensor, a: Tensor, b: Tensor, factor: float = 1.0  # [V, D], [V, N], [N, D]
) -> Tensor:
    """out = factor * a @ b, summed in fp32 (fp64 for fp64) and rounded to the dtype of out."""
    if _is_widened(a):
        for part, values in _widened_rows(out, a, b):
            part.copy_(values.mul_(factor))
    elif a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=0, alpha=factor, out=out)
    elif a.is_cuda and out.dtype == torch.float32 and factor == 1:
        wide_product(a, b, out=out)
    else:
        out.copy_(product(a, b).mul_(factor))
    return out


def add_product_(
    total: Tensor, a: Tensor, b: Tensor, first: bool = False  # [V, D], [V, N], [N, D]
) -> Tensor:
    """total += a @ b, or the first summand; total is fp32, or fp64 for fp64 factors."""
    if a.dtype == total.dtype:  # FlopCounterMode doesn't know addmm_
        return torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    # A product of all of a would be as large as total; a tile of it is still in cache when added.
    tiles = zip(total.split(VOCABULARY_TILE), a.split(VOCABULARY_TILE), strict=True)
    for part, values in (_widened_rows(total, a, b) if _is_widened(a)
                         else ((part, product(rows, b)) for part, rows in tiles)):
        part.copy_(values) if first else part.add_(values)
    return total


def _widened_rows(out: Tensor, a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of the rows of `out` [V, D], and their values of a @ b in fp32."""
    b = b.float()
    for part in _widened_parts(len(a), len(b)):
        yield out[part], torch.mm(a[part].float(), b)


def logits_into(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, V], [N, D], [V, D], [V]
) -> Tensor:
    """out = x @ weight.T + bias, summed in fp32 (fp64 for fp64) and rounded to the dtype of out,
    which is that of the factors or fp32."""
    if not _is_widened(x) and out.dtype == x.dtype:
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)
    x = x.float()
    for part in _widened_parts(*weight.shape):
        values = torch.mm(x, weight[part].float().t())
        out[:, part] = values if bias is None else values.add_(bias[part])
    return out


def wide_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
) -> Tensor:  # [N, V]
    """x @ weight.T + bias in fp32 (fp64 for fp64), never rounded to 16 bits.

    Rounded to bf16, 4 % of rows tie at the top and 2 % change their argmax.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.is_cuda:
        return logits_into(x.new_empty(len(x), len(weight), dtype=wide), x, weight, bias)
    logits = product(x, weight.t())
    return logits if bias is None else logits.add_(bias.to(wide))
