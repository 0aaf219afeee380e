"""Dense masks of blocks, by definition, and forwards under such a mask: what plans of ranges are
held against."""

import dataclasses

import torch
from bwsft_kernels.block_grid import BlockGrid

from bwsft.models.attention import packed_layout


def clean_numbers(grid, prompt, response, prompt_blocks=False):
    """Block numbers of a clean row [prompt + response]: the prompt is block 0, or is cut on the
    grid that starts at its first token."""
    if prompt_blocks:
        place = torch.arange(prompt + response)
        return BlockGrid(grid.size, "absolute").index_of(place, 0) + 1
    sizes = torch.tensor([prompt, *(b - a for a, b in grid.blocks(prompt, response))])
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)


def block_causal_mask(numbers):
    """Boolean [L, L], True where a query (first) may see a key: of a row with the block numbers
    [L] each token sees its own block and those before it."""
    return numbers[:, None] >= numbers


def masked_states(net, ids, mask, positions=None):
    """Hidden states [L, D] of one sequence under a mask [L, L]."""
    positions = torch.arange(len(ids)) if positions is None else positions
    layout = packed_layout(torch.tensor([0, len(ids)]))
    return net.run_layers(ids, positions, dataclasses.replace(layout, mask=mask[None, None]))
