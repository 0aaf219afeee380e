"""What a decoder by threshold makes of generated problems, and the careful decodings that the study
of fewer passes trains on (fewer.py)."""

from __future__ import annotations

import itertools
import json
import platform
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bwsft import config as c
from bwsft.checkpoints.resolve import Trained
from bwsft.data import word_problems
from bwsft.decoding.summary import tokens_per_forward
from bwsft.evaluation.exact_match import solve
from bwsft.experiments.arms import Plan
from bwsft.experiments.fewer import WEIGHT, WITHIN
from bwsft.utils.files import write_atomic
from bwsft.utils.parallelism import aup

if TYPE_CHECKING:
    from bwsft.experiments.report import Finished

KINDS = ("tpf", "kept", "aup", "careful")  # figure_of
THRESHOLDS = (1.0, 0.995, 0.99, 0.98, 0.95, 0.9, 0.7, 0.5, 0.3)  # at 1.0 one token a step
PILOTED = 200  # test problems that settings of the studies were chosen on
LIMITS = (
    "Limits: one start of each kind of problems, and one set that all arms are trained on. Exact "
    "match has a standard error of up to {error:.0f} points from the problems, which is in no "
    "interval here, and the TPF of the first table is the best of the thresholds by that exact "
    "match. A block of {B} takes one pass at least, so that with one active block no TPF is above "
    "{B}. {settings}; the weight of the confidence term was not tried."
)
OF_TRACES = (
    "Learning rate and number of traces were set after a pilot of one cell, of blocks of 16, which "
    "lost exact match on fewer traces at twice the rate; the windows were not tried"
)
OF_GROUPS = (
    "Updates, learning rate and the thresholds above 0.9 were set after pilots of one cell each, "
    "on other test problems (half of these have the numbers of one of those): 600 updates at half "
    "the rate gave a lower TPF"
)
TRACE_SEED = 11  # of the problems that are decoded: the start was trained on others


class Point(NamedTuple):
    """A model decoded at one threshold."""

    threshold: float
    tpf: float
    accuracy: float
    passes: float  # of an answer


def make_traces(start: str, plan: Plan, out: Path) -> None:
    """The traces of a plan, unless they are there: what the start makes of training problems."""
    from bwsft.commands.distill import run_distill
    from bwsft.commands.options import DistillOptions

    problems = word_problems.named(plan.start.data).problems(plan.traces, TRACE_SEED)
    file = out.with_suffix(".jsonl")
    write_atomic(file, "".join(json.dumps(problem) + "\n" for problem in problems))
    run_distill(DistillOptions(model=start, data=file, out=out, batch_size=50, device="cpu"))


def curve(
    trained: Trained, problems: list[dict], config: c.Config, active: int
) -> Iterator[Point]:
    """What a decoder of each threshold with so many active blocks makes of the problems."""
    fixed = {"context": config.context, "rule": "threshold", "active_blocks": active}
    if active > 1:  # all of them open at once
        fixed |= {"open_share": 0.0}
    for threshold in THRESHOLDS:
        options = fixed | {"threshold": threshold}
        right, found = solve(trained, problems, config, f"threshold {threshold:g}", **options)
        passes = sum(generation.passes for generation in found) / len(found)
        rate = tokens_per_forward(found) or 0.0
        yield Point(threshold, rate, sum(right) / len(right), passes)


def measure(
    kind: str, trained: Trained, problems: list[dict], config: c.Config, active: int, stem: str
) -> dict:
    """A measure of KINDS. The model is decoded once with so many active blocks, into a file whose
    name begins with `stem`."""
    several = f"-{active}-active" if active > 1 else ""
    file = Path(f"{stem}-thresholds{several}.json")
    if not file.exists():
        write_atomic(file, json.dumps(list(curve(trained, problems, config, active))) + "\n")
    points = [Point(*row) for row in json.loads(file.read_text(encoding="utf-8"))]
    return {"value": figure_of(kind, points), "points": points}


def figure_of(kind: str, points: list[Point]) -> float:
    """The value of a measure of KINDS: the highest TPF within a point of careful, which is exact
    match at one token a step; the exact match of that TPF; AUP; careful."""
    careful = points[0].accuracy
    if kind == "careful":
        return careful
    if kind == "aup":
        return aup([(point.tpf, 100 * point.accuracy) for point in points], best=100)
    near = [point for point in points if point.accuracy >= careful - WITHIN - 1e-9]
    fastest = max(near, key=lambda point: (point.tpf, point.accuracy))
    return fastest.tpf if kind == "tpf" else fastest.accuracy


def decoder(block: str) -> str:
    """How a page names the block size, and several active blocks, that end a measure's name."""
    size, _, active = block.partition("x")
    return f"B {size}" + (f", {active} active" if active else "")


def how(finished: Finished) -> str:
    """What all arms share, as the end of a sentence."""
    plan = finished.plan
    arm = plan.arms[-1].config
    more = ""
    if arm.objective.name == "distill":
        more = ", windows grow from half a block to a whole one"
    elif arm.active_blocks > 1:
        more = f", and {arm.active_blocks} active blocks are decoded from the first pass on"
    made = f"on {arm.data}"
    if plan.traces:
        made = (
            f"on those of its careful decodings of {plan.traces} other training problems that came "
            "out right"
        )
    return (
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}: the embedded base, trained for "
        f"{plan.start.steps} updates on {plan.start.data} (context block_causal, blocks of "
        f"{arm.block_size}, canvas {arm.gen_length}), solves {finished.start:.1%} of "
        f"problems like the test's. Every arm makes {arm.steps} updates more of "
        f"{arm.batch_size} sequences at a "
        f"peak learning rate of {arm.optim.lr:g}, {made}; the confidence term weighs {WEIGHT:g}"
        f"{more}. {len(finished.seeds)} seeds, which share the starting model, the problems and "
        f"{finished.tests.problems} test problems, {len(repeats(finished))} of which differ in "
        "more than names and things: mean ± standard error says nothing about others. FLOPs are "
        "counted."
    )


def section(finished: Finished) -> list[str]:
    """Markdown lines: every threshold of every arm."""
    heads = ("arm", "decoder", "threshold", "exact match", "TPF", "passes")
    lines = ["## Every threshold, means over seeds", "", f"| {' | '.join(heads)} |",
             "|---|---|---:|---:|---:|---:|"]  # fmt: skip
    names = [name for name in finished.measures if name.startswith("tpf@")]
    for arm, name in itertools.product(finished.arms, names):
        for mean in mean_curve(arm.cells, name):
            cells = (arm.name, decoder(name.partition("@")[2]), f"{mean.threshold:g}",
                     f"{mean.accuracy:.1%}", f"{mean.tpf:.2f}", f"{mean.passes:.1f}")  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    share = sum((n / finished.tests.problems) ** 2 for n in repeats(finished).values())
    error, B = 50 * share**0.5, finished.plan.start.block_size
    settings = OF_TRACES if finished.plan.traces else OF_GROUPS
    limits = LIMITS.format(error=error, B=B, settings=settings)
    return [*lines, "", limits, ""]


def repeats(finished: Finished) -> Counter[str]:
    """How often each test problem comes: those that differ in names and things alone are one."""
    from bwsft.experiments.measures import test_problems

    data = finished.tests.generated or finished.plan.start.data
    problems = test_problems(finished.tests.problems, data, first=PILOTED)
    return Counter(re.sub("[A-Za-z ]+", "", f"{p['query']}|{p['response']}") for p in problems)


def mean_curve(cells: list[dict], name: str) -> list[Point]:
    """Means over cells of a TPF's curve."""
    curves = [[Point(*row) for row in cell["measures"][name]["points"]] for cell in cells]
    return [
        Point(*(sum(values) / len(values) for values in zip(*same, strict=True)))
        for same in zip(*curves, strict=True)
    ]
