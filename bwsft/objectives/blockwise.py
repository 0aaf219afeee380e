"""Blockwise SFT: the paper's method in one file.

A response r of Lr tokens is cut in M = ceil(Lr / B) blocks. One step of one example:

1. Choose the active block a, uniformly over 1..M (paper, Algorithm 1), or each block once per
   traversal, or in turn.
2. Draw the mask rate pi ~ U(low, high): the diffusion time of an absorbing process.
3. Keep prompt and earlier blocks clean, mask every token of block a with probability pi, hide
   everything behind it behind [MASK]: what semi-autoregressive decoding sees.
4. If nothing was masked, mask the block's last token (paper, section 4).
5. Loss: cross-entropy on the masked tokens of block a alone, each weighed 1 / (their number).
   With pi uniform this has the expectation of the 1/pi-weighted bound and less variance: the
   number of masked tokens is then uniform on 0..n and the set uniform given its size.

Every choice is a pure function of (seed, example, visit): see bwsft_kernels.philox. The ablations
(noisy prefix, leaky suffix) and the other weights are arguments, not other files.
"""

from __future__ import annotations

import dataclasses

import torch
from bwsft_kernels.block_mask import MaskedBatch, MaskSpec, block_mask
from bwsft_kernels.philox import Stream, philox_u24
from torch import Tensor


def mask_spec(config, family) -> MaskSpec:
    """The kernel's options for a run `config` on a model `family`."""
    o = config.objective
    return MaskSpec(
        block_size=config.block_size,
        mask_id=family.mask_id,
        seed=config.seed,
        low=o.low,
        high=o.high,
        weight=o.weight,
        empty=o.empty,
        block_factor=o.block_factor,
        prefix_noise=o.prefix_noise,
        suffix_leak=o.suffix_leak,
        block_origin=family.block_origin,
        pairs=o.pairs,
    )


def choose_blocks(batch, spec: MaskSpec, order: str, draws: int) -> Tensor | None:
    """Active block of each sequence [S], one for all draws of a visit; None: the kernel's own.

    A traversal is M visits; its order sorts the blocks by the words of (block, traversal).
    """
    if order == "uniform" and draws == 1:
        return None
    blocks = num_blocks(batch, spec)
    if order == "uniform":
        first = batch.visits * draws
        word = philox_u24(0, first, batch.sample_ids, seed=spec.seed, stream=Stream.BLOCK)
        return word * blocks >> 24
    turn = batch.visits % blocks
    if order == "sequential":
        return turn
    traversal = batch.visits // blocks
    # A bound that the host knows: reading the largest M would wait for the device.
    width = batch.max_length // spec.block_size + 1
    index = torch.arange(width, device=blocks.device)
    words = philox_u24(
        index[None],
        traversal[:, None],
        batch.sample_ids[:, None],
        seed=spec.seed,
        stream=Stream.BLOCK,
    )
    words = words.masked_fill(index[None] >= blocks[:, None], 1 << 24)  # absent blocks last
    ranked = words.argsort(dim=1, stable=True)
    return ranked.gather(1, turn[:, None]).squeeze(1)


def num_blocks(batch, spec: MaskSpec) -> Tensor:
    """Blocks of each response [S], at least 1."""
    size = spec.block_size
    into = batch.prompt_lengths % size if spec.block_origin == "absolute" else 0
    return ((into + batch.response_lengths + size - 1) // size).clamp(min=1)


def corrupt(batch, spec: MaskSpec, order: str = "uniform", draw: int = 0, draws: int = 1):
    """(noisy batch, MaskedBatch with loss rows and row weights) for one visit of each example:
    `draw` of `draws` masks of the same active block.

    The weights sum to 1 per sequence (0 where nothing bears loss): a step divides the summed
    loss once by its number of sequences.
    """
    masked: MaskedBatch = block_mask(
        batch.ids,
        batch.prompt_lengths,
        batch.response_lengths,
        spec,
        cu_seqlens=batch.cu_seqlens,
        sample_ids=batch.sample_ids,
        draw=batch.visits * draws + draw,
        block=choose_blocks(batch, spec, order, draws),
    )
    return dataclasses.replace(batch, ids=masked.noisy_ids), masked
