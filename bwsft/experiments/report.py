"""A finished experiment as a Markdown page, a CSV with one line per cell, and a figure."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bwsft.checkpoints.folders import versions
from bwsft.experiments.figures import draw
from bwsft.experiments.measures import TestSet
from bwsft.experiments.plans import Plan
from bwsft.experiments.results import Judged, Measured, is_nelbo, judge
from bwsft.experiments.scales import Scale
from bwsft.experiments.statistics import mean_error
from bwsft.utils.claims import claimed
from bwsft.utils.files import write_atomic

LABELS = {"nelbo": "NELBO", "pilot": "pilot NELBO", "solved": "solved", "math": "MATH"}


@dataclass(frozen=True)
class Finished:
    """Everything a report is made from."""

    plan: Plan
    scale: Scale
    seeds: list[int]
    tests: TestSet
    arms: list[Measured]

    @property
    def seconds(self) -> float | None:
        """Time of every training, where the plan gives all arms the same."""
        return next((arm.cpu_seconds for arm in self.plan.arms if arm.cpu_seconds), None)

    @property
    def measures(self) -> list[str]:
        """Measures of the plan's arms, in order; curves are drawn, not listed."""
        names = dict.fromkeys(m for arm in self.plan.arms for m in arm.measures)
        return [name for name in names if not name.startswith("curve")]


@contextlib.contextmanager
def held(plan: Plan, folder: Path) -> Iterator[None]:
    """Claim NAME.md, NAME.csv and NAME.png in a folder. ValueError if they are there and the page
    is not one of this plan."""
    page = folder / f"{plan.name}.md"
    known = page.is_file() and page.read_bytes().startswith(title(plan).encode())
    otherwise = f"exists, and {page} is not its report: name another folder by --report"
    with contextlib.ExitStack() as stack:
        for suffix in (".md", ".csv", ".png"):
            path = page.with_suffix(suffix)
            stack.enter_context(claimed(path, lambda head: known, otherwise))
        yield


def title(plan: Plan) -> str:
    """What a page begins with."""
    return f"# {plan.title} ("


def write(finished: Finished, folder: Path) -> Path:
    """Write NAME.md, NAME.csv and NAME.png into the folder; returns the page."""
    page = folder / f"{finished.plan.name}.md"
    judged = judge(finished.plan, finished.arms, len(finished.seeds))
    write_atomic(page, markdown(finished, judged))  # first: by it the others are known
    write_atomic(page.with_suffix(".csv"), csv_text(finished))
    write_atomic(page.with_suffix(".png"), draw(finished))
    return page


def markdown(finished: Finished, judged: list[Judged]) -> str:
    """The page."""
    plan = finished.plan
    lines = [f"{title(plan)}{finished.scale.name})", "", plan.question, ""]
    heads, *arms = (f"| {' | '.join(texts)} |" for texts in table(finished))
    ruler = "|---|" + "---:|" * (heads.count("|") - 2)
    lines += [settings(finished), "", heads, ruler, *arms, ""]
    lines += [f"![{plan.title}]({plan.name}.png)", ""]
    if judged:
        lines += claims(judged)
    return "\n".join(lines)


def settings(finished: Finished) -> str:
    """One paragraph with everything that all arms share."""
    base, tests = finished.scale.base, finished.tests
    model = base.model or "the embedded base"
    # Of a path its end says enough, and no more of it belongs on a page that is passed on.
    data = "/".join(Path(base.data).parts[-2:]) if base.data else "generated word problems"
    timed = f" --seconds {finished.seconds:g}" if finished.seconds else ""
    found = versions()
    made = " ".join(f"{k} {found[k]}" for k in ("bwsft", "torch", "transformers") if k in found)
    return (
        f"`bwsft experiment {finished.plan.name} --scale {finished.scale.name}{timed}`, "
        f"{time.strftime('%Y-%m-%d')}, {made}, {platform.machine()}. {model} on {data}, "
        f"{len(finished.seeds)} seeds, {base.batch_size} sequences an update, peak learning rate "
        f"{base.optim.lr:g}, canvas {base.gen_length}. "
        f"Evaluated on {tests.problems} problems with {tests.draws} masked states each; decoding "
        "is greedy, one token a step. Mean ± standard error over seeds; the seeds share the "
        "starting model and the test set, so the intervals say nothing about other problems. FLOPs "
        "are counted. The same seed gives other figures on another CPU."
    )


def table(finished: Finished, brief: bool = False) -> list[list[str]]:
    """The heads, then the texts of every arm; `brief`: the columns that a terminal has room for."""

    def counted(name: str) -> Callable[[Measured], str]:
        return lambda arm: "-" if (value := arm.trained(name)) is None else f"{value:,.0f}"

    def measured(name: str) -> Callable[[Measured], str]:
        return lambda arm: spread(arm.values(name), percent=not is_nelbo(name))

    def strict(name: str) -> Callable[[Measured], str]:
        return lambda arm: spread(arm.values(name, "strict"), percent=True)

    def flops(arm: Measured) -> str:
        return "-" if arm.flops is None else f"{arm.flops / 1e12:,.2f}"

    names = finished.measures
    columns = {"arm": lambda arm: arm.name, "updates": counted("updates"), "TFLOP": flops}
    if not brief:
        columns["supervised tokens"] = counted("supervised_tokens")
        columns["region tokens"] = counted("region_tokens")
    if finished.seconds:
        columns["CPU s"] = counted("cpu_seconds")  # with setup and evaluations
    columns |= {label(name): measured(name) for name in names}
    if not brief:
        ruled = [name for name in names if name.startswith(("gsm8k", "math"))]
        columns |= {f"{label(name)}, strict": strict(name) for name in ruled}
    return [[*columns], *([text(arm) for text in columns.values()] for arm in finished.arms)]


def label(name: str) -> str:
    kind, _, block = name.partition("@")
    return f"{LABELS.get(kind, kind.upper())}, B {block}"


def spread(values: list[float] | None, percent: bool) -> str:
    if values is None:
        return "-"
    mean, error = mean_error(values)
    form = "{:.1%}" if percent else "{:.4f}"
    return form.format(mean) + ("" if math.isnan(error) else " ± " + form.format(error))


def claims(judged: list[Judged]) -> list[str]:
    """The table of the plan's claims; differences are (should be smaller) - (should be larger)."""
    lines = [
        "| claim, written down before the test | difference [95 % interval] | p (Holm) | verdict |",
        "|---|---:|---:|---|",
    ]
    for j in judged:
        f = j.found
        shown = f"{f.mean:+.4f} [{f.low:+.4f}, {f.high:+.4f}]" if f.n > 1 else f"{f.mean:+.4f}"
        p = "-" if math.isnan(j.adjusted_p) else f"{j.adjusted_p:.3g}"
        lines.append(f"| {j.claim.text} | {shown} | {p} | {j.verdict} |")
    note = (
        "A claim holds if the difference is negative: Welch's t test over seeds, p-values adjusted "
        "over the claims of this page about the same kind of measure. `opposite` means "
        "significantly the other way."
    )
    return [*lines, "", note, ""]


def csv_text(finished: Finished) -> str:
    out = io.StringIO()
    names = finished.measures
    counted = ("updates", "tokens", "supervised_tokens", "region_tokens", "loss", "seconds")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["arm", "seed", "flops", *counted, *names, "evals"])
    for arm in finished.arms:
        for i, cell in enumerate(arm.cells):
            train = cell.get("train", {})
            seed = finished.seeds[i] if train else ""
            values = [cell["measures"].get(name, {}).get("value", "") for name in names]
            evals = json.dumps(train.get("evals", [])) if train else ""
            flops = "" if arm.flops is None else f"{arm.flops:.6g}"
            numbers = [train.get(k, "") for k in counted]
            writer.writerow([arm.name, seed, flops, *numbers, *values, evals])
    return out.getvalue()
