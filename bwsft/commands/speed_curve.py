"""Accuracy over tokens per forward (TPF): the curve of each context mode, as table and plot."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from bwsft.utils.lines import say
from bwsft.utils.parallelism import aup

if TYPE_CHECKING:
    from bwsft.commands.compare import ModeResult


@dataclass(frozen=True)
class Curve:
    """One mode at every threshold."""

    mode: str
    points: list[tuple[float, float]]  # (TPF, accuracy in percent), as the rows come
    aup: float | None  # None where no forward pass committed anything


def curves(rows: Sequence[ModeResult]) -> list[Curve]:
    """The curve of each mode; the best accuracy of all modes is what each loss is measured by."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault(row.mode, []).append((row.tokens_per_forward or 0, 100 * row.accuracy))
    best = max(accuracy for some in points.values() for _, accuracy in some)
    found = []
    for mode, some in points.items():
        known = [point for point in some if point[0] > 0]
        found.append(Curve(mode, some, aup(known, best) if known else None))
    return found


def print_curves(rows: Sequence[ModeResult], count: int) -> None:
    """A line per mode and threshold on stdout, and the AUP of each mode."""
    heads = ("tokens per forward (TPF)", "accuracy", "forward passes", "truncated",
             "seconds in all")
    columns = [Column(head, justify="right") for head in heads]
    title = f"{count} questions; passes per answer"
    table = Table("mode", Column("threshold", justify="right"), *columns, title=title,
                  title_justify="left")
    for row in rows:
        table.add_row(
            row.mode, f"{row.threshold:g}", f"{row.tokens_per_forward or 0:.2f}",
            f"{row.accuracy:.1%}", f"{row.passes:.1f}", f"{row.truncated:.1%}",
            "-" if row.seconds is None else f"{row.seconds:.1f}",
        )  # fmt: skip
    Console().print(table)
    for curve in curves(rows):
        value = "unknown: nothing was committed" if curve.aup is None else f"{curve.aup:.1f}"
        say(f"accuracy under parallelism (AUP), {curve.mode}: {value}")


def draw_curves(rows: Sequence[ModeResult]) -> bytes:
    """PNG of the curves."""
    from matplotlib.figure import Figure  # takes a second

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for curve in curves(rows):
        score = "" if curve.aup is None else f" (AUP {curve.aup:.0f})"
        axes.plot(*zip(*sorted(curve.points), strict=True), "o-", label=f"{curve.mode}{score}")
    axes.set(xlabel="tokens per forward", ylabel="accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    out = io.BytesIO()
    figure.savefig(out, dpi=110, format="png")
    return out.getvalue()
