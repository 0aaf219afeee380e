"""`bwsft demo`: accuracy of the embedded base, Blockwise SFT, accuracy after, two decoded examples.

Everything is generated here and runs on a CPU without network. Training and test problems are
disjoint by construction (bwsft/wordproblems.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from bwsft import config as c
from bwsft import data as d
from bwsft import presets, scoring, wordproblems
from bwsft.decoding import DecodeConfig
from bwsft.generate import Generation, decode_stream
from bwsft.models import Trained, load_trained

TEST_SEED = 1  # another seed than the training data's, and another split


@dataclass(frozen=True)
class DemoOptions:
    """Five minutes on two CPU cores."""

    out: str = "runs/demo"
    """Run folder of the training; it must not exist."""
    steps: int = 300
    """Optimiser updates."""
    problems: int = 200
    """Held-out problems that are decoded before and after."""
    seed: int = 0
    """Seed of the training."""


def demo_config(options: DemoOptions) -> c.Config:
    """The debug preset with enough updates to see the accuracy rise."""
    return c.Config(
        **{
            **vars(presets.debug()),
            "out": options.out,
            "steps": options.steps,
            "seed": options.seed,
            "batch_size": 32,
            "micro_batch_size": 32,
            "save_every": options.steps,
            "eval": c.EvalConfig(every=max(options.steps // 3, 1)),
        }
    )


def run_demo(options: DemoOptions) -> int:
    """Run the demo and return the exit status."""
    from bwsft.train import train  # heavy, and only needed here

    config = demo_config(options)
    if Path(options.out).exists():
        raise ValueError(f"{options.out} exists; choose another --out, or remove it")
    began = time.perf_counter()
    console = Console()
    problems = wordproblems.generate(options.problems, TEST_SEED, split="test")
    console.rule("1/4 the embedded base on held-out problems")
    before, _ = solve(load_trained(None), problems, config, "base")
    console.rule("2/4 Blockwise SFT")
    if status := train(config):
        return status
    console.rule("3/4 after training, same problems and decoder")
    trained = load_trained(options.out)
    after, generations = solve(trained, problems, config, "after")
    table = Table("model", "solved", "accuracy", "95 % interval")
    for name, solved in (("base", before), ("after Blockwise SFT", after)):
        low, high = scoring.wilson(sum(solved) / len(solved), len(solved))
        table.add_row(
            name,
            f"{sum(solved)} of {len(solved)}",
            f"{sum(solved) / len(solved):.1%}",
            f"{low:.1%} to {high:.1%}",
        )
    console.print(table)
    console.rule("4/4 how two answers were unmasked (number: denoising step)")
    for i in (0, 1):
        console.print(f"[bold]{problems[i]['query']}[/bold]")
        console.print(unmasking(generations[i], trained.tokenizer))
        console.print()
    console.print(f"run folder: {options.out}   plot: {options.out}/loss.png", soft_wrap=True)
    console.print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


def solve(
    trained: Trained, problems: list[dict], config: c.Config, name: str
) -> tuple[list[bool], list[Generation]]:
    """Decode the problems; (which are right, the generations)."""
    template = d.Template(trained.tokenizer, config.dataset.template)
    prompts = template.encode_prompts([p["query"] for p in problems])
    decode = DecodeConfig(
        gen_length=config.gen_length,
        block_size=config.block_size,
        batch_size=50,
        context=trained.state["config"]["context"] if trained.state else "exact",
    )
    results: list = [None] * len(problems)
    stream = decode_stream(trained.backbone, prompts, decode, trace=True)
    for i, generation in tqdm(stream, total=len(problems), desc=f"decoding, {name}"):
        results[i] = generation
    solved = []
    for problem, generation in zip(problems, results, strict=True):
        answer, _ = scoring.extract_gsm8k(trained.tokenizer.decode(generation.tokens))
        truth, _ = scoring.extract_gsm8k(problem["response"])
        solved.append(scoring.numbers_equal(truth, answer))
    return solved, results


def unmasking(generation: Generation, tokenizer) -> Text:
    """The answer with the denoising step under which each token was committed; late is brighter."""
    step_of = {position: step for step, position, _, _ in generation.trace}
    last = max(step_of.values(), default=1) or 1
    text = Text()
    for position, token in enumerate(generation.tokens):
        step = step_of[position]
        shade = 110 + round(145 * step / last)
        piece = tokenizer.decode([token]).replace("\n", "⏎")
        text.append(piece, style=f"rgb({shade},{shade},255) bold")
        text.append(f"{step + 1} ".translate(SUBSCRIPTS), style="dim")
    return text


SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
