"""How a benchmark shows its results: provenance, table, last line of JSON, file and plot."""

import json
import math
import platform
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import torch
from harness import Result
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]


def header(device: torch.device) -> dict:
    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"cpu, {torch.get_num_threads()} threads, {_cpu_name()}"
    try:
        import triton
        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    status = git("status", "--porcelain")
    return {
        "device": name,
        "commit": git("rev-parse", "--short=12", "HEAD") or "unknown",
        "dirty": bool(status) if status is not None else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def print_table(title: str, head: dict, results: list, peak: float | None) -> None:
    console = Console(width=max(160, Console().width))
    dirty = " (dirty)" if head["dirty"] else ""
    console.print(f"[bold]{title}[/bold]")
    console.print(
        f"{head['device']} · torch {head['torch']} · triton {head['triton']} · python "
        f"{head['python']} · commit {head['commit']}{dirty} · {head['date']}", highlight=False,
    )
    phases = [p for r in results for p in r.phases if p != "total"]
    phases = list(dict.fromkeys(phases))
    table = Table()
    for column in ("variant", *phases, "total ms", "20-80 %", "x naive", "tokens/s",
                   "supervised/s", "MiB above base", "GFLOP", "ops", "of peak"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    naive = next((r.median_s for r in results if r.name == "naive"), None)
    for r in results:
        table.add_row(r.name, *_cells(r, phases, naive, peak))
    console.print(table)
    for r in results:
        if r.note:
            console.print(f"{r.name}: {r.note}", highlight=False)


def _cells(r: Result, phases: list, naive: float | None, peak: float | None) -> list[str]:
    def show(value, pattern, scale=1.0):
        return "-" if value is None else pattern.format(value * scale)

    spread, share = "-", None
    if r.median_s is not None:
        spread = f"{r.low_s * 1e3:.1f}-{r.high_s * 1e3:.1f}"
        share = r.flops / r.median_s / peak if r.flops and peak else None
    speedup = naive / r.median_s if naive and r.median_s else None
    return [
        *(show(r.phases.get(phase), "{:.1f}", 1e3) for phase in phases),
        show(r.median_s, "{:.1f}", 1e3), spread, show(speedup, "{:.2f}"),
        show(r.tokens_per_s, "{:,.0f}"),
        show(r.supervised_tokens_per_s, "{:,.0f}"), show(r.peak_bytes, "{:,.1f}", 2**-20),
        show(r.flops, "{:,.1f}", 1e-9), show(r.operators, "{:,.0f}"), show(share, "{:.0%}"),
    ]


def summary(bench: str, head: dict, results: list) -> dict:
    """The object of the last line; keys that don't apply are left out."""
    keys = ("median_s", "tokens_per_s", "supervised_tokens_per_s", "peak_bytes", "flops",
            "operators")
    variants = {
        r.name: {key: getattr(r, key) for key in keys if getattr(r, key) is not None}
        for r in results if r.median_s is not None
    }
    naive = variants.get("naive", {}).get("median_s")
    speedup = {name: naive / v["median_s"] for name, v in variants.items()} if naive else {}
    return {"bench": bench, "device": head["device"], "commit": head["commit"],
            "variants": variants, "speedup": speedup}


def finish(args, bench: str, head: dict, points: list) -> None:
    """Write --json and --plot, then print the summary of the first point as the last line.

    points: [(settings, results)], one for each shape that was measured.
    """
    if args.json:
        everything = [
            {"settings": settings, "results": [asdict(r) for r in results]}
            for settings, results in points
        ]
        text = json.dumps({"bench": bench, "header": head, "points": everything}, indent=1)
        Path(args.json).write_text(text + "\n")
    if args.plot:
        _plot(args.plot, bench, head, points)
    print(json.dumps(summary(bench, head, points[0][1])), flush=True)


def _plot(path: str, bench: str, head: dict, points: list) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(points), 2, figsize=(10, 0.8 + 2.4 * len(points)),
                                   squeeze=False, layout="constrained")
    for (settings, results), (left, right) in zip(points, axes, strict=True):
        shown = [r for r in results if r.median_s is not None][::-1]
        names, seconds = [r.name for r in shown], [r.median_s * 1e3 for r in shown]
        spread = [[(r.median_s - r.low_s) * 1e3 for r in shown],
                  [(r.high_s - r.median_s) * 1e3 for r in shown]]
        bars = left.barh(names, seconds, xerr=spread)
        left.bar_label(bars, fmt="%.0f", padding=3)
        memory = [(r.peak_bytes or math.nan) / 2**20 for r in shown]
        right.bar_label(right.barh(names, memory), fmt="%.0f", padding=3)
        left.set_xlabel("ms, median and 20-80 %")
        right.set_xlabel("MiB above the baseline")
        left.set_title(", ".join(f"{k} {v}" for k, v in settings.items()), fontsize=8, loc="left")
        for axis in (left, right):
            axis.set_xscale("log")
            axis.margins(x=0.15)
    figure.suptitle(f"{bench} on {head['device']}, commit {head['commit']}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
