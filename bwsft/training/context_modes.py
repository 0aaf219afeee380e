"""The context modes of training: how a batch and an objective become losses.

A mode yields one `Loss` per backward. Their sums add up to the sum over the batch's sequences, so
that a step divides by sequences alone, whatever the mode. No graph outlives its backward.

exact         every draw runs the whole canvas, with gradients through the context; with
              shared_context the first one alone, whose context serves the others as a constant
cached        a context pass without autograd, then cheap passes over the active block against it
block_causal  all blocks in one pass: a clean row and noisy copies (block_causal.py), which see it
              with gradients, or as a constant that a pass without autograd made
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from bwsft_kernels import LinearArgmax
from bwsft_kernels.block_grid import BlockGrid
from torch import Tensor

from bwsft.models.backbone import Backbone, Family
from bwsft.models.kv_cache import Context, Span
from bwsft.objectives.base import Draw, Objective, Place
from bwsft.training.block_causal import OnePass, block_size_at, clean_responses, one_pass

if TYPE_CHECKING:
    from bwsft.config import Config
    from bwsft.data.packing import Batch


class Loss(NamedTuple):
    """What one backward needs, and what a step counts."""

    total: Tensor  # weighted sum of CE
    rows: Tensor  # 0-dim: supervised tokens
    region: Tensor  # 0-dim: tokens of the supervised regions, masked or not


def on_host(count: Tensor) -> Callable[[], int]:
    """A function that returns a 0-dim count. From a GPU it is copied from now on, and the layers
    are launched meanwhile: the head must know its rows, and nothing waits for them."""
    if not count.is_cuda:
        return lambda: int(count)
    host = torch.empty((), dtype=count.dtype, pin_memory=True).copy_(count, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> int:
        copied.synchronize()
        return int(host)

    return read


@dataclass(frozen=True)
class ContextMode:
    """One context mode, with the model and the objective that it joins."""

    backbone: Backbone  # or a wrapper around it (DDP) with the same forward
    objective: Objective
    grid: BlockGrid
    device: torch.device
    autocast: Callable[[], AbstractContextManager] = nullcontext
    even: bool = False  # every active block is full, as the `fixed` canvas makes it
    confidence: float = 0.0  # weight of the entropy of tokens that the model has right
    active_blocks: int = 1  # at most, in a draw

    def losses(self, batch: Batch, place: Place) -> Iterator[Loss]:
        """Weighted sums of CE whose total is that of a batch on the host."""
        context = None
        for draw in self.objective.draws(batch.to(self.device), place, self.predict):
            context = self.context_of(draw, context)
            total = self.loss_of(draw, context, training=True) / draw.of
            yield Loss(total, draw.num_rows, draw.region)

    def context_of(self, draw: Draw, before: Context | None) -> Context | None:
        """What a draw's forward sees of its context; before: that of the draw before it."""
        raise NotImplementedError

    @torch.no_grad()
    def score(self, draw: Draw) -> Tensor:
        """Weighted sum of CE of a held-out draw, as the mode's own decoder sees it."""
        return self.loss_of(draw.to(self.device), None)

    def loss_of(self, draw: Draw, context: Context | None, training: bool = False) -> Tensor:
        """Weighted sum of CE of a draw, in training with the objective's own terms: the model's one
        forward."""
        count = on_host(draw.num_rows)
        own = (self.objective.excluded_id, self.confidence) if training else (None, 0.0)
        with self.autocast():
            supervised = draw.rows, draw.target, draw.weight
            return self.backbone(
                draw.noisy, *supervised, context, draw.smoothing, *own, count)

    def backwards(self, draws: int) -> int:
        """How many losses a batch has whose visits have so many draws of one block."""
        return draws

    @torch.no_grad()
    def predict(self, noisy: Batch, rows: Tensor) -> LinearArgmax:
        """Token and confidence at the rows [N] of a noisy batch."""
        with self.autocast():
            return self.backbone(noisy, rows, None, None)

    def span(self, draw: Draw) -> Span:
        """The active blocks of a draw."""
        width = self.active_blocks * self.grid.size
        return Span(draw.block_start, draw.block_length.clamp(min=1), width, self.even)

    def empty_context(self, draw: Draw) -> Context:
        """The active blocks of a draw, and room for the keys and values of its canvas."""
        inner = getattr(self.backbone, "module", self.backbone)  # inside DDP
        with self.autocast():  # which decides the cache's dtype
            cache = inner.new_cache(draw.noisy.num_sequences, draw.noisy.max_length)
        return Context(self.span(draw), cache)

    def idle(self, batch: Batch) -> Tensor:
        """A forward whose loss is 0, for a rank that must keep step with others."""
        batch = batch.to(self.device)
        row = batch.ids.new_zeros(1)
        with self.autocast():
            return self.backbone(batch, row, batch.ids[row], torch.zeros_like(row).float())


@dataclass(frozen=True)
class Exact(ContextMode):
    """A forward and backward over the whole canvas per draw."""

    prune: bool = True  # run the last layer for the active block alone

    def context_of(self, draw: Draw, before: Context | None) -> Context | None:
        return Context(self.span(draw)) if self.prune else None


@dataclass(frozen=True)
class SharedContext(ContextMode):
    """The first draw of a visit as in `Exact`; its keys and values are the context of the others,
    of which the active rows alone run."""

    def context_of(self, draw: Draw, before: Context | None) -> Context | None:
        if draw.number == 0:
            return dataclasses.replace(self.empty_context(draw), live=True)
        return dataclasses.replace(before, live=False)


@dataclass(frozen=True)
class FrozenContext(ContextMode):
    """A context pass without autograd, then the draws' passes over the active rows against it."""

    def context_of(self, draw: Draw, before: Context | None) -> Context | None:
        return self.context_pass(draw) if draw.number == 0 else before

    def hidden(self, draw: Draw, span: Span) -> Batch:
        """What the context pass sees: the noisy block itself."""
        return draw.noisy

    @torch.no_grad()
    def context_pass(self, draw: Draw) -> Context:
        """The keys and values of a draw's context, as constants."""
        context = self.empty_context(draw)
        with self.autocast():
            self.backbone(self.hidden(draw, context.span), None, None, None, context)
        return context


@dataclass(frozen=True)
class Cached(FrozenContext):
    """The active block is all [MASK] in the context pass, as the cached decoder enters a block."""

    mask_id: int = -1

    def hidden(self, draw: Draw, span: Span) -> Batch:
        block = span.flat(draw.noisy.cu_seqlens).flatten()
        ids = draw.noisy.ids.index_fill(0, block, self.mask_id)
        return dataclasses.replace(draw.noisy, ids=ids)

    @torch.no_grad()
    def score(self, draw: Draw) -> Tensor:
        draw, uneven = draw.to(self.device), dataclasses.replace(self, even=False)
        return self.loss_of(draw, uneven.context_pass(draw))  # a held-out block may be short


@dataclass(frozen=True)
class BlockCausal(ContextMode):
    """Every block of every response supervised by one forward and backward, in as many noisy copies
    as a visit has draws. Batches are on the host, where their rows are laid out."""

    prompt_blocks: bool = False  # the prompt is cut on the same grid (a block-causal family)
    context_grad: bool = True  # gradients go through what the copies see of the clean rows
    size_at: Callable[[int], int] | None = None  # update -> tokens in a block; None: the grid's
    shift: int = 0  # of the family's logits
    causal: bool = False  # a clean token sees no later one
    ar_weight: float = 0.0  # of the loss of clean tokens, each predicted by the one before

    def losses(self, batch: Batch, place: Place) -> Iterator[Loss]:
        mode = self if self.size_at is None else self.in_blocks_of(self.size_at(place.step))
        batch = mode.objective.visited(batch)
        draw = mode.laid_out(batch, list(mode.objective.draws(batch, place, mode.predict)))
        draw = mode.with_clean_rows(batch, draw) if mode.ar_weight else draw
        context = mode.live(draw) if mode.context_grad else mode.clean_pass(draw.noisy)
        yield Loss(mode.loss_of(draw, context, training=True), draw.num_rows, draw.region)

    def in_blocks_of(self, size: int) -> BlockCausal:
        """The mode where blocks have so many tokens."""
        spec = dataclasses.replace(self.objective.spec, block_size=size)
        objective = dataclasses.replace(self.objective, spec=spec)
        return dataclasses.replace(self, grid=spec.grid, objective=objective)

    @torch.no_grad()
    def score(self, draw: Draw) -> Tensor:
        # Blocks before the active one are clean in the noisy row; it sees no others.
        draw = self.laid_out(draw.noisy, [draw])
        return self.loss_of(draw, self.live(draw))

    def backwards(self, draws: int) -> int:
        return 1

    def laid_out(self, clean: Batch, draws: list[Draw]) -> Draw:
        """The draws as one, over clean rows and noisy copies, on the device."""
        noisy = torch.stack([draw.noisy.ids for draw in draws])
        one = one_pass(clean, noisy, self.grid, self.prompt_blocks, self.shift, self.causal,
                       self.ar_weight > 0, draws[0].groups)
        if draws[0].conditioned is not None:
            one = one.seeing_predictions([draw.conditioned for draw in draws])
        parts = []  # of each draw without the list's tail
        for draw, row in zip(draws, one.row_of, strict=True):
            n = int(draw.num_rows)
            parts.append((row[draw.rows[:n]], draw.target[:n], draw.weight[:n] / draw.of))
        rows, target, weight = (torch.cat(part) for part in zip(*parts, strict=True))
        num_rows, region = (sum(getattr(d, k) for d in draws) for k in ("num_rows", "region"))
        return Draw(one, rows, target, weight, num_rows, region).to(self.device)

    def with_clean_rows(self, batch: Batch, draw: Draw) -> Draw:
        """The draw with the responses' clean tokens supervised too."""
        rows, target, weight = (x.to(self.device) for x in clean_responses(batch, draw.noisy))
        return dataclasses.replace(
            draw,
            rows=torch.cat([draw.rows, rows]),
            target=torch.cat([draw.target, target]),
            weight=torch.cat([draw.weight, self.ar_weight * weight.to(draw.weight.dtype)]),
            num_rows=draw.num_rows + len(rows),
            region=draw.region + len(rows),
        )

    def live(self, draw: Draw) -> Context | None:
        """The copies as the tokens that come out of the last layer, which gives of the clean rows
        keys and values alone; None where clean rows predict the first tokens of blocks."""
        return None if self.shift else Context(draw.noisy.noisy)

    @torch.no_grad()
    def clean_pass(self, one: OnePass) -> Context:
        """The keys and values of the clean rows as constants, with room for those of the copies,
        which are the active tokens."""
        inner = getattr(self.backbone, "module", self.backbone)  # inside DDP
        with self.autocast():
            context = Context(one.noisy, inner.new_cache(1, len(one.ids) - 1))
            self.backbone(one.clean, None, None, None, context)
        return context


def make_mode(
    config: Config,
    family: Family,
    backbone: Any,  # a Backbone, or a wrapper with its forward
    objective: Objective,
    device: torch.device,
) -> ContextMode:
    """The context mode of a run `config` on a model: bf16 matmuls on CUDA, elsewhere the model's
    own dtype."""
    cuda = device.type == "cuda"
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=cuda)
    grid = BlockGrid(config.block_size, family.block_origin)
    active = config.active_blocks  # or fewer, in the first and the last group of a response
    even = config.dataset.canvas == "fixed" and grid.at_response and active == 1
    common = (backbone, objective, grid, device, autocast, even, config.objective.confidence,
              active)  # fmt: skip
    if config.context == "block_causal":
        blocks = family.attention == "block_causal" and not grid.at_response
        grad = config.objective.context_grad
        size_at = functools.partial(block_size_at, config) if config.block_size_schedule else None
        causal = config.clean_attention == "causal"
        clean = (family.logit_shift, causal, config.ar_weight)
        return BlockCausal(*common, blocks, grad, size_at, *clean)
    if config.context == "cached":
        return Cached(*common, mask_id=family.mask_id)
    o = config.objective
    if not o.context_grad:
        return FrozenContext(*common)
    if config.shared_context:
        return SharedContext(*common)
    return Exact(*common, prune=o.has_blocks and not o.suffix_weight)
