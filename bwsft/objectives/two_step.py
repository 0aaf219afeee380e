"""Two-step loss with scheduling (Asada & Miwa 2025, aistairc/text-diff-2step-loss), ported to a
masked LM: train on what the model itself would have written one step before.

One step of one example:

1. Draw a rate t1 ~ U(low, high) and mask each response token with probability t1.
2. Predict the masked tokens, without gradient ([MASK] is never predicted).
3. Draw t2 below t1: uniform ("uniform"), or t1 less one step of a decoder that reveals one of
   gen_length positions per step ("step"), but at least low. Of the masked tokens keep a share
   t2 / t1 masked: random ones, or the least confident, round(n1 t2 / t1) of them.
4. With probability beta the sequence shows its own predictions at the revealed places, else the
   truth. beta rises from 0 to 1 over the run ("linear") or over its first fifth ("ramp"), or is 1.
   `replace` puts random tokens at a share of the visible places.
5. Loss: cross-entropy with gradient on the second input, 1 / (supervised tokens of the sequence)
   each; supervised are the masked tokens, also the revealed ones, or the whole response.

The original masks the same places in both steps of a denoiser that predicts every position again; a
masked LM would meet the same input twice, so here the second mask is inside the first. The
original supervises every position and replaces a tenth of the visible tokens, in both inputs; here
both are options, the replacement for the second input alone. The first step costs one more forward,
with dropout as in the second. With beta and replace 0 and "masked" this is classical SFT with
weight "count" and empty "skip" at rate t2, bit for bit.
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
class TwoStep(d.WholeResponse):
    """Trains on what the model itself would have written one step before."""

    gap: str
    reveal: str
    schedule: str
    replace: float
    supervise: str
    steps: int
    positions: int
    vocab_size: int

    @classmethod
    def of(cls, config: Any, family: Any, responses: Iterable = ()) -> TwoStep:
        sizes = {"positions": config.gen_length, "vocab_size": family.vocab_size}
        own = vars(config.objective.two_step)
        return cls(**d.common(config, family), **own, steps=config.steps, **sizes)

    def draws(self, batch: Batch, place: d.Place, predict: d.Predict) -> Iterator[d.Draw]:
        """One corruption, after one call of predict."""
        rows, (first, second) = d.response_rows(batch), rates(batch, self)
        marks = d.token_u24(batch, rows, self.seed, Stream.MARKS, batch.visits)
        hidden = rows.inside & (marks < first[rows.owner])
        token, confidence = first_step(batch, hidden, self, predict)
        if self.reveal == "random":
            kept = hidden & (marks < second[rows.owner])
        else:
            # floor(n1 t2 / t1 + 1/2) in integers
            wanted = (2 * d.count(hidden, rows) * second + first) // (2 * first).clamp(min=1)
            kept = hidden & (d.ranks(batch, rows, hidden, confidence) < wanted[rows.owner])
        mix = d.sequence_u24(batch, self.seed, Stream.MIX, batch.visits)
        own = mix < round(beta(place.step, self) * d.ONE24)
        text = torch.where(hidden & own[rows.owner], token, batch.ids)
        if self.replace > 0:
            text = with_random(text, batch, rows, self)
        text = torch.where(rows.inside, text, batch.ids).masked_fill(kept, self.mask_id)
        where = {"masked": kept, "revealed": hidden, "all": rows.inside}[self.supervise]
        weight = (1 / d.count(where, rows).double()).float()[rows.owner]
        yield d.supervise(dataclasses.replace(batch, ids=text), batch.ids, where, weight, rows)


def beta(step: int, options: TwoStep) -> float:
    """Chance that a sequence of update `step` (from 0) sees its own predictions."""
    if options.schedule == "constant":
        return 1.0
    progress = step / max(options.steps - 1, 1)
    return min(1.0, 5 * progress) if options.schedule == "ramp" else progress


def rates(batch: Batch, options: TwoStep) -> tuple[Tensor, Tensor]:
    """Both rates of each sequence in units of 2^-24, [S]."""
    first = d.times(batch, options)
    if options.gap == "step":
        return first, (first - round(d.ONE24 / options.positions)).clamp(min=options.low)
    u24 = d.sequence_u24(batch, options.seed, Stream.TIME, batch.visits)
    return first, d.between(options.low, first, u24)


def first_step(
    batch: Batch, hidden: Tensor, options: TwoStep, predict: d.Predict
) -> tuple[Tensor, Tensor]:
    """(token, confidence) [T] that the model gives the ``hidden`` places; elsewhere meaningless."""
    noisy = dataclasses.replace(batch, ids=batch.ids.masked_fill(hidden, options.mask_id))
    index, real = d.row_list(hidden)
    found = predict(noisy, index)
    slot = torch.where(real, index, hidden.numel())  # the tail goes to a spare place

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(len(slot) + 1).scatter_(0, slot, values)[:-1]

    return spread(found.token), spread(found.confidence)


def with_random(text: Tensor, batch: Batch, rows: d.Rows, options: TwoStep) -> Tensor:
    """``text`` [T] with a share of its tokens replaced by others, uniform without [MASK]."""
    which, what = (
        d.token_u24(batch, rows, options.seed, Stream.REPLACE, 2 * batch.visits + part)
        for part in (0, 1)
    )
    other = what * (options.vocab_size - 1) >> 24
    other += (other >= options.mask_id).long()
    return torch.where(which < round(options.replace * d.ONE24), other, text)
