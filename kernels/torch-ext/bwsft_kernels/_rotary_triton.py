"""Rotary embedding of queries and keys in Triton: one token's heads share its cosines and sines.

The Triton implementation of _rotary.py. Letters: T tokens, H query heads, K key/value heads,
E head width.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import close, down_cast, empty_like, on_device

PAIRS = 2048  # of a program: 16 a thread with 4 warps


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, token, heads, HEADS, stride_token, stride_head, cos, sin,
    HALF: tl.constexpr, BLOCK_E: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_E)
    inside = (heads < HEADS)[:, None] & (cols < HALF)[None, :]
    place = token * stride_token + heads[:, None] * stride_head + cols[None, :]
    first = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + place + HALF, mask=inside, other=0.0).to(tl.float32)
    out_ptr += (token * HEADS + heads[:, None]) * (2 * HALF) + cols[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr, down_cast(first * cos - second * sin, dtype), mask=inside)
    tl.store(out_ptr + HALF, down_cast(second * cos + first * sin, dtype), mask=inside)


@triton.jit
def _rotary_heads_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    H, K, stride_q, stride_q_head, stride_k, stride_k_head, Q_BLOCKS,
    INVERSE: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr,
):
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK_E)
    cos = tl.load(cos_ptr + token * HALF + cols, mask=cols < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + cols, mask=cols < HALF, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    heads = tl.arange(0, BLOCK_H)
    if block < Q_BLOCKS:
        heads += block * BLOCK_H
        _rotate_heads(q_ptr, q_out_ptr, token, heads, H, stride_q, stride_q_head, cos, sin,
                      HALF, BLOCK_E)
    else:
        heads += (block - Q_BLOCKS) * BLOCK_H
        _rotate_heads(k_ptr, k_out_ptr, token, heads, K, stride_k, stride_k_head, cos, sin,
                      HALF, BLOCK_E)


def _tokens(x: Tensor, heads: int, width: int) -> tuple[Tensor, int, int]:
    """(x with neighboring entries along the last dimension, strides of a token and of a head).

    The heads of a token are within the reach of int32 offsets, as attention's own layout
    [H, T, E] of millions of tokens is not."""
    if not x.is_contiguous():
        x = close(x.reshape(-1, heads, width))
        if heads * x.stride(1) < 2**31:
            return x, x.stride(0), x.stride(1)
        x = x.contiguous()
    return x, heads * width, width


@functools.cache
def _plan(heads: int, more: int, width: int) -> tuple[int, int, int, int]:
    """(blocks of query heads, of key heads, heads of a block, columns of a block)."""
    block_e = triton.next_power_of_2(width // 2)
    block_h = min(triton.next_power_of_2(max(heads, more)), max(1, PAIRS // block_e))
    return triton.cdiv(heads, block_h), triton.cdiv(more, block_h), block_h, block_e


def rotate(
    q: Tensor | None, k: Tensor | None,  # [..., H, E], [..., K, E] fp32 or 16 bits
    cos: Tensor, sin: Tensor,  # [..., 1, E / 2] fp32
    inverse: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Both rotated, or rotated back."""
    if q is None:
        return rotate(k, q, cos, sin, inverse)[::-1] if k is not None else (None, None)
    heads, width = q.size(-2), q.size(-1)
    q_out = empty_like(q)
    q, stride_q, stride_q_head = _tokens(q, heads, width)
    k_out, more, other, stride_k, stride_k_head = None, 0, q, 0, 0
    if k is not None:
        more = k.size(-2)
        k_out = empty_like(k)
        other, stride_k, stride_k_head = _tokens(k, more, width)
    blocks, more_blocks, block_h, block_e = _plan(heads, more, width)
    if size := q_out.numel() // (heads * width):
        with on_device(q):
            # Without fused multiply-adds, so that the numbers are torch's to the last bit.
            _rotary_heads_kernel[(size, blocks + more_blocks)](
                q, other, cos.contiguous(), sin.contiguous(), q_out, q_out if k is None else k_out,
                heads, more, stride_q, stride_q_head, stride_k, stride_k_head, blocks,
                INVERSE=inverse, HALF=width // 2, BLOCK_H=block_h, BLOCK_E=block_e,
                num_warps=4, enable_fp_fusion=False,
            )
    return q_out, k_out
