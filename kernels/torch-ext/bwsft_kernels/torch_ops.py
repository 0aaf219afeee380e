"""The small operations between a model's matmuls, in plain torch and with its autograd.

They are the reference implementation of `rms_norm`, `rotary` and `swiglu` of this package, what
those run with impl="torch", and what a model runs where the fused ones are off: the same names and
arguments. Letters: D features, H and K heads, E head width, M features of an MLP.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    eps: float,
    residual: Tensor | None = None,  # [..., D]
) -> Tensor | tuple[Tensor, Tensor]:  # normed [..., D], or (normed x + residual, x + residual)
    """Normalize x in at least fp32, cast back, then scale: the rounding points of LLaDA's and
    Llama's code."""
    total = x if residual is None else x + residual
    normed = weight * unit_rows(total, eps)[0]
    return normed if residual is None else (normed, total)


def unit_rows(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # [..., D] -> [..., D], [..., 1]
    """(x / rms(x) in the dtype of x, 1 / rms(x) in at least fp32)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype), scale


def rotary(
    q: Tensor,  # [..., H, E]
    k: Tensor | None,  # [..., K, E]
    cos: Tensor, sin: Tensor,  # [..., 1, E / 2]
) -> tuple[Tensor, Tensor | None]:
    """RoPE that pairs entry i with i + E / 2, computed in the dtype of cos and sin."""
    return rotated(q, cos, sin), None if k is None else rotated(k, cos, sin)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [..., H, E], [..., 1, E / 2] twice
    """One tensor of `rotary`."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    both = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return both.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:  # all [..., M]
    """silu(gate) * up, silu rounded to the dtype of gate."""
    return F.silu(gate) * up
