"""The decoder's policies as small functions: block grid, quotas, which tokens a step commits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeConfig:
    """How a canvas is filled."""

    gen_length: int = 128
    """Response positions of the canvas."""
    block_size: int = 32
    """Tokens in a block, B."""
    steps: int | None = None
    """Denoising steps for the whole canvas, split evenly over its blocks; default: one per
    token. Fewer steps commit several tokens at a time."""
    temperature: float = 0.0
    """0: the most probable token; above: Gumbel noise on the choice, never on the confidence."""
    seed: int = 0
    """Seed of the noise; each prompt's noise depends on its own request number only."""
    banned_ids: tuple[int, ...] = ()
    """Token ids that are never produced."""
    stop_at_end: bool = True
    """A row is done once an end token is committed with no [MASK] before it."""
    batch_size: int = 8
    """Prompts decoded together."""

    def steps_per_block(self) -> int:
        return (self.steps or self.gen_length) // (self.gen_length // self.block_size)


def validate(config: DecodeConfig) -> None:
    """Raise ValueError, naming the field, for settings no canvas can be filled with."""
    if config.block_size < 1 or config.gen_length < 1 or config.batch_size < 1:
        raise ValueError("gen_length, block_size and batch_size must be at least 1")
    if config.gen_length % config.block_size:
        raise ValueError(
            f"block_size {config.block_size} must divide gen_length {config.gen_length}"
        )
    blocks = config.gen_length // config.block_size
    if config.steps is not None and (config.steps < blocks or config.steps % blocks):
        raise ValueError(
            f"steps {config.steps} must be a multiple of the number of blocks, {blocks} "
            f"(gen_length / block_size), so that every block gets the same number"
        )
    if config.temperature < 0:
        raise ValueError("temperature must not be negative")


def quotas(masks: Tensor, steps: int) -> Tensor:
    """Tokens to commit per step [S, steps] for `masks` [S] masked positions: as even as can be,
    the remainder on the first steps (LLaDA's get_num_transfer_tokens)."""
    base, extra = masks // steps, masks % steps
    step = torch.arange(steps, device=masks.device)
    return base[:, None] + (step[None] < extra[:, None])


def block_bounds(prompt_lengths: Tensor, config: DecodeConfig, origin: str) -> Tensor:
    """Row-relative [start, end) of every block of the canvas, [S, M, 2].

    origin "response": the grid starts at the canvas' first position. "absolute": it starts at
    position 0 of the row, so the first block is cut short by the prompt and one more may follow.
    """
    size, end = config.block_size, prompt_lengths + config.gen_length
    first = prompt_lengths // size * size if origin == "absolute" else prompt_lengths
    count = config.gen_length // size + (1 if origin == "absolute" else 0)
    start = first[:, None] + size * torch.arange(count, device=prompt_lengths.device)
    stop = torch.minimum(start + size, end[:, None])
    start = torch.maximum(start, prompt_lengths[:, None])
    return torch.stack([torch.minimum(start, stop), stop], dim=-1)


def commit_quota(confidence: Tensor, open_slots: Tensor, quota: Tensor) -> Tensor:
    """The `quota` [S] most confident open slots of every row [S, n] -> bool [S, n].

    Low-confidence remasking, seen from the other side: the rest stays [MASK]. Ties go to the
    leftmost slot.
    """
    ranked = confidence.masked_fill(~open_slots, -torch.inf)
    order = ranked.sort(dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return open_slots & (rank < quota[:, None])


def final_rows(canvas: Tensor, mask_id: int, end_ids: Tensor) -> Tensor:
    """Rows [S] of a response canvas [S, G] whose text is final: an end token stands in it with no
    [MASK] before it. Committed tokens never change, so what follows cannot matter."""
    at_end = torch.isin(canvas, end_ids)
    open_before = (canvas == mask_id).cumsum(1) > 0
    return (at_end & ~open_before).any(1)
