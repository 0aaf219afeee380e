"""Guards of a run: losses that are not finite, spikes, memory that runs out.

A step's loss and gradient norm are the same on every rank, so the ranks decide alike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from bwsft.training.distributed import PeerFailed, shares

if TYPE_CHECKING:
    from bwsft.config import WatchConfig
    from bwsft.training.trainer import Run

Samples = list[tuple[int, int]]  # (example index, earlier visits) of the sequences of an update
MOST_REPROS = 5  # of spikes that did not end the run


class TrainingStopped(Exception):
    """The run cannot go on; the message says where, why and what next."""


class SpikeGuard:
    """Compares each update's loss and gradient norm with their running medians.

    In 12,000 updates of 14 healthy runs of small models the loss never reached 7 times its median;
    the gradient norm passed 10 times its own in 1 of 400, and 50 times once.
    """

    NAMES = ("loss", "grad_norm")

    def __init__(self, config: WatchConfig, history: dict[str, list[float]]):
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


def check_finite(
    run: Run, step: int, samples: Samples, parts: list[tuple[int, float]], loss: float
) -> None:
    """TrainingStopped, with the micro-batch, if the update's `loss` is not finite. parts: (first
    sample of a micro-batch, its summed loss) on this rank."""
    if math.isfinite(loss):
        return
    bad = [start for start, value in parts if not math.isfinite(value)]
    first = -run.world.max(-min(bad, default=len(samples)))
    per_rank = shares(len(samples), run.config.micro_batch_size, run.world.size)
    whole = range(len(samples))  # if the parts are finite and their sum is not
    part = next((p for rank in per_rank for p in rank if p.start == first), whole)
    raise stopped(run, step, samples, part, f"loss {loss}")


def stopped(run: Run, step: int, samples: Samples, part: range, what: str) -> Exception:
    """The exception that ends a run at update `step`, the sequences `part` of its samples being
    suspect: TrainingStopped on rank 0, which keeps them in the run folder. Every rank must call
    it."""
    kept = run.world.on_main(run.files.keep, run, step, samples, part, what, run.weights())
    if not run.world.main:
        return PeerFailed()
    newest = run.files.newest_checkpoint()
    back = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
    ids = ", ".join(map(str, run.data.sample_ids([samples[i] for i in part])))
    return TrainingStopped(
        f"{what} at step {step + 1}; sample ids (rows of the data, from 0): {ids}; {back}. Look at "
        f"these records, {kept}, or start a run with a lower --optim.lr."
    )


def spike(run: Run, step: int, samples: Samples, loss: float, norm: float) -> bool:
    """Whether to leave the update out, after reporting a spike of it; TrainingStopped if a spike is
    to end the run."""
    what, action = run.guard.judge(loss=loss, grad_norm=norm), run.config.watch.spike_action
    if what is None:
        return False
    if action == "stop":
        raise stopped(run, step, samples, range(len(samples)), what)
    line = run.world.on_main(report_spike, run, step, samples, what)
    tqdm.write(f"{line}{'; its update is left out' if action == 'skip' else ''}")
    return action == "skip"


def report_spike(run: Run, step: int, samples: Samples, what: str) -> str:
    """A line about a spike that does not end the run. The first few batches are kept too."""
    line = f"step {step + 1}: {what}"
    if len(run.files.repros()) >= MOST_REPROS:
        return line
    kept = run.files.keep(run, step, samples, range(len(samples)), what, None)
    return f"{line}; to see its sequences, {kept}"


def out_of_memory(run: Run, error: torch.OutOfMemoryError) -> str:
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
    reason = str(error).partition("\n")[0]
    return f"{reason} {used}{text}, and go on with --resume {run.folder}"
