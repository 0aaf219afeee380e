"""`bwsft demo`: accuracy of the embedded base, Blockwise SFT, accuracy after, two decoded examples.

Everything is generated here and runs on a CPU without network. Training and test problems are
disjoint by construction (bwsft/data/word_problems.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import load_trained
from bwsft.commands.options import DemoOptions
from bwsft.commands.trace import unmasking
from bwsft.data import word_problems
from bwsft.decoding.result import Generation
from bwsft.evaluation.answers import wilson
from bwsft.evaluation.exact_match import TEST_SEED, solve
from bwsft.utils.lines import say


def demo_config(options: DemoOptions) -> c.Config:
    """The debug preset in block-causal mode, which supervises every block of a response in one
    pass: the mode that learns most in two minutes."""
    return dataclasses.replace(
        presets.debug(),
        out=options.out or free_folder("runs/demo"), steps=options.steps, seed=options.seed,
        save_every=options.steps, context="block_causal",
        dataset=c.DataConfig(template="chat", holdout=64),
        optim=c.OptimConfig(lr=2e-3), eval=c.EvalConfig(every=max(options.steps // 4, 1)),
    )  # fmt: skip


def free_folder(name: str) -> str:
    tries = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(path for path in tries if not Path(path).exists())


def run_demo(options: DemoOptions) -> int:
    """Run the demo and return the exit status."""
    from bwsft.training.setup import train  # heavy, and only needed here

    config = demo_config(options)
    if Path(config.out).exists():
        raise ValueError(f"{config.out} exists; choose another --out, or remove it")
    began = time.perf_counter()
    console = Console()
    problems = word_problems.generate(options.problems, TEST_SEED, split="test")
    console.rule("1/4 the embedded base on held-out problems")
    before, _ = solve(load_trained(None), problems, config, "base")
    console.rule("2/4 Blockwise SFT")
    if status := train(config, saves_on_signal=False):
        return status
    console.rule("3/4 after training, same problems")
    trained = load_trained(config.out)
    after, generations = solve(trained, problems, config, "after")
    table = Table("model", "solved", "accuracy", "95 % interval")
    for name, solved in (("base", before), ("after Blockwise SFT", after)):
        low, high = wilson(sum(solved) / len(solved), len(solved))
        rate = f"{sum(solved) / len(solved):.1%}"
        table.add_row(name, f"{sum(solved)} of {len(solved)}", rate, f"{low:.1%} to {high:.1%}")
    console.print(table)
    console.rule("4/4 how two answers were unmasked (number: denoising step)")
    for problem, found in zip(problems[:2], generations, strict=False):
        console.print(f"[bold]{problem['query']}[/bold]")
        console.print(unmasked(found, trained.tokenizer.decode, config.block_size))
        console.print()
    say(f"run folder: {config.out}   plot: {config.out}/loss.png")
    say(f"{time.perf_counter() - began:.0f} s in all")
    return 0


def unmasked(generation: Generation, decode: Callable[[list[int]], str], block_size: int) -> Text:
    """The answer and the steps in which its tokens came."""
    pieces = {i: decode([token]) for i, token in enumerate(generation.tokens)}
    steps = {position: step for step, position, _, _ in generation.trace}
    return unmasking(steps, pieces, sorted(pieces), block_size)
