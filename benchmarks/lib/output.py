"""How a benchmark shows its results: provenance, table, last line of JSON, file and plot."""

import json
import platform
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from lib import harness
from lib.harness import Peak, Result

from bwsft.utils.parallelism import per_forward

Point = tuple[dict, list[Result]]  # the settings of a shape, and what was measured there
ROOT = Path(__file__).resolve().parents[2]
KEYS = ("median_s", "tokens_per_s", "supervised_tokens_per_s", "peak_bytes", "flops", "operators")


def run(
    args: Namespace, bench: str, title: str, points: Iterable[Point], remarks: Iterable[str] = ()
) -> None:
    """Measure point after point, each with a table of its own, then `finish`."""
    counting = getattr(args, "count_only", False)
    peak = Peak() if counting else harness.peak_of(args.device)
    head, done = header(args.device, peak, args), []
    for settings, results in points:
        done.append((settings, results))
        print_table(f"{title}{settings_text(settings)}", head, results, peak, settings)
    finish(args, bench, head, done, remarks)


def header(device: torch.device, peak: Peak, args: Namespace) -> dict:
    """Where a result comes from."""

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        # One thread is timed by its own clock (harness.py).
        kind = f"{threads} threads" if threads > 1 else "1 thread, CPU seconds"
        name = f"cpu, {kind}, {_cpu_name()}"
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
        "peak_flops": peak.flops,
        "peak_bytes_per_s": peak.bytes,
        "command": _command(args),
    }


def _command(args: Namespace) -> str:
    """The command line without the files that it wrote and without this machine's paths."""
    words, words_left = [f"benchmarks/{Path(args.command[0]).name}"], iter(args.command[1:])
    for word in words_left:
        if word in ("--json", "--plot"):
            next(words_left)
        elif not word.startswith(("--json=", "--plot=")):
            words.append(word)
    return "python " + " ".join(words)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def provenance(head: dict) -> str:
    dirty = ", with changes that are not in it" if head["dirty"] else ""
    return (
        f"{head['device']}; torch {head['torch']}, triton {head['triton']}, python "
        f"{head['python']}; commit {head['commit']}{dirty}; {head['date']}"
    )


def cells(results: list[Result], peak: Peak, settings: dict | None = None) -> list[list[str]]:
    """A table as text, the titles first; columns without a number are left out. settings: of a
    decoding, whose TPF then stands beside its passes."""

    def show(values: list, scale: float = 1.0, pattern: str | None = None) -> list[str]:
        scaled = [None if v is None else v * scale for v in values]
        return [_plain(v) if pattern is None or v is None else pattern.format(v) for v in scaled]

    def column(name: str, scale: float = 1.0) -> list[str]:
        return show([getattr(r, name) for r in results], scale)

    naive = next((r.median_s for r in results if r.name == "naive"), None)
    phases = list(dict.fromkeys(p for r in results for p in r.phases if p != "total"))
    extra = list(dict.fromkeys(key for r in results for key in r.extra))
    others = {}
    for key in extra:
        others[key] = show([r.extra.get(key) for r in results], 1)
        if key == "passes":
            wanted = wanted_tokens(settings)
            rates = [per_forward(wanted, r.extra.get(key, 0)) for r in results]
            others["TPF"] = show(rates, pattern="{:.2f}")
    speed = [naive / r.median_s if naive and r.median_s else None for r in results]
    phases = phases if len(phases) > 1 else []  # a single one is the total
    table = {
        "variant": [r.name for r in results],
        **{f"{p} ms": show([r.phases.get(p) for r in results], 1e3) for p in phases},
        "total ms": column("median_s", 1e3),
        "20-80 %": [
            "" if r.median_s is None else f"{_plain(r.low_s * 1e3)}-{_plain(r.high_s * 1e3)}"
            for r in results
        ],
        "x naive": show(speed, pattern="{:.2f}"),
        "tokens/s": column("tokens_per_s"),
        "supervised/s": column("supervised_tokens_per_s"),
        "MiB above base": column("peak_bytes", 2**-20),
        "GFLOP": column("flops", 1e-9),
        "operators": column("operators", 1),
        "of roofline": show([peak.share(r) for r in results], pattern="{:.1%}"),
        **others,
    }
    table = {title: values for title, values in table.items() if any(values)}
    return [list(table), *map(list, zip(*table.values(), strict=True))]


def wanted_tokens(settings: dict) -> int:
    """Tokens that a decoding with these settings commits for each sequence: early exit is off, so
    that all of them are kept."""
    blocks = settings.get("blocks")
    return settings["gen"] if blocks is None else blocks * settings["block"]


def _plain(value: float | str | None) -> str:
    """Four digits, or all of an integer."""
    if value is None:
        return ""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return str(value) if isinstance(value, str) else f"{value:,.0f}"


def settings_text(settings: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def print_table(
    title: str, head: dict, results: list[Result], peak: Peak, settings: dict
) -> None:
    rows = cells(results, peak, settings)
    widths = [max(map(len, values)) for values in zip(*rows, strict=True)]
    print(f"\n{title}\n{provenance(head)}")
    for number, row in enumerate(rows):
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([row[0].ljust(widths[0]), *rest]))
        if number == 0:
            print("  ".join("─" * width for width in widths))
    for r in results:
        if r.note:
            print(f"{r.name}: {r.note}")


def summary(bench: str, head: dict, results: list[Result]) -> dict:
    """The object of the last line; keys that don't apply are left out."""
    variants = {
        r.name: {key: getattr(r, key) for key in KEYS if getattr(r, key) is not None}
        for r in results if r.median_s is not None or r.flops is not None
    }
    times = {name: v["median_s"] for name, v in variants.items() if "median_s" in v}
    speedup = {name: times["naive"] / t for name, t in times.items()} if "naive" in times else {}
    return {"bench": bench, "device": head["device"], "commit": head["commit"],
            "variants": variants, "speedup": speedup}


def finish(
    args: Namespace, bench: str, head: dict, points: list[Point], remarks: Iterable[str] = ()
) -> None:
    """Print the remarks, which belong to the numbers, write --json and --plot, then print the
    summary of the first point as the last line."""
    for remark in remarks:
        print(remark)
    content = {
        "bench": bench, "header": head, "remarks": list(remarks),
        "points": [
            {"settings": settings, "results": [_filled(r) for r in results]}
            for settings, results in points
        ],
    }
    if args.json:
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if args.plot and any(r.median_s for _, results in points for r in results):
        from lib.figures import draw  # matplotlib is optional

        draw(content, args.plot)
    print(json.dumps(summary(bench, head, points[0][1])), flush=True)


def _filled(result: Result) -> dict:
    """A result without what wasn't measured."""
    return {key: value for key, value in asdict(result).items() if value not in (None, "", {})}
