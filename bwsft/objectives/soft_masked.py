"""Soft-masked diffusion: a port of Masked-Diffuse LM (Chen et al. 2023, arXiv:2304.04746) to
absorbing noise. Its official code is not to be had; the paper's importance is kept, its Gaussian
noise on word embeddings is not.

One step of one example with N response tokens and m buckets:

1. Importance of a token: its share of the response's tf-idf plus its share of the response's
   entropy terms -p log p, with statistics of the training responses. Shares add up to 2.
2. Sort by importance, ties by position; bucket k = 1 + floor(rank m / N), bucket 1 the most
   important.
3. Draw a time t ~ U(low, high) and mask each token with probability
   p(t) = (1 - lambda) t + lambda clip(t m - (k - 1), 0, 1): at softness lambda = 1 one bucket after
   another, the important tokens first, so that the model learns to write the easy ones first.
4. Loss: cross-entropy on the masked tokens, each weighed 1 / (their number) as the original's plain
   cross-entropy, or p'(t) / (p(t) N), which is unbiased for the bound per token. Where p'(t) is 0
   a masked token is not supervised.

tf-idf of token w is (its count in the response) log(responses / (1 + responses that hold w)), at
least 0; p is its share of all training tokens. The responses count as the loss sees them, end token
and fill included: these are in nearly every response, so they weigh little and are masked last. A
token never seen has the largest tf-idf and no entropy. Where all terms of a response are 0, its
shares are equal. With softness 0 or one bucket this is classical SFT with empty "skip", bit for
bit: weight "count" is its "count", "elbo" its "rate".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from bwsft_kernels import Stream
from torch import Tensor

from bwsft.objectives import base as d

if TYPE_CHECKING:
    from bwsft.data.packing import Batch

CHUNK = 4096  # responses counted at a time


@dataclass(frozen=True, kw_only=True)
class SoftMasked(d.WholeResponse):
    """Masks the important tokens first."""

    softness: float
    buckets: int
    weight: str
    table: Tensor  # [2, V] int64: idf in units of 2^-24, -p log p in units of 2^-40
    copies: dict = field(default_factory=dict)

    def table_on(self, device: torch.device) -> Tensor:
        """The table, copied to a device once."""
        if device not in self.copies:
            self.copies[device] = self.table.to(device)
        return self.copies[device]

    @classmethod
    def of(cls, config: Any, family: Any, responses: Iterable = ()) -> SoftMasked:
        own, table = config.objective.soft_masked, statistics(responses, family.vocab_size)
        return cls(**d.common(config, family), **vars(own), table=table)

    def draws(self, batch: Batch, place: d.Place, predict: d.Predict) -> Iterator[d.Draw]:
        """One corruption."""
        rows = d.response_rows(batch)
        rate24, slope = rates(batch, rows, self)
        marks = d.token_u24(batch, rows, self.seed, Stream.MARKS, batch.visits)
        marked = rows.inside & (marks < rate24)
        if self.weight == "count":
            weight = (1 / d.count(marked, rows).double())[rows.owner]
        else:
            weight = slope / (rate24.double() * rows.lengths[rows.owner] * 2.0**-24)
        yield d.masked_draw(batch, marked, weight.float(), rows, self.mask_id)


def statistics(responses: Iterable, vocab_size: int) -> Tensor:
    """idf and entropy term of every token, [2, V]. Integers: their sums over a response are exact,
    so that the order of tokens is the same on every device."""
    holders = torch.zeros(vocab_size, dtype=torch.int64)
    tokens = torch.zeros_like(holders)
    responses, total = iter(responses), 0
    while chunk := [torch.tensor(r).long() for r in itertools.islice(responses, CHUNK)]:
        ids = torch.cat(chunk)
        owner = torch.repeat_interleave(torch.tensor([len(r) for r in chunk]))
        once = (owner * vocab_size + ids).unique() % vocab_size
        tokens += ids.bincount(minlength=vocab_size)
        holders += once.bincount(minlength=vocab_size)
        total += len(chunk)
    idf = (total / (1 + holders.double())).log().clamp(min=0)
    entropy = torch.special.entr(tokens.double() / tokens.sum().clamp(min=1))
    return torch.stack([idf * 2.0**24, entropy * 2.0**40]).round().long()


def importance(batch: Batch, rows: d.Rows, options: SoftMasked) -> Tensor:
    """Importance of each response token, [T] float64; it adds up to 2 in every response."""
    idf, entropy = options.table_on(batch.ids.device)[:, batch.ids]
    # Occurrences of the same token in the same response, by two searches in the sorted pairs.
    pair = rows.owner * options.table.shape[1] + batch.ids
    pair = torch.where(rows.inside, pair, -1)
    ordered = pair.sort().values
    times = torch.searchsorted(ordered, pair, right=True) - torch.searchsorted(ordered, pair)
    return share(times * idf, rows) + share(entropy, rows)


def share(part: Tensor, rows: d.Rows) -> Tensor:
    """``part`` [T] over its sum over the response, or 1 / N where that is 0."""
    part = torch.where(rows.inside, part, 0)
    total = torch.zeros_like(rows.lengths).index_add_(0, rows.owner, part)[rows.owner]
    equal = 1 / rows.lengths.double()[rows.owner]
    return torch.where(total > 0, part.double() / total, equal)


def rates(batch: Batch, rows: d.Rows, options: SoftMasked) -> tuple[Tensor, Tensor]:
    """(p(t) in units of 2^-24, p'(t)) of each response token, [T]."""
    buckets, soft = options.buckets, options.softness
    rank = d.ranks(batch, rows, rows.inside, -importance(batch, rows, options))
    bucket = rank * buckets // rows.lengths.clamp(min=1)[rows.owner]  # from 0
    t24 = d.times(batch, options)[rows.owner]
    inner = t24 * buckets - bucket * d.ONE24
    rate = (1 - soft) * t24.double() + soft * inner.clamp(0, d.ONE24).double()
    rises = (inner > 0) & (inner <= d.ONE24)
    return rate.round().long(), (1 - soft) + soft * buckets * rises.double()
