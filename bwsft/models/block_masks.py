"""Attention masks over blocks: who sees whom when a block never looks ahead."""

from __future__ import annotations

import torch
from bwsft_kernels.block_grid import BlockGrid
from torch import Tensor

PAD = 1 << 30


def grid_numbers(length: int, block_size: int) -> Tensor:
    """Block numbers [length], from 1, of positions on a grid that starts at position 0."""
    return BlockGrid(block_size, "absolute").index_of(torch.arange(length), 0) + 1


def block_causal_mask(
    numbers: Tensor, copies: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Boolean [S, 1, L, L], True where a query (third) may see a key (fourth), from block numbers
    [S, L]: 0 prompt, k clean block k, -k a noisy copy of it, PAD; and, where there are several,
    the number of the copy [S, L].

    Clean k sees the prompt and clean <= k; noisy k sees the prompt, clean < k and itself. Allowed
    pairs of one sequence with c copies: P^2 + (1 + c) sum_k b_k (P + sum_{j <= k} b_j). Where the
    prompt has blocks of its own nothing is numbered 0. `causal`: a clean token sees none after it.
    """
    q, k = numbers[:, :, None], numbers[:, None, :]
    clean = (q >= 0) & (k >= 0) & (k <= q)
    if causal:
        clean = clean.tril()
    itself = k == q
    if copies is not None:
        itself &= copies[:, None, :] == copies[:, :, None]
    noisy = (q < 0) & (itself | ((k >= 0) & (k < -q)))
    allowed = (clean | noisy) & (k != PAD) & (q != PAD)
    # A padded query sees one key: a row without any would give NaN, and NaN gradients to others.
    first = torch.arange(numbers.shape[1], device=numbers.device) == 0
    return (allowed | ((q == PAD) & first))[:, None]
