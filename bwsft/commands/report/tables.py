"""The tables of a page: a row per fact, a column per run."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from bwsft.checkpoints.folders import versions
from bwsft.checkpoints.state import read_state
from bwsft.commands.report.recorded import Recorded
from bwsft.presets import PRESETS
from bwsft.training.run_files import DATA
from bwsft.utils.config_check import flat

Rows = Iterable[tuple[str, str]]
ABSENT = "–"


def joined(head: str, names: list[str], columns: list[Rows]) -> dict:
    """One table of the (label, value) rows of several runs."""
    found = [dict(column) for column in columns]
    labels = dict.fromkeys(label for column in found for label in column)
    rows = [[label, *(column.get(label, ABSENT) for column in found)] for label in labels]
    return {"head": [head, *names], "rows": rows}


def differing(table: dict) -> dict:
    """The rows of a table whose values are not all the same."""
    return {**table, "rows": [row for row in table["rows"] if len(set(row[1:])) > 1]}


def settings(runs: list[Recorded]) -> dict:
    """Every setting of the runs, and those that differ: between the runs, or of a single one from
    its preset."""
    columns = [flat(dataclasses.asdict(run.config)) for run in runs]
    if len(runs) > 1:
        names, hide = [run.name for run in runs], ("out", "resume")
        about = ["All have the same settings.", "What differs between the runs:"]
    else:
        names, hide = ["this run"], ("preset",)
        preset = runs[0].config.preset
        about = [f"All as in the preset {preset}.", f"What differs from the preset {preset}:"]
        if preset in PRESETS:
            names.append("preset")
            columns.append(flat(dataclasses.asdict(PRESETS[preset]())))
        else:
            about[0] = "These values started from no preset that is known here."
    shown = [((k, str(v)) for k, v in column.items() if k not in hide) for column in columns]
    every = joined("setting", names, shown)
    changed = differing(every)
    return {"about": about[bool(changed["rows"])], "differ": changed, "all": every}


def data_counts(run: Recorded) -> list[tuple[str, str]]:
    """What became of the records, from data.json."""
    report = run.data
    if report is None:
        return []
    try:
        rows = [
            ("source", str(report["source"] or "generated word problems")),
            ("records", f"{report['records']:,}"),
            ("examples", f"{report['examples']:,}"),
            ("kept", f"{report['kept']:,} ({report['kept'] / report['examples']:.2%})"),
        ]
        rows += [(f"dropped: {why}", f"{count:,}") for why, count in report["dropped"].items()]
        rows += [(f"malformed: {bad['where']}", bad["reason"]) for bad in report["skipped"]]
        rows += [(f"not read: {name}", f"{count:,}") for name, count in report["unread"].items()]
        rows += [("trained on", f"{report['train']:,}"), ("held out", f"{report['held_out']:,}")]
        for part in ("prompt", "response"):
            q = report["lengths"][part]
            text = f"median {q['50%']:,}, 90 % up to {q['90%']:,}, longest {q['max']:,}"
            rows.append((f"{part} tokens", text))
        longer = f"{report['longer_than_gen_length']:.1%}"
        return [*rows, (f"responses longer than {report['gen_length']:,} tokens", longer)]
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        path = run.folder / DATA
        raise ValueError(f"{path} is damaged: remove it to have a page without it") from None


def provenance(run: Recorded, checkpoint: Path | None) -> list[tuple[str, str]]:
    """Where the figures come from. Versions are those that wrote the checkpoint."""
    config, now, then = run.config, versions(), {}
    model = config.model or ("random" if config.tokenizer else "the embedded base")
    found = [("folder", str(run.folder)), ("model", model)]
    found.append(("data", config.data or "generated word problems"))
    if checkpoint is not None:
        state = read_state(checkpoint)
        found += [("checkpoint", checkpoint.name), ("data fingerprint", state["data"])]
        found.append(("trained on", state.get("device", "unknown")))
        then = state["versions"]
    for name in {**then, **now}:
        texts = [then.get(name, now.get(name)), now.get(name, "absent")]
        same = texts[0] == texts[1]
        found.append((name, texts[0] if same else f"{texts[0]}; for this page {texts[1]}"))
    if commit := source_commit():
        found.append(("commit when this page was made", commit))
    return [*found, ("page made", time.strftime("%Y-%m-%d %H:%M:%S %z"))]


@functools.cache
def source_commit() -> str | None:
    """The commit of a source checkout; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
