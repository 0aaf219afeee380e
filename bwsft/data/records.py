"""Reads data files and Hub data sets, and brings their records into one shape.

JSONL is read line by line and JSON whole here, so that every complaint can name its place; CSV,
Parquet and Hub ids go through `datasets`, imported when first needed.
"""

import csv
import hashlib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bwsft.utils import strict_json

# MetaMathQA, GSM8K, MATH, and the two spellings of prompt/answer pairs; the first that fits wins.
PAIRS = (
    ("query", "response"),
    ("question", "answer"),
    ("problem", "solution"),
    ("prompt", "response"),
    ("prompt", "completion"),
)
SHAPES = ", ".join("/".join(pair) for pair in PAIRS) + " or messages"
TABLES = {".csv": "csv", ".parquet": "parquet"}  # as `datasets` calls them
LINES = (".jsonl", ".ndjson")
FORMATS = (*LINES, ".json", *TABLES)
ROLES = ("system", "user", "assistant")

Row = tuple[str, Any]


@dataclass(frozen=True)
class Record:
    """One example as text: the turns (role, content) before the answer, and the answer."""

    messages: tuple[tuple[str, str], ...]
    response: str
    kind: str = ""  # the source's `type` field, such as MetaMathQA's GSM_AnsAug


@dataclass(frozen=True)
class Source:
    """Where records come from. `digest` changes with the content, None if it isn't worth caching;
    `rows()` yields (place, raw value) in source order, the raw value of JSONL being bytes."""

    name: str
    digest: str | None
    total: int | None
    rows: Callable[[], Iterable[Row]]


def normalize(raw: Any) -> Record:
    """A raw record as a Record. Raises ValueError with what is wrong, without the place."""
    if isinstance(raw, bytes):
        raw = strict_json.parse(raw)
    if not isinstance(raw, dict):
        raise ValueError(f"is {_kind(raw)}, expected an object with {SHAPES}")
    if raw.get("messages") is not None:
        return replace(_from_messages(raw["messages"]), kind=_type(raw))
    keys = {key for key, value in raw.items() if value is not None}
    for prompt, answer in PAIRS:
        if prompt in keys and answer in keys:
            query = ("user", _text(raw[prompt], prompt))
            return Record((query,), _text(raw[answer], answer), _type(raw))
    halves = [(*pair, "response") for pair in PAIRS] + [(*pair[::-1], "prompt") for pair in PAIRS]
    for there, lacking, half in halves:
        if there in keys:
            raise ValueError(f"has {there!r} but no {lacking!r}: the {half} is missing")
    raise ValueError(f"has none of {SHAPES}; its keys are {reprlib.repr(sorted(map(str, raw)))}")


def _type(raw: dict) -> str:
    kind = raw.get("type")
    return str(kind) if isinstance(kind, str | int | float) else ""


def _from_messages(messages: Any) -> Record:
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' must be a non-empty list of {role, content} objects")
    turns = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is {_kind(message)}, expected {{role, content}}")
        role = message.get("role")
        if role not in ROLES:
            found = reprlib.repr(role)
            raise ValueError(f"message {number} has role {found}, expected one of {ROLES}")
        if role == "system" and number > 0:
            raise ValueError(f"message {number} is a system message; only the first may be one")
        turns.append((role, _text(message.get("content"), f"content of message {number}")))
    if turns[-1][0] != "assistant":
        raise ValueError(f"ends with a {turns[-1][0]} message: the response is missing")
    if len(turns) < 2 or turns[-2][0] != "user":
        raise ValueError("has no user message right before its last assistant message")
    return Record(tuple(turns[:-1]), turns[-1][1])


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {_kind(value)}, expected text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{key!r} contains half of a surrogate pair, not valid text") from error
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "not text")


def open_source(source: str | Path | list[dict]) -> Source:
    """Opens a file (.jsonl, .json, .csv, .parquet), a Hub id (its split "train") or a list of
    records. Raises ValueError if there is nothing to read, naming the source."""
    if isinstance(source, list):
        return Source("the list", None, len(source), lambda: _places(source, "the list"))
    name, path = str(source), Path(source).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir():
        raise ValueError(f"{name} is a folder; give one data file")
    if not path.exists():
        if suffix in FORMATS or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise ValueError(f"data file {name} doesn't exist")
        table = _load_dataset(name, name, {"split": "train"})  # no such file, but maybe a Hub id
        digest = f"hub:{name}:{table._fingerprint}"
        return Source(name, digest, len(table), lambda: _places(table, f"{name} (train)"))
    if not path.is_file():  # a pipe would wait for a writer, and can't be read twice
        raise ValueError(f"{name} is not a regular file; write the records to one first")
    if suffix not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"{name}: can't tell the format from {suffix!r}; known are {known}")
    digest, lines = _digest(path)
    if suffix in LINES:
        return Source(name, digest, lines, lambda: _read_lines(path, name))
    read = _read_json if suffix == ".json" else _read_table
    return Source(name, f"{suffix}:{digest}", None, lambda: read(path, name))


def _digest(path: Path) -> tuple[str, int]:
    """SHA-256 of the file's bytes and its number of line ends (a progress total)."""
    digest, lines = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                lines += chunk.count(b"\n")
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from error
    if path.stat().st_size == 0:
        raise ValueError(f"data file {path} is empty")
    return digest.hexdigest(), lines


def _read_lines(path: Path, name: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield f"{name}, line {number}", line


def _read_json(path: Path, name: str) -> Iterator[Row]:
    """An array of records, or what JSONL holds under another name."""
    try:
        text = strict_json.read_text(path)
        lines = [line for line in text.split("\n") if line.strip()]
        if all(line.startswith("{") and line.rstrip().endswith("}") for line in lines):
            found = [strict_json.parse(line) for line in lines]
        else:
            found = strict_json.parse(text)
    except (ValueError, OSError) as error:
        raise ValueError(f"can't read {name}: it {str(error).removeprefix(f'{path} ')}") from error
    yield from _places(found if isinstance(found, list) else [found], name)


def _read_table(path: Path, name: str) -> Iterator[Row]:
    kind = TABLES[path.suffix.lower()]
    options: dict[str, Any] = {"data_files": str(path), "split": "train"}
    if kind == "csv":
        options |= _csv_options(path, name)
    yield from _places(_load_dataset(kind, name, options), name)


def _csv_options(path: Path, name: str) -> dict[str, Any]:
    """Every column as text: an answer column of bare numbers would else be read as integers."""
    import datasets

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file), [])
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error.reason}") from error
    except csv.Error as error:
        raise ValueError(f"{name}: its first line is no header ({error})") from error
    if twice := sorted({column for column in header if header.count(column) > 1}):
        raise ValueError(f"{name} has several columns {reprlib.repr(twice[0])}: keep one")
    features = datasets.Features({column: datasets.Value("string") for column in header})
    return {"features": features, "keep_default_na": False, "encoding": "utf-8-sig"}


def _places(rows: Iterable[Any], name: str) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield f"{name}, record {number}", row


def _load_dataset(kind: str, name: str, options: dict[str, Any]) -> Any:
    import datasets

    try:
        return datasets.load_dataset(kind, **options)
    except Exception as error:  # datasets, pyarrow, pandas and the network raise many kinds
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        what = name if kind in TABLES.values() else f"{name} (no such file, so taken as a Hub id)"
        raise ValueError(f"can't read {what}: {reason}") from error
