"""Brings records of the shapes that people keep into one: a conversation and its answers.

Text columns in pairs (any of PROMPTS with any of ANSWERS; Alpaca's instruction + input + output),
`messages` (OpenAI's, ShareGPT's from/value, content in parts, tool turns), TRL's prompt and
completion as lists of messages. What no shape reads is named in `Record.unread`.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bwsft.data.columns import (
    ANSWERS,
    PAIRS,
    SHAPES,
    Columns,
    Fields,
    check_strings,
    kind_of,
    shown,
    text_of,
)
from bwsft.utils import strict_json

# Who speaks, by other names (ShareGPT's, Gemini's).
SPEAKERS = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "observation": "tool", "function_call": "assistant",
}  # fmt: skip
OPENERS = ("system", "developer", "assistant")  # who can speak before anybody has asked

TOOLS = "tools of the record"  # a field of a first turn that is passed on without its record

Message = dict[str, Any]


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
    turns, passed_on = turns_and_tools(turns)
    tools, kind = _tools(fields.take("tools")) or passed_on, fields.take("type")
    unread = fields.unread()
    if len(turns) > spoken[-1] + 1:
        unread += ("turns after the last answer",)
    return Record(
        tuple(turns[: spoken[-1] + 1]), tuple(kept) if _counts(weight) else (), tools,
        str(kind) if isinstance(kind, str | int | float) else "", unread, fields.used(),
    )  # fmt: skip


def conversation(raw: Any, columns: Columns | None = None) -> list[Message]:
    """The turns of a raw record that a model is to answer: all before its last answer, or all.
    The first one also has the record's tools, as TOOLS."""
    fields = Fields(raw, columns or Columns())
    turns, tools = _turns(fields, None), list(_tools(fields.take("tools")))
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns:
        raise ValueError("has no user message")
    turns = [{k: v for k, v in turn.items() if k != "weight"} for turn in turns]
    return [turns[0] | ({TOOLS: tools} if tools else {}), *turns[1:]]


def turns_and_tools(asked: str | Sequence[Message]) -> tuple[list[Message], tuple[Any, ...]]:
    """What `question` gives, as a chat template takes it."""
    turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    tools = tuple(tool for turn in turns for tool in turn.get(TOOLS, ()))
    return [{k: v for k, v in turn.items() if k != TOOLS} for turn in turns], tools


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
        text = text_of(system, "system")
        history[:0] = [{"role": "system", "content": text}] if text.strip() else []
    turns = history + turns
    check_strings(turns)
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
    if below is not None and (text := text_of(fields.value(below), below)).strip():
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
        return [{"role": speaker, "content": text_of(value, name)}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} must be a non-empty list of {{role, content}} objects")
    return [_message(message, number) for number, message in enumerate(value)]


def _is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} is {kind_of(message)}, expected {{role, content}}")
    turn = {key: value for key, value in message.items() if value is not None}
    role = turn.pop("role", None) or turn.pop("from", None)
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {number} has role {reprlib.repr(role)}: say who speaks")
    content = turn.pop("content", None)
    content = turn.pop("value", None) if content is None else content
    if content is None and turn:  # calls of tools, or reasoning alone
        content = ""
    content = text_of(content, f"content of message {number}")
    return {"role": SPEAKERS.get(role, role), "content": content, **turn}


def _history(value: Any) -> list[Message]:
    pairs = [] if value is None else value
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise ValueError("'history' must be a list of [prompt, response] pairs")
    who = ("user", "assistant")
    return [
        {"role": role, "content": text_of(text, "history")}
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
        raise ValueError(f"'tools' is {kind_of(value)}, expected a list")
    check_strings(value)
    return tuple(value or ())


def _counts(weight: Any) -> bool:
    """Whether a weight, as JSON or as text, is other than 0."""
    if isinstance(weight, str):
        weight = weight.strip().lower()
        return weight not in ("false", "no") and not re.fullmatch(r"[+-]?0*\.?0*", weight or "1")
    if weight is not None and not isinstance(weight, bool | int | float):
        raise ValueError(f"'weight' is {kind_of(weight)}, expected a number")
    return weight is None or bool(weight)
