"""One-pass training: every block of every response in one packed batch (context block_causal)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from bwsft_kernels.block_grid import BlockGrid
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bwsft.models.block_masks import PAD, block_causal_mask, grid_numbers
from bwsft.models.kv_cache import Span
from bwsft.objectives.base import response_rows

if TYPE_CHECKING:
    from bwsft.config import Config
    from bwsft.data.packing import Batch


@dataclass(frozen=True)
class OnePass:
    """Per sequence a clean row [prompt + response], and after it noisy copies of the response at
    the same positions (with prompt_blocks: of the blocks that hold it, so of the prompt's tail
    too). The copies of a block stand side by side, so that what a token sees, and what sees it, is
    at most two stretches of the row."""

    ids: Tensor  # [T]
    cu_seqlens: Tensor  # [S + 1]
    position_ids: Tensor  # [T]
    slot_positions: Tensor  # [S, L] the same, padded
    numbers: Tensor  # [S, L] block numbers for block_causal_mask
    copies: Tensor  # [S, L] the number of a noisy token's copy, from 1; else 0
    clean: Tensor  # [S] length of the clean row, after which the copies begin
    width: int  # most tokens that a row has in its copies
    copy_of: Tensor  # [copies, T of the batch] where each copy of a response token is; 0 elsewhere
    row_of: Tensor  # [copies, T of the batch] and the row by which it is predicted: predicted_at
    max_length: int
    causal: bool = False  # a clean token sees no later one

    @property
    def mask(self) -> Tensor:
        """Boolean [S, 1, L, L], see block_causal_mask."""
        return block_causal_mask(self.numbers, self.copies, self.causal)

    @property
    def span(self) -> Span:
        """The copies, as active tokens with the clean rows as their context."""
        return Span(self.clean, self.cu_seqlens.diff() - self.clean, self.width)

    def to(self, device: torch.device) -> OnePass:
        tensors = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **tensors)


def one_pass(
    batch: Batch, noisy: Tensor, grid: BlockGrid, prompt_blocks: bool = False, shift: int = 0,
    causal: bool = False,
) -> OnePass:  # fmt: skip
    """Lay out the clean rows of a batch, and copies of their responses with the ids noisy
    [copies, T]. Both are on the host. `shift`: position i predicts token i + shift."""
    ids, positions, numbers, copies = [], [], [], []
    lengths, clean_lengths = [0], []
    copy_of, row_of = torch.zeros_like(noisy), torch.zeros_like(noisy)
    shapes = zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    for first, (prompt, response) in zip(batch.cu_seqlens.tolist(), shapes, strict=False):
        clean = clean_numbers(grid, prompt, response, prompt_blocks)
        tail = prompt - grid.start(prompt) if prompt_blocks else 0
        row, start = slice(first, first + len(clean)), prompt - tail
        # A copy after the other, [copies, tail + response]; then sorted by blocks.
        block = clean[start:].repeat(len(noisy))
        order = block.argsort(stable=True)
        copy = torch.arange(len(noisy)).repeat_interleave(tail + response)
        ids += [batch.ids[row], noisy[:, first + start : row.stop].flatten()[order]]
        position = torch.arange(len(clean))
        positions += [torch.cat([position, position[start:].repeat(len(noisy))[order]])]
        numbers += [torch.cat([clean, -block[order]])]
        copies += [torch.cat([torch.zeros_like(clean), 1 + copy[order]])]
        place = (order.argsort() + len(clean)).view(len(noisy), tail + response)[:, tail:]
        own = slice(first + prompt, row.stop)
        copy_of[:, own] = sum(lengths) + place
        row_of[:, own] = sum(lengths) + predicted_at(clean, place, shift)
        clean_lengths.append(len(clean))
        lengths.append(len(clean) + len(order))
    return OnePass(
        ids=torch.cat(ids),
        cu_seqlens=torch.tensor(lengths).cumsum(0).int(),
        position_ids=torch.cat(positions),
        slot_positions=pad_sequence(positions, batch_first=True),
        numbers=pad_sequence(numbers, batch_first=True, padding_value=PAD),
        copies=pad_sequence(copies, batch_first=True),
        clean=torch.tensor(clean_lengths),
        width=max(n - m for n, m in zip(lengths[1:], clean_lengths, strict=True)),
        copy_of=copy_of,
        row_of=row_of,
        max_length=max(lengths),
        causal=causal,
    )


def block_size_at(config: Config, step: int) -> int:
    """Tokens in a block in update `step` (0-based): --block-size; under --block-size-schedule at
    first the least 2^n times as many that hold gen_length, then half of them, ..., for an equal
    number of updates each."""
    blocks = math.ceil(config.gen_length / config.block_size)
    halvings, shrinking = (blocks - 1).bit_length(), config.block_size_schedule * config.steps
    done = halvings if step >= shrinking else int(step * halvings / shrinking)
    return config.block_size << (halvings - done)


def clean_numbers(grid: BlockGrid, prompt: int, response: int, prompt_blocks: bool) -> Tensor:
    """Block numbers of a clean row [prompt + response]: the prompt is block 0, or is cut on the
    grid that starts at its first token."""
    if prompt_blocks:
        return grid_numbers(prompt + response, grid.size)
    sizes = torch.tensor([prompt, *(b - a for a, b in grid.blocks(prompt, response))])
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)


def predicted_at(clean: Tensor, copies: Tensor, shift: int) -> Tensor:
    """The rows by which a model predicts the response tokens of some copies [copies, R], each from
    the row `shift` before: their own places `copies`, and for the first token of a block its place
    in the clean row, since the token before it is clean when the decoder comes to the block.
    `clean` [L] are the clean row's block numbers; places count from its first token.

    A first token that several copies mask is supervised once for each, by the same row.
    """
    place = torch.arange(len(clean) - copies.shape[1], len(clean))
    return torch.where(clean[place] == clean[place - shift], copies, place)


def clean_responses(batch: Batch, one: OnePass) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, tokens, weights) of the response tokens in the clean rows, which a model with causal
    clean rows predicts from the rows before; weights sum to 1 per sequence."""
    inside = response_rows(batch).inside
    owner = torch.repeat_interleave(batch.cu_seqlens.diff().long())
    rows = one.cu_seqlens[:-1].long()[owner] + batch.position_ids
    weight = 1 / batch.response_lengths.float()
    return rows[inside], batch.ids[inside], weight[owner][inside]
