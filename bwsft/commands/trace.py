"""`bwsft trace`: how an answer was unmasked, drawn in the terminal and as a PNG.

Reads what `bwsft generate --trace FILE` wrote: a line per prompt, with `commits` of [step, response
position, token, confidence]. Under a rule that revises, a later commit at a position replaces the
earlier one.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from bwsft.commands.options import TraceOptions
from bwsft.evaluation.answer_files import read_records
from bwsft.utils.claims import claimed
from bwsft.utils.files import write_atomic
from bwsft.utils.lines import printable

LARGEST = 100_000  # positions or steps of a trace
LARGEST_PNG = 4096  # of a heat map: it has 2,400 pixels in a line
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def run_trace(options: TraceOptions) -> int:
    """Draw an answer and return the exit status; ValueError or OSError for bad input."""
    records, _ = read_records(options.file)
    if not 1 <= options.line <= len(records):
        raise ValueError(f"--line {options.line}: {options.file} has lines 1 to {len(records)}")
    record = checked(records[options.line - 1], f"{options.file}: line {options.line}")
    steps = 1 + max(step for step, *_ in record["commits"])
    if options.png and max(record["gen_length"], steps) > LARGEST_PNG:
        raise ValueError(
            f"--png draws up to {LARGEST_PNG:,} positions and steps, and line {options.line} has "
            f"{record['gen_length']:,} positions and {steps:,} steps: leave it out"
        )
    with claimed(options.png) if options.png else contextlib.nullcontext():
        show(record, Console(), options.png)
    return 0


def show(record: dict, console: Console, png: Path | None) -> None:
    console.print(Text(printable(record["question"]), style="bold"))
    pieces = {p: record["tokens"][str(token)] for _, p, token, _ in record["commits"]}
    steps = {p: step for step, p, _, _ in record["commits"]}
    console.print(unmasking(steps, pieces, range(record["gen_length"]), record["block_size"]))
    console.print(summary(record["commits"]))
    if png:
        write_atomic(png, draw(record))
        console.print(f"{png}", markup=False, soft_wrap=True)


def checked(record: dict, place: str) -> dict:
    """The record with numbers as numbers; ValueError if it is no trace."""
    try:
        commits = [
            (int(step), int(position), int(token), float(confidence))
            for step, position, token, confidence in record["commits"]
        ]
        gen_length, block_size = int(record["gen_length"]), int(record["block_size"])
        question, tokens = str(record["question"]), dict(record["tokens"])
        known = {str(token) for _, _, token, _ in commits} <= tokens.keys()
        texts = all(isinstance(piece, str) for piece in tokens.values())
        inside = gen_length <= LARGEST and all(
            0 <= position < gen_length and 0 <= step < LARGEST for step, position, _, _ in commits
        )
        if not (known and texts and inside and commits and block_size > 0):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{place} is no trace of bwsft generate --trace") from None
    return {
        "question": question, "gen_length": gen_length, "block_size": block_size,
        "tokens": tokens, "commits": sorted(commits),
    }  # fmt: skip


def unmasking(
    step_of: dict[int, int], pieces: dict[int, str], places: Sequence[int], block_size: int
) -> Text:
    """The tokens at these places with the denoising step under which each was committed, counted
    from 1; late is brighter. A bar stands between blocks, a dot for what has no step."""
    last = max(step_of.values(), default=1) or 1
    text = Text()
    for position in places:
        if position in block_edges(block_size, LARGEST):
            text.append("│", style="dim")
        if position not in step_of:
            text.append("·", style="dim")
            continue
        shade = 110 + round(145 * step_of[position] / last)
        # A token may hold an escape sequence that a terminal obeys.
        piece = printable(pieces[position]).replace("\n", "⏎")
        text.append(piece, style=f"rgb({shade},{shade},255) bold")
        text.append(f"{step_of[position] + 1} ".translate(SUBSCRIPTS), style="dim")
    return text


def block_edges(block_size: int, length: int) -> range:
    """Positions where a block starts after another (BlockGrid's, which would import torch)."""
    return range(block_size, length, block_size)


def summary(commits: Sequence[tuple]) -> str:
    last = {position: confidence for _, position, _, confidence in commits}
    steps = 1 + max(step for step, *_ in commits)
    mean, revised = sum(last.values()) / len(last), len(commits) - len(last)
    return (
        f"{len(last)} tokens in {steps} steps ({len(last) / steps:.2f} per step), mean "
        f"confidence {mean:.3f}" + (f", {revised} revised" if revised else "")
    )


def grid(record: dict) -> list[list[float]]:
    """Confidence of the token at [step][position] from its commitment on, NaN before."""
    steps = 1 + max(step for step, *_ in record["commits"])
    rows = [[float("nan")] * record["gen_length"] for _ in range(steps)]
    for step, position, _, confidence in record["commits"]:
        for row in rows[step:]:
            row[position] = confidence
    return rows


def draw(record: dict) -> bytes:
    """The heat map as a PNG."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = grid(record)
    size = (min(4 + 0.12 * record["gen_length"], 24), min(2 + 0.12 * len(rows), 16))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    corners = (-0.5, record["gen_length"] - 0.5, len(rows) + 0.5, 0.5)  # steps count from 1
    look = {"vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    colors = colormaps["viridis"].with_extremes(bad="0.9")
    image = axes.imshow(rows, extent=corners, cmap=colors, **look)
    edges = [edge - 0.5 for edge in block_edges(record["block_size"], record["gen_length"])]
    axes.autoscale(False)
    axes.vlines(edges, *corners[2:], color="black", linewidth=0.8)
    axes.set_xlabel("response position (lines: blocks)")
    axes.set_ylabel("denoising step")
    axes.set_title(printable(record["question"][:80]), fontsize="small", parse_math=False)
    figure.colorbar(image, label="confidence when committed")
    drawn = io.BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)
    return drawn.getvalue()
