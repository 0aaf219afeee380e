"""The columns of a raw record: which is what, which were read, and what their values are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bwsft.utils import strict_json
from bwsft.utils.config_check import assignments

# Pairs that belong together come first (MetaMathQA, GSM8K, MATH, ...); else any goes with any.
PAIRS = (
    ("query", "response"),
    ("question", "answer"),
    ("problem", "solution"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("input", "output"),
)
PROMPTS = tuple(dict.fromkeys(prompt for prompt, _ in PAIRS))
ANSWERS = tuple(dict.fromkeys(answer for _, answer in PAIRS))
SHAPES = ", ".join("/".join(pair) for pair in PAIRS) + " or messages"
# What --dataset.columns can say that a column is, and the names that say so by themselves.
ROLES = {
    "prompt": PROMPTS,
    "response": ANSWERS,
    "input": (),  # text under the prompt; Alpaca's input and Dolly's context where there is one
    "messages": ("messages", "conversations", "conversation"),
    "system": ("system", "system_prompt"),
    "history": ("history",),  # earlier (prompt, response) pairs
    "tools": ("tools",),
    "weight": ("weight",),  # false or 0: not trained on
    "type": ("type",),
}


@dataclass(frozen=True)
class Columns:
    """Which column is what, where its name does not say so, and which are not to be read."""

    roles: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str | None) -> "Columns":
        """Of "prompt=q,response=a,ignore=url"; names of ROLES, or one of those that they stand
        for (query=q). ValueError for any other, and for a role given twice."""
        known = {name: role for role, names in ROLES.items() for name in names}
        known |= {role: role for role in ROLES}
        roles, ignored = {}, set()
        for name, column in assignments(text, "--dataset.columns"):
            if name == "ignore":
                ignored.add(column)
            elif name not in known:
                raise ValueError(
                    f"--dataset.columns: {name!r} is nothing that a column can be; known are "
                    f"{', '.join(ROLES)} and ignore"
                )
            elif known[name] in roles:
                raise ValueError(f"--dataset.columns names two columns for {known[name]}")
            else:
                roles[known[name]] = column
        return cls(roles, frozenset(ignored))


class Fields:
    """The columns of a raw record that have a value, and which of them were read."""

    def __init__(self, raw: Any, columns: Columns):
        if isinstance(raw, bytes):
            raw = strict_json.parse(raw)
        if not isinstance(raw, Mapping):
            raise ValueError(f"is {kind_of(raw)}, expected an object with {SHAPES}")
        if missing := [name for name in columns.roles.values() if name not in raw]:
            raise ValueError(f"has no column {missing[0]!r}, which --dataset.columns names")
        self.values = {key: value for key, value in raw.items() if value is not None}
        self.columns, self.read = columns, set(columns.ignored)

    def find(self, role: str) -> str | None:
        """The column that plays a role: the one that --dataset.columns names, or by its name."""
        named = self.columns.roles.get(role)
        names = ROLES[role] if named is None else (named,)
        return next((name for name in names if name in self.values), None)

    def take(self, role: str) -> Any:
        """The value of the column that plays a role, None where there is none."""
        name = self.find(role)
        return None if name is None else self.value(name)

    def value(self, name: str) -> Any:
        self.read.add(name)
        return self.values[name]

    def used(self) -> tuple[str, ...]:
        names = (name for name in self.values if name in self.read - self.columns.ignored)
        return tuple(shown(str(name)) for name in names)

    def unread(self) -> tuple[str, ...]:
        empty = ("", [], {})
        found = (k for k, v in self.values.items() if k not in self.read and v not in empty)
        return tuple(shown(str(name)) for name in found)


def text_of(value: Any, key: str) -> str:
    """A text; a number as it is written; the texts of content in parts."""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        kinds = [part.get("type", "text") for part in value]
        if odd := [kind for kind in kinds if kind not in ("text", "input_text", "output_text")]:
            raise ValueError(f"{key!r} has a part of type {odd[0]!r}: only text can be read")
        return "".join(text_of(part.get("text"), key) for part in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key!r} is {value}, which is no number and no text")
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {kind_of(value)}, expected text")
    return value


def check_strings(value: Any) -> None:
    """ValueError for half of a surrogate pair in any text within."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            shown = value[max(error.start - 20, 0) : error.start]
            raise ValueError(
                f"contains half of a surrogate pair, not valid text, after {shown!r}"
            ) from error
    elif isinstance(value, Mapping):
        for item in value.items():
            check_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            check_strings(item)


def shown(name: str) -> str:
    """Another's name, short and printable."""
    return (name if name.isprintable() else ascii(name))[:60]


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "not text")
