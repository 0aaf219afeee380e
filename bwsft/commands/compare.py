"""`bwsft compare`: the same prompts decoded in several context modes, side by side.

Every mode is set beside the first one: how many tokens agree, in which denoising step the two part,
what each costs (forward passes, FLOPs, seconds) and how many answers are right. With --thresholds
each mode is decoded at several of them, for its curve of accuracy over tokens per forward.

Answers are kept in runs/compare/ as they come, and an interrupted comparison goes on with them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median_high
from typing import get_args

from rich.console import Console
from rich.table import Column, Table

from bwsft.commands.options import CompareOptions
from bwsft.commands.speed_curve import curves, draw_curves, print_curves
from bwsft.decoding.config import RULES
from bwsft.decoding.pipeline import Decoder, chosen_settings
from bwsft.decoding.result import Commit, Generation
from bwsft.decoding.result_file import kept_answers
from bwsft.decoding.settings import ContextMode
from bwsft.decoding.summary import tokens_per_forward
from bwsft.evaluation.answer_files import Output, join, read_references
from bwsft.evaluation.math_equality import MathVerifier
from bwsft.evaluation.pass_at_1 import score, summarize
from bwsft.utils.claims import claimed
from bwsft.utils.files import write_atomic
from bwsft.utils.flops import flop_counter
from bwsft.utils.identity import short


@dataclass(frozen=True)
class ModeResult:
    """What decoding in one mode gave; agreements are with the first mode."""

    mode: str
    threshold: float | None  # of --thresholds
    accuracy: float
    truncated: float  # share of answers without an end token
    mean_tokens: float
    steps: float  # denoising steps per answer
    passes: float  # forward passes per answer
    tokens_per_forward: float | None  # of all answers; None if there was no forward pass
    # Of matmuls and attention per answer; None on CUDA (kernels not counted), and of a mode whose
    # answers did not come in one go.
    flops: float | None
    seconds: float | None  # of wall-clock time for all answers, with the counting; None likewise
    token_agreement: float  # share of equal tokens by position, over the longer of both answers
    identical: float  # share of equal answers
    # Median denoising step, from 0, in which the two first committed something else; None if never.
    first_divergence: float | None
    diverged: float  # share of answers whose commitments differ anywhere before the earlier end


def run_compare(options: CompareOptions) -> int:
    """Run `bwsft compare` and return the exit status; ValueError or OSError for bad input."""
    modes = check(options)
    asked = (options.data, options.task, options.subset, options.split, options.columns)
    references = read_references(*asked)
    questions = [question for question, _ in references.values()][: options.limit]
    with ExitStack() as claims:
        for path in (options.json, options.plot):
            claims.enter_context(claimed(path) if path else nullcontext())
        compare(options, modes, questions, references)
    return 0


def compare(
    options: CompareOptions, modes: list[str], questions: list[str], references: dict
) -> None:
    """Decode in every mode; print the table and write the JSON."""
    decoder = Decoder.load(options.model, replace(options, context=modes[0]))
    if decoder.trained.backbone.family.noise != "mask":
        raise ValueError(
            "this model's undecided tokens are random ones, and it decodes in one way: there is "
            "nothing to compare; bwsft evaluate measures it"
        )
    prompts, thresholds = decoder.encode(questions), options.threshold_list()
    chosen = list(itertools.product(modes, thresholds or [None]))
    decoders = [with_settings(decoder, *one) for one in chosen]
    run = short([[one.digest() for one in decoders], len(questions)])
    made = {"run": run, "identity": decoder.identity() | {"data": short(references)}}
    name = Path(options.model).name if options.model else "embedded"
    path = Path("runs/compare") / f"{name}-{run[:8]}.answers.jsonl"
    first, rows = None, []
    with kept_answers(path, run, questions * len(chosen), made["identity"]) as kept:
        records = kept.answers(partial(decoded, decoders, prompts))
        for (mode, threshold), one in zip(chosen, decoders, strict=True):
            some = list(itertools.islice(records, len(questions)))
            found = [generation(record) for record in some]
            first = found if first is None else first
            scored = accuracy(one, questions, found, references, options.task)
            figures = scored | cost(some, found) | agreement(first, found)
            rows.append(ModeResult(mode, threshold, **figures))
        report(options, rows, len(questions), made)


def report(options: CompareOptions, rows: list[ModeResult], count: int, made: dict) -> None:
    """Print the figures, and write them where the options say; `made`: what they are of."""
    thresholds = options.threshold_list()
    if thresholds:
        print_curves(rows, count)
        if options.plot:
            write_atomic(options.plot, draw_curves(rows))
    else:
        print_table(rows, count)
    if options.json:
        content = {**made, "questions": count, "modes": [asdict(r) for r in rows]}
        if thresholds:
            content["aup"] = {curve.mode: curve.aup for curve in curves(rows)}
        content["settings"] = json.loads(json.dumps(vars(options), default=str))
        write_atomic(options.json, json.dumps(content, indent=2) + "\n")


def check(options: CompareOptions) -> list[str]:
    """The modes; ValueError for options that compare nothing."""
    modes = [mode.strip() for mode in options.modes.split(",")]
    known = get_args(ContextMode)
    if unknown := [mode for mode in modes if mode not in known]:
        raise ValueError(f"--modes has {unknown[0]!r}: choose from {', '.join(known)}")
    thresholds = options.threshold_list()
    if len(set(modes)) < len(modes) or len(modes) * max(1, len(thresholds)) < 2:
        raise ValueError("--modes needs at least two modes, each once (with --thresholds one)")
    if options.plot and not thresholds:
        raise ValueError("--plot draws the curve of --thresholds: give some")
    if only := getattr(RULES.get(options.rule), "only_context", None):
        raise ValueError(
            f"rule {options.rule} decodes under context {only} alone: there is nothing to compare"
        )
    if options.context is not None:
        raise ValueError("--context is what --modes compares: leave it out")
    for name, value in (("refresh", 0), ("cfg_scale", 0.0), ("suffix", "all")):
        if getattr(options, name) != value:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} does not fit every context mode: compare without it")
    if options.data is None:
        raise ValueError("bwsft compare needs --data FILE, the questions to answer")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {options.limit}")
    rule = chosen_settings(replace(options, context=None)).get("rule")  # before a model is read
    if thresholds and (rule != "threshold" or options.threshold is not None):
        raise ValueError("--thresholds needs --rule threshold, and takes the place of --threshold")
    for mode in modes:
        try:
            chosen_settings(replace(options, context=mode))
        except ValueError as error:
            raise ValueError(f"--modes has {mode}: {error}") from error
    return modes


def with_settings(decoder: Decoder, mode: str, threshold: float | None) -> Decoder:
    config = replace(decoder.config, context=mode)
    return replace(
        decoder, config=config if threshold is None else replace(config, threshold=threshold)
    )


def decoded(
    decoders: Sequence[Decoder], prompts: Sequence[Sequence[int]], done: int
) -> Iterator[dict]:
    """Answers of each decoder to all prompts as JSON objects, without the first `done` of them. The
    last one of a decoder that gave all has what they cost."""
    which, skip = divmod(done, len(prompts))
    for decoder in decoders[which:]:
        began, last, total = time.perf_counter(), {}, {}
        with flop_counter() as counter:
            answers = decoder.answers(prompts, skip, trace=True)
            for index, answer in enumerate(map(asdict, answers), skip + 1):
                if index < len(prompts):
                    yield answer
                last = answer
        if not skip:
            on_cpu = decoder.trained.backbone.head()[0].device.type == "cpu"
            total["flops"] = counter.get_total_flops() if on_cpu else None
            total["seconds"] = time.perf_counter() - began
        yield last | total
        skip = 0


def generation(record: dict) -> Generation:
    """An answer of `decoded`, which may have been in a file."""
    values = {f.name: record[f.name] for f in fields(Generation)}
    return Generation(**values | {"trace": [Commit(*commit) for commit in record["trace"]]})


def cost(records: Sequence[dict], found: Sequence[Generation]) -> dict:
    """What a mode's answers took, each; FLOPs and time are unknown where they did not come in one
    go."""
    total = records[-1].get("flops")
    return {
        "steps": fmean(g.steps for g in found),
        "passes": fmean(g.passes for g in found),
        "tokens_per_forward": tokens_per_forward(found),
        "flops": None if total is None else total / len(found),
        "seconds": records[-1].get("seconds"),
    }


def accuracy(
    decoder: Decoder, questions: list[str], found: list[Generation], references: dict, task: str
) -> dict:
    """The figures of `bwsft evaluate` that a comparison shows."""
    outputs = [
        Output(question, decoder.text(g.tokens), tokens=len(g.tokens), truncated=not g.ended)
        for question, g in zip(questions, found, strict=True)
    ]
    joined, _ = join(outputs, references)
    with MathVerifier() if task == "math" else nullcontext() as verifier:
        result = summarize(score(joined, task, verifier), task)
    return {name: result[name] for name in ("accuracy", "truncated", "mean_tokens")}


def agreement(first: Sequence[Generation], other: Sequence[Generation]) -> dict:
    """How far the answers of two modes agree."""
    pairs = list(zip(first, other, strict=True))
    equal = sum(x == y for a, b in pairs for x, y in zip(a.tokens, b.tokens, strict=False))
    total = sum(max(len(a.tokens), len(b.tokens)) for a, b in pairs)
    parted = [step for pair in pairs if (step := divergence(*pair)) is not None]
    return {
        "token_agreement": equal / total if total else 1.0,
        "identical": fmean(a.tokens == b.tokens for a, b in pairs),
        "first_divergence": median_high(parted) if parted else None,
        "diverged": len(parted) / len(first),
    }


def divergence(a: Generation, b: Generation) -> int | None:
    """The first denoising step in which two histories commit something else; None if one is the
    beginning of the other."""
    last = min(a.steps, b.steps)
    left, right = ({c[:3] for c in g.trace if c.step < last} for g in (a, b))
    return min((step for step, *_ in left ^ right), default=None)


def print_table(rows: list[ModeResult], count: int) -> None:
    """The comparison on stdout: a column per mode."""

    def share(name: str) -> list[str]:
        return [f"{getattr(row, name):.1%}" for row in rows]

    def number(name: str) -> list[str]:
        values = [getattr(row, name) for row in rows]
        return ["-" if value is None else f"{value:.1f}" for value in values]

    first = rows[0]
    parted = ["never" if r.first_divergence is None else str(r.first_divergence) for r in rows]
    lines = {
        "accuracy": share("accuracy"),
        f"tokens as in {first.mode}": share("token_agreement"),
        f"answers as in {first.mode}": share("identical"),
        "histories that part": share("diverged"),
        "in step (median)": parted,
        "denoising steps": number("steps"),
        "forward passes": number("passes"),
        "tokens per forward (TPF)": [f"{row.tokens_per_forward or 0:.2f}" for row in rows],
        "GFLOP": [f"{row.flops / 1e9:.3g}" if row.flops else "-" for row in rows],
        "times fewer FLOPs": [
            f"{first.flops / r.flops:.2f}" if first.flops and r.flops else "-" for r in rows
        ],
        "seconds in all": number("seconds"),
        "truncated": share("truncated"),
    }
    columns = [Column(row.mode, justify="right") for row in rows]
    title = f"{count} questions; steps, passes and FLOPs per answer"
    table = Table("", *columns, title=title, title_justify="left")
    for name, values in lines.items():
        table.add_row(name, *values)
    Console().print(table)
