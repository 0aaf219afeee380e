"""Figures of the experiments, in the shape of the paper's."""

from __future__ import annotations

import io
import statistics

from bwsft.experiments.statistics import mean_error


def draw(finished) -> bytes:
    """PNG of a finished experiment."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = {
        "block-grid": heat_maps,
        "prefix-noise": shares,
        "suffix-leak": shares,
        "equal-tokens": traversals,
        "dynamics": curves,
    }
    figure = shapes.get(finished.plan.name, dots)(plt, finished)
    out = io.BytesIO()
    figure.savefig(out, dpi=110, format="png")
    plt.close(figure)
    return out.getvalue()


def shown_measures(finished) -> list[str]:
    """NELBO at the scale's block size, or the first there is, and every exact match."""
    own = f"nelbo@{finished.scale.block_size}"
    names = finished.measures
    first = own if own in names else names[0]
    return [first, *(n for n in names if not n.startswith(("nelbo", "pilot")))]


def axis_label(name: str) -> str:
    kind, _, block = name.partition("@")
    if kind in ("nelbo", "pilot"):
        return f"NELBO at B {block}, nats per token"
    return f"{kind} at B {block}"


def dots(plt, finished):
    """One line per arm, a dot per seed and a bar at the mean. A base that lies far off is written
    at the edge: the axis belongs to the trained arms."""
    names, rows = shown_measures(finished), finished.rows
    size = (4.2 * len(names) + 1.5, 0.35 * len(rows) + 1.2)
    figure, axes = plt.subplots(1, len(names), figsize=size, squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        trained = [v for row in rows if row.flops for v in row.values(name) or ()]
        for place, row in enumerate(rows):
            if (values := row.values(name)) is None:
                continue
            if far_off(values[0], trained):
                edge, side = (0.98, "right") if values[0] > max(trained) else (0.02, "left")
                at = axis.get_yaxis_transform()
                axis.text(edge, place, f"{values[0]:.3f}", transform=at, ha=side, va="center")
                continue
            axis.plot(values, [place] * len(values), "o", alpha=0.5, color="tab:blue")
            axis.plot([statistics.fmean(values)] * 2, [place - 0.3, place + 0.3], color="black")
        axis.set_yticks(range(len(rows)), [row.name for row in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel(axis_label(name))
        axis.grid(axis="x", alpha=0.3)
    return figure


def far_off(value: float, trained: list[float]) -> bool:
    """Drawn to scale it would press the trained arms' values together."""
    room = 0.5 * (max(trained) - min(trained)) + 1e-9
    return not min(trained) - room <= value <= max(trained) + room


def base_line(axis, base: float, rows, name: str) -> None:
    """The untouched base as a dashed line, or as a number in the legend if it lies far off."""
    if far_off(base, [v for row in rows for v in row.values(name)]):
        axis.plot([], [], ls="--", color="0.5", label=f"base: {base:.3f}, off the axis")
    else:
        axis.axhline(base, ls="--", color="0.5", label="base")


def heat_maps(plt, finished):
    """Training block size against decoding block size, one map per kind of measure."""
    grid, kinds = finished.scale.grid, ("nelbo", *finished.scale.tasks)
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(4.6 * len(kinds), 4), squeeze=False, layout="constrained"
    )
    rows = {row.name: row for row in finished.rows}
    for axis, kind in zip(axes[0], kinds, strict=True):
        means = [
            [statistics.fmean(rows[f"B {a}"].values(f"{kind}@{b}")) for b in grid] for a in grid
        ]
        reverse = "" if kind == "nelbo" else "_r"
        axis.imshow(means, cmap=f"viridis_r{reverse}".replace("_r_r", ""))
        for i, line in enumerate(means):
            for j, value in enumerate(line):
                text = f"{value:.4f}" if kind == "nelbo" else f"{value:.1%}"
                axis.text(j, i, text, ha="center", va="center", color="white", fontsize=9)
                axis.texts[-1].set_path_effects(outline())
        axis.set_xticks(range(len(grid)), grid)
        axis.set_yticks(range(len(grid)), grid)
        axis.set(xlabel="decoded at B", ylabel="trained at B", title=kind)
    return figure


def outline() -> list:
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=2, foreground="black")]


def shares(plt, finished):
    """A measure against the share of noise."""
    names = shown_measures(finished)
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.6 * len(names), 3.4), squeeze=False, layout="constrained"
    )
    base, *rest = finished.rows
    at = [float(row.name.rstrip("%")) for row in rest]
    for axis, name in zip(axes[0], names, strict=True):
        series(axis, at, [row.values(name) for row in rest], "trained")
        base_line(axis, base.values(name)[0], rest, name)
        axis.set(xlabel=f"{finished.plan.name}, %", ylabel=axis_label(name))
        axis.legend()
    return figure


def traversals(plt, finished):
    """A measure against the number of traversals, a line per objective."""
    names = shown_measures(finished)
    figure, axes = plt.subplots(
        1, len(names), figsize=(5 * len(names), 3.8), squeeze=False, layout="constrained"
    )
    base, *rest = finished.rows
    groups: dict[str, list] = {}
    for row in rest:
        name, _, tau = row.name.partition(", tau ")
        groups.setdefault(name, []).append((int(tau), row))
    for axis, name in zip(axes[0], names, strict=True):
        for label, members in groups.items():
            taus, rows = zip(*sorted(members, key=lambda m: m[0]), strict=True)
            series(axis, taus, [row.values(name) for row in rows], label)
        base_line(axis, base.values(name)[0], rest, name)
        axis.set(xlabel="traversals", ylabel=axis_label(name), xticks=sorted({1, 2, 3}))
        axis.legend(fontsize=8)
    return figure


def series(axis, at, columns, label) -> None:
    """Means with standard errors."""
    pairs = [mean_error(values) for values in columns]
    errors = [0 if error != error else error for _, error in pairs]
    axis.errorbar(at, [mean for mean, _ in pairs], errors, fmt="o-", capsize=3, label=label)


def curves(plt, finished):
    """Held-out NELBO of every seed along the run, against updates and supervised tokens."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for color, row in zip(("tab:gray", "tab:blue", "tab:red"), finished.rows, strict=False):
        for i, cell in enumerate(row.cells):
            steps, values = zip(*cell["train"]["evals"], strict=True)
            label = row.name if i == 0 else None
            axes[0].plot(steps, values, color=color, alpha=0.6, label=label)
            per_update = cell["train"]["supervised_tokens"] / cell["train"]["updates"]
            tokens = [step * per_update for step in steps]
            axes[1].plot(tokens, values, color=color, alpha=0.6, label=label)
    for axis, what in zip(axes, ("updates", "supervised tokens"), strict=True):
        axis.set(xlabel=what, ylabel="held-out NELBO, nats per token")
        axis.legend()
    return figure


