"""Classical SFT of a masked-diffusion model (LLaDA): Bernoulli masks over the whole response.

It is Blockwise SFT with one block that holds the response, so the masks, the three weights
(1/count: the paper's baseline; 1/rate: LLaDA's bound; flat) and the loss rows are the same code.
"""

from __future__ import annotations

import dataclasses

from bwsft.objectives import blockwise


def mask_spec(config, family):
    """As blockwise.mask_spec, with a block no response can outgrow."""
    spec = blockwise.mask_spec(config, family)
    widest = config.max_length + config.gen_length + config.block_size
    return dataclasses.replace(spec, block_size=widest, block_origin="response")


def corrupt(
    batch, spec, order: str = "uniform", draw: int = 0, draws: int = 1, *, block=None, levels=None
):
    """(noisy batch, MaskedBatch) for one visit of each example; `order` has one block to choose."""
    return blockwise.corrupt(batch, spec, "uniform", draw, draws, block=block, levels=levels)
