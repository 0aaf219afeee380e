"""How long a run is: --epochs as steps, and another number of steps for a resumed run."""

from __future__ import annotations

import dataclasses
import math

from bwsft import config as c
from bwsft.training.optim import lr_at
from bwsft.utils.lines import say


def in_steps(config: c.Config, epoch: int) -> c.Config:
    """The config with its epochs of `epoch` sequences as steps, the last one begun in full."""
    if config.epochs is None:
        return config
    steps = max(math.ceil(config.epochs * epoch / config.batch_size - 1e-9), 1)
    return dataclasses.replace(config, steps=steps, epochs=None)


def announce(config: c.Config, stored: c.Config | None, done: int) -> None:
    """Say how the schedule of a run that goes on after `done` steps differs from its `stored` one.
    ValueError for fewer steps than are done."""
    if stored is None or stored.steps == config.steps:
        return
    if config.steps < done:
        raise ValueError(f"--steps {config.steps}: the run has done {done} already; give as many")
    before, now = (lr_at(done, steps, config.optim) for steps in (stored.steps, config.steps))
    say(
        f"steps {stored.steps} -> {config.steps}, which is a new schedule: the learning rate of "
        f"step {done + 1} is {now:.3g} (by the old one {before:.3g}), after a warm-up of "
        f"{round(config.optim.warmup * config.steps)} steps it falls towards "
        f"{config.optim.floor * config.optim.lr:.3g} in step {config.steps}"
    )
