"""Which keys a query row may see, as ranges: made once for a batch, read by every layer.

Every row of a one-pass batch, and of a block that is decoded against a cache, sees at most two
ranges of keys (a prefix, and its own block or what a group of them has up to there), and every key
is seen by at most two ranges of queries. So a plan is a few integers for each row, and attention
needs no mask.
Letters: T query rows, N key rows, S sequences, B block size.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ._dispatch import require
from .block_grid import BlockGrid

TILE = 128  # rows of a tile; kernels with smaller ones take its parts
CLEAN = ("block", "causal")


@dataclass(frozen=True)
class RangePlan:
    """int32 tensors, on the device of the lengths that they come from.

    A range is [start, stop); where stop <= start it is empty. Tiles never cross a segment, of
    which all rows share their sequence and have neighboring own ranges: so the keys of a tile are
    one interval of the prefix and one of own ranges, whatever the batch. Tiles past the last one
    are [0, 0).
    """

    query_ranges: Tensor  # [4, T] prefix start and stop, own start and stop: of keys
    key_ranges: Tensor  # [4, N] first start and stop, second start and stop: of queries
    query_tiles: Tensor  # [tiles, 2] start and stop of query rows
    key_tiles: Tensor  # [tiles, 2] start and stop of key rows

    def to(self, device: torch.device | str) -> "RangePlan":
        moved = {name: tensor.to(device) for name, tensor in vars(self).items()}
        return dataclasses.replace(self, **moved)

    def part(self, queries: Tensor | None = None, keys: Tensor | None = None) -> "RangePlan":
        """The plan of some query rows [W] and key rows [M] alone, numbered as they stand in these
        lists of integers, which rise; a query may come more than once. None: all of them."""
        plan = self
        if queries is not None:
            tiles = _tiles(*_among(queries, plan.query_tiles).t(), len(queries))
            plan = RangePlan(plan.query_ranges[:, queries], _among(queries, plan.key_ranges),
                             tiles, plan.key_tiles)
        if keys is not None:
            tiles = _tiles(*_among(keys, plan.key_tiles).t(), len(keys))
            plan = RangePlan(_among(keys, plan.query_ranges), plan.key_ranges[:, keys],
                             plan.query_tiles, tiles)
        return plan


@dataclass(frozen=True)
class OnePassRows:
    """What the rows of a one-pass batch hold, int64 [T].

    For each sequence its clean row, prompt + response, and after it the noisy copies of its
    response group by group, of one block or several: group 0 of copy 1, of copy 2, ..., group 1 of
    copy 1, ... So the noisy rows of all groups after a position are one range, for any number of
    copies.
    """

    sequence: Tensor  # which of the batch's sequences
    position: Tensor  # in that sequence
    copy: Tensor  # 0 where clean, else the number of the copy, from 1


@dataclass(frozen=True)
class _Layout:
    """Where the rows of a one-pass batch are; tensors [S] but for `sequence` [T]."""

    grid: BlockGrid
    copies: int
    group: int  # blocks that a copy sees of itself, at most
    offset: Tensor  # blocks that its first group lacks
    undivided: Tensor  # tokens of the prompt that are one block
    lengths: Tensor  # clean rows
    first_noisy: Tensor  # position of the first noisy token
    starts: Tensor  # first row
    sequence: Tensor
    rows: int

    @property
    def noisy_start(self) -> Tensor:
        """First noisy row [S]."""
        return self.starts + self.lengths

    @property
    def stops(self) -> Tensor:
        return self.noisy_start + self.copies * (self.lengths - self.first_noisy)

    def block(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(start, stop) [T] of the block that holds the position [T] in each row's sequence."""
        whole = self.undivided[self.sequence]
        index = self.grid.index_of(position, whole)
        start, stop = self._bounds(index, index)
        inside = position < whole
        return torch.where(inside, 0, start), torch.where(inside, whole, stop)

    def group_of(self, position: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """(start, stop) [T] of the group of blocks that holds the position [T] in each row's
        sequence; what is given, its block's, where that has no noisy row."""
        if self.group == 1:
            return start, stop
        whole, noisy = self.undivided[self.sequence], self.first_noisy[self.sequence]
        origin = self.grid.index_of(noisy, whole) - self.offset[self.sequence]
        index = self.grid.index_of(position, whole)
        first = index - (index - origin) % self.group
        begin, end = self._bounds(first, first + self.group - 1)
        clean = position < noisy
        begin = torch.maximum(begin, noisy)
        return torch.where(clean, start, begin), torch.where(clean, stop, end)

    def _bounds(self, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """(start, stop) [T] of the blocks with these numbers [T], whole prompts apart."""
        whole, length = self.undivided[self.sequence], self.lengths[self.sequence]
        start, _ = self.grid.bounds(first, whole, length - whole)
        _, stop = self.grid.bounds(last, whole, length - whole)
        return start, stop

    def noisy_row(self, position: Tensor) -> Tensor:
        """First noisy row [T] of the group that starts at the position [T]."""
        passed = position - self.first_noisy[self.sequence]
        return self.noisy_start[self.sequence] + self.copies * passed


def range_plan(
    prompt_lengths: Tensor,  # [S] integers
    response_lengths: Tensor,  # [S] integers
    block_size: int,
    origin: str = "response",  # of the block grid, or "absolute"
    copies: int = 1,
    *,
    clean: str = "block",  # or "causal"
    prompt_blocks: bool = False,
    group: int = 1,
    group_offset: Tensor | None = None,  # [S] integers in [0, group)
    rows: int | None = None,  # T, where the host knows it
) -> tuple[RangePlan, OnePassRows]:
    """The plan of one-pass training, queries and keys being the same T rows, and what they hold.

    A clean row sees its sequence's clean rows up to the end of its block (clean="causal": up to
    itself); the prompt is one block, or with prompt_blocks cut on the absolute grid like the
    response. A noisy row sees the clean rows before its block, and its block in its own copy. With
    prompt_blocks a copy begins with the block that holds the response's first token. With `group`
    block b of a copy, from 0, is in group (b + group_offset) // group (default offset 0), and a
    noisy row sees the clean rows before its group, and in its own copy the group up to the end of
    its block. Without `rows` the host reads one number from the device of the lengths.
    """
    _check_one_pass(prompt_lengths, response_lengths, copies, clean)
    offset = _checked_offset(prompt_lengths, group, group_offset)
    grid = BlockGrid(block_size, origin)
    if prompt_blocks and grid.at_response:
        raise ValueError('prompt_blocks=True cuts the prompt too: it needs origin="absolute"')
    layout = _layout(prompt_lengths.long(), response_lengths.long(), grid, copies, prompt_blocks,
                     (group, offset), rows)
    own = _rows(layout)
    segments = torch.stack((layout.starts, layout.noisy_start), 1).flatten()
    tiles = _tiles(segments, torch.stack((layout.noisy_start, layout.stops), 1).flatten(),
                   layout.rows)
    query_ranges, key_ranges = _ranges(layout, own, clean == "causal")
    return RangePlan(query_ranges.int(), key_ranges.int(), tiles, tiles), own


def cache_plan(
    stops: Tensor,  # [T] integers
    cu_seqlens: Tensor,  # [S + 1] integers
    slots: int,
) -> RangePlan:
    """The plan of decoding against a cache [S * slots] of keys that holds the new rows' own too.

    Queries are packed rows [T] with boundaries cu_seqlens, from 0 to T; a row of sequence s sees
    the slots of s before its stop, and stops rise within a sequence. So finished blocks can be
    stored by the forward that makes the first step of the next one, and a prompt with them.
    """
    if stops.dim() != 1 or stops.is_floating_point() or cu_seqlens.dim() != 1 or slots < 1:
        raise ValueError("stops must be integers [T], cu_seqlens [S + 1] and slots at least 1, not "
                         f"{stops.dtype} {list(stops.shape)}, {list(cu_seqlens.shape)}, {slots}")
    stops, edges = stops.long(), cu_seqlens.long()
    count, rows = len(edges) - 1, len(stops)
    sequence = torch.searchsorted(edges[1:], torch.arange(rows, device=stops.device), right=True)
    order = sequence * (slots + 1) + stops  # rises over the sequences too
    require(((stops >= 0) & (stops <= slots)).all() & (order.diff() >= 0).all(),
            lambda: f"stops must rise in a sequence, from 0 to at most slots ({slots})")
    begins = sequence * slots
    slot = torch.arange(count * slots, device=stops.device)
    firsts = torch.arange(count, device=stops.device) * slots
    sees = torch.searchsorted(order, slot + slot // slots, right=True)  # the first row that does
    last = edges[1:, None].expand(-1, slots).flatten()
    no_query, no_key = torch.zeros_like(begins), torch.zeros_like(slot)
    return RangePlan(
        torch.stack((begins, begins + stops, no_query, no_query)).int(),
        torch.stack((sees, last, no_key, no_key)).int(),
        _tiles(edges[:-1], edges[1:], rows),
        _tiles(firsts, firsts + slots, len(slot)),
    )


def _among(rows: Tensor, edges: Tensor) -> Tensor:
    """How many of the rows, which rise, are before each edge: so a range keeps its rows of them."""
    return torch.searchsorted(rows.to(edges.dtype), edges.contiguous(), out_int32=True)


def _check_one_pass(prompt: Tensor, response: Tensor, copies: int, clean: str) -> None:
    for name, lengths in (("prompt_lengths", prompt), ("response_lengths", response)):
        if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise ValueError(f"{name} must be integers [S], not {lengths.dtype} "
                             f"{list(lengths.shape)}")
    if prompt.shape != response.shape or prompt.device != response.device:
        raise ValueError("prompt_lengths and response_lengths must have one entry for each "
                         "sequence, on one device")
    if copies < 1:
        raise ValueError(f"copies must be at least 1, not {copies}")
    if clean not in CLEAN:
        raise ValueError(f"clean must be one of {CLEAN}, not {clean!r}")
    require(((prompt >= 0) & (response >= 0)).all(), lambda: "a length is negative")


def _checked_offset(prompt: Tensor, group: int, offset: Tensor | None) -> Tensor:
    if group < 1:
        raise ValueError(f"group must be at least 1, not {group}")
    if offset is None:
        return torch.zeros_like(prompt, dtype=torch.int64)
    if offset.shape != prompt.shape or offset.device != prompt.device or offset.is_floating_point():
        raise ValueError("group_offset must have an integer for each sequence, on their device")
    fits = ((offset >= 0) & (offset < group)).all()
    require(fits, lambda: f"group_offset must lie in [0, {group})")
    return offset.long()


def _layout(
    prompts: Tensor, responses: Tensor, grid: BlockGrid, copies: int, prompt_blocks: bool,
    group: tuple[int, Tensor], rows: int | None,
) -> _Layout:
    lengths = prompts + responses
    undivided = torch.zeros_like(prompts) if prompt_blocks else prompts
    first_noisy = grid.start(prompts) if prompt_blocks else prompts
    first_noisy = torch.where(responses > 0, first_noisy, lengths)  # no noisy row where none
    ends = (lengths + copies * (lengths - first_noisy)).cumsum(0)
    total = ends[-1] if len(ends) else ends.sum()
    if rows is None:
        rows = int(total)
    else:
        require(total == rows, lambda: f"rows is {rows}, but the batch has {int(total)}")
    starts = torch.cat((ends.new_zeros(1), ends))[:-1]
    sequence = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)
    return _Layout(
        grid, copies, *group, undivided, lengths, first_noisy, starts, sequence, rows)


def _rows(layout: _Layout) -> OnePassRows:
    sequence, copies = layout.sequence, layout.copies
    place = torch.arange(layout.rows, device=sequence.device) - layout.starts[sequence]
    after = place - layout.lengths[sequence]  # negative in clean rows
    position = layout.first_noisy[sequence] + after // copies
    start, stop = layout.group_of(position, *layout.block(position))
    inside = after - copies * (start - layout.first_noisy[sequence])
    width = (stop - start).clamp(min=1)
    noisy = after >= 0
    return OnePassRows(
        sequence,
        torch.where(noisy, start + inside % width, place),
        torch.where(noisy, inside // width + 1, 0),
    )


def _ranges(layout: _Layout, own: OnePassRows, causal: bool) -> tuple[Tensor, Tensor]:
    """(query_ranges, key_ranges) [4, T]."""
    sequence, position, copy = own.sequence, own.position, own.copy
    first, clean_stop = layout.starts[sequence], layout.noisy_start[sequence]
    start, stop = layout.block(position)
    begin, end = layout.group_of(position, start, stop)
    clean = copy == 0
    sees = position + 1 if causal else stop
    group = layout.noisy_row(begin) + (copy - 1) * (end - begin)  # own group's first row
    later = layout.noisy_row(torch.maximum(end, layout.first_noisy[sequence]))
    zero = torch.zeros_like(first)
    query_ranges = torch.stack((
        first, first + torch.where(clean, sees, begin),
        torch.where(clean, zero, group), torch.where(clean, zero, group + stop - begin),
    ))
    seen_from = first + (position if causal else start)
    key_ranges = torch.stack((
        torch.where(clean, seen_from, group + start - begin),
        torch.where(clean, clean_stop, group + end - begin),
        torch.where(clean, later, zero), torch.where(clean, layout.stops[sequence], zero),
    ))
    return query_ranges, key_ranges


def _tiles(starts: Tensor, stops: Tensor, rows: int) -> Tensor:
    """int32 [tiles, 2]: segments [start, stop), which hold `rows` rows, cut into tiles; as many as
    any segments of that number could need."""
    segments = len(starts)
    if segments == 0:
        return starts.new_zeros(0, 2, dtype=torch.int32)
    ends = ((stops - starts + TILE - 1) // TILE).cumsum(0)
    index = torch.arange(rows // TILE + segments, device=starts.device)
    segment = torch.searchsorted(ends, index, right=True).clamp(max=segments - 1)
    passed = torch.cat((ends.new_zeros(1), ends))[segment]
    start = starts[segment] + (index - passed) * TILE
    tiles = torch.stack((start, torch.minimum(start + TILE, stops[segment])), 1)
    return torch.where((index < ends[-1])[:, None], tiles, 0).int()
