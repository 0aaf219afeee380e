"""Renders conversations by the tokenizer's chat template, and turns them into token ids.

A conversation is rendered and tokenized as a whole. Its prompt is what the template prints with
add_generation_prompt, with the ids that `apply_chat_template` gives; its response is what the
template prints after that, up to the end of the assistant's turn. Special tokens count where the
template printed them: "<|eot_id|>" typed by a user stays text.
"""

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bwsft.data.outlines import Outlines
from bwsft.data.records import Message, Record, turns_and_tools
from bwsft.data.tokenizer import (
    encode,
    first_ids,
    merged_end_ids,
    parts_texts,
    special_tokens,
    template_environment,
    with_renamed_specials,
)
from bwsft.utils.config_check import assignments

NAMES = ("metamath", "chat", "none")
# The instruction of MetaMath, as one line before the blank line, as its code has it.
METAMATH = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{query}\n\n### Response: Let's think step by step."
)
# What a template that prints today's date prints (Llama 3.2's own fallback): the ids of a record
# must not depend on the day, or a run could neither go on tomorrow nor decode as it was trained.
TODAY = datetime.datetime(2024, 7, 26)
QUESTION, REPLY = "bwsft0slot", "bwsft1slot"  # contents whose place a rendering is searched for
# Private characters around the id of a special token that is only text, or that is a token.
SHIELD, MARK = "\U0010fffc", "\U0010fffd"
SHIELDED = re.compile(f"{SHIELD}([0-9]+){SHIELD}")

Prompt = str | Sequence[Message]


@dataclass(frozen=True)
class Prepared:
    """An example as text. `marked`: special tokens stand there by the names of
    `with_renamed_specials`, and any other text is only text."""

    prompt: str
    response: str
    marked: bool


class Template:
    """Renders and tokenizes the records of one data set.

    `name` is "metamath" (the instruction text as the user's turn), "chat" (the user's text as it
    is) or "none" (the user's text alone, no chat template). metamath does without a chat template
    where the tokenizer has none. `args`: arguments of the chat template, as
    "enable_thinking=false,style=brief". `end_id` ends every answer: the template's end of turn
    where it has one, else EOS; decoding stops at any of `end_ids`. `first_ids`, such as BOS, begin
    every prompt that no chat template writes.
    """

    def __init__(self, tokenizer: Any, name: str = "metamath", args: str | None = None):
        if name not in NAMES:
            raise ValueError(f"unknown template {name!r}; known are {', '.join(NAMES)}")
        if name == "chat" and not tokenizer.chat_template:
            raise ValueError(
                "this tokenizer has no chat template; use 'metamath' or 'none' (--dataset.template "
                "none)"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("this tokenizer has no EOS token; set its eos_token")
        self.tokenizer, self.name, self.args = tokenizer, name, parse_args(args)
        self._chat = name != "none" and bool(tokenizer.chat_template)
        # A tokenizer may have one template for conversations with tools and one for those without.
        kinds = (None, [{}]) if self._chat else ()
        self._sources = [on_one_day(tokenizer.get_chat_template(tools=kind)) for kind in kinds]
        self._outlines = self._chat and self._new_outlines()
        self._special = special_tokens(tokenizer)
        self._names = {number: text for text, (number, _, _) in self._special.items()}
        # A special token of one character has the id that this character has in a text.
        names = sorted((n for n in self._special if len(n) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._renamed: Any = None
        self._parting: dict[str, bool] = {}  # special token -> parts_texts
        self.first_ids = [] if self._chat else first_ids(tokenizer)
        self._end, self._tail, self.lead = self._find_end()
        self.end_id = self._special[self._end][0] if self._end else tokenizer.eos_token_id
        self.end_ids = merged_end_ids([self.end_id, tokenizer.eos_token_id])

    def prepare(self, record: Record, answer: int | None = None) -> Prepared:
        """Prompt and response of turn `answer` of a record (default: the last), for `tokenize`.
        ValueError with what is wrong where the template cannot take the record."""
        at = record.last if answer is None else answer
        return self._prepare(record.messages[: at + 1], record.tools, answered=True)

    def tokenize(self, prepared: Sequence[Prepared]) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, response ids with the end token) of each prepared example."""
        # The prompt is tokenized once: it ends, up to a few characters, where the text can be cut.
        cuts = [self._cut(p) for p in prepared]
        heads = [(p.prompt[:cut], p.marked) for p, cut in zip(prepared, cuts, strict=True)]
        tails = [replace(p, prompt=p.prompt[cut:]) for p, cut in zip(prepared, cuts, strict=True)]
        texts = {*heads, *((p.prompt, p.marked) for p in tails)}
        ids = self._text_ids(texts | {(p.prompt + p.response, p.marked) for p in tails})
        split = [self._split_ids(p, ids) for p in tails]
        # Where a token would reach over the border, the response is tokenized alone.
        alone = {(p.response, p.marked) for p, s in zip(tails, split, strict=True) if s is None}
        ids |= self._text_ids(alone)
        return [
            (
                [*self.first_ids, *ids[head], *ids[p.prompt, p.marked]],
                [*(ids[p.response, p.marked] if s is None else s), self.end_id],
            )
            for head, p, s in zip(heads, tails, split, strict=True)
        ]

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of what is to be answered: a question each, or the turns so far."""
        prepared = [self._prepare(*turns_and_tools(p), answered=False) for p in prompts]
        return [prompt for prompt, _ in self.tokenize(prepared)]

    def reads(self, name: str) -> bool:
        """Whether the chat template names a field of messages, or an argument such as tools."""
        return any(name in source for source in self._sources)

    def render(self, messages: Sequence[Message], tools: Sequence[Any], prompt: bool) -> str:
        """The text that the chat template prints; `prompt`: with the header of an answer."""
        if not tools and (known := self._outlines.text(messages, prompt)) is not None:
            return known
        try:
            printed = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False,
                add_generation_prompt=prompt, chat_template=self._sources[bool(tools)], **self.args,
            )  # fmt: skip
        except Exception as error:  # templates raise jinja's errors and whatever they call
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        if not tools:
            self._outlines.learn(messages, prompt, printed)
        return printed

    def _new_outlines(self) -> Outlines:
        """Of conversations without tools."""
        source, tokenizer = self._sources[False], self.tokenizer
        given = {"tools": None, "documents": None} | tokenizer.special_tokens_map | self.args
        environment = template_environment(tokenizer, source, self.args)
        return Outlines(source, environment, given)

    def _prepare(
        self, messages: Sequence[Message], tools: Sequence[Any], answered: bool
    ) -> Prepared:
        asked = messages[: len(messages) - answered]
        roles = tuple(turn["role"] for turn in asked)
        if self.name != "chat" and roles not in (("user",), ("system", "user")):
            raise ValueError(
                f"template {self.name!r} takes one user turn; use 'chat' (--dataset.template chat)"
            )
        if not self._chat and len(roles) > 1:
            raise ValueError("a system message needs a chat template")
        if self.name == "metamath":
            query = asked[-1] | {"content": METAMATH.format(query=asked[-1]["content"])}
            asked = [*asked[:-1], query]
        if not self._chat:
            texts = asked[-1]["content"], messages[-1]["content"] if answered else ""
            marked = any(map(self._pattern.search, texts))
            if marked and MARK in "".join(texts):
                raise ValueError("contains U+10FFFD beside special tokens: take one of them out")
            return Prepared(*texts, marked)
        return self._render_pair([*asked, *messages[len(asked) :]], tools, len(asked))

    def _render_pair(self, turns: list[Message], tools: Sequence[Any], asked: int) -> Prepared:
        (safe, safe_tools), shielded = self._shield((turns, list(tools)))
        prompt = self.render(safe[:asked], safe_tools, prompt=True)
        if shielded and self.render(turns[:asked], tools, True) != self._unshield(prompt):
            raise ValueError("the chat template acts on special tokens in the text of messages")
        response = ""
        if asked < len(safe):
            whole = self.render(safe, safe_tools, prompt=False)
            response = self._response(prompt, whole, safe[-1])
        if shielded:
            prompt, response = map(self._mark, (prompt, response))
        return Prepared(prompt, response, shielded)

    def _shield(self, value: Any) -> tuple[Any, bool]:
        """Messages with a private name for every special token in their texts, so that those that
        a rendering has are the template's; and whether there was any."""
        if isinstance(value, str):
            safe = self._pattern.sub(lambda m: f"{SHIELD}{self._special[m[0]][0]}{SHIELD}", value)
            if safe != value and (SHIELD in value or MARK in value):
                raise ValueError("contains U+10FFFC or U+10FFFD beside special tokens")
            return safe, safe != value
        if isinstance(value, dict):
            keys, values = self._shield(list(value)), self._shield(list(value.values()))
            return dict(zip(keys[0], values[0], strict=True)), keys[1] or values[1]
        if isinstance(value, list | tuple):
            items = [self._shield(item) for item in value]
            return [item for item, _ in items], any(found for _, found in items)
        return value, False

    def _unshield(self, text: str) -> str:
        return SHIELDED.sub(lambda m: self._names[int(m[1])], text)

    def _mark(self, text: str) -> str:
        """A shielded rendering with the template's special tokens by their private names."""
        marked = self._pattern.sub(lambda m: f"{MARK}{self._special[m.group()][0]}{MARK}", text)
        return self._unshield(marked)

    def _response(self, prompt: str, whole: str, message: Message) -> str:
        """What the template prints of an answer after the prompt, without its end."""
        body, content = self._before_end(whole), message["content"].strip()
        if body is None:
            raise ValueError("the chat template does not end the answer as it ends others")
        if body.startswith(prompt):
            response = body[len(prompt) :]
            near = prompt[-len(content) :] + response  # whose start the prompt may have
            if "".join(content.split()) not in "".join(near.split()):
                raise ValueError("the chat template rewrites the text of the answer")
            # A block that the template makes up (Qwen3's empty <think>) and no decoder sends is
            # left out, unless the answer has one; blanks belong to the answer.
            made_up = self.lead.strip() and response.startswith(self.lead)
            own = content.startswith(self.lead.strip())
            return response[len(self.lead) :] if made_up and not own else response
        # The prompt goes on where the answer does not (an opened <think>).
        if not content or not body.rstrip().endswith(content):
            raise ValueError("the chat template rewrites the text of the answer")
        return body.rstrip()[-len(content) :]

    def _before_end(self, whole: str) -> str | None:
        """A rendering up to the end of its last answer, None if that comes too early."""
        if not self._end:
            return whole[: len(whole) - len(self._tail)] if whole.endswith(self._tail) else None
        at = whole.rfind(self._end)
        if at < 0:
            return None
        return whole[:at].rstrip() if self._special[self._end][1] else whole[:at]

    def _find_end(self) -> tuple[str | None, str, str]:
        """(special token that ends an answer, text that does where none does, what the template
        prints between a prompt and an answer)."""
        if not self._chat:
            return None, "", ""
        user, reply = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": REPLY}
        prompt, whole = self.render([user], (), True), self.render([user, reply], (), False)
        before, found, tail = whole.rpartition(REPLY)
        if QUESTION not in prompt or QUESTION not in before or not found:
            raise ValueError("the chat template doesn't print every message")
        match = self._pattern.match(tail.lstrip())
        lead = before[len(prompt) :] if before.startswith(prompt) else ""
        return match and match.group(), tail, lead

    def _cut(self, prepared: Prepared) -> int:
        """Where the prompt's last special token begins, if no token reaches over that place."""
        found = [] if prepared.marked else list(self._pattern.finditer(prepared.prompt))
        if not found:
            return 0
        name = found[-1][0]
        if name not in self._parting:
            self._parting[name] = parts_texts(self.tokenizer, name)
        return found[-1].start() if self._parting[name] else 0

    def _split_ids(self, prepared: Prepared, ids: dict) -> list[int] | None:
        """Ids of the response within the whole, None if its first token began in the prompt."""
        prompt = ids[prepared.prompt, prepared.marked]
        whole = ids[prepared.prompt + prepared.response, prepared.marked]
        return whole[len(prompt) :] if whole[: len(prompt)] == prompt else None

    def _text_ids(self, texts: set[tuple[str, bool]]) -> dict[tuple[str, bool], list[int]]:
        found: dict[tuple[str, bool], list[int]] = {}
        for kind in (False, True):
            some = [text for text, marked in texts if marked == kind]
            if kind and some and self._renamed is None:
                self._renamed = with_renamed_specials(self.tokenizer, MARK)
            backend = self._renamed if kind else self.tokenizer.backend_tokenizer
            if some:
                found |= zip(((text, kind) for text in some), encode(backend, some), strict=True)
        return found


def on_one_day(template: str) -> str:
    """A chat template with TODAY where it would print the day of its use."""
    fixed = re.sub(
        r"""strftime_now\(\s*(?P<quote>['"])(.*?)(?P=quote)\s*\)""",
        lambda call: repr(TODAY.strftime(call[2])), template,
    )  # fmt: skip
    if re.search(r"strftime_now\s*\(", fixed):
        raise ValueError("the chat template prints the date by a format that it makes up itself")
    return fixed


def parse_args(text: str | None) -> dict[str, Any]:
    """Arguments of a chat template from "name=value,...": values that are JSON, or else text."""
    args = {}
    for name, value in assignments(text, "--dataset.template-args"):
        try:
            args[name] = json.loads(value)
        except ValueError:
            args[name] = value
    return args
