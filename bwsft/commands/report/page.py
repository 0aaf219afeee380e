"""`bwsft report`: a run as one HTML page that opens from disk, with no network.

The page (template.html and the scripts beside this file) draws itself from the JSON that is
embedded in it: curves, config, decoded samples, provenance.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

from bwsft import config as c
from bwsft.checkpoints.folders import newest_complete, versions
from bwsft.checkpoints.state import read_state
from bwsft.commands.options import ReportOptions
from bwsft.commands.report.samples import decode_samples
from bwsft.presets import PRESETS
from bwsft.training.metrics import read_log, running_mean
from bwsft.utils.config_check import flat
from bwsft.utils.files import write_atomic
from bwsft.utils.strict_json import read_text

PAGE = Path(__file__).parent
SCRIPTS = ("charts.js", "samples.js", "page.js")
MOST_POINTS = 1500  # of a curve: more than a screen has pixels, and 150 kB of JSON


def run_report(options: ReportOptions) -> int:
    """Write the page and return the exit status; ValueError or OSError for bad input."""
    path = options.out or options.run / "report.html"
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    data = collect(options)
    for note in data["notes"]:
        print(note, file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page(data))
    print(path)
    return 0


def page(data: dict) -> str:
    """The HTML text with `data` in it, read back by JSON.parse."""
    parts = {
        "title": html.escape(f"bwsft report: {data['name']}"),
        "style": (PAGE / "report.css").read_text(encoding="utf-8"),
        # "<" would let a sample's text end the script element that holds it.
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "script": "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    template = (PAGE / "template.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def collect(options: ReportOptions) -> dict:
    """Everything the page shows, as JSON values. ValueError or OSError unless it is a run."""
    run = options.run
    stored = run / "config.json"
    if not stored.exists():
        raise ValueError(f"{run} is not a run folder: it has no config.json")
    config = c.from_json(read_text(stored), str(stored))
    metrics, evals = read_log(run / "metrics.jsonl"), read_log(run / "eval.jsonl")
    checkpoint, skipped = newest_complete(run)
    samples, notes = decode_samples(config, run, checkpoint, options)
    done = metrics[-1]["step"] if metrics else 0
    return {
        "name": run.resolve().name,
        "summary": f"{config.objective.name} SFT, {config.context} context, preset "
        f"{config.preset or 'none'}; {done:,} of {config.steps:,} updates done",
        "facts": facts(metrics, evals),
        "curves": curves(metrics),
        "evals": {name: column(evals, name) for name in ("step", "nelbo")},
        "samples": samples,
        "notes": [*skipped, *notes],
        "config": config_table(config),
        "provenance": provenance(config, checkpoint),
    }


def column(records: list[dict], name: str) -> list[float | None]:
    """One number of every record; None where it is missing or not finite."""
    values = (record.get(name) for record in records)
    return [v if type(v) in (int, float) and math.isfinite(v) else None for v in values]


def curves(metrics: list[dict]) -> dict:
    """Columns of equal length, thinned to the means of `every` updates; the running mean is taken
    before that."""
    found = {name: column(metrics, name) for name in ("step", "loss", "lr", "grad_norm")}
    seconds = column(metrics, "seconds")
    for rate, count in (("tokens", "tokens"), ("supervised", "supervised_tokens")):
        pairs = zip(column(metrics, count), seconds, strict=True)
        found[f"{rate}_per_second"] = [n / s if n is not None and s else None for n, s in pairs]
    known = [loss for loss in found["loss"] if loss is not None]
    means = iter(running_mean(known, max(len(known) // 20, 5)))
    found["mean"] = [None if loss is None else next(means) for loss in found["loss"]]
    every = max(math.ceil(len(metrics) / MOST_POINTS), 1)
    thinned = {name: thin(values, every) for name, values in found.items()}
    return {**thinned, "step": found["step"][every - 1 :: every], "every": every}


def thin(values: list[float | None], every: int) -> list[float | None]:
    """The mean of each whole group of `every` values, to 6 digits; None for a group of Nones."""
    out: list[float | None] = []
    for end in range(every, len(values) + 1, every):
        group = [v for v in values[end - every : end] if v is not None]
        out.append(float(f"{math.fsum(group) / len(group):.6g}") if group else None)
    return out


def facts(metrics: list[dict], evals: list[dict]) -> list[list[str]]:
    """The figures at the top of the page."""
    found = [["updates", f"{metrics[-1]['step']:,}" if metrics else "none yet"]]
    nelbo = [value for value in column(evals, "nelbo") if value is not None]
    if nelbo:
        found.append(["held-out NELBO", f"{nelbo[0]:.3f} → {nelbo[-1]:.3f}"])
    done = curves(metrics)
    if means := [value for value in done["mean"] if value is not None]:
        found.append(["loss, running mean", f"{means[-1]:.4f}"])
    seconds = math.fsum(s for s in column(metrics, "seconds") if s is not None)
    if seconds:
        for label, name in (("tokens", "tokens"), ("supervised tokens", "supervised_tokens")):
            total = sum(n for n in column(metrics, name) if n is not None)
            found.append([f"{label}/s", f"{total / seconds:,.0f}"])
        found.append(["training time", duration(seconds)])
    if left_out := sum(bool(record.get("skipped")) for record in metrics):
        found.append(["updates left out (spikes)", f"{left_out:,}"])
    return found


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def config_table(config: c.Config) -> dict:
    """Fields as [name, value, the preset's value or None], all as texts."""
    values = flat(dataclasses.asdict(config))
    known = config.preset in PRESETS
    preset = flat(dataclasses.asdict(PRESETS[config.preset]())) if known else {}
    fields = [
        [name, str(value), str(preset[name]) if known else None]
        for name, value in values.items()
        if name != "preset"
    ]
    return {"preset": config.preset if known else None, "fields": fields}


def provenance(config: c.Config, checkpoint: Path | None) -> list[list[str]]:
    """Where the figures come from. Versions are those that wrote the checkpoint."""
    now, then = versions(), {}
    model = config.model or ("random" if config.tokenizer else "the embedded base")
    found = [["model", model], ["data", config.data or "generated word problems"]]
    if checkpoint is not None:
        state = read_state(checkpoint)
        found += [["checkpoint", checkpoint.name], ["data fingerprint", state["data"]]]
        found += [["trained on", state.get("device", "unknown")]]
        then = state["versions"]
    for name in {**then, **now}:
        texts = [then.get(name, now.get(name)), now.get(name, "absent")]
        same = texts[0] == texts[1]
        found.append([name, texts[0] if same else f"{texts[0]}; for this page {texts[1]}"])
    if commit := source_commit():
        found.append(["commit when this page was made", commit])
    return [*found, ["page made", time.strftime("%Y-%m-%d %H:%M:%S %z")]]


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
