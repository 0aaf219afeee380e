"""Held-out blockwise NELBO: the common yardstick of every objective, in nats per response token.

For a block of n tokens the any-order bound is sum over l = 1..n of (1/l) E[sum of CE over a random
masked set of size l], so n times the mean CE at a count l ~ U{1..n} is unbiased for it, with far
less variance than Bernoulli masks at 1/pi (LLaDA's likelihood evaluation does the same for whole
responses). A draw masks l tokens of one block, whose chance is its share of the response, so its
mean CE is unbiased for the bound per token, end token and fill included.

An example gets `count` draws, spread evenly over its blocks: the cost is `count` forwards however
many blocks a response has (all blocks of a 256-token canvas at B 8 would be 32). The draws are
functions of (seed, example, number) alone: curves of different runs compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from bwsft_kernels import MaskSpec, Stream
from torch import Tensor

from bwsft.objectives import base as d

if TYPE_CHECKING:
    from bwsft.data.packing import Batch

# Draw numbers of the evaluation are far above those of training visits.
FIRST_DRAW = 1 << 31
# 2^24 / golden ratio. With block choices 1/count apart and masked counts this far apart, the pairs
# (block, masked count) of an example cover the square evenly for any number of draws.
GOLDEN24 = 10368889


@dataclass(frozen=True, kw_only=True)
class HeldOut(d.Objective):
    """Masks the same tokens of the same held-out examples at every call."""

    spec: MaskSpec  # block size and origin, mask id and seed
    count: int  # draws per example

    def draws(
        self, batch: Batch, place: d.Place | None = None, predict: d.Predict | None = None
    ) -> Iterator[d.Draw]:
        """Yield `count` draws of a batch, one partly masked block per sequence in each.

        The weights are 1/l: they sum to 1 per sequence, and the weighted sum of CE over the
        supervised tokens, divided by the number of sequences, estimates nats per response token.
        """
        spec, tokens = self.spec, d.response_rows(batch)
        owner, position = tokens.owner, tokens.position
        for number in range(self.count):
            start, stop = self.active_block(batch, number)
            masked = 1 + (self.spread(batch, number) * (stop - start) >> 24)
            active = (position >= start[owner]) & (position < stop[owner])
            suffix = tokens.inside & (position >= stop[owner])
            words = d.token_u24(
                batch, tokens, spec.seed, Stream.MARKS, torch.full_like(masked, FIRST_DRAW + number)
            )
            # The `masked` active positions with the smallest words of their sequence.
            marked = active & (d.ranks(batch, tokens, active, words) < masked[owner])
            rows = marked.nonzero().squeeze(1)
            noisy = batch.ids.masked_fill(marked | suffix, spec.mask_id)
            yield d.Draw(
                noisy=dataclasses.replace(batch, ids=noisy),
                rows=rows,
                target=batch.ids[rows],
                weight=(1 / masked[owner[rows]]).float(),
                num_rows=masked.sum(),
                region=(stop - start).sum(),
                block_start=start,
                block_length=stop - start,
            )

    def active_block(self, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
        """(start, stop), positions [S] of the block that holds response token floor(u * length) of
        each example, whose u the draws spread evenly."""
        u24 = _shifted(batch, self.spec, Stream.BLOCK, (number << 24) // self.count)
        prompt, length, grid = batch.prompt_lengths, batch.response_lengths, self.spec.grid
        return grid.bounds(grid.index_of(prompt + (u24 * length >> 24), prompt), prompt, length)

    def spread(self, batch: Batch, number: int) -> Tensor:
        """u24 [S] of each example, which its draws spread evenly too."""
        return _shifted(batch, self.spec, Stream.RATE, number * GOLDEN24)

    @torch.no_grad()
    def nelbo(self, score: Callable[[d.Draw], Tensor], batches: Iterable[Batch]) -> float:
        """Nats per response token, averaged over the sequences of `batches`; score(draw) returns
        the weighted sum of CE."""
        sums, sequences = [], 0
        for batch in batches:
            sequences += len(batch.sample_ids)
            sums += [score(draw).double() for draw in self.draws(batch)]
        return float(torch.stack(sums).sum()) / (self.count * sequences)


def _shifted(batch: Batch, spec: MaskSpec, stream: Stream, shift: int) -> Tensor:
    """One word per example, moved on by `shift`: u24 [S]."""
    return (d.sequence_u24(batch, spec.seed, stream, FIRST_DRAW) + shift) % d.ONE24
