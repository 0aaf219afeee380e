"""The rows that are being decoded, packed, with what the host knows of each of them.

T packed tokens, S rows, G gen_length, P steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bwsft.backbones.base import Family
from bwsft.decoding import PlannedStep


@dataclass(frozen=True)
class Row:
    """What the host knows of a row before it is decoded."""

    index: int
    request: int
    prompt: list[int]
    plan: list[PlannedStep]

    @property
    def length(self) -> int:
        return self.plan[-1].stop


@dataclass(frozen=True)
class Canvas:
    """Rows that are being decoded, packed. The rows of a batch start together, so that `step` is
    the same for all; which steps a row has does not depend on the others."""

    rows: list[Row]
    ids: Tensor  # [T]
    committed_at: Tensor  # [T] step, -1 for the prompt and for [MASK]
    confidence: Tensor  # [T] of the token committed there
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [S + 1] int32
    requests: Tensor  # [S]
    plan: Tensor  # [S, P, 3]: start, stop and quota of every step

    @classmethod
    def begin(cls, rows: list[Row], family: Family, like: Tensor) -> Canvas:
        """Every row's prompt followed by [MASK]; on the device of `like`, confidences in its dtype
        or float32."""
        ids = [i for r in rows for i in r.prompt + [family.mask_id] * (r.length - len(r.prompt))]
        ids = torch.tensor(ids, device=like.device)
        wide = torch.promote_types(like.dtype, torch.float32)
        return cls.of(rows, ids, torch.full_like(ids, -1), torch.zeros_like(ids, dtype=wide))

    @classmethod
    def of(cls, rows: list[Row], ids: Tensor, committed_at: Tensor, confidence: Tensor) -> Canvas:
        longest = max((len(row.plan) for row in rows), default=0)
        # A row that has no more steps is gone before its padding would be read.
        plan = [[(t.start, t.stop, t.quota) for t in row.plan] for row in rows]
        plan = [row + [(0, 0, 0)] * (longest - len(row)) for row in plan]
        edges = torch.tensor([0, *(row.length for row in rows)]).cumsum(0)
        positions = [torch.arange(row.length) for row in rows]
        return cls(
            rows, ids, committed_at, confidence,
            position_ids=torch.cat(positions or [edges[:0]]).to(ids.device),
            cu_seqlens=edges.to(ids.device, torch.int32),
            requests=torch.tensor([row.request for row in rows]).to(ids.device),
            plan=torch.tensor(plan).to(ids.device),
        )  # fmt: skip

    def keep(self, kept: list[int]) -> Canvas:
        """The canvas with only these rows: a retired row costs nothing any more."""
        lengths = [row.length for row in self.rows]

        def pick(values: Tensor) -> Tensor:
            parts = values.split(lengths)
            return torch.cat([parts[i] for i in kept]) if kept else values[:0]

        return self.of(
            [self.rows[i] for i in kept],
            pick(self.ids),
            pick(self.committed_at),
            pick(self.confidence),
        )

    def responses(self, gen_length: int) -> Tensor:
        """Response canvas [S, G] of every row."""
        first = self.cu_seqlens[1:].long() - gen_length
        return self.ids[first[:, None] + torch.arange(gen_length, device=first.device)]
