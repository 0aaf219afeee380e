"""One-pass training: every block of every response in one packed batch (context block_causal)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from bwsft_kernels import OnePassRows, RangePlan, range_plan
from bwsft_kernels.block_grid import BlockGrid
from torch import Tensor

from bwsft.models.kv_cache import Listed
from bwsft.objectives.base import Groups, response_rows

if TYPE_CHECKING:
    from bwsft.config import Config
    from bwsft.data.packing import Batch


@dataclass(frozen=True)
class PlannedBatch:
    """Packed tokens of which each sees the ranges of others that a plan says."""

    ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [S + 1]
    plan: RangePlan
    slots: Tensor | None = None  # [T] flat ones of the context that records them

    def to(self, device: torch.device) -> PlannedBatch:
        moved = {k: v.to(device) for k, v in vars(self).items() if v is not None}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class OnePass(PlannedBatch):
    """Per sequence a clean row [prompt + response], and after it noisy copies of the response at
    the same positions (with prompt_blocks: of the blocks that hold it, so of the prompt's tail
    too), in the order of range_plan. No copy sees the clean tokens of the last block, or group of
    active blocks: unless they are supervised, they are left out."""

    clean_rows: Tensor = field(kw_only=True)  # [W] indices
    noisy_rows: Tensor = field(kw_only=True)  # [T - W] indices
    # [copies, T of the batch] where each copy of a response token is; 0 elsewhere
    copy_of: Tensor = field(kw_only=True)
    # [copies, T of the batch] and the row that predicts it; 0 elsewhere
    row_of: Tensor = field(kw_only=True)
    # [T] bool: rows of copies that see what the model itself says of their block
    conditioned: Tensor | None = field(default=None, kw_only=True)

    @property
    def noisy(self) -> Listed:
        """The copies, as active tokens with the clean rows as their context."""
        return Listed(self.noisy_rows)

    def seeing_predictions(self, tokens: Sequence[Tensor]) -> OnePass:
        """With these tokens [T of the batch] of each copy seeing what the model says of them."""
        rows = [copy[which] for copy, which in zip(self.copy_of, tokens, strict=True)]
        seeing = torch.zeros_like(self.ids, dtype=torch.bool).index_fill_(0, torch.cat(rows), True)
        return dataclasses.replace(self, conditioned=seeing)

    @property
    def clean(self) -> PlannedBatch:
        """The clean rows alone."""
        rows = self.clean_rows
        cu_seqlens = torch.searchsorted(rows, self.cu_seqlens.long()).int()
        ids, positions = self.ids[rows], self.position_ids[rows]
        return PlannedBatch(ids, positions, cu_seqlens, self.plan.part(rows, rows), rows)


def one_pass(
    batch: Batch, noisy: Tensor, grid: BlockGrid, prompt_blocks: bool = False, shift: int = 0,
    causal: bool = False, supervised: bool = False, groups: Groups | None = None,
) -> OnePass:  # fmt: skip
    """Lay out the clean rows of a batch, and copies of their responses with the ids noisy
    [copies, T]. Both are on the host. `shift`: position i predicts token i + shift. `causal`: a
    clean token sees no later one. `supervised`: clean tokens are predicted too. `groups`: a block
    of a copy sees the blocks before it in its group as they are in the copy."""
    groups = groups or Groups(1, torch.zeros_like(batch.prompt_lengths))
    plan, rows = range_plan(
        batch.prompt_lengths, batch.response_lengths, grid.size, grid.origin, len(noisy),
        clean="causal" if causal else "block", prompt_blocks=prompt_blocks,
        group=groups.size, group_offset=groups.offset,
    )  # fmt: skip
    first, last = plan.key_ranges[2:]  # the copies' rows that see a clean one
    if not supervised and (last > first).any():  # a context has a token at least
        kept = ((rows.copy > 0) | (last > first)).nonzero()[:, 0]
        plan = plan.part(kept, kept)
        rows = OnePassRows(*(x[kept] for x in vars(rows).values()))
    source = batch.cu_seqlens.long()[rows.sequence] + rows.position  # in the batch
    ids = torch.where(rows.copy == 0, batch.ids[source], noisy[rows.copy - 1, source])
    lengths = rows.sequence.bincount(minlength=len(batch.prompt_lengths))
    # Of the copies of response tokens: own places, and the rows that predict them.
    own = (rows.copy > 0) & (rows.position >= batch.prompt_lengths[rows.sequence])
    own = own.nonzero()[:, 0]
    into, first = (rows.copy[own] - 1, source[own]), plan.query_ranges[0].long()[own]
    copy_of, row_of = torch.zeros_like(noisy), torch.zeros_like(noisy)
    copy_of[into] = own
    # A token is predicted from the one `shift` before it. Where that is before the group of active
    # blocks, of one or several, the decoder has finished it: the clean row predicts, once for each
    # copy.
    from_clean = rows.position[own] - shift < plan.query_ranges[1].long()[own] - first
    row_of[into] = torch.where(from_clean, first + rows.position[own], own)
    return OnePass(
        ids,
        rows.position,
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
        plan,
        clean_rows=(rows.copy == 0).nonzero()[:, 0],
        noisy_rows=rows.copy.nonzero()[:, 0],
        copy_of=copy_of,
        row_of=row_of,
    )


def block_size_at(config: Config, step: int) -> int:
    """Tokens in a block in update `step` (0-based): --block-size; under --block-size-schedule at
    first the least 2^n times as many that hold gen_length, then half of them, ..., for an equal
    number of updates each."""
    blocks = math.ceil(config.gen_length / config.block_size)
    halvings, shrinking = (blocks - 1).bit_length(), config.block_size_schedule * config.steps
    done = halvings if step >= shrinking else int(step * halvings / shrinking)
    return config.block_size << (halvings - done)


def clean_responses(batch: Batch, one: OnePass) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, tokens, weights) of the response tokens in the clean rows, which a model with causal
    clean rows predicts from the rows before; weights sum to 1 per sequence."""
    inside = response_rows(batch).inside
    owner = torch.repeat_interleave(batch.cu_seqlens.diff().long())
    rows = one.cu_seqlens[:-1].long()[owner] + batch.position_ids
    weight = 1 / batch.response_lengths.float()
    return rows[inside], batch.ids[inside], weight[owner][inside]
