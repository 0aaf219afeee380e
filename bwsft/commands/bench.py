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
from bwsft.utils.lines import say

# Beside the package in a source checkout; an installed wheel has none.
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TOKENS = "supervised_tokens_per_s"
PROGRESS = "{desc} {n_fmt}/{total_fmt} {bar:20} {postfix}"


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
    with tqdm(options.only, "benchmarks", disable=None, bar_format=PROGRESS) as bar:
        for name in bar:
            outcomes.append(run_one(name, options.out, bar))
    say(table(outcomes))
    return 1 if any(o.summary is None for o in outcomes) else 0


def run_one(name: str, out: Path | None, bar: tqdm) -> Outcome:
    """One benchmark in a process of its own, so that the memory it measures is its own; `bar` says
    how long it has been running."""
    command = [sys.executable, str(FOLDER / f"bench_{name}.py"), "--quick"]
    if out:
        command += ["--json", str(out.resolve() / f"{name}.json")]
    began, running = time.monotonic(), True
    if bar.disable:  # no terminal
        say(f"{name}: started", file=sys.stderr)
    # Its progress would fight with ours for the terminal; the end of it is shown if it fails.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(command, **pipes) as process:
        while running:
            bar.set_postfix_str(f"{name}, {time.monotonic() - began:.0f} s")
            try:
                output, errors = process.communicate(timeout=1)
                running = False
            except subprocess.TimeoutExpired:
                continue
            except BaseException:
                process.kill()
                raise
    seconds, said = time.monotonic() - began, errors.strip().rpartition("\n")[2]
    if bar.disable:
        say(f"{name}: {seconds:.0f} s", file=sys.stderr)
    if process.returncode:
        return Outcome(name, seconds, None, said or f"exit {process.returncode}")
    return Outcome(name, seconds, json.loads(output.strip().rpartition("\n")[2]))


def table(outcomes: list[Outcome]) -> str:
    """Every variant of every benchmark: time, supervised tokens, and speed and memory against
    naive."""
    found = [o.summary for o in outcomes if o.summary]
    lines = [f"{found[0]['device']}, commit {found[0]['commit']}"] if found else []
    titles = ("ms", "supervised tok/s", "against naive", "MiB", "memory of naive")
    lines.append(f"{'benchmark':10}{'variant':20}" + "".join(f"{t:>18}" for t in titles))
    for outcome in outcomes:
        if outcome.summary is None:
            lines.append(f"{outcome.name:10}failed after {outcome.seconds:.0f} s: {outcome.error}")
            continue
        variants = outcome.summary["variants"]
        naive = variants.get("naive", {})
        for name, v in variants.items():
            peak, most = v.get("peak_bytes"), naive.get("peak_bytes")
            cells = (
                cell(v.get("median_s"), 1e3),
                cell(v.get(TOKENS)),
                "" if name == "naive" else against(v, naive),
                cell(peak, 2**-20),
                cell(peak / most if peak and most else None, 100, " %"),
            )
            lines.append(f"{outcome.name:10}{name:20}" + "".join(f"{c:>18}" for c in cells))
    note = "against naive: by supervised tokens per second where they are given, else by ms"
    return "\n".join([*lines, note])


def against(variant: dict, naive: dict) -> str:
    """How fast a variant is beside naive, in words; per supervised token where both train."""
    if variant.get(TOKENS) and naive.get(TOKENS):
        ratio = variant[TOKENS] / naive[TOKENS]
    elif variant.get("median_s") and naive.get("median_s"):
        ratio = naive["median_s"] / variant["median_s"]
    else:
        return ""
    text = f"{max(ratio, 1 / ratio):.3g}"
    return "as fast" if text == "1" else f"{text}x {'faster' if ratio > 1 else 'slower'}"


def cell(value: float | None, scale: float = 1.0, unit: str = "") -> str:
    if value is None:
        return ""
    value *= scale
    return (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}") + unit
