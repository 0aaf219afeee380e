"""The context modes of decoding: how the active block's hidden states are computed in a step.

exact         every step runs the whole canvas
cached        on entering a block one pass over the whole canvas, which is its first denoising step
              and stores all keys and values; then the block runs alone against those
prefix        as cached, but the suffix is recomputed with the block
block_causal  a block sees the prompt, the blocks before it and itself; the pass that enters it, its
              first denoising step, stores the keys and values of the finished tokens before it
              (finished.py), and then it runs alone, or with the active blocks after it. In a
              block-causal family the prompt's tail, which shares the first block of the response,
              runs with that block

S sequences, T packed tokens, W width of the active blocks, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from bwsft_kernels import RangePlan, cache_plan
from torch import Tensor

from bwsft.decoding.canvas import Canvas, Packed, span_of, upload
from bwsft.decoding.cuda_graphs import GraphedPasses, graphed
from bwsft.decoding.finished import Finished
from bwsft.decoding.plan import Planned
from bwsft.models.backbone import Backbone
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
    finished: Finished | None = None  # block_causal: what of the cache is final

    @classmethod
    def begin(
        cls, model: Backbone, config: DecodeConfig, canvas: Canvas, verifier: Verifier | None = None
    ) -> DecodeContext:
        rows, cache, finished = canvas.rows, None, None
        if config.context != "exact":
            cache = model.new_cache(len(rows), max(row.length for row in rows))
        if config.context == "block_causal":
            finished = Finished.nothing(rows, model.family, config.block_size)
        run = graphed(model) if config.graphs else model
        return cls(model, run, config, cache, [0] * len(rows), finished)

    def keep(self, kept: list[int]) -> None:
        """Rows but these, at least one, leave the cache, whose buffers are others from then on."""
        if self.config.graphs:  # with all that was recorded on the old buffers, and its memory
            self.run = graphed(self.model)
        if self.cache is not None:
            self.cache = self.cache.keep(upload(kept, self.cache.visible.device))
        self.passes = [self.passes[i] for i in kept]
        if self.finished is not None:
            self.finished = self.finished.keep(kept)

    def hidden(self, canvas: Canvas, planned: Planned, block: Span) -> Tensor:
        """The hidden states that predict the tokens of the active blocks, [S * W, D]."""
        if self.config.context == "exact":
            return self.exact(canvas, planned, block)
        if self.config.context == "block_causal":
            return self.block_causal(canvas, planned, block)
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
        return [min(step.end + window, row.length) for step, row in pairs]

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

    def block_causal(self, canvas: Canvas, planned: Planned, block: Span) -> Tensor:
        """block_causal: rows that enter a block store what is finished before it in the same pass,
        the others run their block alone."""
        enter = self.finished.entering(planned)
        parts, rest = [], [i for i in range(len(planned)) if i not in enter]
        if enter:
            parts.append((enter, self.entering_pass(canvas, enter, planned, block)))
        if rest:
            parts.append((rest, self.block_pass(canvas, rest, planned, block)))
        return joined(parts, len(planned), block.width)

    def entering_pass(
        self, canvas: Canvas, rows: list[int], planned: Planned, block: Span
    ) -> Tensor:
        """block_causal: run the active blocks of some rows, and store the finished tokens before
        them that are not stored yet."""
        self.count(rows)
        every = self.finished.begins(planned)
        begins = [every[i] for i in rows]
        starts, stops = [self.finished.stored[i] for i in rows], [planned[i].stop for i in rows]
        seen = self.finished.seen(rows, begins, stops)
        cache, block = self.part(rows, block)
        if any(starts):
            span = span_of(starts, stops, block.start.device)
            wanted = span.places_of(block.shifted(self.model.family.logit_shift))
            show_each(cache, seen, span.width)
            hidden = self.run_span(canvas, span, cache, wanted)
        else:  # the prompts, which may be of any length: packed
            view = canvas.view(rows, stops)
            wanted = self.model.predicting_rows(block.flat(view.cu_seqlens))
            hidden = self.model.fill(view, cache, wanted, prefix_plan(view, sum(seen, [])))
        if self.model.family.logit_shift:
            self.finished.note(rows, hidden.unflatten(0, (-1, block.width))[:, 0])
        self.finished.store(rows, begins)
        return hidden

    def block_pass(
        self, canvas: Canvas, rows: list[int], planned: Planned, block: Span
    ) -> Tensor:
        """block_causal: the active blocks of some rows see what is stored, those before them and
        themselves, of a block that holds the prompt's tail also that."""
        self.count(rows)
        shift = self.model.family.logit_shift
        starts, stops = [self.finished.stored[i] for i in rows], [planned[i].stop for i in rows]
        cache, block = self.part(rows, block)
        span, wanted = block, None
        if starts != [planned[i].start for i in rows]:
            span = span_of(starts, stops, block.start.device)
        if span is not block or shift:
            wanted = span.places_of(block.shifted(shift))
        if any(len(planned[i].window) > 1 for i in rows):
            show_each(cache, self.finished.seen(rows, starts, stops), span.width)
        else:
            show(cache, stops)
        hidden = self.run_span(canvas, span, cache, wanted)
        if not shift:
            return hidden
        whole = [i for i in rows if self.finished.stored[i] == planned[i].start]
        return self.finished.recall(rows, whole, hidden.unflatten(0, (-1, block.width)))

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
        """Run what predicts the tokens of a span, against the first `visible` positions."""
        self.count(rows)
        show(cache, [visible[i] for i in rows])
        return self.run_span(canvas, span.shifted(self.model.family.logit_shift), cache, wanted)

    def run_span(
        self, canvas: Canvas, span: Span, cache: ContextCache, wanted: Tensor | None = None
    ) -> Tensor:
        """Run the tokens of a span against what the cache shows."""
        starts = canvas.cu_seqlens[:-1]
        if cache.rows is not None:
            starts = starts[cache.rows]
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


def show(cache: ContextCache, visible: list[int]) -> None:
    most = max(visible)
    if min(visible) == most:
        cache.show(most)
    else:
        cache.show(upload(visible, cache.visible.device), most)


def show_each(cache: ContextCache, seen: list[list[int]], width: int) -> None:
    """Show each token of a span so many positions; the last one of a short stretch repeats."""
    full = [own + own[-1:] * (width - len(own)) for own in seen]
    cache.show(upload(full, cache.visible.device), max(own[-1] for own in seen))


def prefix_plan(view: Packed, seen: list[int]) -> RangePlan:
    """The plan of packed tokens of which each sees so many of its sequence, from the left."""
    slots = view.max_length
    stops = upload(seen, view.ids.device)
    owner = torch.searchsorted(
        view.cu_seqlens[1:].long(), torch.arange(len(seen), device=stops.device), right=True
    )
    plan = cache_plan(stops, view.cu_seqlens, slots)
    return plan.part(keys=owner * slots + view.position_ids)


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
