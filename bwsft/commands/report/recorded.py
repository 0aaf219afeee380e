"""What a run has written down, and its figures for a page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwsft import config as c
from bwsft.training.metrics import read_log, running_mean
from bwsft.training.run_files import DATA, FACTS, repros
from bwsft.utils import strict_json
from bwsft.utils.strict_json import read_text

MOST_POINTS = 1500  # of a curve: more than a screen has pixels, and 150 kB of JSON
LATEST = 20  # updates whose speed says how long the rest will take


@dataclass(frozen=True)
class Recorded:
    """A run folder, finished or in progress, as it is now."""

    folder: Path
    name: str
    config: c.Config
    metrics: list[dict]
    evals: list[dict]
    data: dict[str, Any] | None
    """data.json: what became of the records; older runs have none."""

    @property
    def done(self) -> int:
        """Updates."""
        return self.metrics[-1]["step"] if self.metrics else 0


def read_run(folder: Path, name: str) -> Recorded:
    """ValueError or OSError unless `folder` is a run's."""
    stored, noted = folder / "config.json", folder / DATA
    if not stored.exists():
        raise ValueError(f"{folder} is not a run folder: it has no config.json")
    config = c.from_json(read_text(stored), str(stored))
    logs = (read_log(folder / f"{log}.jsonl") for log in ("metrics", "eval"))
    data = strict_json.read_object(noted) if noted.exists() else None
    return Recorded(folder, name, config, *logs, data)


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
    found["mean"] = mean_loss(metrics)
    every = max(math.ceil(len(metrics) / MOST_POINTS), 1)
    thinned = {name: thin(values, every) for name, values in found.items()}
    return {**thinned, "step": found["step"][every - 1 :: every], "every": every}


def mean_loss(metrics: list[dict]) -> list[float | None]:
    """Running mean of the loss over 5 % of the updates."""
    losses = column(metrics, "loss")
    known = [loss for loss in losses if loss is not None]
    means = iter(running_mean(known, max(len(known) // 20, 5)))
    return [None if loss is None else next(means) for loss in losses]


def thin(values: list[float | None], every: int) -> list[float | None]:
    """The mean of each whole group of `every` values, to 6 digits; None for a group of Nones."""
    out: list[float | None] = []
    for end in range(every, len(values) + 1, every):
        group = [v for v in values[end - every : end] if v is not None]
        out.append(float(f"{math.fsum(group) / len(group):.6g}") if group else None)
    return out


def spikes(run: Recorded) -> list[tuple[int, str, str]]:
    """(step, what was wrong, what became of it) of every update that the spike guard reports, and
    of those that ended the run."""
    found = {}
    for line in run.metrics:
        if what := line.get("spike"):
            became = "its update was left out" if line.get("skipped") else "the run went on"
            found[line["step"]] = str(what), became
    for path in repros(run.folder):
        try:
            facts = strict_json.read_object(path / FACTS)
            step, what = facts["step"] + 1, facts["what"]
        except (ValueError, OSError, KeyError, TypeError):  # half a folder is no fault of the run
            continue
        what, became = found.get(step, (what, "the run ended"))
        found[step] = what, f"{became}; bwsft replay {path}"
    return [(step, *found[step]) for step in sorted(found)]


def facts(run: Recorded, spiked: list[tuple[int, str, str]]) -> list[tuple[str, str]]:
    """The figures at the top of the page."""
    updates = f"{run.done:,} of {run.config.steps:,}" if run.metrics else "none yet"
    found = [("updates", updates)]
    nelbo = [value for value in column(run.evals, "nelbo") if value is not None]
    if nelbo:
        what = run.config.objective.held_out.replace("blockwise ", "")
        found.append((what, f"{nelbo[0]:.3f} → {nelbo[-1]:.3f}"))
    if means := [value for value in mean_loss(run.metrics) if value is not None]:
        found.append(("loss, running mean", f"{means[-1]:.4f}"))
    seconds = math.fsum(s for s in column(run.metrics, "seconds") if s is not None)
    if seconds:
        for label, name in (("tokens", "tokens"), ("supervised tokens", "supervised_tokens")):
            total = sum(n for n in column(run.metrics, name) if n is not None)
            found.append((f"{label}/s", f"{total / seconds:,.0f}"))
        found.append(("training time", duration(seconds)))
    out = sum(bool(record.get("skipped")) for record in run.metrics)
    found.append(("spikes", f"{len(spiked):,}" + (f", {out:,} left out" if out else "")))
    return found


def time_left(run: Recorded) -> str | None:
    """How long the rest of the updates takes at the speed of the latest; None if none is done."""
    seconds = [s for s in column(run.metrics[-LATEST:], "seconds") if s is not None]
    rest = run.config.steps - run.done
    return duration(math.fsum(seconds) / len(seconds) * rest) if seconds and rest > 0 else None


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
