"""The sizes of every experiment: `mini` and `debug` on a CPU, `8b` on a GPU.

A scale fixes what all arms of an experiment share: the starting model, data, canvas, batch, updates
and learning rate. Whatever is compared changes one thing from there (plans.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from bwsft import config as c
from bwsft import presets
from bwsft.objectives.config import ObjectiveConfig


@dataclass(frozen=True)
class Scale:
    """What the arms of an experiment have in common."""

    name: str
    base: c.Config
    """Classical SFT and every other arm start from these settings."""
    grid: tuple[int, ...]
    """Block sizes of the grid, for training and for decoding; the ablations take the smallest."""
    seeds: int
    traversal_examples: int | None
    """Training examples of EQUAL-TOKENS, so that traversals are short; None: all."""
    tasks: tuple[str, ...]
    """Exact match: "solved" on generated problems, or the names of answer files."""
    claims_matches: bool = False
    """Exact match is claimed about: not of a model of a million parameters, which solves next to
    nothing."""
    cpu_seconds: float = 40
    """Time of a training where arms get equal time."""

    @property
    def block_size(self) -> int:
        return self.base.block_size


def mini() -> Scale:
    """A minute a cell on one CPU core: the embedded base, 4 blocks of 10, and problems with larger
    operands than the base has seen, so that there is something to learn."""
    base = dataclasses.replace(
        presets.debug(),
        data="wordproblems-20-seed2", steps=200, block_size=10, batch_size=16, micro_batch_size=16,
        save_every=200, keep_last=1,
        dataset=c.DataConfig(template="chat", holdout=64),
        # Of 1e-3, 3e-3 and 1e-2 the best for every arm (experiment `pilot`).
        optim=c.OptimConfig(lr=3e-3),
        eval=c.EvalConfig(every=20, draws=4),
        objective=ObjectiveConfig(empty="last"),  # as the paper
    )  # fmt: skip
    return Scale("mini", base, (5, 10, 20, 40), 5, 800, ("solved",))


def shifted() -> Scale:
    """A model near convergence that is fine-tuned on other stories with another form of answer, in
    4 blocks of 8: the `mini` of the decisive experiment."""
    base = dataclasses.replace(
        mini().base, data="newstories-9-seed5", block_size=8, gen_length=32, max_length=64,
        optim=c.OptimConfig(lr=1e-3, clip=0),
        objective=ObjectiveConfig(),
    )  # fmt: skip
    return Scale("mini", base, (8,), 10, None, ("own",))


def debug() -> Scale:
    """The embedded base on more problems like those it was pre-trained on, 5 blocks of 8."""
    base = dataclasses.replace(
        mini().base, data="wordproblems-9-seed2", block_size=8, batch_size=32, micro_batch_size=32,
        optim=c.OptimConfig(lr=1e-3),
    )  # fmt: skip
    return Scale("debug", base, (4, 8, 20, 40), 3, 800, ("solved",))


def eight_b(preset: str = "paper") -> Scale:
    """LLaDA-8B-Instruct with LoRA on MetaMathQA; `preset`: paper, released or llada-8b-lora."""
    base = presets.PRESETS[preset]()
    base = dataclasses.replace(base, data=base.data or "meta-math/MetaMathQA", keep_last=1)
    return Scale("8b", base, (8, 16, 32, 64), 3, None, ("gsm8k", "math"), True)
