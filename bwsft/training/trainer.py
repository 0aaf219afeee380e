"""The training loop. Read `train_step` first: it is the whole of one optimiser update.

A step goes train_step -> objectives/ -> bwsft_kernels.block_mask, the backbone's hidden states,
bwsft_kernels.linear_cross_entropy, and never back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field

import torch
from bwsft_kernels.philox import Stream, philox_u24
from tqdm import tqdm

from bwsft import config as c
from bwsft.checkpoints.folders import prune, save_checkpoint
from bwsft.checkpoints.resolve import device_name
from bwsft.objectives import nelbo
from bwsft.training import guards as watch
from bwsft.training.distributed import PeerFailed, World, join, lost, parts
from bwsft.training.metrics import plot_run
from bwsft.training.optim import clip, lr_at, moments
from bwsft.training.setup import Run, open_run, open_shared, setup
from bwsft.training.trackers import Logs, check_installed
from bwsft.utils.files import lock_folder

__all__ = ["Step", "evaluate", "open_run", "setup", "train", "train_step"]


@dataclass(frozen=True)
class Step:
    """What one update reports: sums over all processes."""

    loss: float
    lr: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    """Masked tokens that bear loss."""
    region_tokens: int
    """Tokens of the supervised regions, masked or not: what EQUAL-TOKENS counts."""
    skipped: bool = False
    """The spike guard left this update out."""
    data_seconds: float = field(default=0.0, compare=False)
    """Time that the slowest process waited for its batches to be packed."""


def train_step(run: Run, step: int) -> Step:
    """Optimiser update `step` (0-based): draw, mask, forward, backward, clip, update.

    The loss is the sum of the row weights times CE, divided once by the step's number of
    sequences, so micro-batches of any size, on any number of processes, give the same result up to
    summation order.
    """
    config, data, world = run.config, run.data, run.world
    slots = data.slots(step, config.batch_size, config.seed)
    losses, tokens, waited = [], 0, 0.0
    run.optimizer.zero_grad(set_to_none=True)

    for part in parts(len(slots), config.micro_batch_size, world):
        # 1. Pack: no padding, the canvas of every example laid out as the decoder will see it.
        began = time.perf_counter()
        batch = data.pack(slots[part.start : part.stop])
        waited += time.perf_counter() - began
        seed_dropout(config.seed, step, int(batch.sample_ids[0]))

        # 2. Corrupt (active block, rate, marks, hidden suffix) and forward, as the objective and
        #    the context mode have it; the head meets the loss rows only.
        for loss in run.losses(batch, step, slots, part.start):
            # 3. Backward adds to the gradients; no graph outlives its draw.
            (loss.total / world.share_of(len(slots))).backward()
            losses.append((part.start, loss._replace(total=loss.total.detach())))
        tokens += batch.ids.numel()
    world.finish(run.idle)

    # 4. From here on the host waits for the device: check, clip, update.
    totals, *counts = on_host([loss for _, loss in losses])
    loss, *counts = world.sum([sum(totals), *map(sum, counts), tokens])
    starts = [start for start, _ in losses]
    watch.check_finite(run, step, slots, list(zip(starts, totals, strict=True)), loss)
    norm = clip(run.backbone, config.optim.clip)
    if not math.isfinite(norm):
        raise watch.stopped(run, step, slots, range(len(slots)), f"gradient norm {norm}")
    skipped = watch.spike(run, step, slots, loss / len(slots), norm)
    lr = lr_at(step, config.steps, config.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    if not skipped:
        run.optimizer.step()
    rows, region, tokens = map(int, counts)
    seconds = world.max(waited)
    return Step(loss / len(slots), lr, norm, tokens, rows, region, skipped, seconds)


def on_host(losses: list) -> list[list]:
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
    """Held-out blockwise NELBO, nats per response token, with draws that never change. The
    processes share its batches."""
    run.backbone.eval()
    batches = list(run.data.holdout_batches(run.config.micro_batch_size))
    mine = batches[run.world.rank :: run.world.size]
    count = sum(batch.num_sequences for batch in mine)
    value = 0.0
    if mine:
        value = count * nelbo.blockwise_nelbo(
            lambda state: run.mode.score(run, state), mine, run.eval_spec, run.config.eval.draws
        )
    run.world.finish(run.idle)
    run.backbone.train()
    total, sequences = run.world.sum([value, count])
    return total / sequences


def train(config: c.Config) -> int:
    """Run a whole training and return the exit status: 0 done or stopped by a signal, 1 failed."""
    check_installed(config)
    try:
        with join(config.parallel, config.device) as world, contextlib.ExitStack() as stack:
            if not world.main:
                silence = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(silence))
            return train_in(world, config, stack)
    except PeerFailed:
        return 1


def train_in(world: World, config: c.Config, stack: contextlib.ExitStack) -> int:
    """train, as one of the processes of `world`; `stack` keeps the run folder locked."""
    folder, held = c.run_folder(config), []

    def lock() -> None:
        """On rank 0, once the folder is a run's: a lock file has no business in another."""
        if not held and (folder / "config.json").exists():
            held.append(stack.enter_context(lock_folder(folder)))

    if config.resume is not None:  # before a checkpoint is chosen, which another run may prune
        world.on_main(lock)
    _, checkpoint = open_shared(config, world)
    run = setup(config, folder, checkpoint, world)
    world.on_main(lock)
    try:
        with watch.signals(world.size > 1) as asked:
            done = loop(run, asked)
    except (watch.TrainingStopped, RuntimeError) as error:
        message = why(run, error)
        if message is None:
            raise
        print(f"bwsft train: {message}", file=sys.stderr)
        return 1
    print(f"loss curve: {world.on_main(plot_run, folder)}")
    if done < config.steps:
        print(f"stopped after step {done} of {config.steps}; go on with --resume {folder}")
    else:
        print(f"run folder: {folder}")
    return 0


def why(run: Run, error: Exception) -> str | None:
    """What to tell the user about an error that ended the loop; None if it is not understood."""
    if isinstance(error, watch.TrainingStopped):
        return f"stopped: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return watch.out_of_memory(run, error)
    if lost(error):
        return f"another process of the run has ended; go on with --resume {run.folder}"
    return None


def loop(run: Run, asked: watch.Signals) -> int:
    """Train, log, evaluate and save until the last step or a signal; returns the steps done."""
    config, world = run.config, run.world
    done = saved = run.first
    with contextlib.closing(Logs(run)) as logs, progress(run) as bar, watch.profiler(run) as prof:
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
            logs.append("metrics", {"step": done, **line_of(result), "seconds": seconds})
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
                save(run, done, logs)
                saved = done
                # A signal during the save ends the run here; a wish to save comes up again.
                stop, asked.save = asked.agreed(world)
            if not stop and report_eval(run, logs, done):
                stop, _ = asked.agreed(world)
        if saved < done:  # the signal came during an evaluation
            save(run, done, logs)
    return done


def line_of(result: Step) -> dict:
    """A line of metrics.jsonl; `skipped` only where it is true."""
    return {k: v for k, v in vars(result).items() if k != "skipped" or v}


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
    tqdm.write(f"step {done}: held-out blockwise NELBO {value:.4f} nats per token")
    return True


def save(run: Run, done: int, logs: Logs) -> None:
    """Checkpoint after `done` steps. Every rank must call it; rank 0 writes."""
    whole = None
    if run.world.sharded:
        whole = run.weights(), run.world.gather(moments(run.backbone, run.optimizer))
    run.world.on_main(write, run, done, logs, whole)


def write(run: Run, done: int, logs: Logs, whole: tuple[dict, dict] | None) -> None:
    logs.sync()
    state = {
        "config": json.loads(c.to_json(run.config)),
        "data": run.data.fingerprint,
        "base": run.base,
        "device": device_name(run.device),
    }
    path = save_checkpoint(
        run.folder, done, run.backbone, run.tokenizer, run.optimizer, state, whole
    )
    prune(path, run.config.keep_last)
