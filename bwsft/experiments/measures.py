"""What is measured on a trained cell: held-out blockwise NELBO and exact match, at a block size.

A measure is a name: "nelbo@10" and "solved@10" on generated test problems, "own@10" as "solved" but
every seed on other ones; "gsm8k@32" and "math@32" on answer files, under the ladder and under the
paper's strict rule; "tpf@16", "aup@16" and "careful@16" of decoding by threshold, and "tpf@4x2"
with 2 active blocks of 4 (thresholds.py); "pilot@10", the NELBO on the half of the test problems
that chooses settings and that no result is reported on; "gradient@8", of an update's gradient at
these weights (gradients.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from bwsft import config as c
from bwsft.checkpoints.resolve import Trained, load_trained
from bwsft.data import word_problems
from bwsft.data.dataset import load_set
from bwsft.data.packing import pack
from bwsft.evaluation.exact_match import TEST_SEED, solve
from bwsft.experiments import gradients, thresholds
from bwsft.objectives.nelbo import HeldOut
from bwsft.training.context_modes import make_mode
from bwsft.training.run_data import data_options, layout_of

GENERATED = ("solved", "own")  # kinds of exact match that need no file
TEST_MASKS = 4242  # seed of the held-out masks, which no run uses


@dataclass(frozen=True)
class TestSet:
    """What all cells of a folder are evaluated on."""

    problems: int = 100
    """Generated test problems that are decoded, and on which the NELBO is taken."""
    draws: int = 8
    """Masked states per problem."""
    gsm8k: str | None = None
    """GSM8K-shaped answer file."""
    math: str | None = None
    """MATH-shaped answer file."""
    generated: str | None = None
    """Kind of the generated problems, as a run's --data; none: that of the cell's own data."""
    nelbo_data: str | None = None
    """Records for the NELBO; none: generated problems."""
    batch_size: int = 50
    """Sequences scored or decoded together."""


def measure(name: str, source: str | None, config: c.Config, tests: TestSet, stem: str) -> dict:
    """Take one measure of the model `source` (a run folder; None: the embedded base). Answers go to
    files whose names begin with `stem`."""
    kind, _, decoder = name.partition("@")
    block, _, active = decoder.partition("x")
    config = dataclasses.replace(config, block_size=int(block))
    if kind == "gradient":
        return gradients.measure(config, Path(stem).parent)
    if kind in ("nelbo", "pilot"):
        trained = load_trained(source, device=config.device)
        return {"value": held_out_nelbo(trained, config, tests, pilot=kind == "pilot")}
    if kind in thresholds.KINDS:
        data = tests.generated or config.data
        problems = test_problems(tests.problems, data, first=thresholds.PILOTED)
        trained = load_trained(source, device=config.device)
        return thresholds.measure(kind, trained, problems, config, int(active or 1), stem)
    if kind in GENERATED:
        first = config.seed * tests.problems if kind == "own" else 0
        return solved(load_trained(source, device=config.device), config, tests, first)
    return answers(kind, source, config, tests, Path(f"{stem}-{kind}-b{block}"))


def test_problems(
    count: int, data: str | None = None, pilot: bool = False, first: int = 0
) -> list[dict]:
    """Problems of the test split, generated as the training's were, from the first one on; the
    numbers of a problem decide which half it is in."""
    generated = word_problems.named(data)
    if generated is None:
        raise ValueError(f"{data} has no generated test problems: give --nelbo-data FILE")
    asked = generated.problems(4 * (first + count), TEST_SEED, "test")
    half = [p for p in asked if sum(map(int, re.findall(r"\d+", p["query"]))) % 2 == int(pilot)]
    assert len(half) >= first + count
    return half[first : first + count]


def held_out_nelbo(
    trained: Trained, config: c.Config, tests: TestSet, pilot: bool = False
) -> float:
    """Nats per response token in the cell's own context mode, the same masks for all cells. End
    tokens that fill a block don't count: at another block size there would be others."""
    from bwsft.objectives.blockwise import mask_spec

    family = trained.backbone.family
    records = tests.nelbo_data or test_problems(tests.problems, config.data, pilot)
    # The columns, turns and parts of the training data are not those of the problems.
    plain = {"columns": None, "turns": "last", "subset": None, "split": None}
    options = dataclasses.replace(data_options(config, family), **plain)
    examples = load_set(records, trained.tokenizer, options)
    # A decoder's canvas, whatever the training's was.
    layout = dataclasses.replace(layout_of(config, family), canvas="fixed", fill=False)
    # The pilot's are others: of a file those that come next, of generated ones the other half.
    first = tests.problems if pilot and tests.nelbo_data else 0
    indices = range(first, min(first + tests.problems, len(examples)))
    if not indices:
        raise ValueError(f"a pilot needs more than {first} records in --nelbo-data: the others are "
                         "what results are reported on")
    batches = [
        pack([examples.example(i) for i in indices[start : start + tests.batch_size]], layout)
        for start in range(0, len(indices), tests.batch_size)
    ]
    spec = dataclasses.replace(mask_spec(config, family), seed=TEST_MASKS)
    held_out = HeldOut(spec=spec, count=tests.draws)
    device = next(trained.backbone.parameters()).device
    mode = make_mode(config, family, trained.backbone, held_out, device)
    mode = dataclasses.replace(mode, autocast=contextlib.nullcontext, even=False)
    return held_out.nelbo(mode.score, batches)


def solved(trained: Trained, config: c.Config, tests: TestSet, first: int = 0) -> dict:
    """Exact match on generated problems, one token a step; `each` keeps every problem's result."""
    problems = test_problems(tests.problems, config.data, first=first)
    right, found = solve(trained, problems, config, "test set", context=config.context)
    return {
        "value": sum(right) / len(right),
        "each": "".join("01"[ok] for ok in right),
        "passes": sum(generation.passes for generation in found),
    }


def answers(task: str, source: str | None, config: c.Config, tests: TestSet, stem: Path) -> dict:
    """Pass@1 on an answer file at fixed decoder settings: greedy, one token a step."""
    from bwsft.decoding.pipeline import AskedModel
    from bwsft.decoding.settings import DecoderOptions
    from bwsft.evaluation.pass_at_1 import EvaluateOptions, evaluate

    file = getattr(tests, task)
    if file is None:
        raise ValueError(f"measuring {task} needs --{task} FILE")
    options = DecoderOptions(
        gen_length=config.gen_length, block_size=config.block_size, context=config.context,
        template=config.dataset.template, batch_size=tests.batch_size, device=config.device,
    )  # fmt: skip
    asked = EvaluateOptions(
        task=task, model=Path(source or "embedded"), data=Path(file),
        save=stem.with_suffix(".jsonl"), json=stem.with_suffix(".json"),
    )  # fmt: skip
    found = AskedModel(source, options)
    result = evaluate(asked, found.decode, found.identity)
    return {"value": result["ladder_accuracy"], "strict": result["strict_accuracy"]}
