"""`bwsft bench`: the quick benchmarks, one after the other, and one table of what came out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from bwsft.commands.options import BenchOptions

# Beside the package in a source checkout; an installed wheel has none.
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@dataclass(frozen=True)
class Outcome:
    """What one benchmark said: its last line, or why there is none."""

    name: str
    seconds: float
    summary: dict | None
    error: str = ""


def run_bench(options: BenchOptions) -> int:
    """Run the benchmarks and print the table; 1 if one failed. ValueError without a checkout."""
    if not (FOLDER / "lib/harness.py").is_file():
        raise ValueError(
            "the benchmarks are files of the source repository and not of the installed package: "
            "clone it, `pip install -e .` there, and run this again"
        )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for name in (bar := tqdm(options.only, "benchmarks", disable=None)):
        bar.set_postfix_str(name)
        outcomes.append(run_one(name, options.out))
    print(table(outcomes))
    return 1 if any(o.summary is None for o in outcomes) else 0


def run_one(name: str, out: Path | None) -> Outcome:
    """One benchmark in a process of its own, so that the memory it measures is its own."""
    command = [sys.executable, str(FOLDER / f"bench_{name}.py"), "--quick"]
    if out:
        command += ["--json", str(out.resolve() / f"{name}.json")]
    began = time.monotonic()
    # Its progress would fight with ours for the terminal; the end of it is shown if it fails.
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    seconds, said = time.monotonic() - began, done.stderr.strip().rpartition("\n")[2]
    if done.returncode:
        return Outcome(name, seconds, None, said or f"exit {done.returncode}")
    return Outcome(name, seconds, json.loads(done.stdout.strip().rpartition("\n")[2]))


def table(outcomes: list[Outcome]) -> str:
    """Every variant of every benchmark: milliseconds, and time and memory against naive."""
    found = [o.summary for o in outcomes if o.summary]
    lines = [f"{found[0]['device']}, commit {found[0]['commit']}"] if found else []
    titles = ("variant", "ms", "x faster", "MiB", "memory of naive")
    lines.append(f"{'benchmark':10}{titles[0]:20}" + "".join(f"{t:>16}" for t in titles[1:]))
    for outcome in outcomes:
        if outcome.summary is None:
            lines.append(f"{outcome.name:10}failed after {outcome.seconds:.0f} s: {outcome.error}")
            continue
        variants = outcome.summary["variants"]
        naive = variants.get("naive", {}).get("peak_bytes")
        for name, v in variants.items():
            peak = v.get("peak_bytes")
            cells = (
                cell(v.get("median_s"), 1e3),
                cell(outcome.summary["speedup"].get(name)),
                cell(peak, 2**-20),
                cell(peak / naive if peak and naive else None, 100, " %"),
            )
            lines.append(f"{outcome.name:10}{name:20}" + "".join(f"{c:>16}" for c in cells))
    return "\n".join(lines)


def cell(value: float | None, scale: float = 1.0, unit: str = "") -> str:
    if value is None:
        return ""
    value *= scale
    return (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}") + unit
