"""MDLM (Sahoo et al. 2024, kuleshov-group/mdlm) on the response of a pre-trained masked LM.

One step of one example, sequence b of the n sequences of an update:

1. Draw a time t in [low, high): t = low + (high - low) e with e = (u + b) / n, so that every
   stratum of [0, 1) holds one sequence of the update (low-discrepancy sampling).
2. Log-linear noise sigma = -log(1 - (1 - eps) t), eps = 1e-3: mask each response token with
   probability 1 - e^-sigma = (1 - eps) t. The prompt stays.
3. SUBS: the [MASK] column leaves the softmax; visible tokens carry over and are not supervised.
4. Loss: cross-entropy on masked tokens, each weighed sigma' / (e^sigma - 1) = 1 / t, divided by
   all response tokens of the update, masked or not.

The model has no time input, as in MDLM's own default. What this port leaves out: the other noise
schedules, the discrete-time loss, and the average of weights that MDLM evaluates. With stratify
and subs off, rate "llada" and normalize "sequence" it is classical SFT with weight 1 / rate, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from bwsft_kernels import Stream
from torch import Tensor

from bwsft.objectives import base as d

if TYPE_CHECKING:
    from bwsft.data.packing import Batch

EPS24 = round(1e-3 * d.ONE24)


@dataclass(frozen=True, kw_only=True)
class Mdlm(d.WholeResponse):
    """MDLM's objective on the response."""

    stratify: bool
    rate: str
    normalize: str

    @classmethod
    def of(cls, config: Any, family: Any, responses: Iterable = ()) -> Mdlm:
        own = config.objective.mdlm
        return cls(
            **d.common(config, family), excluded_id=family.mask_id if own.subs else None,
            stratify=own.stratify, rate=own.rate, normalize=own.normalize,
        )  # fmt: skip

    def draws(self, batch: Batch, place: d.Place, predict: d.Predict) -> Iterator[d.Draw]:
        """One corruption; row weights 1/t over the mean response length of the update ("token") or
        over the sequence's own."""
        rows, t24 = d.response_rows(batch), times(batch, self, place)
        rate24 = mask_rate(t24) if self.rate == "mdlm" else t24
        marks = d.token_u24(batch, rows, self.seed, Stream.MARKS, batch.visits)
        marked = rows.inside & (marks < rate24[rows.owner])
        lengths = rows.lengths
        if self.normalize == "token":
            lengths = torch.full_like(lengths, place.tokens).double() / place.sequences
        weight = (1 / (t24.double() * lengths * 2.0**-24)).float()
        yield d.masked_draw(batch, marked, weight[rows.owner], rows, self.mask_id)


def times(batch: Batch, options: Mdlm, place: d.Place) -> Tensor:
    """Time of each sequence in units of 2^-24, [S]."""
    if not options.stratify:
        return d.times(batch, options)
    u24 = d.sequence_u24(batch, options.seed, Stream.RATE, batch.visits)
    index = place.first + torch.arange(batch.num_sequences, device=u24.device)
    return d.between(options.low, options.high, (u24 + index * d.ONE24) // place.sequences)


def mask_rate(t24: Tensor) -> Tensor:
    """(1 - eps) t, in and out in units of 2^-24."""
    return t24 - (t24 * EPS24 + d.ONE24 // 2 >> 24)
