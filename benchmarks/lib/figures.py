"""The picture of a result file: bars for one or two shapes, lines for a sweep."""

import math

import matplotlib
from lib.harness import Result

matplotlib.use("Agg")
from matplotlib import pyplot, ticker  # noqa: E402

MEASURES = (
    ("ms, median", lambda r: r.median_s and r.median_s * 1e3),
    ("MiB above the baseline", lambda r: r.peak_bytes and r.peak_bytes / 2**20),
)


def draw(content: dict, path: str) -> None:
    """Draw a result file's content to `path`."""
    points = [(p["settings"], [Result(**r) for r in p["results"]]) for p in content["points"]]
    points = [point for point in points if any(r.median_s for r in point[1])]
    head = content["header"]
    varying = sweeps(points)
    figure = _lines(points, varying) if varying else _bars(points)
    title = f"{content['bench']}, {head['date']}, commit {head['commit']}\n{head['device']}"
    figure.suptitle(title, fontsize=9)
    # No version in the file: another matplotlib would change nothing else.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def sweeps(points: list) -> dict[str, list]:
    """Setting -> the points that differ from the first in this number alone. Fewer than three
    points of one setting are no sweep."""
    first = points[0][0]
    numbers = [k for k, v in first.items() if isinstance(v, int | float)]
    found = {}
    for key in numbers:
        line = [
            (settings, results) for settings, results in points
            if all(settings.get(k) == first[k] for k in numbers if k != key)
        ]
        if len({settings[key] for settings, _ in line}) > 1:
            found[key] = sorted(line, key=lambda point, key=key: point[0][key])
    return found if len(found) > 1 or any(len(line) > 2 for line in found.values()) else {}


def _lines(points: list, varying: dict):
    measures = [m for m in MEASURES if any(m[1](r) for _, results in points for r in results)]
    figure, axes = pyplot.subplots(len(measures), len(varying), squeeze=False,
                                   figsize=(4.6 * len(varying), 3.4 * len(measures)),
                                   sharey="row", layout="constrained")
    for row, (label, measure) in zip(axes, measures, strict=True):
        for axis, (key, line) in zip(row, varying.items(), strict=True):
            for number, name in enumerate(r.name for r in points[0][1]):
                pairs = [
                    (settings[key], measure(r))
                    for settings, results in line for r in results
                    if r.name == name and measure(r)
                ]
                if pairs:
                    axis.plot(*zip(*pairs, strict=True), marker="o", label=name, color=f"C{number}")
            axis.set(xscale="log", yscale="log", xlabel=key)
            axis.set_xticks([s[key] for s, _ in line], [f"{s[key]:,}" for s, _ in line])
            axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        row[0].set_ylabel(label)
    axes[0][0].legend(fontsize=7)
    return figure


def _bars(points: list):
    measured = [[r for r in results if r.median_s] for _, results in points]
    height = sum(0.7 + 0.3 * len(results) for results in measured)
    figure, axes = pyplot.subplots(len(points), 2, figsize=(10, 0.6 + height), squeeze=False,
                                   layout="constrained")
    for (settings, _), shown, (left, right) in zip(points, measured, axes, strict=True):
        shown = shown[::-1]
        names, times = [r.name for r in shown], [r.median_s * 1e3 for r in shown]
        spread = [[(r.median_s - r.low_s) * 1e3 for r in shown],
                  [(r.high_s - r.median_s) * 1e3 for r in shown]]
        left.bar_label(left.barh(names, times, xerr=spread), fmt="%.4g", padding=3)
        left.set_xlabel("ms, median and 20-80 %")
        right.set_xlabel("MiB above the baseline")
        memory = [(r.peak_bytes or math.nan) / 2**20 for r in shown]
        if all(map(math.isnan, memory)):
            right.remove()
        else:
            right.bar_label(right.barh(names, memory), fmt="%.4g", padding=3)
        text = ", ".join(f"{k} {v}" for k, v in settings.items() if not isinstance(v, dict))
        left.set_title(text, fontsize=7, loc="left")
        for axis in (left, right):
            axis.margins(x=0.2)
    return figure
