"""One cell of an experiment: a training and what is measured on its result, done once.

A cell's folder is named by its config, so that experiments share cells (the table's `blockwise` is
the grid's diagonal and the ablations' zero), a changed setting is a new cell, and a run that was
killed goes on where it was. `CELL.json` beside the folder holds what is finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bwsft import config as c
from bwsft.checkpoints.resolve import identity_of, locate, tokenizer_place
from bwsft.data import word_problems
from bwsft.data.sources import open_source
from bwsft.data.tokenizer import load_tokenizer, tokenizer_content
from bwsft.experiments import measures
from bwsft.training.metrics import read_log
from bwsft.utils.files import write_atomic
from bwsft.utils.identity import short
from bwsft.utils.lines import say

METERED = 4  # updates under the FLOP counter
TIMED = 8  # updates on the clock, after those


@dataclass(frozen=True)
class Cell:
    """A training with its seed, or the untouched base."""

    config: c.Config
    trained: bool = True
    drawn: bool = False
    """Untouched, and what it is measured by depends on the objective's draws."""
    content: str = ""
    """Digest of the files that the config names; none where it names none, or in earlier
    releases."""

    @property
    def key(self) -> str:
        """Folder name: a readable front, then a digest of every setting."""
        config = self.config
        mode = config.context
        if config.draws_per_context > 1:
            mode += f"-k{config.draws_per_context}"
        if self.drawn:
            return f"gradient-{mode}-{digest(config, self.content)}"
        if not self.trained:  # training settings don't touch it
            plain = c.Config(
                model=config.model, tokenizer=config.tokenizer, data=config.data,
                context=config.context, gen_length=config.gen_length,
                max_length=config.max_length, dataset=config.dataset,
            )  # fmt: skip
            return f"base-{mode}-{digest(plain, self.content)}"
        front = f"{config.objective.name}-{mode}-b{config.block_size}-u{config.steps}"
        return f"{front}-s{config.seed}-{digest(config, self.content)}"


def digest(config: c.Config, content: str = "") -> str:
    """Of what differs from the defaults, so that a new field doesn't make finished cells new, and
    of what is in the files."""
    changed = c.differences(c.Config(), config) + [content] * bool(content)
    return hashlib.sha256("\n".join(changed).encode()).hexdigest()[:8]


def content_of(config: c.Config) -> str:
    """Digest of the records, weights and tokenizer that a config names; "" if it names none."""
    named = {}
    if word_problems.named(config.data) is None:
        asked = (config.data, config.dataset.subset, config.dataset.split)
        named["data"] = open_source(*asked).digest
    if config.model is not None:
        source, state = locate(config.model)
        words = load_tokenizer(config.tokenizer or tokenizer_place(source, state))
        named |= identity_of(source, state, words)
    elif config.tokenizer is not None:
        named["tokenizer"] = short(tokenizer_content(load_tokenizer(config.tokenizer)))
    return short(named) if named else ""


def adopt(folder: Path, cell: Cell) -> None:
    """Give a cell of an earlier release, whose name tells no contents, to the cell of today's."""
    old, new = dataclasses.replace(cell, content="").key, cell.key
    found = [path for path in folder.glob(f"{old}*") if old != new]
    if not found or any(folder.glob(f"{new}*")):
        return
    for path in found:
        path.rename(folder / path.name.replace(old, new))
    say(
        f"{folder / old} is a cell of an earlier release, without digests of data and model: taken "
        f"to be made from today's, as {new}"
    )


def read(folder: Path, cell: Cell) -> dict:
    """What is finished of a cell."""
    path = folder / f"{cell.key}.json"
    if not path.exists():
        return {"measures": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def missing(folder: Path, cell: Cell, wanted: tuple[str, ...]) -> list[str]:
    """Those of the wanted measures that are not taken yet."""
    done = read(folder, cell)
    return [m for m in wanted if m not in done["measures"]]


def run(folder: Path, cell: Cell, wanted: tuple[str, ...], tests: measures.TestSet) -> str:
    """Train the cell if it isn't, and measure what is wanted; its output goes to CELL.log.

    Meant for a process of its own. Returns the cell's key.
    """
    set_threads(cell.config)
    path = folder / f"{cell.key}.json"
    with (
        open(folder / f"{cell.key}.log", "a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        done = read(folder, cell)
        if cell.trained and "train" not in done:
            done["config"] = json.loads(c.to_json(cell.config))
            began = time.process_time()
            done["train"] = train_cell(folder / cell.key, cell.config)
            done["train"]["cpu_seconds"] = round(time.process_time() - began, 1)
            write_atomic(path, json.dumps(done, indent=1) + "\n")
        source = str(folder / cell.key) if cell.trained else cell.config.model
        for name in missing(folder, cell, wanted):
            began = time.process_time()
            value = measures.measure(name, source, cell.config, tests, str(folder / cell.key))
            done["measures"][name] = {**value, "cpu_seconds": round(time.process_time() - began, 1)}
            write_atomic(path, json.dumps(done, indent=1) + "\n")
    return cell.key


def set_threads(config: c.Config) -> None:
    """One thread on a CPU: cells run side by side."""
    import torch

    if config.device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def train_cell(out: Path, config: c.Config) -> dict:
    """Train to the end, from wherever an earlier attempt came, and sum up its metrics."""
    from bwsft.training.setup import train

    where = {"resume": str(out)} if (out / "config.json").exists() else {"out": str(out)}
    config = dataclasses.replace(config, **where)
    if train(config):
        raise RuntimeError(f"{out.name}: the training failed, see {out}.log")
    log = read_log(out / "metrics.jsonl")
    if len(log) < config.steps:
        raise RuntimeError(f"{out.name} stopped after {len(log)} of {config.steps} updates")
    evals = read_log(out / "eval.jsonl")
    names = ("tokens", "supervised_tokens", "region_tokens", "seconds")
    return {
        "updates": len(log),
        **{name: sum(record[name] for record in log) for name in names},
        "loss": statistics.fmean(r["loss"] for r in log[-max(len(log) // 10, 1) :]),
        "evals": [[r["step"], r["nelbo"]] for r in evals],
    }


def meter(config: c.Config, timed: bool = False) -> dict:
    """FLOPs, tokens and, if `timed`, CPU seconds of an update, taken on the first few of a training
    that is thrown away.

    Rates and blocks vary from update to update; FLOPs per token hardly do. Where blocks shrink, the
    first few of each size count for its share of the updates.
    """
    from bwsft.training.block_causal import block_size_at
    from bwsft.training.run_files import open_run
    from bwsft.training.setup import setup
    from bwsft.training.trainer import train_step
    from bwsft.utils.flops import flop_counter

    set_threads(config)
    seconds = []
    with tempfile.TemporaryDirectory() as scratch:
        config = dataclasses.replace(config, out=str(Path(scratch) / "run"))
        run = setup(config, *open_run(config))
        total, tokens, size_at = 0.0, 0.0, functools.partial(block_size_at, run.config)
        for _, updates in itertools.groupby(range(run.config.steps), size_at):
            of_size = list(updates)
            taken = of_size[:METERED]
            with flop_counter() as flops:
                steps = [train_step(run, i) for i in taken]
            share = len(of_size) / run.config.steps / len(taken)
            total += share * flops.get_total_flops()
            tokens += share * sum(step.tokens for step in steps)
        for i in range(METERED, METERED + TIMED if timed else METERED):
            began = time.process_time()
            train_step(run, i)
            seconds.append(time.process_time() - began)
    found = {"flops_per_token": total / tokens, "tokens": tokens}
    return {**found, "cpu_seconds": statistics.median(seconds)} if timed else found
