"""RDM (Zheng et al. 2024, HKUNLP/reparam-discrete-diffusion) on the response of a masked LM.

One step of one example, with T noise levels:

1. Draw a level k, uniform on 0..T-1, and mask each response token with probability (k + 1) / T.
2. Loss: cross-entropy summed over the masked tokens and divided by all response tokens, times
   lambda(k): 1 - k / T ("linear"), 1 / (k + 1) ("reciprocal", the bound) or 1 ("none").
3. Label smoothing: a share s of the target is uniform over the vocabulary. As in the original this
   term does not carry lambda(k), so a masked token's loss is
   (1 - s) lambda(k) CE + s mean over v of -log p(v).
4. Coupled rows (the original's "conditioned training"): two levels are drawn. The example is masked
   at the higher and at the lower one, the second mask inside the first; at equal levels the second
   mask is a draw of its own. Both rows are scored with their own lambda(k) and averaged.

The original multiplies by T, the importance weight of a uniform level. Here that is left out, so
that the scale does not grow with T: with constant CE and s = 0 the expected loss is CE times
(T + 1) (T + 2) / (6 T^2), 1 / T or (T + 1) / (2 T). Also left out: the loss-aware level sampler,
multinomial noise and the average of weights. The end token and its fill are part of the response.
With "reciprocal", s = 0 and uncoupled rows, T times the loss is that of classical SFT with weight
1 / rate on the grid of rates, bit for bit where T is a power of two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from bwsft_kernels import Stream
from torch import Tensor

from bwsft.objectives import base as d

if TYPE_CHECKING:
    from bwsft.data.packing import Batch


@dataclass(frozen=True, kw_only=True)
class Rdm(d.WholeResponse):
    """The objective of RDM."""

    levels: int
    weight: str
    label_smoothing: float
    coupled: bool

    @classmethod
    def of(cls, config: Any, family: Any, responses: Iterable = ()) -> Rdm:
        return cls(**d.common(config, family), **vars(config.objective.rdm))

    def draws(self, batch: Batch, place: d.Place, predict: d.Predict) -> Iterator[d.Draw]:
        """One corruption, or the two coupled ones, the noisier first, at half the weight each."""
        rows = d.response_rows(batch)
        if not self.coupled:
            marks = d.token_u24(batch, rows, self.seed, Stream.MARKS, batch.visits)
            yield corrupt(batch, rows, self, level(batch, self, batch.visits), marks)
            return
        first, second = 2 * batch.visits, 2 * batch.visits + 1
        one, two = level(batch, self, first), level(batch, self, second)
        # Equal words under a lower rate give the nested mask: P(in 2 | in 1) is the rates' ratio.
        marks = d.token_u24(batch, rows, self.seed, Stream.MARKS, first)
        fresh = d.token_u24(batch, rows, self.seed, Stream.MARKS, second)
        yield corrupt(batch, rows, self, torch.maximum(one, two), marks)
        marks = torch.where((one == two)[rows.owner], fresh, marks)
        yield corrupt(batch, rows, self, torch.minimum(one, two), marks)


def level(batch: Batch, options: Rdm, draw: Tensor) -> Tensor:
    """Level k of each sequence, [S]."""
    return d.sequence_u24(batch, options.seed, Stream.RATE, draw) * options.levels >> 24


def corrupt(batch: Batch, rows: d.Rows, options: Rdm, level: Tensor, marks: Tensor) -> d.Draw:
    """Mask where ``marks`` [T] are below the rate of ``level`` [S]."""
    top, share = options.levels, options.label_smoothing
    rate24 = ((level + 1) * d.ONE24 + top // 2) // top
    marked = rows.inside & (marks < rate24[rows.owner])
    # lambda as a fraction, and both terms in one weight w and smoothing s:
    # w (1 - s) = (1 - share) lambda and w s = share. One rounding to fp32 each.
    over, under = {
        "linear": (top - level, torch.full_like(level, top)),
        "reciprocal": (torch.ones_like(level), level + 1),
        "none": (torch.ones_like(level), torch.ones_like(level)),
    }[options.weight]
    joint = over.double() * (1 - share) + under.double() * share
    views = 2 if options.coupled else 1
    weight = (joint / (under.double() * rows.lengths * views)).float()
    drawn = d.masked_draw(batch, marked, weight[rows.owner], rows, options.mask_id)
    if share == 0:
        return drawn
    smoothing = (under.double() * share / joint).float()
    return dataclasses.replace(drawn, smoothing=smoothing[rows.owner[drawn.rows]])
