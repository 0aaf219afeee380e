"""The small operations between a model's matmuls, in plain torch and with its autograd.

The law for `rms_norm`, `rotary` and `swiglu` of this package, and what a model runs where the fused
ones are off: the same names and arguments. Letters: D features, H and K heads, E head width.
"""

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps: float, residual=None):
    """x [..., D] normalised in at least fp32, cast back, then scaled by weight [D]: the rounding
    points of LLaDA's and Llama's code. With residual: (normed x + residual, x + residual)."""
    total = x if residual is None else x + residual
    normed = weight * unit_rows(total, eps)[0]
    return normed if residual is None else (normed, total)


def unit_rows(x, eps: float):
    """(x / rms(x) in the dtype of x, 1 / rms(x) [..., 1] in at least fp32)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype), scale


def rotary(q, k, cos, sin):
    """RoPE that pairs entry i with i + E / 2, in the dtype of cos and sin [..., 1, E / 2].
    q [..., H, E], and k [..., K, E] or None."""
    return turned(q, cos, sin), None if k is None else turned(k, cos, sin)


def turned(x, cos, sin):
    """One tensor of `rotary`."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    both = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return both.to(x.dtype)


def swiglu(gate, up):
    """silu(gate) * up, silu rounded to the dtype of gate."""
    return F.silu(gate) * up
