"""Attention over packed tokens, and the tables of RoPE.

Whole sequences that see all of themselves take varlen flash attention, on a CPU padding inside
attention; tokens that see ranges of keys take `range_attention`, without a mask.

T packed tokens, S sequences, L the longest of them, H heads, K key/value heads, E head width.
A model builds one layout per forward and hands it down its layers, so that no layer reads a
length back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from bwsft_kernels import RangePlan, range_attention
from torch import Tensor
from torch.autograd.function import once_differentiable

from bwsft.models.kv_cache import ContextCache

# Flash attention's own limits; other widths take the padded path.
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionLayout:
    """How the tokens of a [T, ...] tensor form whole sequences.

    ``slots`` [T] is each token's place in the padded [S * L] grid, None where tokens fill the grid
    in order. ``mask`` is boolean and broadcasts to [S, 1, L, L], True where attention is allowed.
    With ``kernel`` (a varlen function) tokens stay packed, and slots and mask are unused. ``cache``
    takes the keys and values of every layer, at the flat slots ``cache_slots`` [T].
    """

    num_sequences: int
    max_length: int
    slots: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    kernel: Callable | None = None
    cache: ContextCache | None = None
    cache_slots: Tensor | None = None

    def grid(self, x: Tensor) -> Tensor:
        """[T, ...] -> [S, L, ...], zeros in the unused places (so a padded query is never NaN)."""
        size = self.num_sequences * self.max_length
        if self.slots is not None:
            x = x.new_zeros(size, *x.shape[1:]).index_copy_(0, self.slots, x)
        return x.unflatten(0, (self.num_sequences, self.max_length))

    def asked(self, wanted: Tensor) -> AttentionLayout:
        """The layout in which only the tokens ``wanted`` [S, W] (indices) are queries. All of a
        sequence see the same keys, in whatever has wanted ones."""
        return self

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, width: int | None = None
    ) -> Tensor:
        """Softmax attention, scale 1/sqrt(E). q [T, H, E], k and v [T, K, E] -> [T, H, E].

        With ``width`` q holds that many queries of every sequence, [S * width, H, E], and the
        layout is that of :meth:`asked` by them. A sequence
        gives the same alone as in a batch up to the summation order of the kernel: below 1e-12
        relative in float64, a few ulp of the dtype otherwise. Padding adds exact zeros.
        """
        if self.cache is not None:
            self.cache.write(layer, self.cache_slots, k, v)
        k, v = _match_heads(q, k, v)
        if self.kernel is not None:
            cu, longest = self.cu_seqlens, self.max_length
            if width is None:
                return self.kernel(q, k, v, cu, cu, longest, longest)
            cu_q = torch.arange(self.num_sequences + 1, device=cu.device, dtype=cu.dtype) * width
            return self.kernel(q, k, v, cu_q, cu, width, longest)
        k, v = (self.grid(x).transpose(1, 2) for x in (k, v))  # [S, K, L, E]
        q = self.grid(q) if width is None else q.unflatten(0, (-1, width))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=self.mask)
        out = out.transpose(1, 2).flatten(0, 1)  # [S * L or S * width, H, E]
        return out if self.slots is None or width is not None else out.index_select(0, self.slots)


@dataclass(frozen=True)
class RangeLayout:
    """Packed tokens [T, ...] whose queries see the ranges of keys that a plan says. ``cu_seqlens``
    [S + 1] are the sequences' boundaries; cache as in :class:`AttentionLayout`."""

    plan: RangePlan
    cu_seqlens: Tensor
    cache: ContextCache | None = None
    cache_slots: Tensor | None = None

    def asked(self, wanted: Tensor) -> RangeLayout:
        """As :meth:`AttentionLayout.asked`, the wanted ones rising."""
        return replace(self, plan=self.plan.part(queries=wanted.flatten()))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, width: int | None = None
    ) -> Tensor:
        """As :meth:`AttentionLayout.attend`."""
        if self.cache is not None:
            self.cache.write(layer, self.cache_slots, k, v)
        return self.attention(q, k, v)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return range_attention(q, k, v, self.plan)


@dataclass(frozen=True)
class ActiveLayout:
    """Tokens [T, ...] against a context cache: they write their keys and values into the flat slots
    ``cache_slots`` [T] and attend to what the cache shows. Without a plan they are a rectangle
    [S * W], and all see all that a pass reads; a plan says which slots each one sees. ``batch`` is
    that of the tokens in the cache's slots, where those are not a sequence's positions in order."""

    cache: ContextCache
    cache_slots: Tensor
    plan: RangePlan | None
    batch: Any = None

    def asked(self, wanted: Tensor) -> ActiveLayout:
        """As :meth:`AttentionLayout.asked`."""
        if self.plan is None:
            return self
        first = torch.arange(len(wanted), device=wanted.device)[:, None]
        width = self.plan.query_ranges.size(1) // len(wanted)
        return replace(self, plan=self.cache.plan(wanted.size(1), wanted - first * width))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, width: int | None = None
    ) -> Tensor:
        """As :meth:`AttentionLayout.attend`."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return _AttendActive.apply(q, k, v, self, layer)
        return self.against(q, *self.cache.write(layer, self.cache_slots, k, v))

    def against(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries [T, H, E] against a layer's buffers [S, slots, K, E]."""
        keys, values = (self.cache.seen(x) for x in (keys, values))
        if self.plan is not None:
            return range_attention(q, keys.flatten(0, 1), values.flatten(0, 1), self.plan)
        q = q.unflatten(0, (len(keys), -1)).transpose(1, 2)  # [S, H, W, E]
        keys, values = _match_heads(q, keys.transpose(1, 2), values.transpose(1, 2))
        return F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(0, 1)


Layout = AttentionLayout | RangeLayout | ActiveLayout


class _AttendActive(torch.autograd.Function):
    """Active tokens against the cache, keeping q, k and v of those alone for backward.

    Left to autograd, every layer would keep a copy of its whole context (at 640 positions and 32
    active tokens that was two fifths of a draw's memory). Backward writes k and v into their slots
    again, attends once more, and takes the gradient at the slots.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: ActiveLayout, layer: int
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.layout, ctx.layer = layout, layer
        return layout.against(q, *layout.cache.write(layer, layout.cache_slots, k, v))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        layout, slots = ctx.layout, ctx.layout.cache_slots
        buffers = layout.cache.write(ctx.layer, slots, k, v)
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, *buffers)]
            out = layout.against(*inputs)
        dq, *rest = torch.autograd.grad(out, inputs, grad)
        dk, dv = (d.flatten(0, 1).index_select(0, slots) for d in rest)
        return dq, dk, dv, None, None


def packed_layout(
    cu_seqlens: Tensor, max_length: int | None = None, kernel: Callable | None = None
) -> AttentionLayout:
    """Layout of packed tokens with boundaries ``cu_seqlens`` [S + 1] (starts with 0, ends with T).

    ``max_length`` saves the one host read of the varlen path; the padded path reads the lengths
    anyway. Raises ``ValueError`` if a sequence is empty.
    """
    num_sequences, lengths = cu_seqlens.numel() - 1, cu_seqlens.diff()
    if kernel is not None:
        longest = int(lengths.max()) if max_length is None else max_length
        cu_seqlens = cu_seqlens.to(torch.int32)
        return AttentionLayout(num_sequences, longest, cu_seqlens=cu_seqlens, kernel=kernel)
    shortest, longest = (int(n) for n in torch.stack(lengths.aminmax()).tolist())
    if shortest <= 0:
        raise ValueError("cu_seqlens must rise strictly: drop empty sequences from the batch")
    if shortest == longest:
        return AttentionLayout(num_sequences, longest)
    grid = torch.arange(longest, device=cu_seqlens.device)
    filled = grid < lengths[:, None]  # [S, L]
    total = int(cu_seqlens[-1])
    sequence = torch.repeat_interleave(lengths.long(), output_size=total)  # [T]
    slots = torch.arange(total, device=cu_seqlens.device) - cu_seqlens.long()[sequence]
    slots += sequence * longest
    return AttentionLayout(num_sequences, longest, slots, filled[:, None, None, :])


def padded_layout(num_sequences: int, length: int, mask: Tensor | None = None) -> AttentionLayout:
    """Layout of [S, L] tokens flattened to [S * L].

    ``mask``: None; [S, L] with zeros at padding keys; or boolean [S, 1, L, L] (1 broadcasts) with
    True where query (third) may see key (fourth). Anything else raises ``ValueError``.
    """
    if mask is not None and mask.ndim == 2:
        if mask.shape != (num_sequences, length):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, the input needs "
                f"{(num_sequences, length)}"
            )
        mask = (mask != 0)[:, None, None, :]
    elif mask is not None and (mask.ndim != 4 or mask.dtype != torch.bool):
        raise ValueError(
            "attention_mask must be [S, L] (zeros at padding) or boolean [S, 1, L, L] "
            f"(True = may attend), not {mask.dtype} {tuple(mask.shape)}"
        )
    return AttentionLayout(num_sequences, length, mask=mask)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matmuls on ``x`` here: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def varlen_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, implementation: str | None = None
) -> Callable | None:
    """The packed kernel for this device and compute dtype, or None for padding inside attention.

    ``implementation="flash_attention_2"`` (transformers' name) takes the flash-attn package; any
    other value takes torch's own varlen attention.
    """
    fits = head_dim % 8 == 0 and head_dim <= _FLASH_MAX_HEAD_DIM
    if device.type != "cuda" or dtype not in _FLASH_DTYPES or not fits:
        return None
    if implementation == "flash_attention_2":
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _match_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key/value heads (dimension 1) until there are as many as query heads."""
    groups = q.size(1) // k.size(1)
    if groups == 1:
        return k, v
    # Written out rather than left to the kernels: torch 2.11's varlen attention and the
    # memory-efficient kernel (masked float32 on CUDA) have no grouped heads.
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def rope_tables(
    position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, 1, E / 2] of the rotation angles, in at least float32, as ``rotary`` of
    bwsft_kernels takes them."""
    dtype = torch.promote_types(dtype, torch.float32)
    even = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=dtype)
    angles = position_ids.to(dtype)[:, None] * (1.0 / theta ** (even / head_dim))  # [T, E / 2]
    return angles.cos()[:, None, :], angles.sin()[:, None, :]
