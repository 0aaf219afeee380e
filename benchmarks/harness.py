"""What the benchmarks share: interleaved timing, memory, costs, provenance, table and JSON.

A variant is a function that returns a generator; it yields the name of each phase when the phase
is done, and code behind the last yield isn't timed. A variant that can't run here is a string
instead, which says why. Every number belongs to one run on one device, named in the header.
"""

import argparse
import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy
import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[1]
# Dense bf16 peaks in FLOP/s, for the share of the roofline; a CPU's peak is measured.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}


@dataclass
class Result:
    """One variant: seconds (median and 20/80 quantiles), bytes above the baseline, counted cost."""

    name: str
    note: str = ""
    median_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    phases: dict = field(default_factory=dict)
    tokens_per_s: float | None = None
    supervised_tokens_per_s: float | None = None
    peak_bytes: int | None = None
    baseline_bytes: int | None = None
    flops: int | None = None
    operators: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a few rounds, at most 2 minutes")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds (0: 7, or 3 if quick)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw times and memory to FILE (matplotlib)")
    parser.add_argument("--measure-memory", metavar="VARIANT", help=argparse.SUPPRESS)


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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step, device) -> dict:
    """Seconds of each phase of one run, and their "total"."""
    phases = {}
    run = step()
    synchronize(device)
    start = before = time.perf_counter()
    for phase in run:
        synchronize(device)
        now = time.perf_counter()
        phases[phase] = phases.get(phase, 0) + now - before
        before = now
        phases["total"] = now - start
    return phases


def time_interleaved(steps: dict, results: dict, device, rounds: int) -> None:
    """Rounds over all variants in turn, so that drift of clocks and neighbours hits all alike.

    A variant that runs out of memory keeps that as its result.
    """
    samples = {name: defaultdict(list) for name in steps}
    for turn in range(rounds + 1):  # the first round warms up
        for name, step in steps.items():
            if results[name].note:
                continue
            gc.collect()
            try:
                phases = timed(step, device)
            except torch.OutOfMemoryError:
                results[name].note = "out of memory"
                continue
            for phase, seconds in phases.items():
                if turn:
                    samples[name][phase].append(seconds)
    for name, phases in samples.items():
        if results[name].note:
            continue
        result, total = results[name], phases["total"]
        result.median_s = statistics.median(total)
        result.low_s, result.high_s = (float(q) for q in numpy.quantile(total, [0.2, 0.8]))
        result.phases = {name: statistics.median(times) for name, times in phases.items()}


class _CountOperators(TorchDispatchMode):
    """Counts operators that do work; views only change metadata."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = [out.alias_info for out in func._schema.returns]
        self.count += not any(alias is not None and not alias.is_write for alias in aliases)
        return func(*args, **(kwargs or {}))


def count_cost(step, result: Result) -> None:
    """FLOPs and launched operators of one run, the same numbers on every device."""
    with FlopCounterMode(display=False) as flops, _CountOperators() as operators:
        for _ in step():
            pass
    result.flops, result.operators = flops.get_total_flops(), operators.count


def measure_memory(step, warm_step, device) -> dict:
    """Peak of one run above the bytes held just before it; warm_step loads libraries."""
    for _ in warm_step():
        pass
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        before = _resident(reset=True)
    for _ in step():
        pass
    synchronize(device)
    on_gpu = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else _resident(peak=True)
    return {"peak_bytes": peak - before, "baseline_bytes": before}


def _resident(peak=False, reset=False) -> int:
    """Resident bytes of this process, or their high-water mark since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    wanted = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(wanted):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {wanted}")


def memory_in_child(name: str, result: Result) -> None:
    """`measure_memory` in a fresh process: what the allocator of this one holds doesn't count."""
    command = [sys.executable, *sys.argv, "--measure-memory", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        result.note = f"memory run failed: {lines[-1] if lines else done.returncode}"
        return
    for key, value in json.loads(done.stdout.splitlines()[-1]).items():
        setattr(result, key, value)


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s that the device reaches at best: a table for GPUs, a large matmul on a CPU."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((peak for word, peak in PEAKS.items() if word in name), None)
    a = torch.randn(2048, 2048)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times)


def print_table(title: str, head: dict, results: list, peak: float | None) -> None:
    console = Console(width=max(118, Console().width))
    dirty = " (dirty)" if head["dirty"] else ""
    console.print(f"[bold]{title}[/bold]")
    console.print(
        f"{head['device']} · torch {head['torch']} · triton {head['triton']} · python "
        f"{head['python']} · commit {head['commit']}{dirty} · {head['date']}", highlight=False,
    )
    phases = [p for r in results for p in r.phases if p != "total"]
    phases = list(dict.fromkeys(phases))
    table = Table()
    for column in ("variant", *phases, "total ms [20-80 %]", "x naive", "tokens/s",
                   "supervised/s", "MiB above base", "GFLOP", "ops", "of peak"):
        table.add_column(column, justify="left" if column == "variant" else "right")
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

    total, share = "-", None
    if r.median_s is not None:
        total = f"{r.median_s * 1e3:.1f} [{r.low_s * 1e3:.1f}-{r.high_s * 1e3:.1f}]"
        share = r.flops / r.median_s / peak if r.flops and peak else None
    speedup = naive / r.median_s if naive and r.median_s else None
    return [
        *(show(r.phases.get(phase), "{:.1f}", 1e3) for phase in phases),
        total, show(speedup, "{:.2f}"), show(r.tokens_per_s, "{:,.0f}"),
        show(r.supervised_tokens_per_s, "{:,.0f}"), show(r.peak_bytes, "{:,.1f}", 2**-20),
        show(r.flops, "{:,.1f}", 1e-9), show(r.operators, "{:,}"), show(share, "{:.0%}"),
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
