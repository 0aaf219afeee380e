"""The training loop. Read `train_step` first: it is the whole of one optimizer update.

A step goes train_step -> the context mode -> objectives/ -> bwsft_kernels.block_mask, then the
backbone's hidden states and bwsft_kernels.linear_cross_entropy, and never back. setup.py builds the
`Run` and calls `loop`.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from bwsft_kernels import Stream
from bwsft_kernels.philox import philox_u24
from torch import Tensor
from tqdm import tqdm

from bwsft.objectives.base import Place
from bwsft.training import guards
from bwsft.training.context_modes import ContextMode, Loss
from bwsft.training.distributed import World, shares
from bwsft.training.optim import clip, lr_at
from bwsft.training.profiling import profiler
from bwsft.training.signals import Signals

if TYPE_CHECKING:
    from bwsft.config import Config
    from bwsft.models.backbone import Backbone
    from bwsft.objectives.nelbo import HeldOut
    from bwsft.training.run_data import TrainingData
    from bwsft.training.run_files import RunFiles
    from bwsft.training.trackers import Logs


@dataclass
class Run:
    """A training in progress."""

    config: Config
    folder: Path
    first: int
    """Updates already done when this process took over."""
    device: torch.device
    backbone: Backbone
    optimizer: torch.optim.Optimizer
    data: TrainingData
    mode: ContextMode
    held_out: HeldOut
    guard: guards.SpikeGuard
    files: RunFiles
    world: World = field(default_factory=World)

    def place(self, step: int, samples: list[tuple[int, int]]) -> Place:
        """Update number `step` as its first sequence sees it."""
        return Place(step, 0, len(samples), self.data.response_tokens(samples))

    def idle(self) -> Tensor:
        """A forward whose loss is 0, for a rank that must keep step with others."""
        return self.mode.idle(self.data.pack([(int(self.data.train_index[0]), 0)]))

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds of a sharded model, whole, for rank 0; {} where the model has
        whole tensors itself. Every rank must call it."""
        if not self.world.sharded:
            return {}
        model = self.backbone.model
        adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        return self.world.gather(adapters if self.config.lora.rank else model.state_dict())


@dataclass(frozen=True)
class Step:
    """What one update reports: sums over all processes."""

    loss: float
    lr: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    """Masked tokens that the loss is taken on."""
    region_tokens: int
    """Tokens of the supervised regions, masked or not: what EQUAL-TOKENS counts."""
    spike: str | None = None
    """What the spike guard found wrong with this update."""
    skipped: bool = False
    """The spike guard left it out."""
    data_seconds: float = field(default=0.0, compare=False)
    """Time that the slowest process waited for its batches to be packed."""


def train_step(run: Run, step: int) -> Step:
    """Optimizer update `step` (0-based): pack, mask, forward, backward, clip, update.

    The loss is the sum of the row weights times CE, divided once by the step's number of
    sequences, so micro-batches of any size, on any number of processes, give the same result up to
    summation order.
    """
    config, data, world = run.config, run.data, run.world
    samples = data.samples(step, config.batch_size, config.seed)
    place, losses, tokens, waited = run.place(step, samples), [], 0, 0.0
    run.optimizer.zero_grad(set_to_none=True)

    for part in shares(len(samples), config.micro_batch_size, world.size)[world.rank]:
        # 1. Pack: no padding, the canvas of every example laid out as the decoder will see it.
        began = time.perf_counter()
        batch = data.pack(samples[part.start : part.stop])
        waited += time.perf_counter() - began
        seed_dropout(config.seed, step, int(batch.sample_ids[0]))

        # 2. Corrupt (active block, rate, marks, hidden suffix) and forward, as the objective and
        #    the context mode have it; only supervised tokens are projected to logits.
        for loss in run.mode.losses(batch, place._replace(first=part.start)):
            # 3. Backward adds to the gradients; no graph outlives its draw.
            (loss.total / world.share_of(len(samples))).backward()
            losses.append((part.start, loss._replace(total=loss.total.detach())))
        tokens += batch.ids.numel()
    world.finish(run.idle)

    # 4. From here on the host waits for the device: check, clip, update.
    totals, *counts = on_host([loss for _, loss in losses])
    loss, *counts = world.sum([sum(totals), *map(sum, counts), tokens])
    starts = [start for start, _ in losses]
    guards.check_finite(run, step, samples, list(zip(starts, totals, strict=True)), loss)
    norm = clip(run.backbone, config.optim.clip)
    if not math.isfinite(norm):
        raise guards.stopped(run, step, samples, range(len(samples)), f"gradient norm {norm}")
    what, skipped = guards.spike(run, step, samples, loss / len(samples), norm)
    lr = lr_at(step, config.steps, config.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    if not skipped:
        run.optimizer.step()
    rows, region, tokens = map(int, counts)
    seconds = world.max(waited)
    return Step(loss / len(samples), lr, norm, tokens, rows, region, what, skipped, seconds)


def on_host(losses: list[Loss]) -> list[list[float]]:
    """[totals, rows, regions] of the losses of a step, with one wait for the device."""
    if not losses:  # a process without a sequence of its own
        return [[], [], []]
    columns = [torch.stack(values).double() for values in zip(*losses, strict=True)]
    return torch.stack(columns).tolist()


def seed_dropout(seed: int, step: int, first_sample: int) -> None:
    """Dropout is a function of (seed, step, first sample of the micro-batch): resume is exact."""
    high, low = philox_u24(
        torch.arange(2), step, first_sample, seed=seed, stream=Stream.DROPOUT
    ).tolist()
    torch.manual_seed(high << 24 | low)


@torch.no_grad()
def evaluate(run: Run) -> float:
    """What run.held_out measures: blockwise NELBO, nats per response token, with draws that never
    change. The processes share its batches."""
    run.backbone.eval()
    batches = list(run.data.holdout_batches(run.config.micro_batch_size))
    mine = batches[run.world.rank :: run.world.size]
    count = sum(batch.num_sequences for batch in mine)
    value = count * run.held_out.nelbo(run.mode.score, mine) if mine else 0.0
    run.world.finish(run.idle)
    run.backbone.train()
    total, sequences = run.world.sum([value, count])
    return total / sequences


def loop(run: Run, logs: Logs, asked: Signals) -> int:
    """Train, log, evaluate and save until the last step or a signal; returns the steps done."""
    config, world = run.config, run.world
    done = saved = run.first
    with contextlib.closing(logs), progress(run) as bar, profiler(run) as prof:
        stop, _ = asked.agreed(world)
        if not stop and world.from_main(done not in logs.evaluated):
            # a new run, or a signal that didn't wait for it
            report_eval(run, logs, done)
            stop, _ = asked.agreed(world)
        while done < config.steps and not stop:
            began = time.perf_counter()
            result = train_step(run, done)
            seconds = time.perf_counter() - began
            done += 1
            facts = {k: v for k, v in vars(result).items() if v or k not in ("spike", "skipped")}
            logs.append("metrics", {"step": done, **facts, "seconds": seconds})
            bar.set_postfix_str(
                f"loss {result.loss:.4f}, {result.tokens / seconds:,.0f} tok/s, "
                f"{result.supervised_tokens / seconds:,.0f} supervised tok/s",
                refresh=False,
            )
            bar.update()
            if prof:
                prof.step()
            stop, now = asked.agreed(world)
            if stop or now or done == config.steps or done % config.save_every == 0:
                run.files.save(run, done, logs)
                saved = done
                # A signal during the save ends the run here; a wish to save comes up again.
                stop, asked.save = asked.agreed(world)
            if not stop and report_eval(run, logs, done):
                stop, _ = asked.agreed(world)
        if saved < done:  # the signal came during an evaluation
            run.files.save(run, done, logs)
    return done


def progress(run: Run) -> tqdm:
    """The bar of rank 0."""
    return tqdm(
        total=run.config.steps,
        initial=run.first,
        unit="step",
        dynamic_ncols=True,
        # Into a file, a line every 10 s instead of ten a second.
        mininterval=0.1 if sys.stderr.isatty() else 10,
        disable=not run.world.main,
    )


def report_eval(run: Run, logs: Logs, done: int) -> bool:
    """Evaluate if it is due after `done` steps; whether it was."""
    every = run.config.eval.every
    due = every and (done % every == 0 or done == run.config.steps)
    if not due or not len(run.data.holdout_index):
        return False
    value = evaluate(run)
    logs.append("eval", {"step": done, "nelbo": value})
    tqdm.write(f"step {done}: {run.config.objective.held_out} {value:.4f} nats per token")
    return True
