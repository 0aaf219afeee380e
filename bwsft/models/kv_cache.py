"""The context cache: keys and values of everything but the active block, for training and decoding.

Attention over [context ; active tokens] is split in two passes. A context pass runs the whole
canvas and stores every layer's keys (after RoPE) and values in preallocated buffers. An active pass
runs only the tokens of a span (one contiguous stretch per sequence), writes their keys and values
into their own slots, and attends to whatever the cache shows. The four decoding modes and the two
cached training modes differ only in when the buffers are filled, which span is active and which
slots are visible:

cached        context pass with the active block all [MASK]; span = active block; all slots visible
prefix        as cached, but span = active block + suffix: the suffix is recomputed every step
block_causal  buffers grow by finished blocks, each stored by the pass that enters the next one; a
              token sees no slot after its own block
exact with context_grad=False: as cached, but the context pass sees the noisy block itself
exact with shared_context: the first draw's whole forward is the context pass of the others

S sequences, L slots, W tokens of a span, K key/value heads, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from bwsft_kernels import RangePlan, cache_plan
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """One contiguous stretch of tokens per sequence, as a rectangle.

    Shorter stretches repeat their last token up to the width, so that the rectangle is full of
    valid ones: a repeated token computes what its original does, and writes to the spare slot.
    """

    start: Tensor  # [S] position in the sequence
    length: Tensor  # [S], at least 1
    width: int  # at least the longest length
    even: bool = False  # the host knows that every length is the width

    def positions(self) -> Tensor:
        """Positions in the sequences [S, W]."""
        offset = torch.arange(self.width, device=self.start.device)
        return self.start[:, None] + torch.minimum(offset[None], self.length[:, None] - 1)

    def repeats(self) -> Tensor | None:
        """True [S, W] where a token only fills the rectangle; None if none does."""
        if self.even:
            return None
        offset = torch.arange(self.width, device=self.start.device)
        return offset[None] >= self.length[:, None]

    def flat(self, cu_seqlens: Tensor) -> Tensor:
        """Indices [S, W] into packed tokens with boundaries cu_seqlens [S + 1]."""
        return cu_seqlens[:-1, None].long() + self.positions()

    def index_of(self, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Place in the flattened rectangle [S * W] of packed indices [N] within the span (any
        valid place for a list's tail, whose indices are outside and weigh nothing)."""
        owner = torch.searchsorted(cu_seqlens[1:], rows, right=True)
        offset = rows - cu_seqlens[owner] - self.start[owner]
        return owner * self.width + offset.clamp(0, self.width - 1)

    def places_of(self, part: Span) -> Tensor:
        """Places [S, W'] in the flattened rectangle [S * W] of a span that ends within this one;
        its positions before this one's start get the first place."""
        first = torch.arange(len(self.start), device=self.start.device)[:, None] * self.width
        return first + (part.positions() - self.start[:, None]).clamp_min(0)

    def shifted(self, shift: int) -> Span:
        """The positions that predict the tokens of this span under a logit shift."""
        return self if shift == 0 else replace(self, start=self.start - shift)


@dataclass(frozen=True)
class Listed:
    """Any packed tokens in the place of a span: indices [W], each above the one before it."""

    rows: Tensor

    def flat(self, cu_seqlens: Tensor) -> Tensor:
        """[1, W], as :meth:`Span.flat`."""
        return self.rows[None]

    def index_of(self, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
        """As :meth:`Span.index_of`."""
        return torch.searchsorted(self.rows, rows).clamp(max=len(self.rows) - 1)


@dataclass
class Context:
    """What a backbone's forward needs beside the batch: the active tokens, and the cache of their
    context (None: exact, the context is recomputed with autograd). A live context is recomputed so
    too, and fills the cache for later forwards on its way."""

    span: Span | Listed
    cache: ContextCache | None = None
    live: bool = False


@dataclass(frozen=True)
class CacheShape:
    """What a backbone tells about its keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass
class ContextCache:
    """Keys and values of every layer, [S, L + 1, K, E] each: slot p of sequence s holds position p,
    and the last slot takes what must not be kept. `visible` is how many slots, from the left, an
    active token sees: [S], or [S, W] where the W tokens of a span differ. With `rows` [S] the
    sequences are those rows of larger buffers."""

    keys: list[Tensor]
    values: list[Tensor]
    visible: Tensor
    even: int | None = None  # the host knows that every sequence sees this many
    most: int | None = None  # the host knows that no sequence sees more
    rows: Tensor | None = None

    @classmethod
    def allocate(
        cls, shape: CacheShape, num_sequences: int, length: int, like: Tensor
    ) -> ContextCache:
        """Buffers for sequences of at most `length` positions, in the dtype and on the device of
        `like`."""
        size = (num_sequences, length + 1, shape.num_kv_heads, shape.head_dim)
        # Zeros, because a masked slot is still multiplied by 0, and 0 * NaN would not be 0.
        buffers = [[like.new_zeros(size) for _ in range(shape.num_layers)] for _ in range(2)]
        visible = torch.zeros(num_sequences, dtype=torch.long, device=like.device)
        return cls(buffers[0], buffers[1], visible)

    @property
    def length(self) -> int:
        return self.keys[0].shape[1] - 1

    def keep(self, rows: Tensor) -> ContextCache:
        """The cache of these sequences alone, a list or a bool [S] (retired ones are dropped)."""
        return replace(
            self,
            keys=[b[rows] for b in self.keys],
            values=[b[rows] for b in self.values],
            visible=self.visible[rows],
        )

    def at(self, rows: Tensor) -> ContextCache:
        """A view of the sequences [S'], a list: passes over these sequences alone."""
        return replace(self, visible=self.visible[rows], rows=rows)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows k, v [N, K, E] into flat slots [N] of a layer; returns the layer's buffers of
        keys and values [S, L + 1, K, E]. They carry no gradient: the context is a constant."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, k.detach())
        self.values[layer].flatten(0, 1).index_copy_(0, slots, v.detach())
        return self.keys[layer], self.values[layer]

    def slots(self, positions: Tensor, spare: Tensor | None = None) -> Tensor:
        """Flat slots [S * W] of positions [S, W]; `spare` [S, W] go to the last."""
        sequence = torch.arange(len(positions), device=positions.device)[:, None]
        if spare is not None:
            positions = positions.masked_fill(spare, self.length)
        return self.slots_of(sequence, positions).flatten()

    def packed_slots(self, cu_seqlens: Tensor, position_ids: Tensor) -> Tensor:
        """Flat slots [T] of packed tokens at positions [T], with boundaries cu_seqlens [S + 1]."""
        lengths = cu_seqlens.diff().long()
        owner = torch.repeat_interleave(lengths, output_size=len(position_ids))
        return self.slots_of(owner, position_ids)

    def slots_of(self, sequence: Tensor, positions: Tensor) -> Tensor:
        """Flat slots of positions in the sequences with these numbers (shapes broadcast)."""
        row = sequence if self.rows is None else self.rows[sequence]
        return row * (self.length + 1) + positions

    def show(self, visible: Tensor | int, most: int | None = None) -> None:
        """Let active tokens see the first `visible` slots: a number for all, one per sequence [S]
        or per token [S, W]; `most` is the largest where the host knows it."""
        self.even = visible if isinstance(visible, int) else None
        self.most = most if self.even is None else self.even
        if isinstance(visible, int):
            visible = self.visible.new_full((len(self.visible),), visible)
        self.visible = visible.long()

    @property
    def reach(self) -> int:
        """How many slots, from the left, a pass must read."""
        return self.length + 1 if self.most is None else self.most

    def seen(self, buffer: Tensor) -> Tensor:
        """The part of a layer's keys or values that a pass reads, [S, slots, K, E]."""
        if self.rows is not None:
            return buffer[:, : self.reach].index_select(0, self.rows)
        return buffer if self.even is None else buffer[:, : self.even]

    def plan(self, width: int, tokens: Tensor | None = None) -> RangePlan | None:
        """Which of the slots of :meth:`seen` each token of a rectangle [S * width] sees; None: all.
        ``tokens`` [S, width]: which of those that `visible` counts for they are."""
        if self.even is not None:
            return None
        visible = self.visible if self.visible.ndim == 2 else self.visible[:, None]
        if tokens is not None and visible.size(1) > 1:
            visible = visible.gather(1, tokens)
        edges = torch.arange(len(visible) + 1, device=visible.device) * width
        slots = self.length + 1 if self.rows is None else self.reach
        return cache_plan(visible.expand(-1, width).flatten(), edges, slots)
