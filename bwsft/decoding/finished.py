"""Context mode block_causal: which blocks a row has, and how far its cache is final.

A token sees the tokens up to the end of its own block, so that the keys and values of a finished
block are final. They are stored by the pass that enters the next block: the finished tokens and the
[MASK]s of that block run together, the first block with its prompt. Under a logit shift that pass
also predicts the block's first token, from the last finished one, whose hidden state is kept for
the steps to come.

S sequences, W width of a span, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from bwsft_kernels.block_grid import BlockGrid
from torch import Tensor

from bwsft.decoding.canvas import Row, upload
from bwsft.decoding.plan import Planned
from bwsft.models.backbone import Family


@dataclass
class Finished:
    """Of every row the ends of its blocks, the prompt's included, and how many positions are
    stored; under a logit shift also the hidden states of the last stored tokens."""

    stops: list[list[int]]
    stored: list[int]
    causal: bool  # a finished token sees no later one
    last: Tensor | None = None  # [S, D]

    @classmethod
    def nothing(cls, rows: Sequence[Row], family: Family, block_size: int) -> Finished:
        """Of rows of which nothing is stored."""
        stops = [block_stops(row, family, block_size) for row in rows]
        return cls(stops, [0] * len(rows), family.clean_attention == "causal")

    def keep(self, kept: list[int]) -> Finished:
        last = self.last
        if last is not None:
            last = last[upload(kept, last.device)]
        stops, stored = ([values[i] for i in kept] for values in (self.stops, self.stored))
        return Finished(stops, stored, self.causal, last)

    def begins(self, planned: Planned) -> list[int]:
        """Where the active blocks start; one that holds the prompt's tail starts with that."""
        return [
            max((stop for stop in stops if stop <= step.start), default=0)
            for stops, step in zip(self.stops, planned, strict=True)
        ]

    def entering(self, planned: Planned) -> list[int]:
        """Rows with finished tokens before the active block that are not stored yet."""
        places = zip(self.stored, self.begins(planned), strict=True)
        return [i for i, (stored, begin) in enumerate(places) if stored < begin]

    def seen(self, rows: list[int], begins: list[int], stops: list[int]) -> list[list[int]]:
        """Of each row how many positions, from the left, each token sees that is not stored yet,
        from the active block, `begins` to `stops`, and before."""
        return [self.seen_by(*row) for row in zip(rows, begins, stops, strict=True)]

    def seen_by(self, row: int, begin: int, stop: int) -> list[int]:
        found, place = [], self.stored[row]
        for end in self.stops[row]:
            own = range(place, min(end, stop))
            causal = self.causal and end <= begin
            found += [p + 1 for p in own] if causal else [end] * len(own)
            place += len(own)
        return found

    def store(self, rows: list[int], stops: list[int]) -> None:
        for i, stop in zip(rows, stops, strict=True):
            self.stored[i] = stop

    def note(self, rows: list[int], hidden: Tensor) -> None:
        """Keep the hidden states [rows, D] of the last stored tokens of some rows."""
        if self.last is None:
            self.last = hidden.new_zeros(len(self.stops), hidden.shape[-1])
        self.last.index_copy_(0, upload(rows, hidden.device), hidden)

    def recall(self, rows: list[int], whole: list[int], hidden: Tensor) -> Tensor:
        """Hidden states [rows, W, D] of some rows' active blocks, flat; the first one of those in
        `whole` is the one that was kept."""
        if not whole:
            return hidden.flatten(0, 1)
        if len(whole) == len(self.stops):  # nothing to send to the device
            first = self.last
        else:
            number = {row: place for place, row in enumerate(rows)}
            places = upload([number[row] for row in whole], hidden.device)
            first = hidden[:, 0].index_copy(0, places, self.last[upload(whole, hidden.device)])
        return torch.cat([first[:, None], hidden[:, 1:]], 1).flatten(0, 1)


def block_stops(row: Row, family: Family, block_size: int) -> list[int]:
    """Where the blocks of a row end. The prompt is one block, as in training; in a block-causal
    family it is cut like the response, with which its tail shares a block."""
    prompt = len(row.prompt)
    if family.attention == "block_causal":
        blocks = BlockGrid(block_size, "absolute").blocks(0, row.length)
        return [stop for _, stop in blocks]
    blocks = BlockGrid(block_size, family.block_origin).blocks(prompt, len(row.response))
    return [prompt] * (prompt > 0) + [stop for _, stop in blocks]
