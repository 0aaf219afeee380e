"""Brings records of the shapes that people keep into one: a conversation and its answers.

Text columns in pairs (any of PROMPTS with any of ANSWERS; Alpaca's instruction + input + output),
`messages` (OpenAI's, ShareGPT's from/value, content in parts, tool turns), TRL's prompt and
completion as lists of messages. What no shape reads is named in `Record.unread`.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
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
# Who speaks, by other names (ShareGPT's, Gemini's).
SPEAKERS = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "observation": "tool", "function_call": "assistant",
}  # fmt: skip
OPENERS = ("system", "developer", "assistant")  # who can speak before anybody has asked

Message = dict[str, Any]


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


@dataclass(frozen=True)
class Record:
    """A conversation as a chat template takes it, and which of its turns are answers."""

    messages: tuple[Message, ...]
    """Turns with role, content and what else they have, up to the last answer."""
    answers: tuple[int, ...] = ()
    """Indices of the assistant's turns that may be trained on."""
    tools: tuple[Any, ...] = ()
    kind: str = ""
    """The source's `type` field, such as MetaMathQA's GSM_AnsAug."""
    unread: tuple[str, ...] = ()
    """Columns with a value that nothing of the above comes from."""
    read: tuple[str, ...] = ()
    """Columns that it does come from."""

    @property
    def last(self) -> int:
        """Index of the last turn, which is an assistant's."""
        return len(self.messages) - 1


class Fields:
    """The columns of a raw record that have a value, and which of them were read."""

    def __init__(self, raw: Any, columns: Columns):
        if isinstance(raw, bytes):
            raw = strict_json.parse(raw)
        if not isinstance(raw, Mapping):
            raise ValueError(f"is {_kind(raw)}, expected an object with {SHAPES}")
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


def normalize(
    raw: Any, columns: Columns | None = None, answers: Sequence[str] = ANSWERS
) -> Record:
    """A raw record as a Record that ends with an answer. `answers`: names of the column with the
    answer of a pair, the first that is there wins unless it belongs to the prompt's name.

    Raises ValueError with what is wrong, without the place.
    """
    fields = Fields(raw, columns or Columns())
    turns = _turns(fields, answers)
    spoken = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not spoken:
        role = shown(turns[-1]["role"])
        raise ValueError(f"ends with a {role} message: the response is missing")
    asked = next((i for i, turn in enumerate(turns) if turn["role"] not in OPENERS), len(turns))
    if spoken[-1] < asked:
        raise ValueError("has no user message before its last assistant message")
    weight = fields.take("weight")
    kept = [i for i in spoken if i > asked and _counts(turns[i].pop("weight", None))]
    tools, kind = _tools(fields.take("tools")), fields.take("type")
    unread = fields.unread()
    if len(turns) > spoken[-1] + 1:
        unread += ("turns after the last answer",)
    return Record(
        tuple(turns[: spoken[-1] + 1]), tuple(kept) if _counts(weight) else (), tools,
        str(kind) if isinstance(kind, str | int | float) else "", unread, fields.used(),
    )  # fmt: skip


def conversation(raw: Any, columns: Columns | None = None) -> list[Message]:
    """The turns of a raw record that a model is to answer: all before its last answer, or all."""
    turns = _turns(Fields(raw, columns or Columns()), None)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns:
        raise ValueError("has no user message")
    return [{k: v for k, v in turn.items() if k != "weight"} for turn in turns]


def question(raw: Any, columns: Columns | None = None) -> str | list[Message]:
    """What a raw record asks: a text where one user turn is all, else the turns so far."""
    turns = conversation(raw, columns)
    alone = len(turns) == 1 and turns[0]["role"] == "user" and len(turns[0]) == 2
    return turns[0]["content"] if alone else turns


def _turns(fields: Fields, answers: Sequence[str] | None) -> list[Message]:
    """All turns; `answers` None: a response may be missing."""
    explicit = fields.columns.roles
    paired = "messages" not in explicit and ("prompt" in explicit or "response" in explicit)
    found = None if paired else fields.take("messages")
    turns = _pair(fields, answers) if found is None else _messages(found, "messages")
    history = _history(fields.take("history"))
    if turns[0]["role"] != "system" and (system := fields.take("system")) is not None:
        text = _text(system, "system")
        history[:0] = [{"role": "system", "content": text}] if text.strip() else []
    turns = history + turns
    _check_strings(turns)
    return turns


def _pair(fields: Fields, answers: Sequence[str] | None) -> list[Message]:
    """The turns of a prompt and a response, each a text or TRL's list of messages."""
    prompt = fields.find("prompt")
    if prompt is None:
        answer = fields.find("response")
        if answer is not None:
            lacking = next((p for p, a in PAIRS if a == answer), "prompt")
            raise ValueError(f"has {answer!r} but no {lacking!r}: the prompt is missing")
        keys = reprlib.repr(sorted(map(str, fields.values)))
        raise ValueError(
            f"has none of {SHAPES}; its keys are {keys}: say what they are by "
            "--dataset.columns prompt=NAME,response=NAME"
        )
    turns = _messages(fields.value(prompt), prompt, "user")
    below = _below(fields, prompt)
    if below is not None and (text := _text(fields.value(below), below)).strip():
        turns[-1] = turns[-1] | {"content": f"{turns[-1]['content']}\n\n{text}"}
    answer = _answer_of(fields, prompt, answers or ANSWERS)
    if answer is not None and fields.value(answer) != []:
        return turns + _messages(fields.value(answer), answer, "assistant")
    if answers is None or turns[-1]["role"] == "assistant":
        return turns
    partner = next((a for p, a in PAIRS if p == prompt), "response")
    raise ValueError(f"has {prompt!r} but no {partner!r}: the response is missing")


def _below(fields: Fields, prompt: str) -> str | None:
    """The column whose text stands under the prompt's."""
    if (named := fields.find("input")) is not None or prompt != "instruction":
        return named
    return next((name for name in ("input", "context") if name in fields.values), None)


def _answer_of(fields: Fields, prompt: str, answers: Sequence[str]) -> str | None:
    if "response" in fields.columns.roles:
        return fields.find("response")
    partners = [a for p, a in PAIRS if p == prompt] if answers is ANSWERS else []
    return next((name for name in (*partners, *answers) if name in fields.values), None)


def _messages(value: Any, name: str, speaker: str | None = None) -> list[Message]:
    """Turns of a list of messages, which may stand in a text as JSON; or, with a speaker, of one
    text."""
    if isinstance(value, str) and speaker is None:
        try:
            value = json.loads(value)
        except ValueError:
            pass
    if speaker and not (isinstance(value, list) and any(map(_is_turn, value))):
        return [{"role": speaker, "content": _text(value, name)}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} must be a non-empty list of {{role, content}} objects")
    return [_message(message, number) for number, message in enumerate(value)]


def _is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} is {_kind(message)}, expected {{role, content}}")
    turn = {key: value for key, value in message.items() if value is not None}
    role = turn.pop("role", None) or turn.pop("from", None)
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {number} has role {reprlib.repr(role)}: say who speaks")
    content = turn.pop("content", None)
    content = turn.pop("value", None) if content is None else content
    if content is None and turn.get("tool_calls"):
        content = ""
    content = _text(content, f"content of message {number}")
    return {"role": SPEAKERS.get(role, role), "content": content, **turn}


def _history(value: Any) -> list[Message]:
    pairs = [] if value is None else value
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise ValueError("'history' must be a list of [prompt, response] pairs")
    who = ("user", "assistant")
    return [
        {"role": role, "content": _text(text, "history")}
        for pair in pairs
        for role, text in zip(who, pair, strict=True)
    ]


def _tools(value: Any) -> tuple[Any, ...]:
    """Tool descriptions as a template takes them; a text is JSON."""
    if isinstance(value, str):
        try:
            value = strict_json.parse(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f"'tools' {error}") from error
    if value is not None and not isinstance(value, list):
        raise ValueError(f"'tools' is {_kind(value)}, expected a list")
    _check_strings(value)
    return tuple(value or ())


def _counts(weight: Any) -> bool:
    """Whether a weight, as JSON or as text, is other than 0."""
    if isinstance(weight, str):
        weight = weight.strip().lower()
        return weight not in ("false", "no") and not re.fullmatch(r"[+-]?0*\.?0*", weight or "1")
    if weight is not None and not isinstance(weight, bool | int | float):
        raise ValueError(f"'weight' is {_kind(weight)}, expected a number")
    return weight is None or bool(weight)


def _text(value: Any, key: str) -> str:
    """A text; a number as it is written; the texts of content in parts."""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        kinds = [part.get("type", "text") for part in value]
        if odd := [kind for kind in kinds if kind not in ("text", "input_text", "output_text")]:
            raise ValueError(f"{key!r} has a part of type {odd[0]!r}: only text can be read")
        return "".join(_text(part.get("text"), key) for part in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {_kind(value)}, expected text")
    return value


def _check_strings(value: Any) -> None:
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
            _check_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_strings(item)


def shown(name: str) -> str:
    """Another's name, short and printable."""
    return (name if name.isprintable() else ascii(name))[:60]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "not text")
