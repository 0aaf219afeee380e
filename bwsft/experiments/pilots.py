"""The learning rate of every arm, chosen on seeds and problems that nothing is reported on."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bwsft import config as c
from bwsft.experiments import cells
from bwsft.experiments.arms import Arm
from bwsft.experiments.cells import Cell

SEEDS = (1000,)

Pilots = dict[str, dict[float, list[float]]]
"""Arm -> learning rate -> pilot NELBO of every pilot seed."""


def measure_of(config: c.Config) -> str:
    return f"pilot@{config.block_size}"


def with_rate(config: c.Config, rate: float) -> c.Config:
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=rate))


def pilot_cells(
    arm: Arm, config: c.Config, content: str, seed: int
) -> Iterator[tuple[float, Cell]]:
    """(learning rate, cell) of an arm's pilot, at its own updates."""
    for rate in arm.rates:
        yield rate, Cell(dataclasses.replace(with_rate(config, rate), seed=seed), content=content)


def read(folder: Path, arm: Arm, config: c.Config, content: str) -> dict[float, list[float]]:
    """The pilot NELBOs of an arm whose pilot cells are finished."""
    out: dict[float, list[float]] = {rate: [] for rate in arm.rates}
    for seed in SEEDS:
        for rate, cell in pilot_cells(arm, config, content, seed):
            taken = cells.read(folder, cell)["measures"]
            out[rate].append(taken[measure_of(config)]["value"])
    return out


def chosen(found: Mapping[float, Sequence[float]]) -> float:
    """The learning rate with the lowest mean; one that diverged is no choice. ValueError if all
    did."""
    means = {rate: statistics.fmean(values) for rate, values in found.items()}
    known = {rate: mean for rate, mean in means.items() if math.isfinite(mean)}
    if not known:
        raise ValueError("every learning rate of a pilot diverged: lower the scale's")
    return min(known, key=known.__getitem__)
