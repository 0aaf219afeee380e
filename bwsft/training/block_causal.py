"""One-pass training: every block of every response in one packed batch (context block_causal)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from bwsft_kernels.block_grid import BlockGrid
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bwsft.models.block_masks import PAD, block_causal_mask, grid_numbers

if TYPE_CHECKING:
    from bwsft.data.packing import Batch


@dataclass(frozen=True)
class OnePass:
    """Per sequence a clean row [prompt + response], and after it a noisy copy of the response at
    the same positions (with prompt_blocks: of the blocks that hold it, so of the prompt's tail
    too)."""

    ids: Tensor  # [T]
    cu_seqlens: Tensor  # [S + 1]
    position_ids: Tensor  # [T]
    numbers: Tensor  # [S, L] block numbers for block_causal_mask
    copy_of: Tensor  # [T of the batch] where the noisy copy of a response token is; 0 elsewhere
    max_length: int

    @property
    def mask(self) -> Tensor:
        """Boolean [S, 1, L, L], see block_causal_mask."""
        return block_causal_mask(self.numbers)

    def to(self, device: torch.device) -> OnePass:
        tensors = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **tensors)


def one_pass(batch: Batch, noisy: Tensor, grid: BlockGrid, prompt_blocks: bool = False) -> OnePass:
    """Lay out the clean rows of a batch, and copies of their responses with the ids `noisy` [T].
    Both are on the host."""
    ids, positions, numbers, lengths = [], [], [], [0]
    copy_of = torch.zeros_like(batch.ids)
    shapes = zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    for first, (prompt, response) in zip(batch.cu_seqlens.tolist(), shapes, strict=False):
        if prompt_blocks:
            clean, tail = grid_numbers(prompt + response, grid.size), prompt - grid.start(prompt)
        else:
            # The prompt is block 0, clean blocks are 1, 2, ...
            blocks = [stop - start for start, stop in grid.blocks(prompt, response)]
            sizes = torch.tensor([prompt, *blocks])
            clean, tail = torch.repeat_interleave(torch.arange(len(sizes)), sizes), 0
        own = slice(first + prompt, first + prompt + response)
        row = batch.ids[first : own.stop]
        ids += [row, row[prompt - tail : prompt], noisy[own]]
        positions += [torch.arange(len(row)), torch.arange(prompt - tail, len(row))]
        numbers += [torch.cat([clean, -clean[prompt - tail :]])]
        copy_of[own] = torch.arange(response) + sum(lengths) + len(row) + tail
        lengths.append(len(row) + tail + response)
    return OnePass(
        ids=torch.cat(ids),
        cu_seqlens=torch.tensor(lengths).cumsum(0).int(),
        position_ids=torch.cat(positions),
        numbers=pad_sequence(numbers, batch_first=True, padding_value=PAD),
        copy_of=copy_of,
        max_length=max(lengths),
    )
