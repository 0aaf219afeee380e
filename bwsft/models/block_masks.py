"""Which keys a query may see where blocks attend to earlier blocks only."""

from __future__ import annotations

import torch
from torch import Tensor

PAD = 1 << 30


def grid_numbers(length: int, block_size: int) -> Tensor:
    """Block numbers [length], from 1, of positions on a grid that starts at position 0."""
    return torch.arange(length) // block_size + 1


def block_causal_mask(numbers: Tensor) -> Tensor:
    """Boolean [S, 1, L, L], True where query (third) may see key (fourth), from block numbers
    [S, L]: 0 prompt, k clean block k, -k its noisy copy, PAD.

    Clean k sees the prompt and clean <= k; noisy k sees the prompt, clean < k and itself. Allowed
    pairs of one sequence: P^2 + 2 sum_k b_k (P + sum_{j <= k} b_j). Where the prompt has blocks
    of its own nothing is numbered 0.
    """
    q, k = numbers[:, :, None], numbers[:, None, :]
    clean = (q >= 0) & (k >= 0) & (k <= q)
    noisy = (q < 0) & ((k == q) | ((k >= 0) & (k < -q)))
    allowed = (clean | noisy) & (k != PAD) & (q != PAD)
    # A padded query sees one key: a row without any would give NaN, and NaN gradients to others.
    first = torch.arange(numbers.shape[1], device=numbers.device) == 0
    return (allowed | ((q == PAD) & first))[:, None]
