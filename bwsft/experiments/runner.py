"""Runs the cells of a plan, several at a time, and leaves finished ones alone."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from bwsft import config as c
from bwsft.data.sources import open_source
from bwsft.experiments import cells, pilots, thresholds
from bwsft.experiments.arms import Arm, Plan
from bwsft.experiments.cells import Cell
from bwsft.experiments.measures import TestSet
from bwsft.experiments.pilots import Pilots, chosen, measure_of, pilot_cells
from bwsft.experiments.results import Measured, is_gradient, is_of_training
from bwsft.utils.files import write_atomic
from bwsft.utils.identity import short
from bwsft.utils.lines import say

ROUND = 3  # seeds of every arm that are finished before further ones begin


class OutOfTime(Exception):
    """The time that was given ended before a page can be written."""


@dataclass(frozen=True)
class Ran:
    """What an experiment has finished."""

    plan: Plan
    """With the updates and learning rates that were taken."""
    arms: list[Measured]
    """In the plan's order."""
    pilots: Pilots
    start: float | None
    """Exact match of the model that the plan's start trained, on problems like its own."""


@dataclass
class Work:
    """What the cells of an experiment share: where they run, and until when."""

    pool: ProcessPoolExecutor
    folder: Path
    tests: TestSet
    until: float
    """Of time.monotonic(): no cell begins afterwards."""

    def finish(self, asked: Iterable[tuple[Cell, tuple[str, ...]]], what: str) -> bool:
        """Train cells and take their measures where that isn't done, in this order; False if time
        ran out before."""
        todo: dict[str, tuple[Cell, tuple[str, ...]]] = {}
        for cell, wanted in asked:
            cells.adopt(self.folder, cell)
            if cells.missing(self.folder, cell, wanted):
                both = {*todo.get(cell.key, (cell, ()))[1], *wanted}
                todo[cell.key] = (cell, tuple(sorted(both)))
        if todo and time.monotonic() >= self.until:
            return False
        run = [self.pool.submit(cells.run, self.folder, *x, self.tests) for x in todo.values()]
        return gather(run, what, self.until)

    def need(self, asked: Iterable[tuple[Cell, tuple[str, ...]]], what: str) -> None:
        """`finish`; OutOfTime if it does not come to the end."""
        if not self.finish(asked, what):
            raise OutOfTime(f"{what}: not finished, run the command again to go on")


def run_plan(
    plan: Plan, seeds: list[int], folder: Path, tests: TestSet, jobs: int, minutes: float = math.inf
) -> Ran:
    """Meter, train and measure everything that isn't done.

    A failed cell stops the experiment after the running ones; run it again to go on. After so many
    minutes no cell begins: arms then have their first finished seeds. OutOfTime before there are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_test_set(folder, tests)
    contents = Contents()
    meters = Meters(folder / "meters.json", contents)
    # Spawned: torch's threads don't survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, leave_with_parent) as pool:
        work = Work(pool, folder, tests, time.monotonic() + 60 * minutes)
        plan, start = started(plan, work, contents)
        count_flops([arm for arm in plan.arms if arm.trained], meters, pool)
        found = run_pilots(plan, meters, work)
        rates = {name: chosen(values) for name, values in found.items()}
        arms = [
            dataclasses.replace(arm, config=settle(arm, plan, meters, rates)) for arm in plan.arms
        ]
        asked = [
            (cell, arm_measures(arm))
            for first in range(0, len(seeds), ROUND)
            for arm in arms
            for cell in cells_of(arm, arm.config, seeds[first : first + ROUND], contents)
        ]
        if not work.finish(asked, plan.name) and not plan.primary:
            raise OutOfTime(f"{plan.name}: not finished, run the command again to go on")
    done = [measured(arm, arm.config, seeds, folder, meters) for arm in arms]
    return Ran(dataclasses.replace(plan, arms=arms), done, found, start)


def started(plan: Plan, work: Work, contents: Contents) -> tuple[Plan, float | None]:
    """(the plan with all arms on the model that its start trains, a cell like others; what that
    solves of problems like its own). With traces the trained arms' data are those."""
    if plan.start is None:
        return plan, None
    cell = Cell(plan.start, content=contents.of(plan.start))
    measure = f"solved@{plan.start.block_size}"
    work.need([(cell, (measure,))], "the model that all start from")
    model = str((work.folder / cell.key).resolve())
    named = dict.fromkeys((True, False), {"model": model})
    if plan.traces:
        out = work.folder / f"{cell.key}-traces{plan.traces}"
        work.pool.submit(thresholds.make_traces, model, plan, out).result()
        named[True] = {"model": model, "data": str(out.resolve())}
    arms = [
        dataclasses.replace(arm, config=dataclasses.replace(arm.config, **named[arm.trained]))
        for arm in plan.arms
    ]
    solved = cells.read(work.folder, cell)["measures"][measure]["value"]
    return dataclasses.replace(plan, arms=arms), solved


def count_flops(arms: list[Arm], meters: Meters, pool: ProcessPoolExecutor) -> None:
    """Meter what isn't yet."""
    wanted = {meters.key(arm.config): arm for arm in arms if not meters.has(arm)}
    metered = {
        key: pool.submit(cells.meter, arm.config, bool(arm.cpu_seconds))
        for key, arm in wanted.items()
    }
    gather(list(metered.values()), "counting FLOPs")
    meters.add({key: future.result() for key, future in metered.items()})


def run_pilots(plan: Plan, meters: Meters, work: Work) -> Pilots:
    """The pilots of the arms that choose among learning rates."""
    of = {
        arm.name: (arm, settle(arm, plan, meters), meters.contents.of(arm.config))
        for arm in plan.arms
        if arm.rates
    }
    all_cells = [
        (cell, (measure_of(config),))
        for seed in pilots.SEEDS
        for arm, config, content in of.values()
        for _, cell in pilot_cells(arm, config, content, seed)
    ]
    work.need(all_cells, "learning rates")
    return {name: pilots.read(work.folder, *asked) for name, asked in of.items()}


def leave_with_parent() -> None:
    """A worker whose experiment was killed would go on with the next cell."""

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def gather(futures: list, what: str, until: float = math.inf) -> bool:
    """Wait for all with a progress bar; the first failure, or the time `until`, cancels what hasn't
    begun. False if time did."""
    limit = None if until == math.inf else max(0.0, until - time.monotonic())
    with tqdm(total=len(futures), desc=what, unit="cell") as bar:
        for future in futures:
            future.add_done_callback(lambda _: bar.update())
        _, waiting = wait(futures, timeout=limit, return_when=FIRST_EXCEPTION)
        running = [future for future in waiting if not future.cancel()]
        wait(running)
        for future in futures:
            if not future.cancelled():
                future.result()
    return not any(future.cancelled() for future in futures)


def check_test_set(folder: Path, tests: TestSet) -> None:
    """All cells of a folder are evaluated alike; ValueError if this test set is another one, by its
    settings or by what is in its files."""
    path, now = folder / "exam.json", dataclasses.asdict(tests)  # old spelling
    now.pop("batch_size")
    files = {n: now[n] for n in ("gsm8k", "math", "nelbo_data") if now[n] is not None}
    digests = {f"{n} digest": short(open_source(file).digest) for n, file in files.items()}
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else now | digests
    if missing := digests.keys() - stored.keys():
        say(f"{folder} is of an earlier release, without digests of its test files")
        stored |= {n: digests[n] for n in missing}
    now |= digests
    if changed := [k for k in now if stored.get(k) != now[k]]:
        raise ValueError(
            f"{folder} was evaluated with {changed[0]} = {stored.get(changed[0])!r}, not "
            f"{now[changed[0]]!r}: keep the setting, or choose another --out"
        )
    if missing or not path.exists():
        write_atomic(path, json.dumps(now, indent=1) + "\n")


class Contents:
    """Digests of the files that configs name, each taken once in an experiment."""

    def __init__(self):
        self.known: dict[tuple, str] = {}

    def of(self, config: c.Config) -> str:
        data = (config.data, config.dataset.subset, config.dataset.split)
        asked = (config.model, config.tokenizer, *data)
        if asked not in self.known:
            self.known[asked] = cells.content_of(config)
        return self.known[asked]


class Meters:
    """What an update costs, for every config that was metered; kept in one file."""

    def __init__(self, path: Path, contents: Contents | None = None):
        self.path, self.contents = path, contents or Contents()
        text = path.read_text(encoding="utf-8") if path.exists() else "{}"
        self.known: dict[str, dict] = json.loads(text)

    def key(self, config: c.Config) -> str:
        """Updates, seed and learning rate don't change an update's FLOPs."""
        plain = dataclasses.replace(
            config, steps=100, save_every=100, seed=0, optim=c.OptimConfig(), eval=c.EvalConfig()
        )
        return Cell(plain, content=self.contents.of(config)).key

    def has(self, arm: Arm) -> bool:
        found = self.known.get(self.key(arm.config))
        return found is not None and (arm.cpu_seconds is None or "cpu_seconds" in found)

    def add(self, found: dict[str, dict]) -> None:
        if found:
            self.known.update(found)
            write_atomic(self.path, json.dumps(self.known, indent=1) + "\n")

    def flops(self, config: c.Config) -> float:
        """FLOPs of one update."""
        found = self.known[self.key(config)]
        return found["flops_per_token"] * found["tokens"]


def settle(
    arm: Arm, plan: Plan, meters: Meters, rates: Mapping[str, float] | None = None
) -> c.Config:
    """The arm's config with its number of updates and the learning rate that its pilot chose."""
    if rates and arm.rate_of is not None:
        arm = dataclasses.replace(arm, config=pilots.with_rate(arm.config, rates[arm.rate_of]))
    if arm.traversals is not None:
        return with_updates(arm.config, updates_of_traversals(arm.config, arm.traversals))
    if arm.cpu_seconds is not None:
        each = meters.known[meters.key(arm.config)]["cpu_seconds"]
        return with_updates(arm.config, max(1, int(arm.cpu_seconds / each)))
    if arm.equal_flops_of is not None:
        other = next(a.config for a in plan.arms if a.name == arm.equal_flops_of)
        budget = other.steps * meters.flops(other)
        return with_updates(arm.config, max(1, round(budget / meters.flops(arm.config))))
    return arm.config


def updates_of_traversals(config: c.Config, traversals: int) -> int:
    """Updates after which the supervised region is `traversals` times the responses: every example
    once per traversal, or every block of every example where the objective takes one at a time.

    The count stops at the first update that reaches it.
    """
    from bwsft.checkpoints.resolve import plan_model, plan_tokenizer
    from bwsft.data.tokenizer import load_tokenizer
    from bwsft.training.run_data import plan_data

    with contextlib.redirect_stdout(io.StringIO()):
        tokenizer = load_tokenizer(plan_tokenizer(config))
        family = plan_model(config, tokenizer, None).family
        data = plan_data(config, tokenizer, family)
    return math.ceil(data.epoch * traversals / config.batch_size)


def with_updates(config: c.Config, steps: int) -> c.Config:
    """The config with this many updates, saved once at the end and evaluated ten times."""
    every = max(steps // 10, 1) if config.eval.every else 0
    evals = dataclasses.replace(config.eval, every=every)
    return dataclasses.replace(config, steps=steps, save_every=steps, eval=evals)


def arm_measures(arm: Arm) -> tuple[str, ...]:
    """What is taken on a finished cell."""
    return tuple(m for m in arm.measures if not is_of_training(m))


def cells_of(
    arm: Arm, config: c.Config, seeds: list[int], contents: Contents
) -> Iterator[Cell]:
    """One cell per seed, or the one of the untouched base."""
    content = contents.of(config)
    if not arm.trained:
        drawn = any(is_gradient(measure) for measure in arm.measures)
        yield Cell(config, trained=False, drawn=drawn, content=content)
        return
    for seed in seeds:
        yield Cell(dataclasses.replace(config, seed=seed), content=content)


def measured(
    arm: Arm, config: c.Config, seeds: list[int], folder: Path, meters: Meters
) -> Measured:
    """The arm with the records of its finished cells, up to the first seed that isn't."""
    asked = cells_of(arm, config, seeds, meters.contents)
    ready = itertools.takewhile(
        lambda cell: not cells.missing(folder, cell, arm_measures(arm)), asked
    )
    found = [cells.read(folder, cell) for cell in ready]
    if not arm.trained or not found:
        each = [m["flops"] for cell in found for m in cell["measures"].values() if "flops" in m]
        return Measured(arm.name, found, each[0] if each else None)
    per_token = meters.known[meters.key(config)]["flops_per_token"]
    mean_tokens = sum(cell["train"]["tokens"] for cell in found) / len(found)
    return Measured(arm.name, found, per_token * mean_tokens)
