"""Trace distillation: learn to commit several tokens of a block at once from careful decodings.

A careful decoder commits one token a step. Its trace says in which order: `batch.steps` has the
denoising step of every response token (`bwsft distill`, data/traces.py). One step of one example:

1. Choose the active block a, uniformly over 1..M, as Blockwise SFT does.
2. Draw a state along the trace: t, uniform on 0..K-1, of the K tokens of the block that the decoder
   committed are visible, the first t of its order. All others of the block are masked, with what it
   never committed. Prompt and earlier blocks are clean, the suffix is hidden.
3. Loss: cross-entropy on the next w tokens in that order (fewer at the end), each weighed
   1 / (their number). What comes later in the block is masked and without loss.

With w = 1 this is what the careful decoder did; a large w asks for tokens of which it only was sure
after others. w grows linearly over the run, from the share `window_from` of a block to `window_to`
(a curriculum, after d3LLM, arXiv:2601.07568). The targets are the model's own answers that were
right. A sequence's weights sum to 1: every block holds a committed token.

Blockwise SFT masks at random; here masked are the tokens that the decoder left for later, the only
states that decoding comes through. Later tokens are in more windows and so weigh more: with w = B
the r-th of K tokens, from 0, has the expected weight (1/K + 1/(K-1) + ... + 1/(K-r)) / K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from bwsft_kernels import MaskSpec, Stream
from bwsft_kernels.philox import philox_u24
from torch import Tensor

from bwsft.objectives import base as d
from bwsft.objectives.block_choice import num_blocks
from bwsft.objectives.blockwise import mask_spec

if TYPE_CHECKING:
    from bwsft.data.packing import Batch


class Blocks(NamedTuple):
    """The blocks of a batch, each with a number: sequence * (most blocks of one) + index."""

    of: Tensor  # [T] block of each token, meaningless outside responses
    index: Tensor  # [T] its index in the response
    committed: Tensor  # [T] bool: tokens that the trace commits
    order: Tensor  # [T] place of a committed token in its block's order, from 0
    total: Tensor  # [S * most] committed tokens of each block


@dataclass(frozen=True, kw_only=True)
class Distill(d.Objective):
    """Supervises what a trace commits next, in windows that grow over the run."""

    spec: MaskSpec  # of which the grid, [MASK] and the seed hold
    steps: int  # updates of the run
    window_from: float  # tokens of a window at the start of the run, as a share of a block
    window_to: float  # and at its end
    draws_per_visit: int = 1  # states of one block; their losses are averaged
    one_pass: bool = False  # a draw has a state of every block of every response, for block_causal

    @classmethod
    def of(cls, config: Any, family: Any, responses: Iterable = ()) -> Distill:
        return cls(
            spec=mask_spec(config, family), steps=config.steps, **vars(config.objective.distill),
            draws_per_visit=config.draws_per_context, one_pass=config.context == "block_causal",
        )  # fmt: skip

    def draws(self, batch: Batch, place: d.Place, predict: d.Predict) -> Iterator[d.Draw]:
        """`draws_per_visit` states of one block of each example, or of all of them. ValueError for
        a batch without traces."""
        if batch.steps is None:
            raise ValueError("--objective.name distill trains on what `bwsft distill` wrote")
        rows = d.response_rows(batch)
        blocks = blocks_of(batch, rows, self.spec)
        for number in range(self.draws_per_visit):
            visible, taught = self.state(batch, blocks, place.step, number)
            if self.one_pass:
                draw = self.every_block(batch, rows, blocks, visible, taught)
            else:
                draw = self.one_block(batch, rows, blocks, visible, taught)
            yield dataclasses.replace(draw, number=number, of=self.draws_per_visit)

    def window(self, step: int) -> int:
        """Tokens that are supervised in update `step` (from 0), at most."""
        progress = step / max(self.steps - 1, 1)
        share = self.window_from + (self.window_to - self.window_from) * progress
        return max(1, round(share * self.spec.block_size))

    def state(
        self, batch: Batch, blocks: Blocks, step: int, number: int
    ) -> tuple[Tensor, Tensor]:
        """(visible, supervised) committed tokens [T] of every block, state number `number` of the
        visit."""
        most = len(blocks.total) // batch.num_sequences
        index = torch.arange(most, device=batch.ids.device)
        visit = (batch.visits * self.draws_per_visit + number)[:, None]
        counter = index[None], visit, batch.sample_ids[:, None]
        u24 = philox_u24(*counter, seed=self.spec.seed, stream=Stream.TIME).flatten()
        seen = (blocks.total * u24 >> 24)[blocks.of]  # t, uniform on 0..K-1
        visible = blocks.committed & (blocks.order < seen)
        window = blocks.order < seen + self.window(step)
        return visible, blocks.committed & ~visible & window

    def one_block(
        self, batch: Batch, rows: d.Rows, blocks: Blocks, visible: Tensor, taught: Tensor
    ) -> d.Draw:
        """The state of the active block; the suffix is hidden."""
        u24 = d.sequence_u24(batch, self.spec.seed, Stream.BLOCK, batch.visits)
        active = num_blocks(batch, self.spec) * u24 >> 24  # [S]
        mine = active[rows.owner]
        here = rows.inside & (blocks.index == mine)
        hidden = rows.inside & (blocks.index >= mine) & ~(here & visible)
        where = here & taught
        weight = 1 / d.count(where, rows).double()
        draw = d.masked_draw(batch, hidden, weight[rows.owner], rows, self.spec.mask_id, where)
        shape = batch.prompt_lengths, batch.response_lengths
        start, stop = self.spec.grid.bounds(active, *shape)
        length = stop - start
        return dataclasses.replace(
            draw, block_start=start, block_length=length, region=length.sum()
        )

    def every_block(
        self, batch: Batch, rows: d.Rows, blocks: Blocks, visible: Tensor, taught: Tensor
    ) -> d.Draw:
        """A state of every block at once, each block with an equal share of the weight. `batch` is
        on the host."""
        taught_in = torch.zeros_like(blocks.total).index_add_(0, blocks.of, taught.long())
        weight = 1 / (taught_in[blocks.of] * num_blocks(batch, self.spec)[rows.owner]).double()
        hidden = rows.inside & ~visible
        return d.masked_draw(batch, hidden, weight, rows, self.spec.mask_id, taught)


def blocks_of(batch: Batch, rows: d.Rows, spec: MaskSpec) -> Blocks:
    """The blocks of a batch with traces, and their order, without a host read."""
    prompt = batch.prompt_lengths[rows.owner]
    most = batch.max_length // spec.block_size + 2  # a bound that the host knows
    index = torch.where(rows.inside, spec.grid.index_of(rows.position, prompt), 0)
    of = rows.owner * most + index
    committed = rows.inside & (batch.steps >= 0)
    total = of.new_zeros(batch.num_sequences * most).index_add_(0, of, committed.long())
    # Sorted by block, and within one by step, ties by position; the others come last.
    by_step = batch.steps.argsort(stable=True)
    key = torch.where(committed, of, len(total))
    sort = by_step[key[by_step].argsort(stable=True)]
    order = torch.empty_like(sort)
    order[sort] = torch.arange(len(sort), device=sort.device)
    return Blocks(of, index, committed, order - (total.cumsum(0) - total)[of], total)
