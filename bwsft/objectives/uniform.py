"""Uniform diffusion, block by block: the objective of models whose noise is random tokens.

DiffusionGemma knows no [MASK]. Its canvas holds random tokens of the vocabulary in the places that
are not decided yet, and it predicts every place anew. One step of one example:

1. For each block draw a rate t ~ U(low, high), and replace each of its tokens with probability t by
   one drawn uniformly from the whole vocabulary, the true one among them.
2. With probability `self_conditioning` the block also sees what the model says of it, as it sees in
   decoding what it said in the step before (the context mode runs that pass).
3. Loss: cross-entropy on every token of the block, replaced or not, since nothing marks the
   replaced ones: 1 / (tokens of the block) each, and 1 / M for each of M blocks.

Rates and marks are block_mask's, so those of Blockwise SFT with the same seed; every choice is a
pure function of (seed, example, visit).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from bwsft_kernels import Stream
from bwsft_kernels.philox import philox_u24
from torch import Tensor

from bwsft.objectives.base import ONE24, Draw, response_rows, supervise, token_u24
from bwsft.objectives.blockwise import Blockwise

if TYPE_CHECKING:
    from bwsft.data.packing import Batch


@dataclass(frozen=True, kw_only=True)
class Uniform(Blockwise):
    """Replaces tokens of every block of each response, and supervises all of them."""

    vocab_size: int
    self_conditioning: float = 0.5  # chance that a block sees the model's own prediction of it
    one_pass: bool = True

    def __post_init__(self) -> None:
        spec = self.spec
        if not self.one_pass or spec.empty != "skip" or spec.pairs or spec.block_factor != "mean":
            raise ValueError(
                "uniform noise needs one_pass and a MaskSpec with empty='skip', without pairs and "
                "with block_factor='mean': a block in which nothing was replaced is as good as any"
            )

    def one_pass_draw(self, batch: Batch, draw: int = 0) -> Draw:
        """Draw number `draw` of a visit, of every block. `batch` is on the host."""
        marked = super().one_pass_draw(batch, draw)
        rows = response_rows(batch)
        number = batch.visits * self.draws_per_visit + draw
        other = token_u24(batch, rows, self.spec.seed, Stream.REPLACE, number)
        other = other * self.vocab_size >> 24
        where = marked.rows[: int(marked.num_rows)]
        noisy = dataclasses.replace(
            batch, ids=batch.ids.index_copy(0, where, other[where])
        )
        start, stop, blocks = self._blocks(batch)
        weight = 1 / (blocks * (stop - start).clamp(min=1)).double()
        drawn = supervise(noisy, batch.ids, rows.inside, weight, rows)
        return dataclasses.replace(drawn, number=draw, of=self.draws_per_visit)

    def conditioned(self, batch: Batch, draw: int) -> Tensor:
        """Which tokens [T] are of blocks that see the model's own prediction in this draw."""
        rows, grid = response_rows(batch), self.spec.grid
        block = grid.index_of(rows.position, batch.prompt_lengths[rows.owner])
        number = (batch.visits * self.draws_per_visit + draw)[rows.owner]
        chance = philox_u24(
            block.clamp(min=0), number, batch.sample_ids[rows.owner],
            seed=self.spec.seed, stream=Stream.MIX,
        )  # fmt: skip
        return rows.inside & (chance < round(self.self_conditioning * ONE24))

    def _blocks(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token [T]: start and stop of its block, and the blocks of its response."""
        rows, grid = response_rows(batch), self.spec.grid
        shape = batch.prompt_lengths[rows.owner], batch.response_lengths[rows.owner]
        start, stop = grid.bounds(grid.index_of(rows.position, shape[0]), *shape)
        return start, stop, grid.num_blocks(*shape).clamp(min=1)


def one_block(batch: Batch, objective: Uniform) -> Batch:
    """The batch with one block of each response left, drawn uniformly: what is before it joins the
    prompt, what is after it goes. The cheaper step, and the dearer token."""
    grid = objective.spec.grid
    blocks = grid.num_blocks(batch.prompt_lengths, batch.response_lengths).clamp(min=1)
    drawn = philox_u24(0, batch.visits, batch.sample_ids, seed=objective.spec.seed,
                       stream=Stream.BLOCK)  # fmt: skip
    start, stop = grid.bounds(drawn * blocks >> 24, batch.prompt_lengths, batch.response_lengths)
    owner = torch.repeat_interleave(batch.cu_seqlens.diff().long())
    kept = batch.position_ids < stop[owner]
    return dataclasses.replace(
        batch, ids=batch.ids[kept], position_ids=batch.position_ids[kept],
        cu_seqlens=torch.cat([stop.new_zeros(1), stop.cumsum(0)]).int(),
        prompt_lengths=start, response_lengths=stop - start, max_length=int(stop.max()),
    )  # fmt: skip
