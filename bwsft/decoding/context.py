"""The context modes of decoding: how the active block's hidden states are computed in a step.

exact         every step runs the whole canvas
cached        on entering a block one pass over the whole canvas, which is its first denoising step
              and stores all keys and values; then the block runs alone against those
prefix        as cached, but the suffix is recomputed with the block
block_causal  the prompt runs once; a block sees the prompt, the blocks before it and itself; when
              it is finished, one pass with its final tokens stores its keys and values. In a
              block-causal family the prompt has blocks too: its tail, which shares the first
              block of the response, runs with that block

S sequences, T packed tokens, W width of the active blocks, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from bwsft_kernels.block_grid import BlockGrid
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bwsft.decoding.canvas import Canvas, Packed, span_of, upload
from bwsft.decoding.cuda_graphs import GraphedPasses, graphed
from bwsft.decoding.plan import Planned
from bwsft.models.backbone import Backbone
from bwsft.models.block_masks import PAD, block_causal_mask, grid_numbers
from bwsft.models.kv_cache import ContextCache, Span

if TYPE_CHECKING:
    from bwsft.decoding.config import DecodeConfig
    from bwsft.models.verifier import Verifier


@dataclass
class DecodeContext:
    """The context cache of one batch and what it holds; `passes` counts each row's forwards."""

    model: Backbone
    run: Backbone | GraphedPasses  # where the passes of a step go
    config: DecodeConfig
    cache: ContextCache | None
    passes: list[int]
    # block_causal: how far each row's cache is final, and the stop of each of its blocks.
    stored: list[int] = field(default_factory=list)
    blocks: list[dict[int, int]] = field(default_factory=list)

    @classmethod
    def begin(
        cls, model: Backbone, config: DecodeConfig, canvas: Canvas, verifier: Verifier | None = None
    ) -> DecodeContext:
        rows, cache = canvas.rows, None
        if config.context != "exact":
            cache = model.new_cache(len(rows), max(row.length for row in rows))
        run = graphed(model) if config.graphs else model
        return cls(model, run, config, cache, [0] * len(rows))

    def keep(self, kept: list[int]) -> None:
        """Rows but these, at least one, leave the cache, whose buffers are others from then on."""
        if self.config.graphs:  # with all that was recorded on the old buffers, and its memory
            self.run = graphed(self.model)
        if self.cache is not None:
            self.cache = self.cache.keep(upload(kept, self.cache.visible.device))
        self.passes = [self.passes[i] for i in kept]
        if self.blocks:
            self.stored = [self.stored[i] for i in kept]
            self.blocks = [self.blocks[i] for i in kept]

    def hidden(self, canvas: Canvas, planned: Planned, block: Span) -> Tensor:
        """The hidden states that predict the tokens of the active blocks, [S * W, D]."""
        if self.config.context == "exact":
            return self.exact(canvas, planned, block)
        if self.config.context == "block_causal":
            if not self.blocks:
                self.prefill(canvas)
            self.store_finished(canvas, planned)
            return self.block_pass(canvas, planned, block)
        every, lengths = self.config.refresh, self.lengths(canvas, planned)
        entering = [p.number == 0 or bool(every) and p.number % every == 0 for p in planned]
        parts = []
        if enter := [i for i, e in enumerate(entering) if e]:
            parts.append((enter, self.context_pass(canvas, enter, lengths, block)))
        if rest := [i for i, e in enumerate(entering) if not e]:
            starts = [step.start for step in planned]
            parts.append((rest, self.rest_pass(canvas, rest, starts, lengths, block)))
        return joined(parts, len(planned), block.width)

    def lengths(self, canvas: Canvas, planned: Planned) -> list[int]:
        """Positions of every row that are present."""
        window, pairs = self.config.suffix_window, zip(planned, canvas.rows, strict=True)
        return [min(step.stop + window, row.length) for step, row in pairs]

    def exact(self, canvas: Canvas, planned: Planned, block: Span) -> Tensor:
        everyone, scale = list(range(len(planned))), self.config.cfg_scale
        self.count(everyone, 2 if scale else 1)
        view = canvas.view(everyone, self.lengths(canvas, planned))
        wanted = self.model.predicting_rows(block.flat(view.cu_seqlens))
        if scale:
            view, wanted = with_blind_rows(view, wanted, canvas, self.model.family.mask_id)
        hidden = self.run.hidden_states(*view[:3], max_length=view.max_length, wanted=wanted)
        if not scale:
            return hidden
        # The head is linear: combining its input is combining the logits.
        seeing, blind = hidden.chunk(2)
        return (1 + scale) * seeing - scale * blind

    def context_pass(
        self, canvas: Canvas, rows: list[int], lengths: list[int], block: Span
    ) -> Tensor:
        """Compute the context of some rows, at their present state, and store it; the active
        blocks' hidden states come with it."""
        self.count(rows)
        view = canvas.view(rows, [lengths[i] for i in rows])
        cache, block = self.part(rows, block)
        wanted = self.model.predicting_rows(block.flat(view.cu_seqlens))
        return self.model.fill(view, cache, wanted)

    def block_pass(self, canvas: Canvas, planned: Planned, block: Span) -> Tensor:
        """block_causal: the active blocks see what is stored and themselves, of the first one also
        the prompt's tail."""
        everyone, stops, span = list(range(len(planned))), [step.stop for step in planned], block
        if self.stored != [step.start for step in planned]:
            span = span_of(self.stored, stops, block.start.device)
        wanted = None if span is block else span.places_of(block)
        return self.span_pass(canvas, everyone, span, self.cache, stops, wanted)

    def rest_pass(
        self, canvas: Canvas, rows: list[int], starts: list[int], lengths: list[int], block: Span
    ) -> Tensor:
        """cached: run the active blocks of some rows, which see the first `lengths` positions of
        each. prefix: all after the block runs too."""
        cache, block = self.part(rows, block)
        if self.config.context == "cached":
            return self.span_pass(canvas, rows, block, cache, lengths)
        stops = [lengths[i] for i in rows]
        span = span_of([starts[i] for i in rows], stops, block.start.device)
        return self.span_pass(canvas, rows, span, cache, lengths, span.places_of(block))

    def span_pass(
        self,
        canvas: Canvas,
        rows: list[int],
        span: Span,
        cache: ContextCache,
        visible: list[int],
        wanted: Tensor | None = None,
    ) -> Tensor:
        self.count(rows)
        show(cache, [visible[i] for i in rows])
        starts = canvas.cu_seqlens[:-1]
        if cache.rows is not None:
            starts = starts[cache.rows]
        span = span.shifted(self.model.family.logit_shift)
        ids = canvas.ids[starts[:, None].long() + span.positions()]
        return self.run.active_hidden_states(ids, span, cache, wanted)

    def part(self, rows: list[int], block: Span) -> tuple[ContextCache, Span]:
        """Cache and active blocks of some rows."""
        cache = self.cache_of(rows)
        if cache.rows is None:
            return cache, block
        start, length = block.start[cache.rows], block.length[cache.rows]
        return cache, replace(block, start=start, length=length)

    def cache_of(self, rows: list[int]) -> ContextCache:
        if len(rows) == len(self.passes):
            return self.cache
        return self.cache.at(upload(rows, self.cache.visible.device))

    def count(self, rows: list[int], passes: int = 1) -> None:
        for i in rows:
            self.passes[i] += passes

    def prefill(self, canvas: Canvas) -> None:
        """block_causal: store the prompts, each bidirectional in itself, as in training; of a
        block-causal family their whole blocks, which see no later ones."""
        family, size = self.model.family, self.config.block_size
        grid = BlockGrid(size, family.block_origin)
        self.stored = [len(row.prompt) for row in canvas.rows]
        bounds = [grid.blocks(n, self.config.gen_length) for n in self.stored]
        if family.attention == "block_causal":
            self.stored = [BlockGrid(size, "absolute").start(n) for n in self.stored]
        pairs = zip(self.stored, bounds, strict=True)
        self.blocks = [{start: first[0][1], **dict(first[1:])} for start, first in pairs]
        if not (rows := [i for i, n in enumerate(self.stored) if n]):
            return
        self.count(rows)
        view = canvas.view(rows, [self.stored[i] for i in rows])
        if family.attention == "block_causal":
            numbers = [grid_numbers(self.stored[i], size) for i in rows]
            padded = pad_sequence(numbers, batch_first=True, padding_value=PAD)
            mask = block_causal_mask(padded.to(view.ids.device))
            self.model.fill(view, self.cache_of(rows), mask=mask)
        else:
            last = view.cu_seqlens[1:, None].long() - 1  # what comes out is not used
            self.model.fill(view, self.cache_of(rows), last)

    def store_finished(self, canvas: Canvas, planned: Planned) -> None:
        """block_causal: store the blocks before the active ones, with their final tokens."""
        while True:
            stops = [blocks[n] for blocks, n in zip(self.blocks, self.stored, strict=True)]
            if not (rows := [i for i, step in enumerate(planned) if stops[i] <= step.start]):
                return
            starts, ends = zip(*((self.stored[i], stops[i]) for i in rows), strict=True)
            block = span_of(starts, ends, canvas.ids.device)
            # Keys and values are all that counts: one token through the rest of the last layer.
            first = torch.arange(len(rows), device=canvas.ids.device)[:, None] * block.width
            self.span_pass(canvas, rows, block, self.cache_of(rows), stops, first)
            for i in rows:
                self.stored[i] = stops[i]


def show(cache: ContextCache, visible: list[int]) -> None:
    most = max(visible)
    if min(visible) == most:
        cache.show(most)
    else:
        cache.show(upload(visible, cache.visible.device), most)


def joined(parts: list[tuple[list[int], Tensor]], num_rows: int, width: int) -> Tensor:
    """Hidden states of groups of rows, [rows * W, D] each, in the rows' order [S * W, D]."""
    if len(parts) == 1:
        return parts[0][1]
    order = upload([i for rows, _ in parts for i in rows], parts[0][1].device)
    both = torch.cat([hidden.unflatten(0, (-1, width)) for _, hidden in parts])
    return torch.empty_like(both).index_copy_(0, order, both).flatten(0, 1)


def with_blind_rows(
    view: Packed, wanted: Tensor, canvas: Canvas, mask_id: int
) -> tuple[Packed, Tensor]:
    """The rows, and after them the same rows with their prompts masked; the wanted rows of both.
    Given tokens of the response stay."""
    prompts = upload([len(row.prompt) for row in canvas.rows], view.ids.device)
    lengths = view.cu_seqlens.diff().long()
    prompt = torch.repeat_interleave(prompts, lengths, output_size=len(view.ids))
    blind = view.ids.masked_fill(view.position_ids < prompt, mask_id)
    both = Packed(
        torch.cat([view.ids, blind]),
        view.position_ids.repeat(2),
        torch.cat([view.cu_seqlens, view.cu_seqlens[1:] + len(view.ids)]),
        view.max_length,
    )
    return both, torch.cat([wanted, wanted + len(view.ids)])
