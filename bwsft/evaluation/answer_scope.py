"""Which part of an output may hold its answer, and the boxes in it: pure functions, linear in time.

The answer stands after the last thought and before the next question that the model invented.
"""

from __future__ import annotations

import re
from itertools import zip_longest

from bwsft.evaluation.numerals import MASK, fold, whole_number

_RESIDUE = re.compile(
    r"(?:<\|(?!/?think|(?:begin|end)_of_thought)[^|<>\s]{1,60}\|>|<mask>|\[mask\])+", re.IGNORECASE)
_THOUGHT = re.compile(
    r"<(/?)\s?(?:think|thinking|thoughts?|seed:think)\s?>|◁(/?)think▷|\[(/?)THINK\]"
    r"|<\|(/?)think\|>|<\|(?:begin|(end))_of_thought\|>", re.IGNORECASE)
_WHO = r"(?i:question|problem|query|user|human|instruction)|Q"
_QUESTION = re.compile(
    # At the start of a line: "Question 2:", "### Instruction", "**Q:**", "Next problem:", "User:".
    r"^[ \t]{0,8}[#*_>\[ ]{0,8}(?:(?i:next|new|another|second|follow-up|similar)[ \t])?"
    rf"(?:{_WHO})(?![A-Za-z])[ \t]?#?[0-9]{{0,4}}[*_\]]{{0,3}}[ \t]?(?::|\.[ \t]|\)|$)"
    # Run on to the answer: "18Question: Ann has", "18### Instruction".
    r"|(?<=[0-9.)\]}$%!])[ \t]{0,2}(?:(?:Question|Problem|Q|User|Human)[ \t]?[0-9]{0,4}:"
    r"|#{2,4}[ \t]?(?:Question|Problem|User|Human|Instruction)(?![A-Za-z]))",
    re.MULTILINE)
# After "#### 18", the end of a GSM8K solution, a line that asks something.
_AFTER_HASHES = re.compile(
    r"^####[ \t]{0,4}(?![^\w\n]{0,8}[0-9]+[.:)][ \t])[^\w\n]{0,8}[0-9][^\n?]{0,40}"
    r"(?=\n\s{0,8}[^\n?]{1,2000}\?)", re.MULTILINE)

# Diffusion models lose characters: "boxed{5}" without its backslash is frequent in real outputs.
# The form without braces needs it: "she boxed 12 cookies" is prose.
_BOX = re.compile(r"\\?\b(?:boxed|fbox)\s{0,4}\{|\\(?:boxed|fbox)\s{0,4}(?=[0-9$-])")
_EMPTY_BOX = re.compile(
    rf"\\?\b(?:boxed|fbox)\s{{0,4}}\{{(?:[\s.…]|{re.escape(MASK)})*\}}")
_UNCLOSED_END = re.compile(r"\n|</|\Z")
_BARE_END = re.compile(r"[\s}]|\Z")
# What may stand between two boxes of one list: "and", a comma, and the name of an unknown.
_JOINT = re.compile(r"(?:[,;&]|,?(?i:and|or))(?:[a-zA-Z](?:_?[0-9])?(?:=|\\in))?")
_LAYOUT = re.compile(
    r"\\(?:text|mbox|mathrm|textrm)(?![a-z])|\\q?quad(?![a-z])|\\[()\[\],;:! ]|[\s${}*~]")


def one_mask(text: str) -> str:
    """One spelling of masks, [MASK], and no other special tokens.

    Between two digits any special token counts as a mask: it must not glue them.
    """

    def residue(match: re.Match) -> str:
        around = text[match.start() - 1 : match.start()] + text[match.end() : match.end() + 1]
        parts = len(around) == 2 and around.isdecimal()
        return MASK if parts or "mask" in match[0].lower() else ""

    return _RESIDUE.sub(residue, text)


def scopes(text: str) -> list[str]:
    """The parts of a text that may hold its answer, folded and without empty boxes.

    The first part that holds an answer gives it.

    They follow the last closed thought (one that stays open holds no answer) and each starts at a
    question: all but the first part with an answer are the model's inventions.
    """
    text = _EMPTY_BOX.sub(" ", fold(one_mask(text)))
    marks = list(_THOUGHT.finditer(text))
    closed = [index for index, mark in enumerate(marks) if any(mark.groups())]
    start = marks[closed[-1]].end() if closed else 0
    opened = marks[closed[-1] + 1 :] if closed else marks
    text = text[start : opened[0].start() if opened else len(text)]
    cuts = {match.start() for match in _QUESTION.finditer(text)}
    cuts |= {match.end() for match in _AFTER_HASHES.finditer(text)}
    places = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


def _box_spans(text: str) -> list[tuple[int, int, int]]:
    """(start of \\boxed, start and end of its contents) of each box that holds no other box.

    One that is never closed ends at its line, at the next tag, or at the next box.
    """
    closing, opened = {}, []
    for match in re.finditer(r"\\[^a-zA-Z]|[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    boxes = list(_BOX.finditer(text))
    spans = []
    for box, after in zip_longest(boxes, boxes[1:]):
        limit = after.start() if after else len(text)
        if box[0].endswith("{"):
            end = closing.get(box.end() - 1)
            if end is None:
                end = _UNCLOSED_END.search(text, box.end(), limit).start()
        else:
            end = _BARE_END.search(text, box.end(), limit).start()
        if end <= limit:
            spans.append((box.start(), box.end(), end))
    return spans


def boxed_contents(text: str) -> list[str]:
    """What stands in \\boxed{...}, nested braces included, in order.

    Boxes that a comma, "and" or "or" joins hold one list: "x = \\boxed{3} or x = \\boxed{5}" gives
    "3, 5". Spellings of one value count once.
    """
    lists: list[list[str]] = []
    before = 0
    for start, inner, end in _box_spans(text):
        gap = _LAYOUT.sub("", text[before:start].lstrip("}")) if start - before < 80 else ""
        if lists and _JOINT.fullmatch(gap):
            lists[-1].append(text[inner:end].strip())
        else:
            lists.append([text[inner:end].strip()])
        before = end
    return [", ".join({_key(part): part for part in parts}.values()) for parts in lists]


def _key(part: str) -> object:
    value = whole_number(part)
    return part if value is None else value
