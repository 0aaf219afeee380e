"""The files that an evaluation reads, brought into one shape: references and outputs.

JSONL, a JSON list, an object with a list under "generations" (the d1 repository's format), or any
other source of records that training reads.
"""

from __future__ import annotations

import glob
import json
import math
import re
import unicodedata
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from bwsft.data import records
from bwsft.data.chat_template import Prompt
from bwsft.data.columns import Columns
from bwsft.data.file_formats import FORMATS, format_of
from bwsft.data.file_formats import read_text as read_file
from bwsft.data.sources import open_source
from bwsft.evaluation import answers as scoring
from bwsft.evaluation.math_equality import same_spelling
from bwsft.evaluation.numerals import format_number, single_number
from bwsft.utils import lines, strict_json
from bwsft.utils.claims import claimed
from bwsft.utils.identity import others

QUESTION_FIELDS = ("question", "query", "problem", "prompt")
OUTPUT_FIELDS = ("output", "outputs", "generation", "generations", "completion", "response")
USUAL_SPLIT = "test"  # of a data set whose questions are answered
TRUTH_FIELDS = ("ground_truth", "reference", "answer", "target")
ANSWER_FIELDS = ("answer", "response", "ground_truth", "reference", "solution")
JSON = (".jsonl", ".ndjson", ".json")
_NOTES = ("truncated", "tokens", "passes", "sample", "identity")
_QUOTES = str.maketrans("‘’‛′“”„", "''''\"\"\"")


@dataclass(frozen=True)
class Output:
    """One generated text; its tokens, whether it was cut off, and the forward passes that it took
    are None where the source doesn't say."""

    question: Prompt
    text: str
    reference: str | None = None
    tokens: int | None = None
    truncated: bool | None = None
    passes: int | None = None


def question_key(question: Prompt) -> str:
    """What questions are joined by: Unicode NFKC, straight quotes, single spaces."""
    if not isinstance(question, str):
        question = "\n".join(f"{turn['role']}: {turn['content']}" for turn in question)
    return " ".join(unicodedata.normalize("NFKC", question.translate(_QUOTES)).split())


def _number_text(token: str) -> str:
    """A JSON float as its shortest exact text, so that 18.0 reads "18" and 0.1 stays 0.1."""
    if not math.isfinite(float(token)) or len(token) > 400:
        raise ValueError(f"{token[:40]} is no number of a sensible size")
    # An exact 1e-999999999 has a billion digits, and no float below 1e-330 differs from 0.
    return format_number(Fraction(token if abs(float(token)) > 1e-300 else 0))


def _document(text: str | bytes, path: Path | str, line: int = 1) -> object:
    def refuse(name: str):
        raise ValueError(f"{name} is no JSON value")

    try:
        return strict_json.parse(text, parse_float=_number_text, parse_constant=refuse)
    except ValueError as error:
        cause = error.__cause__
        if isinstance(cause, json.JSONDecodeError):
            place = f"{path}:{line + cause.lineno - 1}:{cause.colno}"
            raise ValueError(f"{place}: not valid JSON ({cause.msg})") from error
        raise ValueError(f"{path}:{line}: {str(error).removeprefix('is ')}") from error


def read_text(path: Path) -> str:
    """The text of a file, inflated. FileNotFoundError, or ValueError for what is not UTF-8."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return read_file(path, str(path))


def read_records(
    path: Path | str, subset: str | None = None, split: str | None = None,
    usual_split: str = USUAL_SPLIT,
) -> tuple[list[dict], dict]:
    """The records of a source, and the scalars beside a "generations" list (settings of that run).

    Floats arrive as exact text. FileNotFoundError, or ValueError with the place.
    """
    path = Path(path)
    if _is_document(path) and not (subset or split):
        found, header = _records_of(read_text(path), path)
    else:
        source = open_source(path, subset, split, usual_split)
        found, header = [_exact(raw, place) for place, raw in source.rows()], {}
    for number, record in enumerate(found, 1):
        if not isinstance(record, dict):
            raise ValueError(f"{path}: record {number} is a {type(record).__name__}, not an object")
    if not found:
        raise ValueError(f"{path}: holds no records")
    return found, header


def _is_document(path: Path) -> bool:
    """Whether a path is a file of JSON, which one of an unknown suffix is taken for."""
    form = format_of(path)[0]
    if path.is_file():
        return form in JSON or form not in FORMATS
    return form in JSON and not path.is_dir() and not glob.has_magic(str(path))


def _exact(raw: bytes | dict, place: str) -> object:
    """A raw record with its floats as `_document` reads them."""
    if isinstance(raw, bytes):
        return _document(raw, place)
    if not isinstance(raw, dict):
        return raw
    kinds = float | Decimal
    try:
        return {k: _number_text(str(v)) if isinstance(v, kinds) else v for k, v in raw.items()}
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _records_of(text: str, path: Path) -> tuple[list, dict]:
    # Lines that each start an object are JSONL; an object printed over several lines is not.
    full = [(number, line) for number, line in enumerate(lines.split(text), 1) if line.strip()]
    if format_of(path)[0] in JSON[:2] or (len(full) > 1 and all(s[0] == "{" for _, s in full)):
        return [_document(line, path, number) for number, line in full], {}
    document = _document(text, path)
    if isinstance(document, list):
        return document, {}
    if isinstance(document, dict):
        if any(field in document for field in QUESTION_FIELDS):
            return [document], {}
        if isinstance(document.get("generations"), list):
            header = {k: v for k, v in document.items() if isinstance(v, (str, int))}
            return document["generations"], header
    raise ValueError(f'{path}: needs JSONL, a list, or an object with a list under "generations"')


def _pick(record: dict, fields: Iterable[str]) -> tuple[object, str | None]:
    """The first of the fields that the record fills, and its name."""
    return next(((record[f], f) for f in fields if record.get(f) is not None), (None, None))


def needed(record: dict, what: str, fields: tuple[str, ...], place: str) -> tuple[object, str]:
    """The first of the fields that the record fills, and its name; ValueError if it fills none."""
    value, name = _pick(record, fields)
    if name is None:
        raise ValueError(f"{place} has no {what}: it needs one of {', '.join(fields)} "
                         f"and has {', '.join(record)[:200] or 'nothing'}")
    return value, name


def _question(record: dict, place: str) -> tuple[Prompt, str]:
    """The question of an output: a text, or the turns of a conversation as generate writes them."""
    value, name = needed(record, "question", QUESTION_FIELDS, place)
    if isinstance(value, list):
        value = _asked({"messages": value}, Columns(), place)
    if not isinstance(value, str | list) or not value or isinstance(value, str) and value.isspace():
        raise ValueError(f"{place}: field {name} must be a question's text")
    return value, name


def _asked(record: dict, columns: Columns, place: str) -> Prompt:
    try:
        return records.question(record, columns)
    except ValueError as error:
        raise ValueError(f"{place} {error}") from error


def _answer(record: dict, columns: Columns, place: str) -> object:
    """The reference of a record: its answer field, or else what the assistant says last."""
    named = columns.roles.get("response")
    value, _ = _pick(record, ANSWER_FIELDS if named is None else (named,))
    if value is not None and not isinstance(value, list):
        return value
    try:
        return records.normalize(record, columns).messages[-1]["content"]
    except ValueError as error:
        raise ValueError(f"{place} has no answer: it {error}") from error


def _reference(value: object, task: str, place: str) -> str | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"{place}: a reference must be text or a number, got {value!r:.60}")
    reference = scoring.reference_answer(str(value), task)
    if task == "gsm8k" and single_number(reference) is None:
        raise ValueError(f"{place}: reference {reference[:60]!r} is no number; "
                         "for LaTeX answers use --task math")
    return reference


def _typed(record: dict, field: str, kind: type):
    return record.get(field) if type(record.get(field)) is kind else None


def read_references(
    path: Path | str, task: str, subset: str | None = None, split: str | None = None,
    columns: str | None = None, usual_split: str = USUAL_SPLIT,
) -> dict[str, tuple[Prompt, str]]:  # fmt: skip
    """question_key -> (question, reference answer) of a GSM8K-, MetaMath- or MATH-shaped source."""
    parsed = Columns.parse(columns)
    references: dict[str, tuple[Prompt, str]] = {}
    found, _ = read_records(path, subset, split, usual_split)
    for number, record in enumerate(found, 1):
        place = f"{path}: record {number}"
        question = _asked(record, parsed, place)
        reference = _reference(_answer(record, parsed, place), task, place)
        if reference is None:
            raise ValueError(f"{place} has an empty answer")
        known = references.setdefault(question_key(question), (question, reference))
        if known[1] != reference:
            raise ValueError(f"{place} repeats a question with another answer: "
                             f"{reference!r} here, {known[1]!r} before")
    if repeated := len(found) - len(references):
        lines.say(f"{path}: {repeated:,} of {len(found):,} records repeat a question, asked once")
    return references


def read_outputs(path: Path | str, task: str) -> tuple[list[Output], dict, list[str]]:
    """The outputs of a file in order, its header, and the names of fields that nobody reads.

    A list of outputs, or a repeated question, gives several samples of one question.
    """
    found, header = read_records(path)
    outputs: list[Output] = []
    unused: dict[str, None] = {}
    for number, record in enumerate(found, 1):
        place = f"{path}: record {number}"
        question, question_name = _question(record, place)
        texts, output_name = needed(record, "output", OUTPUT_FIELDS, place)
        truth, truth_name = _pick(record, TRUTH_FIELDS)
        texts = texts if isinstance(texts, list) else [texts]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{place}: field {output_name} must be text or a list of texts")
        reference = _reference(truth, task, place)
        kinds = {"tokens": int, "truncated": bool, "passes": int}
        notes = {name: _typed(record, name, kind) for name, kind in kinds.items()}
        outputs += [Output(question, text, reference, **notes) for text in texts]
        used = {question_name, output_name, truth_name, *TRUTH_FIELDS, *_NOTES}
        unused.update(dict.fromkeys(name for name in record if name not in used))
    return outputs, header, list(unused)


def join(outputs: list[Output], references: dict | None) -> tuple[list[Output], int]:
    """Outputs with end tokens cut, truncation settled and references filled in from `references`.

    `references` beats the outputs' own truths; the second value counts where both exist and
    differ as numbers and as text (rounded or damaged truths). A missing reference stays None.

    Truncation: what the source says; else, if any output of the set carries an end token, the
    outputs without one; else unknown.
    """
    split = [scoring.split_end(output.text) for output in outputs]
    marked = any(ended for _, ended in split)
    joined, conflicts = [], 0
    for output, (text, ended) in zip(outputs, split, strict=True):
        truncated = not ended if output.truncated is None and marked else output.truncated
        reference = output.reference
        if references is not None:
            _, reference = references.get(question_key(output.question), (None, None))
            conflicts += bool(reference and output.reference) and not (
                scoring.numbers_equal(reference, output.reference)
                or same_spelling(reference, output.reference))
        joined.append(replace(output, text=text, reference=reference, truncated=truncated))
    return joined, conflicts


def held(path: Path, run: str, identity: dict[str, str]) -> AbstractContextManager:
    """The file `path` of a result, claimed: ValueError, saying what is another one, if it exists
    and is not one of the settings and contents whose digests are `run` and `identity`."""

    def otherwise(head: bytes) -> str:
        found = dict(re.findall(r'"(\w+)": "([0-9a-f]{12})"', head.decode(errors="replace")))
        other = others(found, identity) if "run" in found and found.keys() & identity.keys() else []
        what = f"other {' and '.join(other)}" if other else "other settings"
        return (f"exists and was not written with these settings and contents ({what}): name "
                "another file, or delete it first")

    start = re.compile(rb'\{\s*"run": "%s"' % run.encode())
    return claimed(path, lambda head: start.match(head) is not None, otherwise)
