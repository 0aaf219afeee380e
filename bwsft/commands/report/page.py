"""`bwsft report`: runs as one HTML page that opens from disk, with no network.

The page (template.html and the scripts beside this file) draws itself from the JSON that is
embedded in it: curves, data counts, spikes, loss by block and mask rate, decoded samples, settings,
provenance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import re
import sys
from collections import Counter
from pathlib import Path

from bwsft.checkpoints.folders import newest_complete
from bwsft.commands.options import ReportOptions, SampleOptions
from bwsft.commands.report.recorded import Recorded, column, curves, facts, read_run, spikes
from bwsft.commands.report.samples import Answered, ask_models
from bwsft.commands.report.tables import data_counts, joined, provenance, settings
from bwsft.commands.report.watch import follow, live
from bwsft.utils.claims import claimed
from bwsft.utils.files import write_atomic
from bwsft.utils.lines import say

PAGE = Path(__file__).parent
SCRIPTS = ("charts.js", "samples.js", "page.js")
TITLE = b"<title>bwsft report: "  # of every page
MOST_RUNS = 8  # that colors and dashes tell apart


def run_report(options: ReportOptions) -> int:
    """Write the page and return the exit status; ValueError or OSError for bad input."""
    folders, names = options.runs, run_names(options.runs)
    path = options.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    if options.samples < 0:
        raise ValueError("--samples must be at least 0")
    if path.exists():  # before anything is decoded
        with held(path):
            pass

    def read() -> list[Recorded]:
        return [read_run(*pair) for pair in zip(folders, names, strict=True)]

    def write_quick(going: list[bool]) -> list[Recorded]:
        runs = read()
        write(path, quick(runs, going))
        return runs

    if options.watch:
        follow(folders, path, write_quick)
    data = collect(read(), options)
    for note in data["notes"]:
        say(note, file=sys.stderr)
    write(path, data)
    say(path)
    return 0


def run_names(folders: tuple[Path, ...]) -> list[str]:
    """What the page calls the runs. ValueError for no run, too many or one twice."""
    if not 1 <= len(folders) <= MOST_RUNS:
        raise ValueError(f"name one to {MOST_RUNS} run folders, not {len(folders)}")
    twice = [path for path, n in Counter(p.resolve() for p in folders).items() if n > 1]
    if twice:
        raise ValueError(f"{twice[0]} is named twice")
    short = [path.resolve().name for path in folders]
    return short if len(set(short)) == len(short) else [str(path) for path in folders]


def held(path: Path) -> contextlib.AbstractContextManager:
    """The file of the page: a new one, or an older page."""
    otherwise = "exists and is no page of bwsft report: name another file by --out"
    return claimed(path, lambda head: TITLE in head, otherwise)


def write(path: Path, data: dict) -> None:
    with held(path):
        write_atomic(path, page(data))


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


def quick(runs: list[Recorded], going: list[bool]) -> dict:
    """The page of runs in progress, for which no model is loaded and no checkpoint read."""
    answered = [Answered([], [], []) for _ in runs]
    data = shown(runs, answered, [None for _ in runs])
    data["notes"] = ["Samples and the loss by block and mask rate come when the runs have ended."]
    return data | {"live": live(runs, going) if any(going) else None}


def collect(runs: list[Recorded], options: SampleOptions) -> dict:
    """Everything the page shows, as JSON values. ValueError or OSError for damaged files."""
    found = [newest_complete(run.folder) for run in runs]
    checkpoints = [checkpoint for checkpoint, _ in found]
    answered = []
    for run, (checkpoint, skipped) in zip(runs, found, strict=True):
        one = ask_models(run.config, run.folder, checkpoint, options)
        start = f"{run.name}: " if len(runs) > 1 else ""
        notes = [start + note for note in [*skipped, *one.notes]]
        answered.append(dataclasses.replace(one, notes=notes))
    return shown(runs, answered, checkpoints)


def shown(runs: list[Recorded], answered: list[Answered], checkpoints: list[Path | None]) -> dict:
    """The page's data: a drawing per run, and tables with a column per run."""
    names = [run.name for run in runs]
    spiked = [spikes(run) for run in runs]
    figures = [facts(*pair) for pair in zip(runs, spiked, strict=True)]
    origins = [provenance(*pair) for pair in zip(runs, checkpoints, strict=True)]
    counts = [data_counts(run) for run in runs]
    drawn = [
        {
            "name": run.name,
            "curves": curves(run.metrics),
            "evals": {name: column(run.evals, name) for name in ("step", "nelbo")},
            "spikes": events,
            "slices": one.slices,
        }
        for run, events, one in zip(runs, spiked, answered, strict=True)
    ]
    return {
        "name": ", ".join(names),
        "summary": [summary(run, len(runs) > 1) for run in runs],
        "facts": joined("", names, figures),
        "runs": drawn,
        "counts": joined("", names, counts),
        "samples": side_by_side(names, [one.samples for one in answered]),
        "notes": [note for one in answered for note in one.notes],
        "settings": settings(runs),
        "provenance": joined("what", names, origins),
        "live": None,
    }


def summary(run: Recorded, named: bool) -> str:
    config = run.config
    return (
        f"{f'{run.name}: ' if named else ''}{config.objective.name} SFT, {config.context} context, "
        f"preset {config.preset or 'none'}; {run.done:,} of {config.steps:,} updates done"
    )


def side_by_side(names: list[str], samples: list[list[dict]]) -> list[dict]:
    """The samples of several runs, with the answers to the same prompt in one. A base that says
    the same in two runs is named once, after both."""
    if len(names) == 1:
        return samples[0]
    found: dict[tuple[str, str], list[dict]] = {}
    for name, some in zip(names, samples, strict=True):
        for sample in some:
            row = found.setdefault((sample["question"], sample["reference"]), [])
            for answer in sample["answers"]:
                own = {**answer, "name": f"{answer['name']} of {name}"}
                same = [x for x in row if x["name"].startswith("base of ") and says(x) == says(own)]
                if same and answer["name"] == "base":
                    same[0]["name"] += f" and {name}"
                else:
                    row.append(own)
    return [{"question": q, "reference": r, "answers": row} for (q, r), row in found.items()]


def says(answer: dict) -> dict:
    """An answer without the name of its model."""
    return {key: value for key, value in answer.items() if key != "name"}
