"""How a training step meets the context mode: each mode yields losses, one backward each.

A mode takes a packed batch on the host and yields one `Loss` per backward. Their sums add up to the
sum over the batch's sequences, so that a step divides by sequences alone, whatever the mode. No
graph outlives its backward. `run` is a Run of setup.py: its backbone, spec, device, autocast and
corrupt(batch, draw, [block]), the objective's masks of one of the visit's draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from bwsft_kernels import MaskedBatch, block_mask
from torch import Tensor

from bwsft.models.block_masks import PAD, block_causal_mask, grid_numbers
from bwsft.models.kv_cache import Context, Span
from bwsft.objectives.blockwise import every_block, levels_of
from bwsft.objectives.nelbo import State


class Loss(NamedTuple):
    """What one backward needs, and what a step counts."""

    total: Tensor  # weighted sum of CE
    rows: Tensor  # 0-dim: masked tokens that bear it
    region: Tensor  # 0-dim: tokens of the supervised region, masked or not


Losses = Iterator[Loss]


@dataclass(frozen=True)
class Mode:
    """One context mode with its options."""

    name: str = "exact"
    draws: int = 1
    context_grad: bool = True
    even: bool = False
    """Every active block is full, as the `fixed` canvas makes it."""
    prune: bool = True
    """The rows that bear loss lie in one block, much shorter than the row."""
    all_blocks: bool = False
    """A visit trains every block of an example, one after the other, and not one of them."""
    prompt_blocks: bool = False
    """block_causal: the prompt is cut on the same grid, as in a block-causal family."""

    def losses(self, run, batch) -> Losses:
        """Weighted sums whose total is the batch's."""
        if self.name == "block_causal":
            yield from block_causal(run, batch, self.prompt_blocks)
            return
        part = self.exact if self.name == "exact" and self.context_grad else self.frozen
        if not self.all_blocks:
            batch = batch.to(run.device)
            yield from part(run, partial(run.corrupt, batch))
            return
        for some, block in every_block(batch, run.spec):
            yield from part(run, partial(run.corrupt, some.to(run.device), block=block))

    def exact(self, run, corrupt) -> Losses:
        """A forward and backward over the whole canvas per draw; the last layer for the block
        alone."""
        for draw in range(self.draws):
            noisy, masked = corrupt(draw)
            context = Context(self.span(masked, run.spec)) if self.prune else None
            with run.autocast():
                total = run.backbone(noisy, *loss_rows(masked), context) / self.draws
            yield Loss(total, masked.num_rows, masked.block_length.sum())

    def frozen(self, run, corrupt) -> Losses:
        """A context pass without autograd, then `draws` passes over the active rows against it.

        `cached` hides the whole active block from the context, as the cached decoder does on
        entering a block; `exact` with context_grad=False shows it the noisy block.
        """
        context = None
        for draw in range(self.draws):
            noisy, masked = corrupt(draw)
            with run.autocast():
                if context is None:
                    context = self.freeze(run, noisy, self.span(masked, run.spec))
                total = run.backbone(noisy, *loss_rows(masked), context) / self.draws
            yield Loss(total, masked.num_rows, masked.block_length.sum())

    def freeze(self, run, noisy, span: Span) -> Context:
        """The context pass of a noisy batch."""
        if self.name == "cached":
            block = span.flat(noisy.cu_seqlens).flatten()
            hidden = noisy.ids.index_fill(0, block, run.spec.mask_id)
            noisy = dataclasses.replace(noisy, ids=hidden)
        inner = getattr(run.backbone, "module", run.backbone)  # inside DDP
        context = Context(span, inner.new_cache(noisy.num_sequences, noisy.max_length))
        with torch.no_grad():
            run.backbone(noisy, None, None, None, context)
        return context

    def span(self, masked, spec) -> Span:
        length = masked.block_length.clamp(min=1)
        return Span(masked.block_start, length, spec.block_size, self.even)

    def score(self, run, state: State) -> Tensor:
        """Weighted sum of CE of a held-out state, in the mode's own decoding."""
        noisy, rows, context = state.noisy, state.rows.to(run.device), None
        loss = (state.target.to(run.device), state.weight.to(run.device))
        with run.autocast():
            if self.name == "block_causal":
                # Blocks before the active one are clean in the noisy row; it sees no others.
                clean = noisy.ids[response_rows(noisy)]
                one = one_pass(noisy, run.eval_spec, clean, self.prompt_blocks)
                copy_of = torch.zeros_like(noisy.ids)
                copy_of[response_rows(noisy)] = one.noisy
                return run.backbone(one.to(run.device), copy_of.to(run.device)[rows], *loss)
            noisy = noisy.to(run.device)
            if self.name == "cached":
                start, length = (x.to(run.device) for x in (state.start, state.stop - state.start))
                span = Span(start, length.clamp(min=1), run.eval_spec.block_size)
                context = self.freeze(run, noisy, span)
            return run.backbone(noisy, rows, *loss, context)


def mode_of(config, family) -> Mode:
    """The context mode of a run `config` on a model `family`."""
    return Mode(
        name=config.context,
        draws=config.draws_per_context,
        context_grad=config.objective.context_grad,
        even=config.dataset.canvas == "fixed" and family.block_origin == "response",
        prune=config.objective.name == "blockwise",
        all_blocks=config.objective.blocks == "all",
        prompt_blocks=family.attention == "block_causal",
    )


def corrupt(run, batch, draw: int, block: int | None = None):
    """(noisy batch, MaskedBatch) of one of the visit's draws, of this block if one is given. `run`
    has a config, an objective (blockwise or classical) and its spec."""
    choice, draws = run.config.objective, run.config.draws_per_context
    more = {"block": block, "levels": levels_of(choice)}
    return run.objective.corrupt(batch, run.spec, choice.blocks, draw, draws, **more)


def loss_rows(masked: MaskedBatch) -> tuple[Tensor, Tensor, Tensor]:
    return masked.rows, masked.row_target, masked.row_weight


def whole_response(run, batch, place) -> Losses:
    """The draws of an objective that masks the whole response (bwsft/objectives/base.py)."""

    @torch.no_grad()
    def predict(noisy, rows):
        with run.autocast():
            return run.backbone(noisy, rows, None, None)

    for drawn in run.objective.draws(batch.to(run.device), run.options, place, predict):
        loss = (drawn.rows, drawn.target, drawn.weight, None, drawn.smoothing)
        with run.autocast():
            total = run.backbone(drawn.noisy, *loss, run.options.excluded_id)
        yield Loss(total, drawn.num_rows, drawn.region)


@dataclass(frozen=True)
class OnePass:
    """All blocks of a batch in one packed batch: per sequence a clean row [prompt + response] and
    a noisy copy of the response at the same positions (with prompt_blocks: of the blocks that hold
    it, so of the prompt's tail too)."""

    ids: Tensor  # [T]
    cu_seqlens: Tensor  # [S + 1]
    position_ids: Tensor  # [T]
    numbers: Tensor  # [S, L] block numbers for block_causal_mask
    noisy: Tensor  # [sum of response lengths] where each response token's noisy copy stands
    max_length: int

    @property
    def mask(self) -> Tensor:
        return block_causal_mask(self.numbers)

    def to(self, device) -> OnePass:
        tensors = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **tensors)


def block_causal(run, batch, prompt_blocks: bool = False) -> Losses:
    """Every block of every response supervised by one forward and backward.

    Block k of a visit has its own rate and marks (draw = visit * M + k) and weight 1 / (M * count),
    so that a sequence's weights sum to 1 as in the other modes, or to M with block_factor "sum".
    `batch` is on the host.
    """
    spec = run.spec
    blocks = block_lengths(batch, spec)
    per_row = torch.tensor([len(row) for row in blocks])
    owner = torch.repeat_interleave(torch.arange(len(blocks)), per_row)
    number = torch.cat([torch.arange(len(row)) for row in blocks])
    sizes = torch.tensor([n for row in blocks for n in row])
    masked = block_mask(
        batch.ids[response_rows(batch)],
        torch.zeros_like(sizes),
        sizes,
        dataclasses.replace(spec, block_origin="response"),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]).int(),
        sample_ids=batch.sample_ids[owner],
        draw=(batch.visits * per_row)[owner] + number,
        block=torch.zeros_like(sizes),
    )
    one = one_pass(batch, spec, masked.noisy_ids, prompt_blocks)
    block_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    weight = masked.row_weight
    if spec.block_factor == "mean":
        weight = weight / per_row[owner][block_of[masked.rows]]
    rows = (x.to(run.device) for x in (one.noisy[masked.rows], masked.row_target, weight))
    with run.autocast():
        total = run.backbone(one.to(run.device), *rows)
    yield Loss(total, masked.num_rows.to(run.device), masked.block_length.sum().to(run.device))


def response_rows(batch) -> Tensor:
    """Flat indices of all response tokens of a batch, in order."""
    start = batch.cu_seqlens[:-1].long() + batch.prompt_lengths
    return torch.cat(
        [torch.arange(a, a + n) for a, n in zip(start.tolist(), batch.response_lengths.tolist(),
                                                strict=True)]
    )


def block_lengths(batch, spec) -> list[list[int]]:
    """Sizes of the blocks of every response, on the family's grid."""
    out, size = [], spec.block_size
    for prompt, length in zip(
        batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True
    ):
        into = prompt % size if spec.block_origin == "absolute" else 0
        first = min(size - into, length)
        rest = length - first
        out.append([first] + [size] * (rest // size) + ([rest % size] if rest % size else []))
    return out


def one_pass(batch, spec, noisy_response: Tensor, prompt_blocks: bool = False) -> OnePass:
    """Lay out clean rows and noisy copies. `batch` is on the host."""
    ids, positions, numbers, copies, lengths = [], [], [], [], [0]
    parts = noisy_response.split(batch.response_lengths.tolist())
    for s, (blocks, part) in enumerate(zip(block_lengths(batch, spec), parts, strict=True)):
        prompt, length = int(batch.prompt_lengths[s]), sum(blocks)
        row = batch.ids[int(batch.cu_seqlens[s]) :][: prompt + length]
        if prompt_blocks:
            clean, tail = grid_numbers(prompt + length, spec.block_size), prompt % spec.block_size
        else:
            # The prompt is block 0, clean blocks are 1, 2, ...
            sizes = torch.tensor([prompt, *blocks])
            clean, tail = torch.repeat_interleave(torch.arange(len(sizes)), sizes), 0
        ids += [row, row[prompt - tail : prompt], part]
        positions += [torch.arange(prompt + length), torch.arange(prompt - tail, prompt + length)]
        numbers += [torch.cat([clean, -clean[prompt - tail :]])]
        first = sum(lengths) + prompt + length + tail
        copies.append(torch.arange(first, first + length))
        lengths.append(prompt + tail + 2 * length)
    return OnePass(
        ids=torch.cat(ids),
        cu_seqlens=torch.tensor(lengths).cumsum(0).int(),
        position_ids=torch.cat(positions),
        numbers=torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True, padding_value=PAD),
        noisy=torch.cat(copies),
        max_length=max(lengths),
    )
