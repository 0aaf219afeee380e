"""Brings records of several shapes into one."""

import reprlib
from dataclasses import dataclass, replace
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
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Record:
    """One example as text: the turns (role, content) before the answer, and the answer."""

    messages: tuple[tuple[str, str], ...]
    response: str
    kind: str = ""  # the source's `type` field, such as MetaMathQA's GSM_AnsAug


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
