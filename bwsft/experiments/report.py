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
from dataclasses import dataclass, field
from pathlib import Path

from bwsft.checkpoints.folders import versions
from bwsft.experiments import gradients, primary_report, thresholds
from bwsft.experiments.arms import Plan
from bwsft.experiments.figures import draw
from bwsft.experiments.measures import TestSet
from bwsft.experiments.pilots import Pilots
from bwsft.experiments.results import Judged, Measured, is_gradient, is_nelbo, judge
from bwsft.experiments.scales import Scale
from bwsft.experiments.statistics import mean_error
from bwsft.utils.claims import claimed
from bwsft.utils.files import write_atomic

LABELS = {
    "nelbo": "NELBO", "pilot": "pilot NELBO", "solved": "solved", "own": "solved", "math": "MATH",
    "cpu_seconds": "CPU s", "careful": "exact match, careful", "kept": "exact match of that TPF",
}  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """Everything a report is made from."""

    plan: Plan
    scale: Scale
    seeds: list[int]
    tests: TestSet
    arms: list[Measured]
    pilots: Pilots = field(default_factory=dict)
    start: float | None = None
    """Exact match of the model that the plan's start trained, on problems like its own."""

    @property
    def seconds(self) -> float | None:
        """Time of every training, where the plan gives all arms the same."""
        return next((arm.cpu_seconds for arm in self.plan.arms if arm.cpu_seconds), None)

    @property
    def rates(self) -> dict[str, float]:
        """Peak learning rates of the trained arms, if they are not all the same; else {}."""
        found = {arm.name: arm.config.optim.lr for arm in self.plan.arms if arm.trained}
        return found if len({*found.values()}) > 1 else {}

    @property
    def gradients(self) -> bool:
        """Whether gradients are measured, and nothing is trained."""
        return any(is_gradient(name) for name in self.measures)

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
    if plan.primary:
        lines += primary_report.section(finished)
    if plan.start:
        lines += thresholds.section(finished)
    return "\n".join(lines)


def settings(finished: Finished) -> str:
    """One paragraph with everything that all arms share."""
    plan, base, tests = finished.plan, finished.scale.base, finished.tests
    model, data = base.model or "the embedded base", base.data or "generated word problems"
    # Of a path its end says enough, and no more of it belongs on a page that is passed on.
    model, data = ("/".join(Path(name).parts[-2:]) for name in (model, data))
    batch = " or ".join(sorted({f"{arm.config.batch_size}" for arm in plan.arms}))
    found = versions()
    made = " ".join(f"{k} {found[k]}" for k in ("bwsft", "torch", "transformers") if k in found)
    made = f"{time.strftime('%Y-%m-%d')}, {made}, {platform.machine()}. {model} on {data}"
    command = f"bwsft experiment {plan.name} --scale {finished.scale.name}"
    if finished.gradients:
        return f"`{command}`, {made}, {batch} sequences an update. {gradients.HOW}"
    if plan.start:
        command = f"bwsft experiment {plan.name} --problems {tests.problems}"
        return f"`{command}`, {thresholds.how(finished)}"
    seconds = finished.seconds
    timed = f"--seconds {seconds:g}" if seconds else f"--steps {base.steps}"
    lr = "" if finished.rates else f"peak learning rate {base.optim.lr:g}, "
    return (
        f"`{command} {timed} --problems {tests.problems}`, {made}, {seeds_of(finished)}, "
        f"{batch} sequences an update, {lr}canvas {base.gen_length}. "
        f"Evaluated on {tests.problems} problems with {tests.draws} masked states each; decoding "
        "is greedy, one token a step. Mean ± standard error over seeds; the seeds share the "
        "starting model and the test set, so the intervals say nothing about other problems. FLOPs "
        "are counted. The same seed gives other figures on another CPU."
    )


def seeds_of(finished: Finished) -> str:
    """How many there are, and how many of them every arm has finished where that isn't all."""
    planned = len(finished.seeds)
    trained = {arm.name for arm in finished.plan.arms if arm.trained}
    done = min([planned, *(len(arm.cells) for arm in finished.arms if arm.name in trained)])
    return f"{planned} seeds" + f" planned, {done} finished by every arm" * (done < planned)


def table(finished: Finished, brief: bool = False) -> list[list[str]]:
    """The heads, then the texts of every arm; `brief`: the columns that a terminal has room for."""

    def counted(name: str) -> Callable[[Measured], str]:
        return lambda arm: "-" if (value := arm.trained(name)) is None else f"{value:,.0f}"

    def measured(name: str) -> Callable[[Measured], str]:
        return lambda arm: spread(arm.values(name), form(name))

    def strict(name: str) -> Callable[[Measured], str]:
        return lambda arm: spread(arm.values(name, "strict"), form(name))

    def flops(arm: Measured) -> str:
        return "-" if arm.flops is None else f"{arm.flops / 1e12:,.2f}"

    if finished.gradients:
        return gradient_table(finished, brief)
    names, rates = finished.measures, finished.rates
    columns: dict[str, Callable[[Measured], str]] = {"arm": lambda arm: arm.name}
    if rates:
        columns["peak lr"] = lambda arm: f"{rates[arm.name]:g}" if arm.name in rates else "-"
    if finished.plan.primary:  # a page of what is finished
        columns["seeds"] = lambda arm: str(len(arm.cells)) if arm.flops else "-"
    columns |= {"updates": counted("updates"), "TFLOP": flops}
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


def gradient_table(finished: Finished, brief: bool) -> list[list[str]]:
    """`table` where gradients are measured."""
    (name,) = finished.measures
    parts = dict(list(gradients.PARTS.items())[: 2 if brief else None])
    lines = [["arm", "TFLOP", *parts.values(), *gradients.PER_FLOP]]
    for arm in finished.arms:
        found = {part: arm.values(name, part)[0] for part in gradients.PARTS}
        shown = [f"{v:.3g} [{low:.3g}, {high:.3g}]" for v, low, high in map(found.get, parts)]
        cost = gradients.per_flop(found, arm.flops / 1e12)
        lines.append([arm.name, f"{arm.flops / 1e12:.4f}", *shown, *(f"{x:.3g}" for x in cost)])
    return lines


def label(name: str) -> str:
    kind, _, block = name.partition("@")
    return LABELS.get(kind, kind.upper()) + (f", {thresholds.decoder(block)}" if block else "")


def form(name: str) -> str:
    """How the values of a measure are written."""
    if name == "cpu_seconds":
        return "{:.1f}"
    short = {"tpf": "{:.2f}", "aup": "{:.0f}"}.get(name.partition("@")[0])
    return short or ("{:.4f}" if is_nelbo(name) else "{:.1%}")


def spread(values: list[float] | None, form: str) -> str:
    if values is None:
        return "-"
    mean, error = mean_error(values)
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
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows(gradient_lines(finished) if finished.gradients else csv_lines(finished))
    return out.getvalue()


def csv_lines(finished: Finished) -> Iterator[list]:
    """The heads, then a line per cell."""
    names = finished.measures
    counted = ("updates", "tokens", "supervised_tokens", "region_tokens", "loss", "seconds")
    yield ["arm", "seed", "flops", *counted, *names, "evals"]
    for arm in finished.arms:
        taken = [arm.values(name) for name in names]
        for i, cell in enumerate(arm.cells):
            train = cell.get("train", {})
            seed = finished.seeds[i] if train else ""
            values = ["" if found is None else found[i] for found in taken]
            evals = json.dumps(train.get("evals", [])) if train else ""
            flops = "" if arm.flops is None else f"{arm.flops:.6g}"
            numbers = [train.get(k, "") for k in counted]
            yield [arm.name, seed, flops, *numbers, *values, evals]


def gradient_lines(finished: Finished) -> Iterator[list]:
    """The heads, then a line per arm: every part with its interval."""
    (name,) = finished.measures
    ends = ("", "_low", "_high")
    yield ["arm", "flops", *(part + end for part in gradients.PARTS for end in ends)]
    for arm in finished.arms:
        parts = [arm.values(name, part)[0] for part in gradients.PARTS]
        yield [arm.name, f"{arm.flops:.6g}", *(f"{x:.6g}" for found in parts for x in found)]
