"""What `bwsft experiment` takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from bwsft.experiments.plans import PLANS

Name = Literal[tuple(PLANS)]


@dataclass(frozen=True)
class ExperimentOptions:
    """Run a comparison of the paper, or print its plan."""

    name: Annotated[Name, tyro.conf.Positional]
    """Which comparison."""
    scale: Literal["mini", "debug", "8b"] = "mini"
    """mini: the embedded base on generated problems, on a CPU; debug: easier problems, in larger
    updates; 8b: LLaDA-8B-Instruct on a GPU."""
    preset: Literal["paper", "released", "llada-8b-lora"] = "paper"
    """Settings of the 8b scale."""
    dry_run: bool = False
    """Print updates, tokens, FLOPs and estimated hours, and run nothing."""
    out: str | None = None
    """Folder of the cells, shared by all experiments of a scale; default runs/experiments-SCALE."""
    report: str | None = None
    """Folder of the page, table and figure; default OUT/reports."""
    seeds: int | None = None
    """Seeds per arm; default 5 (mini) or 3 (8b)."""
    arms: tuple[str, ...] = ()
    """Run and report these alone, with the arms whose FLOPs they equal; none: all of the plan."""
    steps: int | None = None
    """Updates of an arm, instead of the scale's."""
    seconds: float = 40
    """context-modes: CPU seconds that the updates of an arm take, as measured on a few."""
    minutes: float = math.inf
    """Begin no cell after these; the same command goes on. decisive writes its page from what is
    finished, and with 0 does no more than that."""
    jobs: int = 1
    """Cells that run at the same time, each on one CPU core; 1 on a GPU."""
    model: str | None = None
    """Another starting model."""
    data: str | None = None
    """Other training records; their NELBO needs --nelbo-data."""
    nelbo_data: str | None = None
    """Held-out records for the NELBO (8b; mini generates them)."""
    gsm8k: str | None = None
    """GSM8K test questions, for exact match (8b)."""
    math: str | None = None
    """MATH-500 questions, for exact match (8b)."""
    problems: int = 100
    """Held-out problems for NELBO and exact match of generated problems."""
