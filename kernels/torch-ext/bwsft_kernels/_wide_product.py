"""cuBLAS products of 16-bit or fp32 matrices with fp32 results."""

import torch
from torch import Tensor


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
