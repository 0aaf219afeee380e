"""The types of `block_mask`: what is asked, what comes back, and what its implementations get."""

from dataclasses import dataclass

from torch import Tensor

from .block_grid import BlockGrid

ONE24 = 1 << 24


@dataclass(frozen=True)
class MaskSpec:
    """How `block_mask` corrupts; ValueError for a combination whose weights would mean nothing.

    low, high: the mask rate is uniform between them.
    weight: of a supervised token: 1/count ("count"), 1/(rate * block length) ("rate", the NELBO
      weight), 1/block length ("flat") or 1 ("sum"), always times the `factor` of `block_mask`.
    empty: what becomes of a draw that marks nothing, 11 % of them at 8 tokens and rates on (0, 1).
      "redraw": the rate and the number of one uniformly chosen token change places. Every token of
      a block has the same expected weight 1 / length at weight "count", whatever the rates; with
      low 0 and high 1 (and no pairs) rate and marks are distributed as in a draw that marked
      something: the masked count is uniform on 1..length, and the loss estimates the NELBO per
      token without bias.
      "last": the block's last token is marked (the paper's text), whose expected weight then is
      twice that of each other token (1.99 times at 8 tokens and low 1e-3). "skip": nothing is.
    block_factor: "mean" estimates the average over a response's blocks, "sum" their sum.
    prefix_noise: share of earlier response tokens masked; suffix_leak: share of later ones visible.
    block_origin: the grid starts at the "response" or at "absolute" position 0 of the row.
    pairs: draws 2i and 2i+1 share block, rate and marks, and the odd one takes the complement:
      together they supervise every token once. Where the even one marks the whole block the odd one
      is empty; unless empty is "skip" the even one then has the weight of both, so that at weight
      "count" every pair weighs the same, and each state what it weighs without pairs.
    """

    block_size: int
    mask_id: int
    seed: int = 0
    low: float = 1e-3
    high: float = 1.0
    weight: str = "count"
    empty: str = "redraw"
    block_factor: str = "mean"
    prefix_noise: float = 0.0
    suffix_leak: float = 0.0
    block_origin: str = "response"
    pairs: bool = False

    def __post_init__(self) -> None:
        choices = {"weight": ("count", "rate", "flat", "sum"), "empty": ("redraw", "last", "skip"),
                   "block_factor": ("mean", "sum")}
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
        if self.weight in ("rate", "flat") and self.empty != "skip":
            # 52 % too much loss at B 8: the fallback adds rows that 1/rate never asked for.
            raise ValueError(f'weight="{self.weight}" needs empty="skip": filling empty draws '
                             'belongs to weight="count" or "sum" and biases every other')
        if self.weight == "rate" and self.pairs:
            raise ValueError('weight="rate" can\'t go with pairs: the rate is not that of the odd '
                             'half; use weight="count", "flat" or "sum"')

    @property
    def grid(self) -> BlockGrid:
        return BlockGrid(self.block_size, self.block_origin)

    @property
    def bounds24(self) -> tuple[int, int]:
        """low and high in units of 2^-24."""
        return round(self.low * ONE24), round(self.high * ONE24)


@dataclass(frozen=True)
class MaskedBatch:
    """What `block_mask` returns, all on the device of the ids; int64 unless said.

    The lists of supervised rows have the fixed length R = min(S * B, number of ids).
    """

    noisy_ids: Tensor  # shape and dtype of ids
    labels: Tensor  # as ids, -100 where a token isn't supervised
    rows: Tensor  # [R] indices of the supervised tokens in ids.reshape(-1), ascending; then 0
    row_target: Tensor  # [R]; then -100
    row_weight: Tensor  # [R] fp32; then 0
    num_rows: Tensor  # 0-dim: how many rows are real
    block: Tensor  # [S] index of the active block
    block_start: Tensor  # [S] counted from the sequence's first token
    block_length: Tensor  # [S]
    rate: Tensor  # [S] fp32
    count: Tensor  # [S] supervised tokens of the sequence


@dataclass(frozen=True)
class MaskInputs:
    """The tensors that the operator gets, int64 unless said."""

    ids: Tensor  # [T] of any integer dtype
    row_start: Tensor  # [S] index of each sequence's first token in ids
    row_length: Tensor  # [S]
    prompt_lengths: Tensor  # [S]
    response_lengths: Tensor  # [S]
    sample_ids: Tensor  # [S]
    draw: Tensor  # [S]
    block_draw: Tensor | None = None  # [S]; None: draw
    block: Tensor | None = None  # [S]
    block_weights: Tensor | None = None  # [S, M]
    rate: Tensor | None = None  # [S] in units of 2^-24
    factor: Tensor | None = None  # [S] fp64
