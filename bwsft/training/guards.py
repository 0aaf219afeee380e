"""What keeps an eye on a run: bad numbers, signals, memory, a profile.

A step's loss and gradient norm are the same on every rank, so the ranks decide alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import statistics
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from bwsft import config as c
from bwsft.checkpoints.folders import newest_complete, save_model
from bwsft.training.distributed import PeerFailed, World, shares
from bwsft.utils.files import folder_atomic, write_atomic

REPRO, FACTS, BATCH = "repro", "repro.json", "batch.safetensors"
MOST_REPROS = 5  # of spikes that did not end the run
WARM_UP = 3  # steps before a profile: the first ones allocate and compile


class TrainingStopped(Exception):
    """The run cannot go on; the message says where, why and what next."""


class SpikeGuard:
    """Compares each update's loss and gradient norm with their running medians.

    In 12,000 updates of 14 healthy runs of small models the loss never reached 7 times its median;
    the gradient norm passed 10 times its own in 1 of 400, and 50 times once.
    """

    NAMES = ("loss", "grad_norm")

    def __init__(self, config: c.WatchConfig, history: dict[str, list[float]]):
        """history: NAMES' columns of metrics.jsonl so far, so that a resumed run decides alike."""
        self.config = config
        self.seen = {
            name: deque(history.get(name, ()), maxlen=config.spike_window) for name in self.NAMES
        }

    def judge(self, **values: float) -> str | None:
        """What is wrong with loss=, grad_norm= of an update, in words; None if nothing is."""
        found = None
        factors = {"loss": self.config.spike_factor, "grad_norm": self.config.spike_norm_factor}
        for name, value in values.items():
            seen, factor = self.seen[name], factors[name]
            if factor and len(seen) >= self.config.spike_window / 4:
                median = statistics.median(seen)
                if value > factor * median > 0:
                    found = f"{name.replace('_', ' ')} {value:.4g} is {value / median:.0f} times "
                    found += f"the median of the last {len(seen)} updates"
            seen.append(value)
        return found


def check_finite(run, step: int, slots: list, parts: list[tuple[int, float]], loss: float) -> None:
    """TrainingStopped, with the micro-batch, if the update's `loss` is not finite. parts: (first
    slot of a micro-batch, its summed loss) on this rank."""
    if math.isfinite(loss):
        return
    bad = [start for start, value in parts if not math.isfinite(value)]
    first = -run.world.max(-min(bad, default=len(slots)))
    per_rank = shares(len(slots), run.config.micro_batch_size, run.world.size)
    whole = range(len(slots))  # if the parts are finite and their sum is not
    part = next((p for rank in per_rank for p in rank if p.start == first), whole)
    raise stopped(run, step, slots, part, f"loss {loss}")


def stopped(run, step: int, slots: list, part: range, what: str) -> Exception:
    """The exception that ends a run at update `step`, the sequences `part` of its slots being
    suspect: TrainingStopped on rank 0, which keeps them in the run folder. Every rank must call
    it."""
    kept = run.world.on_main(keep, run, step, slots, part, what, run.weights())
    if not run.world.main:
        return PeerFailed()
    newest, _ = newest_complete(run.folder)
    back = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
    ids = ", ".join(map(str, run.data.sample_ids([slots[i] for i in part])))
    return TrainingStopped(
        f"{what} at step {step + 1}; sample ids (rows of the data, from 0): {ids}; {back}. Look at "
        f"these records, {kept}, or start a run with a lower --optim.lr."
    )


def keep(*arguments) -> str:
    """save_repro, in words. A full disk must not hide what ended the run."""
    try:
        return f"run them again (bwsft replay {save_repro(*arguments)})"
    except OSError as error:
        return f"which could not be kept ({error})"


def spike(run, step: int, slots: list, loss: float, norm: float) -> bool:
    """Whether to leave the update out, after reporting a spike of it; TrainingStopped if a spike is
    to end the run."""
    what, action = run.guard.judge(loss=loss, grad_norm=norm), run.config.watch.spike_action
    if what is None:
        return False
    if action == "stop":
        raise stopped(run, step, slots, range(len(slots)), what)
    line = run.world.on_main(report_spike, run, step, slots, what)
    tqdm.write(f"{line}{'; its update is left out' if action == 'skip' else ''}")
    return action == "skip"


def report_spike(run, step: int, slots: list, what: str) -> str:
    """A line about a spike that does not end the run. The first few batches are kept too."""
    line = f"step {step + 1}: {what}"
    if len(list((run.folder / REPRO).glob("step-*"))) >= MOST_REPROS:
        return line
    return f"{line}; to see its sequences, {keep(run, step, slots, range(len(slots)), what, None)}"


def save_repro(run, step: int, slots: list, part: range, what: str, weights) -> Path:
    """Write RUN/repro/step-N: the packed batch, what was wrong, and unless `weights` is None the
    model as it met the batch (as Run.weights gives it). Returns the folder."""
    path = run.folder / REPRO / f"step-{step + 1}"
    chosen = [slots[i] for i in part]
    batch = vars(run.data.pack(chosen))
    facts = {
        "what": what,
        "step": step,
        "first": part.start,
        "sequences": len(slots),
        "sample_ids": run.data.sample_ids(chosen),
        "max_length": batch.pop("max_length"),
        "config": dataclasses.asdict(run.config),
    }
    if path.exists():  # the same step of an earlier attempt
        path = path.with_name(f"{path.name}-{int(time.time())}")
    with folder_atomic(path) as folder:
        save_file(batch, folder / BATCH)
        write_atomic(folder / FACTS, json.dumps(facts, indent=2) + "\n")
        if weights is not None:
            save_model(run.backbone.model, folder, weights or None)
    return path


def out_of_memory(run, error: torch.OutOfMemoryError) -> str:
    """What to change, with numbers."""
    config, world = run.config, run.world
    now = min(config.micro_batch_size, -(-config.batch_size // world.size))
    fits = [n for n in range(1, now // 2 + 1) if config.batch_size % n == 0]
    advice = []
    if fits:
        advice.append(
            f"Lower --micro-batch-size (now {now}; try {max(fits)}; --batch-size stays "
            f"{config.batch_size})"
        )
    if not config.grad_checkpointing:
        advice.append("give --grad-checkpointing")
    if not world.sharded:
        advice.append("give --parallel fsdp on several GPUs")
    if not fits:
        advice.append("shorten --max-length and --gen-length")
    used = ""
    if run.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(run.device)
        peak = torch.cuda.max_memory_allocated(run.device)
        used = "{} had {:.1f} of {:.1f} GiB free; tensors took up to {:.1f} GiB. ".format(
            run.device, *(n / 2**30 for n in (free, total, peak))
        )
    text = " or ".join(advice)
    text = text[:1].upper() + text[1:]
    return f"{str(error).splitlines()[0]} {used}{text}, and go on with --resume {run.folder}"


class Signals:
    """What was asked of this process since it last looked."""

    stop = False
    save = False

    def agreed(self, world: World) -> tuple[bool, bool]:
        """(stop, save) if any rank was asked to. Every rank must call it."""
        save, self.save = self.save, False
        stop, save = world.sum([self.stop, save])
        return bool(stop), bool(save)


@contextlib.contextmanager
def signals(several: bool = False) -> Iterator[Signals]:
    """Note SIGINT and SIGTERM (the loop saves after the running step and ends) and SIGUSR1 (it
    saves and goes on).

    A second SIGINT or SIGTERM takes its usual course; with `several` processes not within five
    seconds of the first, since a launcher hands on the signal that the terminal sent to all.
    """
    asked, previous, first = Signals(), {}, []

    def stop(number, frame):
        if first and several and time.monotonic() - first[0] < 5:
            return
        if first:
            restore()
            os.kill(os.getpid(), number)
            return
        first.append(time.monotonic())
        asked.stop = True
        # Not print: a handler may interrupt one, and output buffers refuse to be re-entered.
        os.write(2, f"\nsignal {number}: saving after this step (again: at once)\n".encode())
        if not several:
            restore()

    def save(number, frame):
        asked.save = True

    def restore():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, previous[number])

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop}
    if hasattr(signal, "SIGUSR1"):  # not on Windows
        handlers[signal.SIGUSR1] = save
    for number, handler in handlers.items():
        previous[number] = signal.signal(number, handler)
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def profiler(run) -> Iterator[torch.profiler.profile | None]:
    """Rank 0's torch profiler: RUN/profile/steps-A-B/trace.json.gz, for a trace viewer, of
    --profile steps after WARM_UP. Its step() ends a step. None if there is nothing to profile."""
    count = min(run.config.profile, run.config.steps - run.first - WARM_UP)
    if count < 1 or not run.world.main:
        yield None
        return

    def write(found: torch.profiler.profile) -> None:
        begin = run.first + WARM_UP + 1
        path = run.folder / "profile" / f"steps-{begin}-{begin + count - 1}"
        shutil.rmtree(path, ignore_errors=True)  # of an earlier attempt
        with folder_atomic(path) as folder:
            found.export_chrome_trace(str(folder / "trace.json.gz"))
        tqdm.write(f"profile: {path / 'trace.json.gz'}")

    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=count, repeat=1),
        on_trace_ready=write,
        profile_memory=True,
        record_shapes=True,
    ) as found:
        yield found
