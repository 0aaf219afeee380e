"""Held-out blockwise NELBO: the common yardstick of every objective, in nats per response token.

For a block of n tokens the any-order bound is sum over l = 1..n of (1/l) E[sum of CE over a random
masked set of size l], so n times the mean CE at a count l ~ U{1..n} is unbiased for it, with far
less variance than Bernoulli masks at 1/pi (LLaDA's likelihood evaluation does the same for whole
responses). A state masks l tokens of one block, whose chance is its share of the response, so its
mean CE is unbiased for the bound per token, end token and fill included.

An example gets `draws` states, spread evenly over its blocks: the cost is draws forwards however
many blocks a response has (all blocks of a 256-token canvas at B 8 would be 32). The draws are
functions of (seed, example, state) alone: curves of different runs compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from bwsft_kernels.philox import Stream, philox_u24
from torch import Tensor

from bwsft.objectives.base import Rows, ranks

# Draw numbers of the evaluation lie far above those of training visits.
FIRST_DRAW = 1 << 31
# 2^24 / golden ratio. With block choices 1/draws apart and counts this far apart, the pairs (block,
# count) of an example cover the square evenly for any number of draws.
GOLDEN24 = 10368889


class State(NamedTuple):
    """A batch with one block per sequence partly masked, and what to predict in it."""

    noisy: Any  # the batch with its noisy ids
    rows: Tensor  # [N] flat indices of the masked tokens
    target: Tensor  # [N]
    weight: Tensor  # [N] fp32
    start: Tensor  # [S] the active block's positions in its row
    stop: Tensor  # [S]


def masked_states(batch, spec, draws: int) -> Iterator[State]:
    """Yield `draws` states of a batch.

    The weights are 1/l: they sum to 1 per sequence, and the weighted sum of CE over the rows,
    divided by the number of sequences, estimates nats per response token.
    """
    lengths = batch.cu_seqlens.diff().long()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    position, end = batch.position_ids, batch.prompt_lengths + batch.response_lengths
    for draw in range(draws):
        start, stop = _active_block(batch, spec, _shifted(batch, spec, Stream.BLOCK, draw, draws))
        count = 1 + (_shifted(batch, spec, Stream.RATE, draw, None) * (stop - start) >> 24)
        active = (position >= start[owner]) & (position < stop[owner])
        suffix = (position >= stop[owner]) & (position < end[owner])
        marked = _smallest(batch, spec, draw, owner, active, count)
        rows = marked.nonzero().squeeze(1)
        noisy = batch.ids.masked_fill(marked | suffix, spec.mask_id)
        weight = (1 / count[owner[rows]]).float()
        noisy = dataclasses.replace(batch, ids=noisy)
        yield State(noisy, rows, batch.ids[rows], weight, start, stop)


def _shifted(batch, spec, stream: Stream, draw: int, draws: int | None) -> Tensor:
    """u24 [S] of state `draw`: one word per example, moved on by 1/draws or by the golden ratio."""
    word = philox_u24(0, FIRST_DRAW, batch.sample_ids, seed=spec.seed, stream=stream)
    return (word + (draw * GOLDEN24 if draws is None else (draw << 24) // draws)) % (1 << 24)


def _active_block(batch, spec, u24: Tensor) -> tuple[Tensor, Tensor]:
    """(start, stop), positions [S] of the block that holds response token floor(u * length)."""
    prompt, length = batch.prompt_lengths, batch.response_lengths
    origin = prompt - prompt % spec.block_size if spec.block_origin == "absolute" else prompt
    token = prompt + (u24 * length >> 24)
    start = origin + (token - origin) // spec.block_size * spec.block_size
    return torch.maximum(start, prompt), torch.minimum(start + spec.block_size, prompt + length)


def _smallest(batch, spec, draw: int, owner, active, count) -> Tensor:
    """Mask [T] of the `count` active positions with the smallest words of their sequence."""
    word = philox_u24(
        batch.position_ids,
        FIRST_DRAW + draw,
        batch.sample_ids[owner],
        seed=spec.seed,
        stream=Stream.MARKS,
    )
    among = Rows(active, owner, batch.position_ids, batch.response_lengths)
    return active & (ranks(batch, among, active, word) < count[owner])


@torch.no_grad()
def blockwise_nelbo(score: Callable[[State], Tensor], batches, spec, draws: int) -> float:
    """Nats per response token, averaged over the sequences of `batches`.

    score(state) returns the weighted sum of CE. Of `spec` (MaskSpec) it takes block size and
    origin, mask id and seed.
    """
    sums, sequences = [], 0
    for batch in batches:
        sequences += len(batch.sample_ids)
        sums += [score(state).double() for state in masked_states(batch, spec, draws)]
    return float(torch.stack(sums).sum()) / (draws * sequences)
