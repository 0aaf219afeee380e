"""Renders prompts and answers through a chat template, and turns them into token ids.

Prompt and answer are tokenized apart. A rendered prompt is cut at the special tokens that the
template itself printed; everything between them, the messages included, is tokenized with special
tokens switched off. So "<|eot_id|>" typed by a user stays text, and benign text gets the same ids
that `apply_chat_template` gives.
"""

import itertools
import re
from typing import Any

from bwsft.data.records import Record
from bwsft.data.tokenizer import merged_end_ids, special_tokens

NAMES = ("metamath", "chat", "none")
# The instruction of MetaMath, as one line before the blank line, as its code has it.
METAMATH = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{query}\n\n### Response: Let's think step by step."
)
# Different on both sides, so that a template's trimming of either side can be told apart.
PAD_LEFT, PAD_RIGHT = "\t ", " \n"


class Template:
    """Renders and tokenizes the records of one data set.

    `name` is "metamath" (the instruction text as the user's turn), "chat" (the user's text as it
    is) or "none" (the user's text alone, no chat template). metamath does without a chat template
    where the tokenizer has none. `end_id` ends every answer: the template's end of turn where it
    has one, else EOS; decoding stops at any of `end_ids`.
    """

    def __init__(self, tokenizer: Any, name: str = "metamath"):
        if name not in NAMES:
            raise ValueError(f"unknown template {name!r}; known are {', '.join(NAMES)}")
        if name == "chat" and not tokenizer.chat_template:
            raise ValueError("this tokenizer has no chat template; use 'metamath' or 'none'")
        if tokenizer.eos_token_id is None:
            raise ValueError("this tokenizer has no EOS token; set its eos_token")
        self.tokenizer, self.name = tokenizer, name
        self._chat = name != "none" and bool(tokenizer.chat_template)
        self._special = special_tokens(tokenizer)
        blanks, parts = {False: "", True: r"\s*"}, []
        for text in sorted(self._special, key=len, reverse=True):
            _, left, right = self._special[text]
            parts.append(blanks[left] + re.escape(text) + blanks[right])
        self._pattern = re.compile("|".join(parts) or r"(?!)")
        self._layouts: dict[tuple[str, ...], tuple[list[str], list[tuple[bool, bool]]]] = {}
        self.end_id, self._answer_trim = self._find_end()
        self.end_ids = merged_end_ids([self.end_id, tokenizer.eos_token_id])

    def prepare(self, record: Record) -> tuple[list[str | int], str]:
        """(prompt as texts and special ids, answer text), ready for `tokenize`. Raises ValueError
        with what is wrong where the template can't take the record."""
        answer = _trim(record.response, self._answer_trim) if self._chat else record.response
        return self._segments(*self._assemble(record.messages)), answer

    def tokenize(self, prepared: list[tuple[list[str | int], str]]) -> list[tuple[list, list]]:
        """(prompt ids, response ids with the end token) of each prepared record."""
        texts = [part for prompt, _ in prepared for part in prompt if isinstance(part, str)]
        ids = self._text_ids([*texts, *(answer for _, answer in prepared)])
        return [
            (
                [i for part in prompt for i in (ids[part] if isinstance(part, str) else (part,))],
                [*ids[answer], self.end_id],
            )
            for prompt, answer in prepared
        ]

    def encode_prompts(self, queries: list[str]) -> list[list[int]]:
        """Prompt ids of bare questions, for decoding."""
        prepared = [self.prepare(Record((("user", query),), "")) for query in queries]
        return [prompt for prompt, _ in self.tokenize(prepared)]

    def _text_ids(self, texts: list[str]) -> dict[str, list[int]]:
        unique = list(dict.fromkeys(texts))
        if not unique:
            return {}
        encoded = self.tokenizer(
            unique, add_special_tokens=False, split_special_tokens=True,
            return_attention_mask=False, return_token_type_ids=False, verbose=False,
        )  # fmt: skip
        return dict(zip(unique, encoded["input_ids"], strict=True))

    def _assemble(self, messages: tuple[tuple[str, str], ...]) -> tuple[list[str], list[str]]:
        """Template texts around the messages, and the messages as the template prints them."""
        roles, contents = zip(*messages, strict=True)
        if self.name != "chat" and roles not in (("user",), ("system", "user")):
            raise ValueError(f"template {self.name!r} takes one user turn; use 'chat'")
        if not self._chat and len(roles) > 1:
            raise ValueError("a system message needs a chat template")
        if self.name == "metamath":
            contents = (*contents[:-1], METAMATH.format(query=contents[-1]))
        if not self._chat:
            return ["", ""], list(contents)
        if roles not in self._layouts:
            self._layouts[roles] = self._layout(roles, answer=False)
        pieces, trims = self._layouts[roles]
        contents = [_trim(text, trim) for text, trim in zip(contents, trims, strict=True)]
        if len(roles) > 1:
            # A layout knows nothing of templates that edit earlier turns (dropping their
            # reasoning, say); one real rendering does.
            whole = "".join(a + b for a, b in zip(pieces, [*contents, ""], strict=True))
            if self._render(roles, contents, answer=False) != whole:
                raise ValueError("the chat template rewrites the text of these messages")
        return pieces, contents

    def _segments(self, pieces: list[str], contents: list[str]) -> list[str | int]:
        """Texts and special ids in turn. Only `pieces`, the template's own text, is searched."""
        segments: list[str | int] = []
        text = ""
        for piece, content in zip(pieces, [*contents, ""], strict=True):
            at = 0
            for match in self._pattern.finditer(piece):
                text += piece[at : match.start()]
                segments += [text] if text else []
                segments.append(self._special[match.group().strip()][0])
                text, at = "", match.end()
            text += piece[at:] + content
        return segments + ([text] if text else [])

    def _layout(
        self, roles: tuple[str, ...], answer: bool
    ) -> tuple[list[str], list[tuple[bool, bool]]]:
        """The template's text around each message (one piece more than messages), and whether it
        trims each message (left, right). Found with markers instead of contents, because a
        template may print an assistant header whatever `add_generation_prompt` says (LLaDA's)."""
        marks = [f"bwsft{i}slot" for i in range(len(roles))]
        plain = _split(self._render(roles, marks, answer), marks)
        padded = [PAD_LEFT + mark + PAD_RIGHT for mark in marks]
        padded, keeps = _split(self._render(roles, padded, answer), marks), []
        for before, after in zip(plain, padded, strict=True):
            options = itertools.product((False, True), repeat=2)  # of the right and the left blanks
            fits = [o for o in options if PAD_RIGHT * o[0] + before + PAD_LEFT * o[1] == after]
            if not fits:
                raise ValueError("the chat template changes the blanks around its messages")
            keeps.append(fits[0])
        return plain, [(not keeps[i][1], not keeps[i + 1][0]) for i in range(len(roles))]

    def _render(self, roles: tuple[str, ...], contents: list[str], answer: bool) -> str:
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not answer
            )
        except Exception as error:  # templates raise jinja's errors and whatever they call
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def _find_end(self) -> tuple[int, tuple[bool, bool]]:
        """The id that follows an assistant message, and the trimming of that message."""
        if not self._chat:
            return self.tokenizer.eos_token_id, (False, False)
        pieces, trims = self._layout(("user", "assistant"), answer=True)
        match = self._pattern.match(pieces[-1].lstrip())
        end = self._special[match.group().strip()][0] if match else self.tokenizer.eos_token_id
        return end, trims[-1]


def _split(text: str, marks: list[str]) -> list[str]:
    pieces = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            raise ValueError("the chat template doesn't print every message once and in order")
        pieces.append(before)
    return [*pieces, text]


def _trim(text: str, trim: tuple[bool, bool]) -> str:
    text = text.lstrip() if trim[0] else text
    return text.rstrip() if trim[1] else text
