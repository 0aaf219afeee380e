"""`bwsft experiment`: the paper's comparisons, one command each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bwsft import config as c
from bwsft.data.word_problems import named
from bwsft.experiments import primary, report, scales
from bwsft.experiments.arms import only
from bwsft.experiments.estimate import print_plan
from bwsft.experiments.measures import GENERATED, TestSet
from bwsft.experiments.options import ExperimentOptions
from bwsft.experiments.plans import PILOT_SEED, PLANS
from bwsft.experiments.runner import OutOfTime, run_plan, with_updates
from bwsft.experiments.scales import Scale
from bwsft.utils.claims import lock_folder
from bwsft.utils.files import write_atomic
from bwsft.utils.lines import say


def run_experiment(options: ExperimentOptions) -> int:
    """Run `bwsft experiment` and return the exit status. ValueError for options that don't fit."""
    scale = chosen_scale(options)
    plan = PLANS[options.name](scale)
    if options.arms:
        plan = only(plan, options.arms)
    seeds = list(range(options.seeds or (primary.SEEDS if plan.primary else scale.seeds)))
    if options.name.endswith("pilot"):
        seeds = [PILOT_SEED + seed for seed in range(options.seeds or 1)]
    if plan.start and (options.scale != "mini" or options.steps or options.model or options.data):
        raise ValueError(f"{plan.name} has a model, data and updates of its own: leave them out")
    for arm in plan.arms:
        c.validate(arm.config)
        if arm.cpu_seconds is not None and options.scale == "8b":
            raise ValueError("context-modes gives all arms equal CPU seconds: take another --scale")
    if options.dry_run:
        print_plan(plan, scale, seeds)
        return 0
    tests, folder = chosen_test_set(options, scale), f"experiments-{scale.name}"
    if plan.start:  # of problems of its own kind
        tests = dataclasses.replace(tests, generated=plan.start.data)
        folder = f"experiments-{plan.name}"
    out = Path(options.out or f"runs/{folder}")

    out.mkdir(parents=True, exist_ok=True)
    pages = Path(options.report or out / "reports")
    with lock_folder(out), report.held(plan, pages):
        stored = out / f"plan-{plan.name}.json"
        if not stored.exists():  # the plan as it stood before any result
            content = {"scale": scale.name, "seeds": seeds, "plan": dataclasses.asdict(plan)}
            write_atomic(stored, json.dumps(content, indent=1) + "\n")
        try:
            ran = run_plan(plan, seeds, out, tests, options.jobs, options.minutes)
        except OutOfTime as why:
            say(str(why))
            return 0
        finished = report.Finished(
            ran.plan, scale, seeds, tests, ran.arms, ran.pilots, ran.start
        )
        page = report.write(finished, pages)
    show(finished)
    say(f"report: {page}")
    return 0


def chosen_scale(options: ExperimentOptions) -> Scale:
    """The scale with what the options change in it."""
    mini = scales.shifted if options.name == "decisive" else scales.mini
    made = {"mini": mini, "debug": scales.debug}
    scale = made[options.scale]() if options.scale in made else scales.eight_b(options.preset)
    given = {"model": options.model, "data": options.data}
    changes = {key: value for key, value in given.items() if value is not None}
    base = dataclasses.replace(scale.base, **changes)
    if options.steps is not None:
        base = with_updates(base, options.steps)
    return dataclasses.replace(scale, base=base, cpu_seconds=options.seconds)


def chosen_test_set(options: ExperimentOptions, scale: Scale) -> TestSet:
    """What the cells are evaluated on. ValueError for a file that is missing or not there."""
    for task in scale.tasks:
        if task not in GENERATED and getattr(options, task) is None:
            raise ValueError(f"--scale {scale.name} measures {task}: give --{task} FILE")
    if named(scale.base.data) is None and options.nelbo_data is None:
        raise ValueError(
            "the held-out NELBO needs --nelbo-data FILE: records like those of the training, and "
            "not among them"
        )
    for path in filter(None, (options.nelbo_data, options.gsm8k, options.math)):
        if not Path(path).is_file():
            raise ValueError(f"{path} is not a file")
    files = {name: getattr(options, name) for name in ("gsm8k", "math", "nelbo_data")}
    batch_size = 10 if scale.name == "8b" else 50
    return TestSet(problems=options.problems, batch_size=batch_size, **files)


def show(finished: report.Finished) -> None:
    """The report's table on the terminal."""
    heads, *arms = report.table(finished, brief=True)
    table = Table(title=finished.plan.title)
    for head in heads:
        table.add_column(head, justify="left" if head == "arm" else "right")
    for texts in arms:
        table.add_row(*texts)
    Console().print(table)
