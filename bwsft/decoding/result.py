"""What decoding hands out: a row's response, and every token as it is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from bwsft.decoding.canvas import Active, Canvas, Change
from bwsft.decoding.context import DecodeContext


class Commit(NamedTuple):
    """A token that was put in its place: denoising step and response position, both from 0. It is
    final, or under a revising rule until a later commit at the same position."""

    step: int
    position: int
    token: int
    confidence: float


@dataclass(frozen=True)
class Generation:
    """One decoded response."""

    tokens: list[int]  # committed before the end token
    ended: bool  # an end token was produced; otherwise the canvas was too short
    steps: int  # denoising steps of this row; rule speculative: of the decoder that it equals
    # On request, everything that was committed, in order, also from the end token on; under a
    # revising rule also what was replaced or taken back later.
    trace: list[Commit] = field(default_factory=list)
    # Forward passes that this row took part in: one a step (rule speculative: fewer), and one more
    # for guidance; those of a verifier do not count.
    passes: int = 0


class Decoded(NamedTuple):
    """An answer as text: what it says, the tokens up to the end token, whether one came, and the
    forward passes that it took where they are known."""

    text: str
    tokens: int
    ended: bool
    passes: int | None = None


# From questions to the answers after the first so many, in order.
Decode = Callable[[Sequence[str], int], Iterable[Decoded]]
OnCommit = Callable[[int, list[Commit]], None]


@dataclass(frozen=True)
class Outcome:
    """What a step did."""

    nan: Tensor  # 0-dim bool
    change: Change  # what became of the slots of the active blocks
    active: Active  # the active blocks before it

    def filled(self) -> Tensor:
        """How many [MASK]s got a token, [S], or [S, g] in each of up to g active blocks."""
        filled, blocks = self.change.taken & self.active.masked, self.active.blocks
        return filled.sum(1) if blocks is None else (filled[:, None] & blocks).sum(2)


# Commits of every row, by its index, under a revising rule: the canvas knows the last one at each
# position only.
History = dict[int, list[Commit]]


def report(
    canvas: Canvas, outcome: Outcome, gen_length: int
) -> Iterator[tuple[int, list[Commit]]]:
    """What the step committed to answers of gen_length tokens, as (row.index, commits)."""
    taken, flat = outcome.change.taken.tolist(), outcome.active.flat
    edges = canvas.cu_seqlens.tolist()
    kept = canvas.committed_at, canvas.ids, canvas.confidence
    columns = [x.tolist() for x in (flat, *(column[flat] for column in kept))]
    for row, start, marks, *values in zip(canvas.rows, edges[:-1], taken, *columns, strict=True):
        first = start + len(row.prompt)
        commits = sorted(
            Commit(step, place - first, token, confidence)
            for mark, place, step, token, confidence in zip(marks, *values, strict=True)
            if mark and place - first < gen_length
        )
        if commits:
            yield row.index, commits


def harvest(
    canvas: Canvas,
    done: list[bool],
    steps: int,
    context: DecodeContext,
    trace: bool,
    history: History | None,
) -> Iterator[tuple[int, Generation]]:
    """The results of the rows that are done."""
    lengths, config = [row.length for row in canvas.rows], context.config
    columns = [c.split(lengths) for c in (canvas.ids, canvas.committed_at, canvas.confidence)]
    for row, is_done, passes, *values in zip(
        canvas.rows, done, context.passes, *columns, strict=True
    ):
        if not is_done:
            continue
        size, whole = config.gen_length, [c[len(row.prompt) :].tolist() for c in values]
        ids, at, confidence = (column[:size] for column in whole)
        end = next((i for i, token in enumerate(ids) if token in canvas.family.end_ids), None)
        own = steps
        if not config.method.revising:  # every step commits something
            last = size if end is None else end + 1  # it may have been final before the last poll
            own = 1 + max(at[:last] if config.stop_at_end else whole[1])
        commits = []
        if history is not None:
            commits = history.pop(row.index, [])
        elif trace:
            places = zip(at, range(size), ids, confidence, strict=True)
            commits = sorted(Commit(*place) for place in places if 0 <= place[0] < own)
        yield row.index, Generation(ids[:end], end is not None, own, commits, passes)
