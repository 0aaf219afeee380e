"""Where an output states its answer: the leads before it, and what stands after and below them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import zip_longest

from bwsft.evaluation.numerals import MASK

# Leads: an answer follows on the same line or, where that is empty, below it.
STATEMENT = re.compile(r"(?i:\banswer\s{1,4}is[*_]{0,3}\s{0,4}:)[*_ \t]{0,6}")
ANSWER_LINE = re.compile(
    r"(?i:(?<![a-z])(?:final[ \t])?(?:answer|ans|réponse|respuesta|resposta|risposta|antwort|"
    r"ответ|答案)"
    r"(?:[ \t]?\([^()\n]{1,40}\)|[ \t]in[ \t][^:\n]{1,24})?[*_]{0,3}[ \t]{0,4}:)[*_ \t]{0,6}"
    r"|^[#>*_ \t-]{0,12}(?i:final[ \t](?:answer|result)|answer|ans|result)\b[*_ \t]{0,6}"
    r"(?:(?:->|[-=—→]|:)[*_ \t]{0,6}|(?=\n))"
    r"|^[#>*_ \t-]{0,12}(?:Ans\.|A:)[*_ \t]{0,6}", re.MULTILINE)
PROSE = re.compile(
    r"(?i:\banswer\s{1,4}(?:is|would\sbe|will\sbe)\b)(?![*_]{0,3}\s{0,4}:)[*_ \t]{0,6}")
TAG = re.compile(
    r"[<\[]answer[>\]](.*?)(?=</|\[/|[<\[]answer[>\]]|\Z)", re.IGNORECASE | re.DOTALL)
# "#### 18", but neither of the Markdown headings "#### Step 1" and "#### 3. Add them".
HASHES = re.compile(r"####\s{0,4}(?![^\w\n]{0,20}[0-9]+[.:)][ \t]+\S)([^\w\n]{0,20}[0-9][^\n]*)")
_DISPLAY = re.compile(
    r"\s{0,20}(?:\\\[(.{1,1000}?)\\\]|\$\$(.{1,1000}?)\$\$"
    r"|\\begin\{(?:equation|align|gather)\*?\}(.{1,1000}?)\\end\{)", re.DOTALL)
_REST = re.compile(r"[^\n]*")
_LINE = re.compile(r"\s{0,20}([^\n]{0,1000})")


def bare(fragment: str) -> str:
    """Mathematics without its delimiters ($, \\( \\)), bold, masks at its ends and final stop."""
    fragment = re.sub(r"(?<!\\)\$|(?<!\\)\\[()\[\]]|\*\*|`", "", fragment).strip()
    parts = fragment.split(MASK)
    filled = [index for index, part in enumerate(parts) if part.strip()]
    fragment = MASK.join(parts[filled[0] : filled[-1] + 1]).strip() if filled else ""
    # ".5" keeps its point.
    return re.sub(r"\A(?:[\s*]|\.(?![0-9]))+", "", fragment.rstrip(" .…*\n"))


def _after(text: str, lead: re.Pattern) -> Iterable[tuple[re.Match, re.Match, int]]:
    """Each place of a lead, what follows it on its line, and where the next place is."""
    places = list(lead.finditer(text))
    for place, following in zip_longest(places, places[1:]):
        limit = following.start() if following else len(text)
        yield place, _REST.match(text, place.end(), limit), limit


def rests(text: str, lead: re.Pattern) -> list[str]:
    return [rest[0] for _, rest, _ in _after(text, lead)]


def answer_lines(text: str) -> tuple[list[str], list[str]]:
    """What follows "Final answer:", and what follows "Answer:".

    An "Answer:" that opens a text and goes on below introduces a solution, unless it is short.
    """
    final, other = [], []
    for index, (place, rest, _) in enumerate(_after(text, ANSWER_LINE)):
        opens = index == 0 and not text[: place.start()].strip() and text[rest.end() :].strip()
        if "final" in place[0].lower():
            final.append(rest[0])
        elif not opens or (len(rest[0].split()) < 5 and "=" not in rest[0]):
            other.append(rest[0])
    return final, other


def below(text: str) -> list[str]:
    """What stands under a lead that says nothing on its line: display maths, or else a line."""
    found = []
    for lead in (PROSE, ANSWER_LINE, STATEMENT):
        for _, rest, limit in _after(text, lead):
            empty = not bare(rest[0])
            if not empty and not re.fullmatch(r"[a-z ]{1,30}:?\s?", rest[0]):
                continue
            if display := _DISPLAY.match(text, rest.start() if empty else rest.end(), limit):
                found.append(next(filter(None, display.groups())))
            elif empty:
                found.append(_LINE.match(text, rest.end(), limit)[1])
    return found
