"""Runs the cells of a plan, several at a time, and leaves finished ones alone."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path

from tqdm import tqdm

from bwsft import config as c
from bwsft.data.sources import open_source
from bwsft.experiments import cells
from bwsft.experiments.arms import Arm, Plan
from bwsft.experiments.cells import Cell
from bwsft.experiments.measures import TestSet
from bwsft.experiments.results import Measured, is_gradient, is_of_training
from bwsft.utils.files import write_atomic
from bwsft.utils.identity import short
from bwsft.utils.lines import say


def run_plan(
    plan: Plan, seeds: list[int], folder: Path, tests: TestSet, jobs: int
) -> list[Measured]:
    """Meter, train and measure everything that isn't done; returns the arms in the plan's order.

    A failed cell stops the experiment after the running ones; run it again to go on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_test_set(folder, tests)
    arms = [arm for arm in plan.arms if arm.trained]
    contents = Contents()
    meters = Meters(folder / "meters.json", contents)
    # Spawned: torch's threads don't survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, leave_with_parent) as pool:
        metered = {
            meters.key(arm.config): pool.submit(cells.meter, arm.config, bool(arm.cpu_seconds))
            for arm in arms
            if not meters.has(arm)
        }
        gather(list(metered.values()), "counting FLOPs")
        meters.add({key: future.result() for key, future in metered.items()})
        planned = [(arm, settle(arm, plan, meters)) for arm in plan.arms]
        work = {}
        for arm, config in planned:
            for cell in cells_of(arm, config, seeds, contents):
                cells.adopt(folder, cell)
                if cells.missing(folder, cell, arm_measures(arm)):
                    wanted = {*work.get(cell.key, (cell, ()))[1], *arm_measures(arm)}
                    work[cell.key] = (cell, tuple(sorted(wanted)))
        gather([pool.submit(cells.run, folder, *todo, tests) for todo in work.values()], plan.name)
    return [measured(arm, config, seeds, folder, meters) for arm, config in planned]


def leave_with_parent() -> None:
    """A worker whose experiment was killed would go on with the next cell."""

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def gather(futures: list, what: str) -> None:
    """Wait for all with a progress bar; the first failure cancels what hasn't begun."""
    with tqdm(total=len(futures), desc=what, unit="cell") as bar:
        for future in futures:
            future.add_done_callback(lambda _: bar.update())
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        for future in done:
            future.result()


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


def settle(arm: Arm, plan: Plan, meters: Meters) -> c.Config:
    """The arm's config with its number of updates."""
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
    """The arm with the records of its finished cells."""
    found = [cells.read(folder, cell) for cell in cells_of(arm, config, seeds, meters.contents)]
    if not arm.trained:
        each = [m["flops"] for m in found[0]["measures"].values() if "flops" in m]
        return Measured(arm.name, found, each[0] if each else None)
    per_token = meters.known[meters.key(config)]["flops_per_token"]
    mean_tokens = sum(cell["train"]["tokens"] for cell in found) / len(found)
    return Measured(arm.name, found, per_token * mean_tokens)
