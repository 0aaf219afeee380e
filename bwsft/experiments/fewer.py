"""Fewer passes at the same answers: what trains a model for decoding by threshold.

A model is trained with noisy copies until it solves much of a kind of problems, and its own careful
decodings of training problems that came out right are what every arm trains on: by plain Blockwise
SFT, which is the control, with the confidence term, by trace distillation, with both. Measured is
what a decoder of each threshold makes of test problems, in tokens per forward pass (TPF).
"""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import Trained
from bwsft.data import word_problems
from bwsft.decoding.summary import tokens_per_forward
from bwsft.evaluation.exact_match import solve
from bwsft.experiments.arms import Arm, Claim, Plan
from bwsft.experiments.scales import Scale
from bwsft.objectives.config import ObjectiveConfig
from bwsft.utils.files import write_atomic
from bwsft.utils.parallelism import aup

if TYPE_CHECKING:
    from bwsft.experiments.report import Finished

BEFORE, PLAIN = "before", "blockwise"
DISTILL, CONFIDENCE, BOTH = "distill", "confidence", "distill + confidence"
THRESHOLDS = (1.0, 0.9, 0.7, 0.5, 0.3)  # at 1.0 one token a step
WITHIN = 0.01  # of the exact match of one token a step
GAIN = 2.0  # times the TPF of the model before
UPDATES = 60
TRACES = 400  # training problems that are decoded
TRACE_SEED = 11  # of them: another than the start's training data
WEIGHT = 0.5  # of the confidence term
# Of each kind of problems: response positions, longest example, updates of the start.
SIZES = {"wordproblems-9-seed4": (32, 64, 800), "chains-9-seed4": (48, 80, 700)}


KINDS = ("tpf", "aup", "careful")  # the last: exact match at one token a step


class Point(NamedTuple):
    """A model decoded at one threshold."""

    threshold: float
    tpf: float
    accuracy: float
    passes: float  # of an answer


def start(data: str) -> c.Config:
    """The model that all arms start from: the embedded base, trained on with noisy copies."""
    gen_length, max_length, steps = SIZES[data]
    return dataclasses.replace(
        presets.debug(), data=data, context="block_causal", block_size=16, gen_length=gen_length,
        max_length=max_length, batch_size=16, micro_batch_size=16, seed=7, steps=steps,
        save_every=steps, keep_last=1, dataset=c.DataConfig(template="chat", holdout=16),
        optim=c.OptimConfig(lr=2e-3), eval=c.EvalConfig(every=0),
    )  # fmt: skip


def fewer(data: str, scale: Scale) -> Plan:
    """The arms on one kind of problems; of the scale nothing but its name is used."""
    base = dataclasses.replace(
        start(data), steps=UPDATES, save_every=UPDATES, seed=42, optim=c.OptimConfig(lr=1e-3),
        dataset=c.DataConfig(template="chat", holdout=0),
    )  # fmt: skip
    ways = {
        PLAIN: ObjectiveConfig(),
        CONFIDENCE: ObjectiveConfig(confidence=WEIGHT),
        DISTILL: ObjectiveConfig(name="distill"),
        BOTH: ObjectiveConfig(name="distill", confidence=WEIGHT),
    }
    measures = ("tpf@16", "aup@16", "careful@16")
    arms = [Arm(BEFORE, base, measures, trained=False)]
    arms += [
        Arm(name, dataclasses.replace(base, objective=way), measures) for name, way in ways.items()
    ]
    claims = []
    for name in (DISTILL, CONFIDENCE, BOTH):
        text = f"{name}: at least {GAIN:g} times the TPF of the model before"
        claims.append(Claim(text, ((BEFORE, "tpf@16"),), ((name, "tpf@16"),), GAIN))
        for measure, title in (("tpf@16", "TPF"), ("aup@16", "AUP")):
            for other in (BEFORE, PLAIN):
                text = f"{name} has a higher {title} than {other}"
                claims.append(Claim(text, ((other, measure),), ((name, measure),)))
    kind = data.partition("-")[0]
    question = (
        "Does training on a model's own careful decodings let it commit more tokens a pass at the "
        "same answers? TPF is that of the threshold with the most among those whose exact match is "
        f"within {100 * WITHIN:g} point of one token a step (careful). AUP is of all thresholds, "
        "with a best accuracy of 100 %."
    )
    name = "fewer" if kind == "wordproblems" else f"fewer-{kind}"
    title = f"Fewer passes at the same answers: {kind}"
    return Plan(name, title, question, arms, claims, start=start(data), traces=TRACES)


def make_traces(start: str, plan: Plan, out: Path) -> None:
    """The traces of a plan, unless they are there: what the start makes of training problems."""
    from bwsft.commands.distill import run_distill
    from bwsft.commands.options import DistillOptions

    problems = word_problems.named(plan.start.data).problems(plan.traces, TRACE_SEED)
    file = out.with_suffix(".jsonl")
    write_atomic(file, "".join(json.dumps(problem) + "\n" for problem in problems))
    run_distill(DistillOptions(model=start, data=file, out=out, batch_size=50, device="cpu"))


def curve(trained: Trained, problems: list[dict], config: c.Config) -> Iterator[Point]:
    """What a decoder of each threshold makes of the problems."""
    for threshold in THRESHOLDS:
        options = {"context": config.context, "rule": "threshold", "threshold": threshold}
        right, found = solve(trained, problems, config, f"threshold {threshold:g}", **options)
        passes = sum(generation.passes for generation in found) / len(found)
        rate = tokens_per_forward(found) or 0.0
        yield Point(threshold, rate, sum(right) / len(right), passes)


def measure(
    kind: str, trained: Trained, problems: list[dict], config: c.Config, stem: str
) -> dict:
    """A measure of KINDS. The model is decoded once, into a file whose name begins with `stem`."""
    file = Path(f"{stem}-thresholds.json")
    if not file.exists():
        write_atomic(file, json.dumps(list(curve(trained, problems, config))) + "\n")
    points = [Point(*row) for row in json.loads(file.read_text(encoding="utf-8"))]
    return {"value": figure_of(kind, points), "points": points}


def figure_of(kind: str, points: list[Point]) -> float:
    """The value of a measure of KINDS."""
    careful = points[0].accuracy
    if kind == "careful":
        return careful
    if kind == "aup":
        return aup([(point.tpf, 100 * point.accuracy) for point in points], best=100)
    return max(point.tpf for point in points if point.accuracy >= careful - WITHIN - 1e-9)


def how(finished: Finished) -> str:
    """What all arms share, as the end of a sentence."""
    plan = finished.plan
    arm = plan.arms[-1].config
    return (
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}: the embedded base, trained for "
        f"{plan.start.steps} updates on {plan.start.data} (context block_causal, blocks of "
        f"{arm.block_size}, canvas {arm.gen_length}), solves {finished.start:.1%} of the test "
        f"problems. Every arm makes {arm.steps} updates more of {arm.batch_size} sequences at a "
        f"peak learning rate of {arm.optim.lr:g}, on those of its careful decodings of "
        f"{plan.traces} other training problems that came out right; the confidence term weighs "
        f"{WEIGHT:g}, windows grow from half a block to a whole one. {len(finished.seeds)} seeds, "
        f"which share the starting model, the traces and {finished.tests.problems} test problems: "
        "mean ± standard error says nothing about others. FLOPs are counted."
    )


def section(finished: Finished) -> list[str]:
    """Markdown lines: every threshold of every arm."""
    heads = ("arm", "threshold", "exact match", "TPF", "passes")
    lines = ["## Every threshold, means over seeds", "", f"| {' | '.join(heads)} |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    for arm in finished.arms:
        for same in zip(*points_of(arm.cells), strict=True):
            mean = Point(*(sum(values) / len(values) for values in zip(*same, strict=True)))
            cells = (f"{mean.threshold:g}", f"{mean.accuracy:.1%}", f"{mean.tpf:.2f}",
                     f"{mean.passes:.1f}")  # fmt: skip
            lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    return [*lines, ""]


def points_of(cells: list[dict]) -> list[list[Point]]:
    """The curve of every cell."""
    return [[Point(*row) for row in cell["measures"]["tpf@16"]["points"]] for cell in cells]
