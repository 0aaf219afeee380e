"""Which examples of a tokenized set fit. They are looked through some at a time, and those that are
kept are mapped columns: millions take no more memory than thousands."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from bwsft.data import token_cache
from bwsft.data.examples import DataOptions
from bwsft.data.packing import CanvasLayout

ROWS = 1 << 17  # examples looked at at once


class Lengths:
    """Numbers of tokens, of which only how many there are of each is kept."""

    def __init__(self) -> None:
        self.counts = np.zeros(1, dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        counts = np.bincount(values, minlength=len(self.counts))
        counts[: len(self.counts)] += self.counts
        self.counts = counts

    def __len__(self) -> int:
        return int(self.counts.sum())

    def quantile(self, share: float, below: int | None = None) -> int:
        """The length that this share does not exceed (inverted_cdf of np.quantile); or, `below` a
        number, that of what each length lacks of it."""
        place = max(math.ceil(len(self) * share - 1), 0)
        if below is not None:
            place = len(self) - 1 - place
        found = int(np.searchsorted(np.cumsum(self.counts), place, side="right"))
        return found if below is None else below - found

    def quantiles(self) -> dict[str, int]:
        shares = {"min": 0.0, "50%": 0.5, "90%": 0.9, "99%": 0.99, "max": 1.0}
        return {name: self.quantile(share) for name, share in shares.items()}

    def above(self, limit: int) -> int:
        """How many are longer."""
        return int(self.counts[limit + 1 :].sum())


def lengths_of(
    prompts: np.ndarray, responses: np.ndarray
) -> tuple[Lengths, Lengths, Lengths]:  # of [n] each
    """(prompts', responses', both's) lengths of examples."""
    found = Lengths(), Lengths(), Lengths()
    parts = (token_cache.pieces(column, ROWS) for column in (prompts, responses))
    for (_, prompt), (_, response) in zip(*parts, strict=True):
        for lengths, values in zip(found, (prompt, response, prompt + response), strict=True):
            lengths.add(values)
    return found


class Columns(NamedTuple):
    """Of each example that is kept: [n] int64, as in TokenizedSet."""

    starts: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    sample_ids: np.ndarray


class Selection:
    """The examples of `arrays`, as token_cache has them, that fit `options`; counts all."""

    def __init__(self, arrays: token_cache.Arrays, options: DataOptions):
        self.arrays, self.options = arrays, options

    def columns(self, folder: Path | None) -> Columns:
        """Those that fit, mapped from files without names in `folder`; in memory without one, or
        where nothing can be written there."""
        try:
            return Columns(*_mapped(self._parts(), folder)) if folder else self._in_memory()
        except OSError:
            return self._in_memory()

    def _in_memory(self) -> Columns:
        return Columns(*map(np.concatenate, zip(*self._parts(), strict=True)))

    def _parts(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Columns of those that fit, of some examples at a time, and at first of none."""
        self.prompts, self.responses, self.both = Lengths(), Lengths(), Lengths()  # that fit
        self.totals, self.shortest = Lengths(), Lengths()  # of all; prompts of all
        self.dropped: dict[str, tuple[int, int]] = {}  # reason -> (count, the first's sample id)
        yield (np.empty(0, dtype=np.int64),) * 4
        names, begin = ("prompt_lengths", "response_lengths", "sample_ids"), 0
        parts = (token_cache.pieces(self.arrays[name], ROWS) for name in names)
        for (_, prompts), (_, responses), (_, ids) in zip(*parts, strict=True):
            totals = prompts + responses
            starts = begin + np.cumsum(totals) - totals
            begin += int(totals.sum())
            self.totals.add(totals)
            self.shortest.add(prompts)
            keep = self._fitting(prompts, responses, totals, ids)
            self.prompts.add(prompts[keep])
            self.responses.add(responses[keep])
            self.both.add(totals[keep])
            yield starts[keep], prompts[keep], responses[keep], ids[keep]

    def _fitting(
        self, prompts: np.ndarray, responses: np.ndarray, totals: np.ndarray, ids: np.ndarray
    ) -> np.ndarray:
        """Indices of the examples that fit, of [n] each; notes the others."""
        options = self.options
        fits = totals <= options.max_length
        self._drop(ids[~fits], f"longer than max_length {options.max_length}")
        keep = np.flatnonzero(fits)
        if options.layout and options.max_positions:
            lengths = canvas_lengths(prompts[keep], responses[keep], options.layout)
            fits = lengths <= options.max_positions
            reason = f"canvas longer than the model's {options.max_positions} positions"
            self._drop(ids[keep[~fits]], reason)
            keep = keep[fits]
        return keep

    def _drop(self, ids: np.ndarray, reason: str) -> None:
        count, first = self.dropped.get(reason, (0, -1))
        first = first if count or not len(ids) else int(ids[0])
        self.dropped[reason] = count + len(ids), first

    def remedy(self) -> str:
        """The flags that would keep examples, where all of them are too long."""
        if not len(self.totals):
            return ""
        least, middle, longest = map(self.totals.quantile, (0.0, 0.5, 1.0))
        layout, most = self.options.layout, self.options.max_positions
        if most and least > most:
            return f"; the model has {most} positions: choose a --model with more, or shorten them"
        if least > self.options.max_length:
            if most and longest > most:
                return f"; --max-length {most} keeps those that the model has positions for"
            return f"; --max-length {longest} keeps them all, --max-length {middle} half of them"
        if layout.canvas == "padded":
            return f"; give --max-length {most}"
        room = (most - self.shortest.quantile(0.0)) // layout.block_size * layout.block_size
        if room > 0:
            return f"; give --gen-length {room} or less"
        return "; no block fits after the prompts: lower --block-size"


def _mapped(parts: Iterator[tuple[np.ndarray, ...]], folder: Path) -> list[np.ndarray]:
    """Columns of int64 that come in parts, as arrays mapped from files without names."""
    files = [tempfile.TemporaryFile(dir=folder) for _ in Columns._fields]
    try:
        for part in parts:
            for file, column in zip(files, part, strict=True):
                file.write(column.tobytes())
        return [_map(file) for file in files]
    finally:
        for file in files:
            file.close()


def _map(file: IO[bytes]) -> np.ndarray:
    file.flush()
    count = file.tell() // 8
    # An empty file can't be mapped.
    return np.memmap(file, np.int64, mode="r", shape=(count,)) if count else np.empty(0, np.int64)


def canvas_lengths(
    prompts: np.ndarray, responses: np.ndarray, layout: CanvasLayout
) -> np.ndarray:  # [n] of [n]
    """Positions that the canvas of each example takes."""
    width = int(responses.max(initial=0)) + 1
    pairs, which = np.unique(prompts * width + responses, return_inverse=True)
    rows = [layout.lengths(*divmod(pair, width))[1] for pair in pairs.tolist()]
    return np.array(rows, dtype=np.int64)[which.reshape(-1)]
