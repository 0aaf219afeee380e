"""The training loop. Read `train_step` first: it is the whole of one optimiser update.

A step goes train_step -> objectives/ -> bwsft_kernels.block_mask, the backbone's hidden states,
bwsft_kernels.linear_cross_entropy, and never back.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from bwsft_kernels.philox import Stream, philox_u24
from tqdm import tqdm

from bwsft import config as c
from bwsft.checkpoint import load_optimizer, load_weights, newest_complete, prune, save_checkpoint
from bwsft.metrics import JsonLog, plot_run
from bwsft.objectives import nelbo
from bwsft.optim import lr_at, trainable
from bwsft.run import Run, open_run, setup, versions


class TrainingStopped(Exception):
    """The run cannot go on (a loss that is not finite); the message says where and what next."""


@dataclass(frozen=True)
class Step:
    """What one update reports."""

    loss: float
    lr: float
    grad_norm: float
    tokens: int
    supervised_tokens: int


def train_step(run: Run, step: int) -> Step:
    """Optimiser update `step` (0-based): draw, mask, forward, backward, clip, update.

    The loss is the sum of the row weights times CE, divided once by the step's number of
    sequences, so micro-batches of any size give the same result up to summation order.
    """
    config, data = run.config, run.data
    slots = data.slots(step, config.batch_size, config.seed)
    losses, supervised, tokens = [], [], 0
    run.optimizer.zero_grad(set_to_none=True)

    for start in range(0, len(slots), config.micro_batch_size):
        # 1. Pack: no padding, the canvas of every example laid out as the decoder will see it.
        batch = data.pack(slots[start : start + config.micro_batch_size]).to(run.device)
        seed_dropout(config.seed, step, batch)

        # 2. Corrupt: active block, rate, marks, hidden suffix; loss rows and their weights.
        noisy, masked = run.objective.corrupt(batch, run.spec, config.objective.blocks)

        # 3. Forward: the head meets the loss rows only. Backward adds to the gradients.
        with run.autocast():
            total = run.backbone(noisy, masked.rows, masked.row_target, masked.row_weight)
        (total / len(slots)).backward()

        losses.append(total.detach())
        supervised.append(masked.num_rows)
        tokens += batch.ids.numel()

    # 4. One transfer to the host per step, then clip and update.
    sums = torch.stack(losses).tolist()
    check_finite(run, step, slots, sums)
    lr = lr_at(step, config.steps, config.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    limit = config.optim.clip or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(trainable(run.backbone).values(), limit)
    if not torch.isfinite(norm):
        raise stopped(run, step, slots, f"gradient norm {norm.item()}")
    run.optimizer.step()
    count = int(torch.stack(supervised).sum())
    return Step(sum(sums) / len(slots), lr, norm.item(), tokens, count)


def seed_dropout(seed: int, step: int, batch) -> None:
    """Dropout is a function of (seed, step, first sample of the micro-batch): resume is exact."""
    first = batch.sample_ids[:1].cpu()
    words = [
        philox_u24(torch.tensor([k]), torch.tensor([step]), first, seed=seed, stream=Stream.DROPOUT)
        for k in (0, 1)
    ]
    torch.manual_seed(int(words[0]) << 24 | int(words[1]))


def check_finite(run: Run, step: int, slots, sums: list[float]) -> None:
    size = run.config.micro_batch_size
    for i, value in enumerate(sums):
        if not torch.isfinite(torch.tensor(value)):
            raise stopped(run, step, slots[i * size : (i + 1) * size], f"loss {value}")


def stopped(run: Run, step: int, slots, what: str) -> TrainingStopped:
    newest, _ = newest_complete(run.folder)
    back = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
    ids = ", ".join(str(i) for i in run.data.sample_ids(slots)[:32])
    return TrainingStopped(
        f"{what} at step {step + 1}; samples of the micro-batch: {ids}; {back}. "
        "Lower --optim.lr, or look at these records."
    )


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Held-out blockwise NELBO, nats per response token, with draws that never change."""
    run.backbone.eval()
    with run.autocast():
        value = nelbo.blockwise_nelbo(
            run.backbone,
            (b.to(run.device) for b in run.data.holdout_batches(run.config.micro_batch_size)),
            run.eval_spec,
            run.config.eval.draws,
        )
    run.backbone.train()
    return value


def train(config: c.Config) -> int:
    """Run a whole training and return the exit status: 0 done or stopped by a signal, 1 failed."""
    folder, checkpoint = open_run(config)
    run = setup(config, folder, checkpoint)
    first = 0
    if checkpoint is not None:
        first = resume(run, checkpoint)
    try:
        with signals() as received:
            done = loop(run, first, received)
    except TrainingStopped as error:
        tqdm.write(f"bwsft train: stopped: {error}")
        return 1
    print(f"loss curve: {plot_run(folder)}")
    if done < config.steps:
        print(f"stopped after step {done}; go on with --resume {folder}")
    else:
        print(f"run folder: {folder}")
    return 0


def resume(run: Run, checkpoint: Path) -> int:
    """Load a checkpoint into the run and return the number of steps it has done."""
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    load_weights(checkpoint, run.backbone)
    load_optimizer(checkpoint, run.backbone, run.optimizer)
    print(f"resuming from {checkpoint}")
    return state["step"]


def loop(run: Run, first: int, received: list[int]) -> int:
    """Steps `first`..; returns how many steps are done. Saves, evaluates and logs on the way."""
    config = run.config
    metrics = JsonLog(run.folder / "metrics.jsonl", first)
    evals = JsonLog(run.folder / "eval.jsonl", first if first else None)
    bar = tqdm(total=config.steps, initial=first, unit="step", dynamic_ncols=True)
    if first == 0 and config.eval.every and len(run.data.holdout_index):
        report_eval(run, evals, 0)
    done = first
    with contextlib.closing(metrics), contextlib.closing(evals), contextlib.closing(bar):
        for step in range(first, config.steps):
            began = time.perf_counter()
            result = train_step(run, step)
            seconds = time.perf_counter() - began
            done = step + 1
            metrics.append({"step": done, **vars(result), "seconds": seconds})
            bar.update()
            bar.set_postfix_str(
                f"loss {result.loss:.4f}, {result.tokens / seconds:,.0f} tok/s, "
                f"{result.supervised_tokens / seconds:,.0f} supervised tok/s"
            )
            last = done == config.steps or bool(received)
            if config.eval.every and len(run.data.holdout_index):
                if done % config.eval.every == 0 or done == config.steps:
                    report_eval(run, evals, done)
            if last or done % config.save_every == 0:
                save(run, done)
            if last:
                break
    return done


def report_eval(run: Run, evals: JsonLog, done: int) -> None:
    value = evaluate(run)
    evals.append({"step": done, "nelbo": value})
    tqdm.write(f"step {done}: held-out blockwise NELBO {value:.4f} nats per token")


def save(run: Run, done: int) -> None:
    state = {
        "config": json.loads(c.to_json(run.config)),
        "data": run.data.fingerprint,
        "versions": versions(),
        "base": run.base,
    }
    save_checkpoint(run.folder, done, run.backbone, run.tokenizer, run.optimizer, state)
    prune(run.folder, run.config.keep_last)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM: the loop saves after the running step and ends.

    A second signal takes its usual course.
    """
    received: list[int] = []
    previous = {}

    def note(number, frame):
        received.append(number)
        tqdm.write(f"signal {number}: saving after this step (again: stop at once)")
        for n, handler in previous.items():
            signal.signal(n, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

