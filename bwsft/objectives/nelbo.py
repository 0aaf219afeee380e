"""Held-out blockwise NELBO: the common yardstick of every objective, in nats per response token.

For a block of n tokens the any-order bound is sum over l = 1..n of (1/l) E[sum of CE over a random
masked set of size l], so mean CE at a count l ~ U{1..n} is unbiased for the bound per token, with
far less variance than Bernoulli masks at 1/pi. Every block of an example gets `draws` counts,
stratified over 1..n (LLaDA's likelihood evaluation does the same for whole responses). All draws
are functions of (seed, example, block, draw): curves of different runs compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from bwsft_kernels.philox import Stream, philox_u24
from torch import Tensor

from bwsft.objectives.blockwise import num_blocks

# Draw numbers of the evaluation lie far above those of training visits.
FIRST_DRAW = 1 << 31


def block_states(batch, spec, draws: int) -> Iterator[tuple]:
    """Yield (noisy batch, rows, target, weight) for every block index and draw of a batch.

    Row weights are 1/l times the block's share of the response, so that the sums over all
    blocks, divided by `draws` and the number of sequences, are nats per response token.
    """
    starts = batch.cu_seqlens[:-1].long()
    lengths = batch.cu_seqlens.diff().long()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=starts.device), lengths)
    position = batch.position_ids
    inside = position - batch.prompt_lengths[owner]
    grid = position if spec.block_origin == "absolute" else inside
    first = batch.prompt_lengths if spec.block_origin == "absolute" else 0 * batch.prompt_lengths
    block_of = grid // spec.block_size - (first // spec.block_size)[owner]
    response = (inside >= 0) & (inside < batch.response_lengths[owner])
    for block in range(int(num_blocks(batch, spec).max())):
        active = response & (block_of == block)
        hidden = response & (block_of > block)
        size = torch.zeros_like(lengths).index_add_(0, owner, active.long())
        for draw in range(draws):
            count = _counts(batch, size, block, draw, draws, spec.seed)
            marked = _smallest(batch, active, owner, position, count, block * draws + draw, spec)
            ids = batch.ids.masked_fill(marked | hidden, spec.mask_id)
            rows = marked.nonzero().squeeze(1)
            share = size / batch.response_lengths.clamp(min=1)
            weight = (share / count.clamp(min=1))[owner[rows]].float()
            yield dataclasses.replace(batch, ids=ids), rows, batch.ids[rows], weight


def _counts(batch, size: Tensor, block: int, draw: int, draws: int, seed: int) -> Tensor:
    """Masked tokens [S] of this draw: u in [0, 1) shifted by draw/draws, mapped on 1..size."""
    word = philox_u24(
        torch.full_like(batch.sample_ids, block),
        torch.full_like(batch.sample_ids, FIRST_DRAW),
        batch.sample_ids,
        seed=seed,
        stream=Stream.RATE,
    )
    shifted = (word + (draw << 24) // draws) % (1 << 24)
    return 1 + (shifted * size >> 24)


def _smallest(batch, active, owner, position, count, draw: int, spec) -> Tensor:
    """Mask [T] of the `count` active positions with the smallest words of their sequence."""
    word = philox_u24(
        position,
        torch.full_like(position, FIRST_DRAW + draw),
        batch.sample_ids[owner],
        seed=spec.seed,
        stream=Stream.MARKS,
    )
    # Sort by (sequence, active first, word, position): the first `count` of each sequence win.
    key = (owner * 2 + (~active).long()) * (1 << 24) + word
    ranked = key.argsort(stable=True)
    rank = torch.empty_like(ranked)
    rank[ranked] = torch.arange(len(ranked), device=ranked.device)
    return active & (rank - batch.cu_seqlens[:-1].long()[owner] < count[owner])


@torch.no_grad()
def blockwise_nelbo(score: Callable[..., Tensor], batches, spec, draws: int = 2) -> float:
    """Nats per response token, averaged over the sequences of `batches`.

    score(noisy batch, rows [N], target [N], weight [N] fp32) returns the weighted sum of CE.
    """
    total, sequences = 0.0, 0
    for batch in batches:
        sequences += len(batch.sample_ids)
        for state in block_states(batch, spec, draws):
            total += float(score(*state))
    return total / (draws * max(sequences, 1))
