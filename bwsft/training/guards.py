"""Guards of a run: losses that are not finite, spikes, memory that runs out.

A step's loss and gradient norm are the same on every rank, so the ranks decide alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from bwsft.training.distributed import PeerFailed, shares

if TYPE_CHECKING:
    from torch import Tensor

    from bwsft.config import WatchConfig
    from bwsft.training.trainer import Run

Samples = list[tuple[int, int]]  # (example index, earlier visits) of the sequences of an update
MOST_REPROS = 3  # spikes that did not end the run and are kept, each with the model's weights


class TrainingStopped(Exception):
    """The run cannot go on; the message says where, why and what next."""


class SpikeGuard:
    """Compares each update's loss and gradient norm with those of the updates before it.

    The loss is a mean over the update's sequences, each with one block at a random mask rate. Where
    a model knows most answers that mean has a heavy tail: nearly all of it comes from the one or
    two sequences whose answer the model does not know, and its median says little. So a value is
    compared with the 90th percentile, and a loss must exceed `factor` of that by more than one
    guessed sequence adds: ln V / sequences, since guessing costs ln V nats per token.
    """

    NAMES = ("loss", "grad_norm")

    def __init__(
        self, config: WatchConfig, history: dict[str, list[float]], vocab_size: int, sequences: int
    ):
        """history: NAMES' columns of metrics.jsonl so far, so that a resumed run decides alike;
        sequences: those of an update."""
        self.config, self.guessed = config, math.log(vocab_size) / sequences
        self.seen = {
            name: deque(history.get(name, ()), maxlen=config.spike_window) for name in self.NAMES
        }

    def judge(self, **values: float) -> str | None:
        """What is wrong with loss=, grad_norm= of an update, in words; None if nothing is."""
        found = None
        limits = {
            "loss": (self.config.spike_factor, self.guessed),
            "grad_norm": (self.config.spike_norm_factor, 0.0),
        }
        for name, value in values.items():
            seen, (factor, margin) = self.seen[name], limits[name]
            if factor and len(seen) >= self.config.spike_window / 4:
                high = percentile_90(seen)
                if high > 0 and value > factor * high + margin:
                    found = f"{name.replace('_', ' ')} {value:.4g} is {value / high:.0f} times "
                    found += f"the 90th percentile of the last {len(seen)} updates"
            seen.append(value)
        return found


def percentile_90(values: Collection[float]) -> float:
    """The least value that nine in ten do not exceed."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


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


def spike(
    run: Run, step: int, samples: Samples, loss: float, norm: float
) -> tuple[str | None, bool]:
    """(what is wrong with an update or None, whether to leave it out), after reporting it;
    TrainingStopped if a spike is to end the run."""
    what, action = run.guard.judge(loss=loss, grad_norm=norm), run.config.watch.spike_action
    if what is None:
        return None, False
    if action == "stop":
        raise stopped(run, step, samples, range(len(samples)), what)
    keep = run.world.from_main(len(run.files.repros()) < MOST_REPROS)
    weights = run.weights() if keep else None
    line = run.world.on_main(report_spike, run, step, samples, what, weights)
    tqdm.write(f"{line}{'; its update is left out' if action == 'skip' else ''}")
    return what, action == "skip"


def report_spike(
    run: Run, step: int, samples: Samples, what: str, weights: dict[str, Tensor] | None
) -> str:
    """A line about a spike that does not end the run. With weights its batch is kept too."""
    line = f"step {step + 1}: {what}"
    if weights is None:
        return line
    kept = run.files.keep(run, step, samples, range(len(samples)), what, weights)
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
