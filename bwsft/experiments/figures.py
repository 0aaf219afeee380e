"""Figures of the experiments, in the shape of the paper's."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bwsft.experiments import primary, primary_report
from bwsft.experiments.arms import at_budget
from bwsft.experiments.fewer import STUDIES
from bwsft.experiments.gradients import PARTS
from bwsft.experiments.results import Measured
from bwsft.experiments.statistics import mean_error
from bwsft.experiments.thresholds import decoder, mean_curve

if TYPE_CHECKING:  # a report draws its figure here; matplotlib takes a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bwsft.experiments.report import Finished


def draw(finished: Finished) -> bytes:
    """PNG of a finished experiment."""
    shapes = {
        "block-grid": heat_maps,
        "prefix-noise": lines,
        "suffix-leak": lines,
        "equal-tokens": lines,
        "dynamics": curves,
        "gradients": intervals,
        "decisive": budgets,
    } | dict.fromkeys(STUDIES, trade_offs)
    out = io.BytesIO()
    shapes.get(finished.plan.name, dots)(finished).savefig(out, dpi=110, format="png")
    return out.getvalue()


def trade_offs(finished: Finished) -> Figure:
    """Exact match over TPF, a line per arm through the means of every threshold; a panel for each
    number of active blocks."""
    names = [name for name in finished.measures if name.startswith("tpf")]
    figure, axes = panels(len(names), 6 * len(names), 4)
    for axis, name in zip(axes, names, strict=True):
        for arm in finished.arms:
            means = mean_curve(arm.cells, name)
            shares = [100 * point.accuracy for point in means]
            axis.plot([point.tpf for point in means], shares, "o-", label=arm.name)
        axis.set(xlabel=axis_label(name), ylabel="exact match, %")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


def panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of so many axes side by side; sizes of the whole in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def shown_measures(finished: Finished) -> list[str]:
    """NELBO at the scale's block size, or the first there is, and every exact match."""
    own = f"nelbo@{finished.scale.block_size}"
    names = finished.measures
    first = own if own in names else names[0]
    return [first, *(n for n in names if not n.startswith(("nelbo", "pilot")))]


def axis_label(name: str) -> str:
    kind, _, block = name.partition("@")
    if kind in ("nelbo", "pilot"):
        return f"NELBO at B {block}, nats per token"
    if kind == "tpf":
        return f"tokens per forward pass, {decoder(block)}"
    return f"{kind} at {decoder(block)}" if block else kind.replace("cpu_seconds", "CPU seconds")


def dots(finished: Finished) -> Figure:
    """One line per arm, a dot per seed and a bar at the mean. A base that is far off is written at
    the edge: the axis belongs to the trained arms."""
    names, arms = shown_measures(finished), finished.arms
    figure, axes = panels(len(names), 4.2 * len(names) + 1.5, 0.35 * len(arms) + 1.2)
    for axis, name in zip(axes, names, strict=True):
        trained = [v for arm in arms if arm.flops for v in arm.values(name) or ()]
        for place, arm in enumerate(arms):
            if (values := arm.values(name)) is None:
                continue
            if far_off(values[0], trained):
                edge, side = (0.98, "right") if values[0] > max(trained) else (0.02, "left")
                at = axis.get_yaxis_transform()
                axis.text(edge, place, f"{values[0]:.3f}", transform=at, ha=side, va="center")
                continue
            axis.plot(values, [place] * len(values), "o", alpha=0.5, color="tab:blue")
            axis.plot([statistics.fmean(values)] * 2, [place - 0.3, place + 0.3], color="black")
        axis.set_yticks(range(len(arms)), [arm.name for arm in arms])
        axis.set_ylim(len(arms) - 0.5, -0.5)
        axis.set_xlabel(axis_label(name))
        axis.grid(axis="x", alpha=0.3)
    return figure


def far_off(value: float, trained: list[float]) -> bool:
    """Drawn to scale it would press the trained arms' values together."""
    room = 0.5 * (max(trained) - min(trained)) + 1e-9
    return not min(trained) - room <= value <= max(trained) + room


def base_line(axis: Axes, base: float, arms: Sequence[Measured], name: str) -> None:
    """The untouched base as a dashed line, or as a number in the legend if it is far off."""
    if far_off(base, [v for arm in arms for v in arm.values(name)]):
        axis.plot([], [], ls="--", color="0.5", label=f"base: {base:.3f}, off the axis")
    else:
        axis.axhline(base, ls="--", color="0.5", label="base")


def heat_maps(finished: Finished) -> Figure:
    """Training block size against decoding block size, one map per kind of measure."""
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=2, foreground="black")]
    grid, kinds = finished.scale.grid, ("nelbo", *finished.scale.tasks)
    figure, axes = panels(len(kinds), 4.6 * len(kinds), 4)
    arms = {arm.name: arm for arm in finished.arms}
    for axis, kind in zip(axes, kinds, strict=True):
        means = [
            [statistics.fmean(arms[f"B {a}"].values(f"{kind}@{b}")) for b in grid] for a in grid
        ]
        axis.imshow(means, cmap="viridis_r" if kind == "nelbo" else "viridis")
        for i, line in enumerate(means):
            for j, value in enumerate(line):
                text = f"{value:.4f}" if kind == "nelbo" else f"{value:.1%}"
                style = {"color": "white", "fontsize": 9, "path_effects": outline}
                axis.text(j, i, text, ha="center", va="center", **style)
        axis.set_xticks(range(len(grid)), grid)
        axis.set_yticks(range(len(grid)), grid)
        axis.set(xlabel="decoded at B", ylabel="trained at B", title=kind)
    return figure


def lines(finished: Finished) -> Figure:
    """A measure against the share of noise, or against the number of traversals with a line per
    objective; means with standard errors."""
    names = shown_measures(finished)
    figure, axes = panels(len(names), 4.8 * len(names), 3.6)
    base, *rest = finished.arms
    groups: dict[str, list[tuple[float, Measured]]] = {}
    for arm in rest:  # "25%", or "blockwise, tau 2"
        name, _, tau = arm.name.partition(", tau ")
        at = (name, float(tau)) if tau else ("trained", float(name.rstrip("%")))
        groups.setdefault(at[0], []).append((at[1], arm))
    what = "traversals" if "trained" not in groups else f"{finished.plan.name}, %"
    for axis, name in zip(axes, names, strict=True):
        for label, members in groups.items():
            means, errors = zip(*(mean_error(arm.values(name)) for _, arm in members), strict=True)
            errors = [0 if error != error else error for error in errors]
            places = [at for at, _ in members]
            axis.errorbar(places, means, errors, fmt="o-", capsize=3, label=label)
        base_line(axis, base.values(name)[0], rest, name)
        axis.set(xlabel=what, ylabel=axis_label(name), xticks=places)
        axis.legend(fontsize=8)
    return figure


def curves(finished: Finished) -> Figure:
    """Held-out NELBO of every seed along the run, against updates and supervised tokens."""
    figure, axes = panels(2, 10, 3.8)
    for color, arm in zip(("tab:gray", "tab:blue", "tab:red"), finished.arms, strict=False):
        for i, cell in enumerate(arm.cells):
            steps, values = zip(*cell["train"]["evals"], strict=True)
            label = arm.name if i == 0 else None
            axes[0].plot(steps, values, color=color, alpha=0.6, label=label)
            per_update = cell["train"]["supervised_tokens"] / cell["train"]["updates"]
            tokens = [step * per_update for step in steps]
            axes[1].plot(tokens, values, color=color, alpha=0.6, label=label)
    for axis, what in zip(axes, ("updates", "supervised tokens"), strict=True):
        axis.set(xlabel=what, ylabel="held-out NELBO, nats per token")
        axis.legend()
    return figure


def intervals(finished: Finished) -> Figure:
    """Noise of the gradient and its expected squared cosines, with their intervals."""
    (name,), arms = finished.measures, finished.arms
    parts = ("noise", "squared_exact", "squared_own")
    figure, axes = panels(len(parts), 13, 0.35 * len(arms) + 1.2)
    for axis, part in zip(axes, parts, strict=True):
        values, lows, highs = zip(*(arm.values(name, part)[0] for arm in arms), strict=True)
        axis.barh(range(len(arms)), values, color="tab:blue", alpha=0.5)
        axis.hlines(range(len(arms)), lows, highs, color="black")
        axis.set_yticks(range(len(arms)), [arm.name for arm in arms])
        axis.set_ylim(len(arms) - 0.5, -0.5)
        axis.set_xlabel(PARTS[part])
        axis.grid(axis="x", alpha=0.3)
    return figure


def budgets(finished: Finished) -> Figure:
    """The first measure over the FLOPs that were spent, a line per way to train, and beside it the
    differences to the first claim's other way with their 95 % intervals."""
    plan, values = finished.plan, primary_report.values_of(finished)
    other, arms = plan.primary[0].other, {arm.name: arm for arm in finished.arms}
    figure, (left, right) = panels(2, 13, 5)
    for way, own in values.items():
        spent = [arms[at_budget(way, budget)].flops for budget in plan.budgets]
        known = [(x / 1e12, *mean_error(v)) for x, v in zip(spent, own, strict=True) if v]
        if known:
            at, means, errors = zip(*known, strict=True)
            errors = [0 if error != error else error for error in errors]
            left.errorbar(at, means, errors, fmt="o-", capsize=3, label=way)
    left.set(xscale="log", xlabel="TFLOP", ylabel=axis_label(finished.measures[0]))
    others = [way for way in values if way != other]
    for i, budget in enumerate(plan.budgets):
        label, shift = f"{budget} updates of {other}", 0.2 * (i - 0.5)
        for place, way in enumerate(others):
            found = primary.shared(values[way][i], values[other][i])
            if found.n < 2:
                continue
            color = f"C{i}"
            right.plot(found.mean, place + shift, "o", color=color, label=label)
            right.hlines(place + shift, found.low, found.high, color=color)
            label = None
    right.axvline(0, color="0.5", ls="--")
    right.set_yticks(range(len(others)), others)
    right.set_ylim(len(others) - 0.5, -0.5)
    right.set_xlabel(f"difference to {other}, 95 % interval")
    for axis in (left, right):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    return figure
