"""Which block of a response is the active one: drawn with chances, in turn, or every one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from bwsft_kernels import MaskSpec, Stream
from bwsft_kernels.philox import philox_u24
from torch import Tensor

from bwsft.objectives.base import ONE24

if TYPE_CHECKING:
    from bwsft.data.packing import Batch

CHANCES = ("length", "rising", "falling")


def chances(batch: Batch, spec: MaskSpec, order: str) -> Tensor | None:
    """Block distribution rho as integers [S, most blocks]: proportional to a block's tokens, or to
    its number from the left or from the right. None: uniform."""
    if order not in CHANCES:
        return None
    index = _block_index(batch, spec)
    if order == "rising":
        return (index + 1).expand(batch.num_sequences, -1)
    if order == "falling":
        return (num_blocks(batch, spec)[:, None] - index).clamp(min=0)
    shape = batch.prompt_lengths[:, None], batch.response_lengths[:, None]
    start, stop = spec.grid.bounds(index, *shape)
    return (stop - start).clamp(min=0)


def importance(batch: Batch, spec: MaskSpec, order: str, block: Tensor) -> Tensor:
    """1 / (rho M) of blocks [S] that `chances` drew, in fp64."""
    weights = chances(batch, spec, order)
    if weights is None:
        return torch.ones_like(block, dtype=torch.float64)
    blocks = num_blocks(batch, spec)
    weights = weights.masked_fill(_block_index(batch, spec) >= blocks[:, None], 0).double()
    return weights.sum(1) / weights.gather(1, block[:, None])[:, 0] / blocks


def _block_index(batch: Batch, spec: MaskSpec) -> Tensor:
    # A bound that the host knows: reading the largest M would wait for the device.
    width = batch.max_length // spec.block_size + 1
    return torch.arange(width, device=batch.prompt_lengths.device)


def choose_blocks(batch: Batch, spec: MaskSpec, order: str) -> Tensor | None:
    """Active block of each sequence [S], one for all draws of a visit; None: block_mask draws it.

    A traversal is M visits; its order sorts the blocks by the words of (block, traversal).
    """
    if order in ("uniform", *CHANCES):
        return None
    blocks = num_blocks(batch, spec)
    number = batch.visits % blocks
    if order == "sequential":
        return number
    traversal = batch.visits // blocks
    index = _block_index(batch, spec)
    counter = index[None], traversal[:, None], batch.sample_ids[:, None]
    words = philox_u24(*counter, seed=spec.seed, stream=Stream.BLOCK)
    words = words.masked_fill(index[None] >= blocks[:, None], ONE24)  # absent blocks last
    ranked = words.argsort(dim=1, stable=True)
    return ranked.gather(1, number[:, None]).squeeze(1)


def num_blocks(batch: Batch, spec: MaskSpec) -> Tensor:
    """Blocks of each response [S], at least 1."""
    return spec.grid.num_blocks(batch.prompt_lengths, batch.response_lengths).clamp(min=1)


def every_block(batch: Batch, spec: MaskSpec) -> Iterator[tuple[Batch, int]]:
    """Yield (sequences that have it, block) for every block. Asks the device once for their
    numbers."""
    blocks = num_blocks(batch, spec).tolist()
    for block in range(max(blocks)):
        yield batch.select([s for s, count in enumerate(blocks) if count > block]), block
