"""Pass@1 of outputs on GSM8K- and MATH-shaped questions: the scoring of `bwsft evaluate`.

Read outputs (or decode them) -> join references by question -> score every output under the ladder
and under the paper's strict rule -> JSON, and a JSONL with every output.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from bwsft.data.chat_template import Prompt
from bwsft.decoding.result_file import ResultFile, kept_answers
from bwsft.evaluation import answer_files as files
from bwsft.evaluation import answers as scoring
from bwsft.evaluation.answer_files import Output, question_key
from bwsft.evaluation.math_equality import MathVerifier, same_spelling, same_value
from bwsft.utils.files import write_atomic
from bwsft.utils.identity import short
from bwsft.utils.parallelism import per_forward
from bwsft.utils.time_limit import time_limit

if TYPE_CHECKING:  # scoring a file takes no torch
    from bwsft.decoding.result import Decode

SECONDS = 20.0  # to read one output and compare its answer; the rules take linear time
LONGEST_OUTPUT = 200_000  # characters of an output, from its end, in which an answer is looked for


@dataclass(frozen=True)
class EvaluateOptions:
    """Score existing outputs (`outputs`), or decode with a model (`model`) and score that."""

    task: Literal["gsm8k", "math"]
    """How answers are found and compared: gsm8k (numbers) or math (LaTeX, needs bwsft[eval])."""
    outputs: Path | None = None
    """JSONL or JSON file with questions and generated outputs."""
    model: Path | None = None
    """Model folder that answers the questions of --data before they are scored."""
    data: Path | None = None
    """Questions with references (a file, folder, glob or Hub id), joined by question; by default
    the truths in --outputs."""
    subset: str | None = None
    """Configuration of a Hub data set in --data, such as openai/gsm8k's main."""
    split: str | None = None
    """Split of --data where it is a Hub data set or a folder; default test."""
    columns: str | None = None
    """What the columns of --data are, as prompt=q,response=a; see docs/train_your_data.md."""
    json: Path | None = None
    """Where the result is written as one JSON object."""
    save: Path | None = None
    """JSONL of every output with its score; by default a file in runs/evaluate/."""
    limit: int | None = None
    """Use only the first so many questions of --data, or outputs of --outputs."""
    strict: bool = False
    """Headline figure by the paper's rule (last number / whole output, equal as strings)."""


def evaluate(
    options: EvaluateOptions, decode: Decode | None = None,
    identity: Callable[[], dict[str, str]] | None = None,
) -> dict:  # fmt: skip
    """Score outputs and write the files; returns the result (keys: `summarize`).

    `decode` gets the questions in order and is needed with `model`: its answers are kept beside the
    result as they come, until they are scored, and a call that was interrupted goes on with them.
    `identity` gives the digests of its weights and tokenizer. A result is named by them, by the
    records and by the settings. Mistakes of the user raise ValueError,
    FileNotFoundError or, for MATH without math-verify, ImportError.
    """
    _check(options, decode)
    settings = {k: v for k, v in asdict(options).items() if k not in ("json", "save")}
    settings = json.loads(json.dumps(settings, default=str))
    read = _read(options)
    contents = read.contents | (identity() if options.model and identity else {})
    run = short([settings, contents])
    stem = (options.outputs or options.model).stem
    save = options.save or Path("runs/evaluate") / f"{options.task}-{stem}-{run[:8]}.jsonl"
    made = {"run": run, "identity": contents}
    with ExitStack() as stack:
        for path in filter(None, (save, options.json)):
            stack.enter_context(files.held(path, run, contents))
        if options.model:
            kept = save.with_suffix(".answers.jsonl")
            questions = [asked for asked, _ in read.references.values()][: options.limit]
            answers = stack.enter_context(kept_answers(kept, run, questions, contents))
            read = read._replace(outputs=_decoded(questions, decode, answers))
        result, records = _scored(options, read)
        result = {**made, **result, "settings": settings, "saved": str(save)}
        write_atomic(save, "".join(json.dumps({**made, **record}) + "\n" for record in records))
        if options.json:
            write_atomic(options.json, json.dumps(result, indent=2) + "\n")
    return result


class _Read(NamedTuple):
    """What the files of an evaluation hold, with digests of it."""

    references: dict | None
    outputs: list[Output]
    header: dict
    unused: list[str]
    contents: dict[str, str]


def _read(options: EvaluateOptions) -> _Read:
    references, contents = None, {}
    if options.data:
        asked = (options.data, options.task, options.subset, options.split, options.columns)
        references = files.read_references(*asked)
        contents["data"] = short(references)
    outputs, header, unused = [], {}, []
    if options.outputs:
        outputs, header, unused = files.read_outputs(options.outputs, options.task)
        contents["outputs"] = short([asdict(output) for output in outputs])
    return _Read(references, outputs[: options.limit], header, unused, contents)


def _scored(options: EvaluateOptions, read: _Read) -> tuple[dict, list[dict]]:
    """(the figures, a record per output) of outputs."""
    references = read.references
    with MathVerifier() if options.task == "math" else nullcontext() as verifier:
        joined, conflicts = files.join(read.outputs, references)
        if not any(output.reference for output in joined):
            raise ValueError(_nothing_joined(options, joined, read.unused))
        records = score(joined, options.task, verifier)
    figures = summarize(records, options.task, options.strict)
    answered = {question_key(record["question"]) for record in records}
    figures["not_attempted"] = None if references is None else len(references.keys() - answered)
    figures["conflicting_references"] = conflicts
    return figures | {"unused_fields": read.unused, "source": read.header}, records


def _check(options: EvaluateOptions, decode: Decode | None) -> None:
    if options.task not in ("gsm8k", "math"):
        raise ValueError(f"task must be gsm8k or math, got {options.task!r}")
    if (options.outputs is None) == (options.model is None):
        raise ValueError("give either --outputs FILE (score a file) or --model DIR (decode first)")
    if options.model is not None and options.data is None:
        raise ValueError("--model needs --data FILE, the questions to answer")
    elif options.subset or options.split or options.columns:
        raise ValueError("--subset, --split and --columns are of --data: name it")
    if options.model is not None and decode is None:
        raise ValueError("evaluate(options, decode=...) needs a decoder for --model")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {options.limit}")
    if options.save and options.json and options.save.resolve() == options.json.resolve():
        raise ValueError("--json and --save name the same file")


def _nothing_joined(options: EvaluateOptions, outputs: list[Output], unused: list[str]) -> str:
    if options.data:
        return (f"none of the {len(outputs)} questions of {options.outputs} is in {options.data}; "
                f"the first one is {question_key(outputs[0].question)[:80]!r}")
    other = f" (fields not read: {', '.join(unused)})" if unused else ""
    return f"{options.outputs} holds no references{other}: give --data FILE"


def _decoded(questions: list[Prompt], decode: Decode, kept: ResultFile) -> list[Output]:
    """The answers that are kept, and those of the other questions, each kept as it comes."""

    def following(done: int) -> Iterator[dict]:
        for text, tokens, ended, passes in decode(questions, done):
            yield {"output": text, "tokens": tokens, "truncated": not ended, "passes": passes}

    records = zip(questions, kept.answers(following), strict=True)
    return [Output(question, record["output"], tokens=record["tokens"],
                   truncated=record["truncated"], passes=record["passes"])
            for question, record in records]


def score(outputs: list[Output], task: str, verifier: MathVerifier | None = None) -> list[dict]:
    """One record per output; `correct` is the ladder's verdict. Without a reference it and the
    strict rule's are None.

    `verdict` says what decided: "spelling", "number" (exact values, units and bases),
    "math-verify", or "failed" (counted as wrong): math-verify gave up, or reading the answer took
    too long or raised.
    """
    records, samples = [], Counter()
    for output in outputs:
        key = question_key(output.question)
        records.append({"question": output.question, "sample": samples[key], "output": output.text,
                        **_judged(output, task, verifier), "truncated": output.truncated,
                        "tokens": output.tokens, "passes": output.passes})
        samples[key] += 1
    return records


def _judged(output: Output, task: str, verifier: MathVerifier | None) -> dict:
    """What the rules say of an output; one that cannot be read costs itself alone."""
    extract = scoring.extract_gsm8k if task == "gsm8k" else scoring.extract_math
    strict = scoring.strict_gsm8k if task == "gsm8k" else scoring.strict_math
    text, reference = output.text, output.reference
    answer, rung, strict_correct, correct, verdict = None, "none", None, None, None
    try:
        with time_limit(SECONDS):
            if reference is not None:
                strict_correct = strict(text, reference)
            answer, rung = extract(text[-LONGEST_OUTPUT:])
            if reference is not None:
                correct, verdict = _compare(reference, answer, task)
        if reference is not None and verdict is None:
            correct = verifier.equal(reference, answer)
            verdict = "failed" if correct is None else "math-verify"
    except Exception:  # a time limit, or a mistake of the rules
        correct, verdict = None, None if reference is None else "failed"
    if reference is not None:
        correct, strict_correct = bool(correct), bool(strict_correct)
    return {"extracted": answer, "reference": reference, "correct": correct,
            "strict_correct": strict_correct, "rung": rung, "verdict": verdict}


def _compare(reference: str, answer: str | None, task: str) -> tuple[bool | None, str | None]:
    """The verdict and what decided; None where math-verify must."""
    if task == "gsm8k":
        return scoring.numbers_equal(reference, answer), "number"
    if answer is None:
        return False, "spelling"
    if same_spelling(reference, answer):
        return True, "spelling"
    equal = same_value(reference, answer)
    return equal, None if equal is None else "number"


def _share(values: list) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _tokens_per_forward(records: list[dict]) -> float | None:
    known = [record for record in records if None not in (record["tokens"], record["passes"])]
    return per_forward(*(sum(record[name] for record in known) for name in ("tokens", "passes")))


def summarize(records: list[dict], task: str, strict: bool = False) -> dict:
    """Figures of scored records. Accuracies are means over questions of the mean over samples.

    ci95 is Wilson's interval over `count` questions (with several samples per question it is
    wider than need be). truncated, no_answer, mean_tokens and tokens_per_forward (all tokens by all
    forward passes) are over all outputs with a reference, and None where no output says.
    """
    scored = [record for record in records if record["correct"] is not None]
    groups: dict[str, list[dict]] = {}
    for record in scored:
        groups.setdefault(question_key(record["question"]), []).append(record)
    rates = {rule: _share([_share([record[rule] for record in group]) for group in groups.values()])
             for rule in ("correct", "strict_correct")}
    headline = rates["strict_correct" if strict else "correct"]
    return {
        "task": task,
        "rule": "strict" if strict else "ladder",
        "accuracy": headline,
        "ci95": list(scoring.wilson(headline, len(groups))),
        "interval": "wilson",
        "count": len(groups),
        "outputs": len(scored),
        "ladder_accuracy": rates["correct"],
        "strict_accuracy": rates["strict_correct"],
        "disagreements": sum(record["correct"] != record["strict_correct"] for record in scored),
        "truncated": _share([record["truncated"] for record in scored]),
        "no_answer": _share([record["rung"] == "none" for record in scored]),
        "mean_tokens": _share([record["tokens"] for record in scored]),
        "tokens_per_forward": _tokens_per_forward(scored),
        "extractors": {rung: n for rung in scoring.RUNGS
                       if (n := sum(record["rung"] == rung for record in scored))},
        "verify_failures": sum(record["verdict"] == "failed" for record in scored),
        "missing_reference": len(records) - len(scored),
    }
