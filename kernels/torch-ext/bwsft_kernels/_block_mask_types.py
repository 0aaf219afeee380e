"""The types of `block_mask`: what is asked, what comes back, and what its implementations get."""

from dataclasses import dataclass

import torch

from .block_grid import BlockGrid

ONE24 = 1 << 24


@dataclass(frozen=True)
class MaskSpec:
    """How `block_mask` corrupts; ValueError for a combination that would bias the loss.

    low, high: the mask rate is uniform between them.
    weight: per loss row 1/count ("count"), 1/(rate * block length) ("rate", the NELBO weight) or
      1/block length ("flat"), always times the `factor` that `block_mask` may be given.
    empty: if no token of the block is marked, its "last" one is, or the draw is left out ("skip").
    block_factor: "mean" estimates the average over a response's blocks, "sum" their sum.
    prefix_noise: share of earlier response tokens masked; suffix_leak: share of later ones visible.
    block_origin: the grid starts at the "response" or at "absolute" position 0 of the row.
    pairs: draws 2i and 2i+1 share block, rate and marks, the odd one takes the complement. Where
      one half would be empty, both draw rate and marks on their own, but not with weight "flat":
      there a pair always bears every token once, and half its weight whole.
    """

    block_size: int
    mask_id: int
    seed: int = 0
    low: float = 1e-3
    high: float = 1.0
    weight: str = "count"
    empty: str = "last"
    block_factor: str = "mean"
    prefix_noise: float = 0.0
    suffix_leak: float = 0.0
    block_origin: str = "response"
    pairs: bool = False

    def __post_init__(self):
        choices = {
            "weight": ("count", "rate", "flat"),
            "empty": ("last", "skip"),
            "block_factor": ("mean", "sum"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}")
        BlockGrid(self.block_size, self.block_origin)  # which checks both
        if self.mask_id < 0:
            raise ValueError(f"mask_id must be at least 0, not {self.mask_id}")
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"0 <= low <= high <= 1 must hold, not {self.low} and {self.high}")
        if not (0 <= self.prefix_noise <= 1 and 0 <= self.suffix_leak <= 1):
            raise ValueError("prefix_noise and suffix_leak must lie in [0, 1]")
        if self.weight != "count" and self.empty == "last":
            # 52 % too much loss at B 8: the fallback adds rows that 1/rate never asked for.
            raise ValueError(f'weight="{self.weight}" needs empty="skip": the last-token fallback '
                             'is unbiased with weight="count" only')
        if self.weight == "rate" and self.pairs:
            raise ValueError('weight="rate" can\'t go with pairs: a pair is conditioned on both '
                             'halves being non-empty; use weight="count" or "flat"')

    @property
    def grid(self) -> BlockGrid:
        return BlockGrid(self.block_size, self.block_origin)


@dataclass(frozen=True)
class MaskedBatch:
    """What `block_mask` returns, all on the device of the ids.

    noisy_ids, labels: shaped as ids; labels are -100 off the loss rows.
    rows [R] int64: indices of the loss rows in ids.reshape(-1), ascending, R = min(S*B, numel);
    row_target [R] int64; row_weight [R] fp32; their tails hold 0, -100 and 0.
    num_rows: 0-dim int64, how many rows are real.
    block, block_start (counted from the row's first token), block_length, count (loss rows of the
    sequence): [S] int64; rate [S] fp32.
    """

    noisy_ids: torch.Tensor
    labels: torch.Tensor
    rows: torch.Tensor
    row_target: torch.Tensor
    row_weight: torch.Tensor
    num_rows: torch.Tensor
    block: torch.Tensor
    block_start: torch.Tensor
    block_length: torch.Tensor
    rate: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True)
class MaskInputs:
    """Validated arguments: ids [T] flat, everything else [S] int64 (block_weights [S, M_max],
    factor fp64)."""

    ids: torch.Tensor
    row_start: torch.Tensor  # index of each row's first token in ids
    row_length: torch.Tensor
    prompt_lengths: torch.Tensor
    response_lengths: torch.Tensor
    sample_ids: torch.Tensor
    draw: torch.Tensor
    block: torch.Tensor | None
    block_weights: torch.Tensor | None
    block_draw: torch.Tensor | None = None  # None: draw
    rate: torch.Tensor | None = None  # in units of 2^-24
    factor: torch.Tensor | None = None
