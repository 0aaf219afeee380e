"""The sequences that are being decoded, packed, with what the host knows of each of them.

T packed tokens, S sequences, G gen_length, B slots of an active block, N of them that are projected
to logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from bwsft_kernels import LinearArgmax
from torch import Tensor

from bwsft.decoding.plan import Plan, Planned
from bwsft.models.backbone import Family
from bwsft.models.kv_cache import Span

if TYPE_CHECKING:
    from bwsft.decoding.rules import Rule


def upload(values: Sequence, device: torch.device) -> Tensor:
    """A tensor of host numbers, sent without waiting for the device."""
    return torch.tensor(values).to(device, non_blocking=True)


def span_of(starts: Sequence[int], stops: Sequence[int], device: torch.device) -> Span:
    """The positions of every sequence from its start to before its stop."""
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    start, length = upload([*zip(starts, sizes, strict=True)], device).unbind(1)
    return Span(start, length, max(sizes), even=min(sizes) == max(sizes))


@dataclass(frozen=True)
class Row:
    """What the host knows of a row before it is decoded."""

    index: int
    request: int
    prompt: list[int]
    response: list[int]  # in whole blocks: given tokens, [MASK] elsewhere
    plan: Plan

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


class Packed(NamedTuple):
    """Packed rows as a backbone takes them."""

    ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [S + 1] int32
    max_length: int


@dataclass(frozen=True)
class Active:
    """The active blocks of a step, one of each sequence, or from the first one of several to the
    last. A short one repeats its last position."""

    planned: Planned
    block: Span
    quota: Tensor | None  # [S], see PlannedStep; None: a dynamic rule
    flat: Tensor  # [S, B] places in the packed canvas
    masked: Tensor  # [S, B] bool, without repeats
    asked: Tensor  # [S, B] bool: slots that are projected to logits
    slots: Tensor  # [N] of them in the flattened blocks
    places: Tensor  # [N] and in the packed canvas
    key: tuple[Tensor, Tensor, Tensor]  # request, step and position [N], which noise depends on
    early: Tensor | None  # [N] bool: no end token may be there yet
    blocks: Tensor | None = None  # [S, g, B] bool: the slots of each of up to g active blocks

    def rectangle(self, values: Tensor, none: float = -torch.inf) -> Tensor:
        """Values [N] in their slots [S, B]."""
        empty = values.new_full((self.masked.numel(),), none)
        return empty.index_copy_(0, self.slots, values).view_as(self.masked)


class Change(NamedTuple):
    """What becomes of the slots [S, B] of the active blocks, bool."""

    taken: Tensor  # they get the token that was chosen
    cleared: Tensor | None = None  # they become [MASK]; None: no token is ever taken back
    steps: Tensor | None = None  # [N] in which step each is taken; None: in this one
    drafted: Tensor | None = None  # [S] tokens that are drafted for the next pass


@dataclass(frozen=True)
class Canvas:
    """Rows that are being decoded, packed. The rows of a batch start together, so that `step` is
    the same for all; which steps a row has does not depend on the others."""

    rows: list[Row]
    family: Family
    ids: Tensor  # [T]
    committed_at: Tensor  # [T] step, -1 for what was given and for [MASK]
    confidence: Tensor  # [T] of the token committed there
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [S + 1] int32
    prompts: Tensor  # [S] lengths
    requests: Tensor  # [S]
    plan: Tensor | None  # [S, P, 3]: start, stop and quota of every step; None: a dynamic rule

    @classmethod
    def begin(
        cls, rows: list[Row], family: Family, like: Tensor, dynamic: bool = False
    ) -> Canvas:
        """Every row's prompt and response; on the device of `like`, confidences in its dtype or
        float32."""
        ids = torch.tensor([i for r in rows for i in r.prompt + r.response], device=like.device)
        wide = torch.promote_types(like.dtype, torch.float32)
        history = torch.full_like(ids, -1), torch.zeros_like(ids, dtype=wide)
        return cls.of(rows, family, dynamic, ids, *history)

    @classmethod
    def of(
        cls, rows: list[Row], family: Family, dynamic: bool, ids: Tensor, *history: Tensor
    ) -> Canvas:
        edges = torch.tensor([0, *(row.length for row in rows)]).cumsum(0)
        return cls(
            rows, family, ids, *history,
            position_ids=torch.cat([torch.arange(row.length) for row in rows]).to(ids.device),
            cu_seqlens=edges.to(ids.device, torch.int32),
            prompts=torch.tensor([len(row.prompt) for row in rows]).to(ids.device),
            requests=torch.tensor([row.request for row in rows]).to(ids.device),
            plan=None if dynamic else plan_table(rows).to(ids.device),
        )  # fmt: skip

    def keep(self, kept: list[int]) -> Canvas:
        """The canvas with only these rows, at least one: a retired row costs nothing any more. One
        that comes twice is copied."""
        lengths = [row.length for row in self.rows]

        def pick(values: Tensor) -> Tensor:
            parts = values.split(lengths)
            return torch.cat([parts[i] for i in kept])

        columns = map(pick, (self.ids, self.committed_at, self.confidence))
        return self.of([self.rows[i] for i in kept], self.family, self.plan is None, *columns)

    def look(self, planned: Planned, step: int, rule: Rule) -> Active:
        """The active blocks before a step. Reads nothing back from the device: the host knows how
        many slots are asked for. Under a planned rule nothing is sent to it either."""
        if self.plan is None:
            block = span_of([p.start for p in planned], [p.stop for p in planned], self.ids.device)
            quota = None
        else:
            start, stop, quota = self.plan[:, step].unbind(1)
            sizes = [p.stop - p.start for p in planned]
            block = Span(start, stop - start, max(sizes), even=min(sizes) == max(sizes))
        flat = block.flat(self.cu_seqlens)
        masked = self.ids[flat] == self.family.mask_id
        if not block.even:
            masked = masked & ~block.repeats()
        asked = masked
        if rule.revising:  # what was committed counts too, and what was given does not
            asked = masked | (self.committed_at[flat] >= 0)
            asked = asked if block.even else asked & ~block.repeats()
        size = sum(p.asked for p in planned)
        slots = asked.flatten().nonzero_static(size=size).squeeze(1)
        places = flat.flatten()[slots]
        owner = slots // block.width
        position = places - self.cu_seqlens[owner]
        noise_step = torch.full_like(places, step if rule.step_noise else 0)
        key, early = (self.requests[owner], noise_step, position), None
        if rule.config.min_length:
            early = position - self.prompts[owner] < rule.config.min_length
        several = rule.config.active_blocks > 1
        blocks = block_slots(planned, block) if several else None
        return Active(planned, block, quota, flat, masked, asked, slots, places, key, early, blocks)

    def write(self, active: Active, best: LinearArgmax, change: Change, step: int) -> None:
        """Each of the N slots gets its token, becomes [MASK] or stays what it was."""
        places, got = active.places, change.taken.flatten()[active.slots]
        step = step if change.steps is None else change.steps
        gone = None if change.cleared is None else change.cleared.flatten()[active.slots]
        for column, new, none in (
            (self.ids, best.token, self.family.mask_id),
            (self.committed_at, step, -1),
            (self.confidence, best.confidence, 0),
        ):
            old = none if gone is None else column[places].masked_fill(gone, none)
            column[places] = torch.where(got, new, old)

    def view(self, rows: Sequence[int], lengths: Sequence[int]) -> Packed:
        """The first `lengths` positions of these rows."""
        full = [row.length for row in self.rows]
        if list(rows) == list(range(len(full))) and list(lengths) == full:
            return Packed(self.ids, self.position_ids, self.cu_seqlens, max(full))
        first = torch.tensor([0, *full]).cumsum(0).tolist()
        parts = [torch.arange(first[i], first[i] + n) for i, n in zip(rows, lengths, strict=True)]
        index = torch.cat(parts).to(self.ids.device, non_blocking=True)
        edges = torch.tensor([0, *lengths]).cumsum(0).int()
        edges = edges.to(self.ids.device, non_blocking=True)
        return Packed(self.ids[index], self.position_ids[index], edges, max(lengths))

    def final(self, gen_length: int) -> Tensor:
        """Sequences [S] whose text, of at most gen_length tokens, can't change any more."""
        first = self.cu_seqlens[:-1].long() + self.prompts
        responses = self.ids[first[:, None] + torch.arange(gen_length, device=first.device)]
        ends = upload(self.family.end_ids, self.ids.device)
        return final_rows(responses, self.family.mask_id, ends)


def block_slots(planned: Planned, span: Span) -> Tensor:
    """Which of its up to g active blocks each slot of a span is in, bool [S, g, W]; the span begins
    with the first of them."""
    bounds = [[(block.start, block.stop) for block in step.window] for step in planned]
    most = max(map(len, bounds))
    padded = [own + [(0, 0)] * (most - len(own)) for own in bounds]
    start, stop = upload(padded, span.start.device).unsqueeze(-1).unbind(2)  # [S, g, 1]
    position = span.positions()[:, None]
    return (start <= position) & (position < stop)


def final_rows(canvas: Tensor, mask_id: int, end_ids: Tensor) -> Tensor:
    """Rows [S] of response canvases [S, G] whose text is final: they have no [MASK], or an end
    token with none before it. Committed tokens never change, so what follows cannot matter."""
    mask_before = (canvas == mask_id).cumsum(1) > 0
    return (torch.isin(canvas, end_ids) & ~mask_before).any(1) | ~mask_before[:, -1]


def plan_table(rows: list[Row]) -> Tensor:
    """Start, stop and quota of every step [S, P, 3]."""
    longest = max(len(row.plan) for row in rows)
    # A row that has no more steps is gone before its padding would be read.
    plan = [[(p.start, p.stop, p.quota) for p in row.plan] for row in rows]
    return torch.tensor([row + [(0, 0, 0)] * (longest - len(row)) for row in plan])
