"""Uniform diffusion, block by block: the objective of models whose noise is random tokens.

DiffusionGemma knows no [MASK]. Its canvas holds random tokens of the vocabulary in the places that
are not decided yet, and it predicts every place anew. One step of one example:

1. For each block draw a rate t ~ U(low, high), and replace each of its tokens with probability t by
   one drawn uniformly from the whole vocabulary, the true one among them.
2. With probability `self_conditioning` the block also sees what the model says of it, as it sees in
   decoding what it said in the step before (the context mode runs that pass).
3. Loss: cross-entropy on every token of the block, replaced or not, since nothing marks the
   replaced ones: 1 / (tokens of the block) each, and 1 / M for each of M blocks.

With `one_block` a visit is about one block of each response, drawn uniformly: what is before it
joins the prompt, what is after it goes. The cheaper step, and the dearer token.

Rates and marks are block_mask's, so those of Blockwise SFT with the same seed; every choice is a
pure function of (seed, example, visit).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from bwsft_kernels import Stream
from bwsft_kernels.philox import philox_u24
from torch import Tensor

from bwsft.objectives.base import (
    ONE24,
    Draw,
    Place,
    Predict,
    between,
    response_rows,
    supervise,
    token_u24,
)
from bwsft.objectives.blockwise import Blockwise, mask_spec
from bwsft.objectives.nelbo import FIRST_DRAW, HeldOut

if TYPE_CHECKING:
    from bwsft.data.packing import Batch


@dataclass(frozen=True, kw_only=True)
class Uniform(Blockwise):
    """Replaces tokens of every block of each response, and supervises all of them."""

    vocab_size: int
    self_conditioning: float = 0.5  # chance that a block sees the model's own prediction of it
    one_block: bool = False
    one_pass: bool = True

    def __post_init__(self) -> None:
        spec = self.spec
        if not self.one_pass or spec.empty != "skip" or spec.pairs or spec.block_factor != "mean":
            raise ValueError(
                "uniform noise needs one_pass and a MaskSpec with empty='skip', without pairs and "
                "with block_factor='mean': a block in which nothing was replaced is as good as any"
            )

    @classmethod
    def of(cls, config: Any, family: Any, responses: Iterable = ()) -> Uniform:
        own, spec = config.objective.uniform, mask_spec(config, family)
        return cls(
            spec=dataclasses.replace(spec, empty="skip", weight="flat"),
            draws_per_visit=config.draws_per_context, vocab_size=family.vocab_size,
            self_conditioning=own.self_conditioning, one_block=own.one_block,
        )  # fmt: skip

    def visited(self, batch: Batch) -> Batch:
        if not self.one_block:
            return batch
        grid, shape = self.spec.grid, (batch.prompt_lengths, batch.response_lengths)
        drawn = philox_u24(0, batch.visits, batch.sample_ids, seed=self.spec.seed,
                           stream=Stream.BLOCK)  # fmt: skip
        blocks = grid.num_blocks(*shape).clamp(min=1)
        return part_of(batch, *grid.bounds(drawn * blocks >> 24, *shape))

    def one_pass_draw(self, batch: Batch, draw: int = 0) -> Draw:
        """Draw number `draw` of a visit, of every block. `batch` is on the host."""
        marked = super().one_pass_draw(batch, draw)
        where = torch.zeros_like(batch.ids, dtype=torch.bool)
        where[marked.rows[: int(marked.num_rows)]] = True
        number = batch.visits * self.draws_per_visit + draw
        drawn = self.replaced(batch, where, number)
        return dataclasses.replace(drawn, number=draw, of=self.draws_per_visit)

    def replaced(self, batch: Batch, where: Tensor, number: Tensor) -> Draw:
        """Draw `number` [S] of each example: the tokens `where` [T] become any of the vocabulary,
        and all of the response are supervised."""
        grid, seed, rows = self.spec.grid, self.spec.seed, response_rows(batch)
        other = token_u24(batch, rows, seed, Stream.REPLACE, number) * self.vocab_size >> 24
        noisy = dataclasses.replace(batch, ids=torch.where(where, other, batch.ids))
        shape = batch.prompt_lengths[rows.owner], batch.response_lengths[rows.owner]
        block = grid.index_of(rows.position, shape[0])
        start, stop = grid.bounds(block, *shape)
        blocks = grid.num_blocks(*shape).clamp(min=1)
        weight = 1 / (blocks * (stop - start).clamp(min=1)).double()
        chance = philox_u24(
            block.clamp(min=0), number[rows.owner], batch.sample_ids[rows.owner], seed=seed,
            stream=Stream.MIX,
        )  # fmt: skip
        seeing = rows.inside & (chance < round(self.self_conditioning * ONE24))
        drawn = supervise(noisy, batch.ids, rows.inside, weight, rows)
        return dataclasses.replace(drawn, conditioned=seeing)


def part_of(batch: Batch, start: Tensor, stop: Tensor) -> Batch:
    """The batch with the responses [start, stop), positions [S]: what is before them joins the
    prompts, what is after them goes."""
    owner = torch.repeat_interleave(batch.cu_seqlens.diff().long())
    kept = batch.position_ids < stop[owner]
    return dataclasses.replace(
        batch, ids=batch.ids[kept], position_ids=batch.position_ids[kept],
        cu_seqlens=torch.cat([stop.new_zeros(1), stop.cumsum(0)]).int(),
        prompt_lengths=start, response_lengths=stop - start, max_length=int(stop.max()),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeldOutUniform(HeldOut):
    """The objective's mean loss per token under the same noise at every call: of one block of each
    example in a draw, at rates that the draws spread evenly. It is no bound of the likelihood."""

    objective: Uniform

    def draws(
        self, batch: Batch, place: Place | None = None, predict: Predict | None = None
    ) -> Iterator[Draw]:
        low, high = (round(rate * ONE24) for rate in (self.spec.low, self.spec.high))
        for number in range(self.count):
            part = part_of(batch, *self.active_block(batch, number))
            rows, draw = response_rows(part), torch.full_like(part.visits, FIRST_DRAW + number)
            rate = between(low, high, self.spread(batch, number))[rows.owner]
            where = token_u24(part, rows, self.spec.seed, Stream.MARKS, draw) < rate
            drawn = self.objective.replaced(part, rows.inside & where, draw)
            length = part.response_lengths
            yield dataclasses.replace(drawn, block_start=part.prompt_lengths, block_length=length)
