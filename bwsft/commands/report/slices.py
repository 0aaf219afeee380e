"""Loss of a model by block index and by mask rate, on the run's held-out examples.

The draws are those of the held-out NELBO: fixed, so that runs and checkpoints compare, and their
mean is the value in eval.jsonl. They are taken when the page is made: the loss of a training step
mixes what a slice is to tell apart, and a record of it would cost every step.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable

import torch

from bwsft import config as c
from bwsft.data.packing import Batch
from bwsft.models.backbone import Backbone
from bwsft.objectives.nelbo import HeldOut
from bwsft.training.context_modes import ContextMode, make_mode
from bwsft.training.run_data import TrainingData, held_out

RATES = 4  # groups of mask rates, each of the same width


def losses(config: c.Config, backbone: Backbone, data: TrainingData) -> dict[str, dict]:
    """{"block": ..., "rate": ...}: see `grouped`. Blocks count from 1, a rate is the upper end of
    its group in percent."""
    family = backbone.family
    draws = held_out(config, family)
    mode = make_mode(config, family, backbone, draws, backbone.head()[0].device)
    scored = score(mode, draws, data.holdout_batches(1))
    return {
        "block": grouped([(block + 1, loss) for block, _, loss in scored]),
        "rate": grouped([(math.ceil(rate * RATES) * 100 // RATES, x) for _, rate, x in scored]),
    }


@torch.no_grad()
def score(
    mode: ContextMode, draws: HeldOut, batches: Iterable[Batch]
) -> list[tuple[int, float, float]]:
    """(block from 0, share of it that is masked or replaced, nats per supervised token) of every
    draw on batches of one sequence."""
    found = []
    for batch in batches:
        for draw in draws.draws(batch):
            block = mode.grid.index_of(draw.block_start, batch.prompt_lengths)
            noisy = (draw.target >= 0) & (draw.noisy.ids[draw.rows] != draw.target)
            rate = noisy.sum() / draw.block_length
            found.append((int(block), float(rate), float(mode.score(draw))))
    return found


def grouped(values: list[tuple[int, float]]) -> dict[str, list]:
    """Values by their group, in columns: `at` (the group), mean, standard error of the mean (None
    for a single value) and count."""
    groups: dict[int, list[float]] = defaultdict(list)
    for group, value in values:
        groups[group].append(value)
    found: dict[str, list] = {"at": sorted(groups), "mean": [], "error": [], "count": []}
    for at in found["at"]:
        some = groups[at]
        error = statistics.stdev(some) / math.sqrt(len(some)) if len(some) > 1 else None
        found["mean"].append(statistics.fmean(some))
        found["error"].append(error)
        found["count"].append(len(some))
    return found
