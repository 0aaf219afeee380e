"""The training loop. Read `train_step` first: it is the whole of one optimiser update.

A step goes train_step -> objectives/ -> bwsft_kernels.block_mask, the backbone's hidden states,
bwsft_kernels.linear_cross_entropy, and never back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bwsft_kernels.philox import Stream, philox_u24
from tqdm import tqdm

from bwsft import config as c
from bwsft.checkpoint import newest_complete, prune, save_checkpoint
from bwsft.metrics import JsonLog, plot_run
from bwsft.objectives import nelbo
from bwsft.optim import lr_at, trainable
from bwsft.run import Run, open_run, setup


class TrainingStopped(Exception):
    """The run cannot go on; the message says where, why and what next."""


@dataclass(frozen=True)
class Step:
    """What one update reports."""

    loss: float
    lr: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    """Masked tokens that bear loss."""
    region_tokens: int
    """Tokens of the supervised regions, masked or not: what EQUAL-TOKENS counts."""


def train_step(run: Run, step: int) -> Step:
    """Optimiser update `step` (0-based): draw, mask, forward, backward, clip, update.

    The loss is the sum of the row weights times CE, divided once by the step's number of
    sequences, so micro-batches of any size give the same result up to summation order.
    """
    config, data = run.config, run.data
    slots = data.slots(step, config.batch_size, config.seed)
    losses, tokens = [], 0
    run.optimizer.zero_grad(set_to_none=True)

    for start in range(0, len(slots), config.micro_batch_size):
        # 1. Pack: no padding, the canvas of every example laid out as the decoder will see it.
        part = slots[start : start + config.micro_batch_size]
        batch = data.pack(part)
        seed_dropout(config.seed, step, data.sample_ids(part)[0])

        # 2. Corrupt (active block, rate, marks, hidden suffix) and forward, as the objective and
        #    the context mode have it; the head meets the loss rows only.
        for loss in run.losses(batch, step, start):
            # 3. Backward adds to the gradients; no graph outlives its draw.
            (loss.total / len(slots)).backward()
            losses.append((start, loss._replace(total=loss.total.detach())))
        tokens += batch.ids.numel()

    # 4. From here on the host waits for the device: check, clip, update.
    starts, parts = zip(*losses, strict=True)
    totals, rows, region = (torch.stack(x).tolist() for x in zip(*parts, strict=True))
    check_finite(run, step, slots, list(zip(starts, totals, strict=True)))
    limit = config.optim.clip or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(trainable(run.backbone).values(), limit).item()
    if not math.isfinite(norm):
        raise stopped(run, step, slots, f"gradient norm {norm}")
    lr = lr_at(step, config.steps, config.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    return Step(sum(totals) / len(slots), lr, norm, tokens, sum(rows), sum(region))


def seed_dropout(seed: int, step: int, first_sample: int) -> None:
    """Dropout is a function of (seed, step, first sample of the micro-batch): resume is exact."""
    high, low = philox_u24(
        torch.arange(2), step, first_sample, seed=seed, stream=Stream.DROPOUT
    ).tolist()
    torch.manual_seed(high << 24 | low)


def check_finite(run: Run, step: int, slots, totals: list[tuple[int, float]]) -> None:
    """Raise TrainingStopped, naming the micro-batch, unless every loss is finite. totals: (first
    slot of the micro-batch, summed loss)."""
    for start, value in totals:
        if not math.isfinite(value):
            part = slots[start : start + run.config.micro_batch_size]
            raise stopped(run, step, part, f"loss {value}")


def stopped(run: Run, step: int, slots, what: str) -> TrainingStopped:
    newest, _ = newest_complete(run.folder)
    back = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
    ids = ", ".join(str(i) for i in run.data.sample_ids(slots))
    return TrainingStopped(
        f"{what} at step {step + 1}; sample ids (rows of the data, from 0): {ids}; {back}. Look at "
        "these records, or start a run with a lower --optim.lr."
    )


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Held-out blockwise NELBO, nats per response token, with draws that never change."""
    run.backbone.eval()
    value = nelbo.blockwise_nelbo(
        lambda state: run.mode.score(run, state),
        run.data.holdout_batches(run.config.micro_batch_size),
        run.eval_spec,
        run.config.eval.draws,
    )
    run.backbone.train()
    return value


def train(config: c.Config) -> int:
    """Run a whole training and return the exit status: 0 done or stopped by a signal, 1 failed."""
    folder, checkpoint = open_run(config)
    run = setup(config, folder, checkpoint)
    try:
        with signals() as received:
            done = loop(run, received)
    except TrainingStopped as error:
        print(f"bwsft train: stopped: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        print(
            f"bwsft train: {str(error).splitlines()[0]} Lower --micro-batch-size (the batch stays "
            f"as it is) or give --grad-checkpointing, and go on with --resume {folder}",
            file=sys.stderr,
        )
        return 1
    print(f"loss curve: {plot_run(folder)}")
    if done < config.steps:
        print(f"stopped after step {done} of {config.steps}; go on with --resume {folder}")
    else:
        print(f"run folder: {folder}")
    return 0


def loop(run: Run, received: list[int]) -> int:
    """Train, log, evaluate and save until the last step or a signal; returns the steps done."""
    config = run.config
    metrics, evals = (JsonLog(run.folder / f"{n}.jsonl", run.first) for n in ("metrics", "eval"))
    # Into a file, a line every 10 s instead of ten a second.
    interval = 0.1 if sys.stderr.isatty() else 10
    bar = tqdm(
        total=config.steps,
        initial=run.first,
        unit="step",
        dynamic_ncols=True,
        mininterval=interval,
    )
    done = saved = run.first
    with contextlib.closing(metrics), contextlib.closing(evals), contextlib.closing(bar):
        if done not in evals.steps:  # a new run, or a signal that didn't wait for it
            report_eval(run, evals, done)
        while done < config.steps and not received:
            began = time.perf_counter()
            result = train_step(run, done)
            seconds = time.perf_counter() - began
            done += 1
            metrics.append({"step": done, **vars(result), "seconds": seconds})
            bar.set_postfix_str(
                f"loss {result.loss:.4f}, {result.tokens / seconds:,.0f} tok/s, "
                f"{result.supervised_tokens / seconds:,.0f} supervised tok/s",
                refresh=False,
            )
            bar.update()
            if received or done == config.steps or done % config.save_every == 0:
                save(run, done, (metrics, evals))
                saved = done
            if not received:
                report_eval(run, evals, done)
        if saved < done:  # the signal came after the step's own chance to save
            save(run, done, (metrics, evals))
    return done


def report_eval(run: Run, evals: JsonLog, done: int) -> None:
    """Evaluate if it is due after `done` steps."""
    every = run.config.eval.every
    due = every and (done % every == 0 or done == run.config.steps)
    if not due or not len(run.data.holdout_index):
        return
    value = evaluate(run)
    evals.append({"step": done, "nelbo": value})
    tqdm.write(f"step {done}: held-out blockwise NELBO {value:.4f} nats per token")


def save(run: Run, done: int, logs: tuple[JsonLog, ...]) -> None:
    for log in logs:
        log.sync()
    state = {
        "config": json.loads(c.to_json(run.config)),
        "data": run.data.fingerprint,
        "base": run.base,
    }
    path = save_checkpoint(run.folder, done, run.backbone, run.tokenizer, run.optimizer, state)
    prune(path, run.config.keep_last)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM: the loop saves after the running step and ends.

    A second signal takes its usual course.
    """
    received: list[int] = []
    previous = {}

    def note(number, frame):
        received.append(number)
        # Not print: a handler may interrupt one, and output buffers refuse to be re-entered.
        os.write(2, f"\nsignal {number}: saving after this step (again: at once)\n".encode())
        restore()

    def restore():
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
