"""MDLM (Sahoo et al. 2024, kuleshov-group/mdlm) on the response of a pre-trained masked LM.

- Time t of each sequence from one grid per update: t = (1 - eps) e + eps, e_b = (u + b) / n mod 1
  for sequence b of n, so that every stratum of [0, 1) holds one (low-discrepancy sampling).
- Log-linear noise sigma = -log(1 - (1 - eps) t): mask rate (1 - eps) t, weight
  sigma' / (e^sigma - 1) = 1 / t.
- SUBS: the [MASK] column leaves the softmax; visible tokens carry over, so they bear no loss.
- Mean over all response tokens of the update, masked or not.

The model has no time input, as MDLM's own default. With stratify and subs off, rate "llada" and
normalise "sequence" it is classical SFT with weight 1 / rate, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bwsft_kernels.philox import Stream, philox_u24
from torch import Tensor

from bwsft.objectives.drawn import ONE24, Drawn, Place, drawn, response_rows, token_u24
from bwsft.objectives.drawn import sequence_u24 as sequence


@dataclass(frozen=True)
class Options:
    mask_id: int
    excluded_id: int | None
    seed: int
    low: float
    high: float
    stratify: bool
    rate: str
    normalise: str


def prepare(config, family, responses) -> Options:
    """Options of a run `config` on a model `family`; `responses` are not needed."""
    o, m = config.objective, config.objective.mdlm
    return Options(
        mask_id=family.mask_id,
        excluded_id=family.mask_id if m.subs else None,
        seed=config.seed,
        low=o.low,
        high=o.high,
        stratify=m.stratify,
        rate=m.rate,
        normalise=m.normalise,
    )


def times(batch, options: Options, place: Place) -> Tensor:
    """Time of each sequence as an integer in units of 2^-24, [S]: floats never decide a mask."""
    u24 = sequence(batch, options.seed, Stream.RATE, batch.visits)
    if options.stratify:
        # One word per update, the same on every rank; `first` places the micro-batch in the grid.
        shared = philox_u24(0, place.step, 0, seed=options.seed, stream=Stream.TIME)
        index = place.first + torch.arange(batch.num_sequences, device=u24.device)
        u24 = (shared.to(u24.device) + index * ONE24) // place.sequences % ONE24
    low, high = round(options.low * ONE24), round(options.high * ONE24)
    return low + ((high - low) * u24 >> 24)


def draws(batch, options: Options, place: Place, predict) -> Iterator[Drawn]:
    """One corruption; row weights 1/t over the mean response length of the update ("token") or
    over the sequence's own."""
    rows, t24 = response_rows(batch), times(batch, options, place)
    rate24 = t24
    if options.rate == "mdlm":
        rate24 = (t24.double() * (1 - options.low)).round().long()
    marks = token_u24(batch, rows, options.seed, Stream.MARKS, batch.visits)
    marked = rows.inside & (marks < rate24[rows.owner])
    lengths = rows.lengths
    if options.normalise == "token":
        lengths = torch.full_like(lengths, place.tokens).double() / place.sequences
    weight = (1 / (t24.double() * lengths * 2.0**-24)).float()
    yield drawn(batch, marked, weight[rows.owner], rows, options.mask_id)
