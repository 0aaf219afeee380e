"""From a model's text to an answer, and from two answers to right or wrong: pure functions.

Two rules stand side by side. The ladder looks for the answer where models state it and compares
values; the strict rule is the one the Blockwise SFT paper describes (GSM8K: last number, equal as
a string; MATH: the whole output equals the reference), which also punishes "18.00" for "18" and
credits a number that merely stands last. Compare models under one rule, never across the two.
"""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_left
from fractions import Fraction
from typing import NamedTuple

RUNGS = ("statement", "boxed", "hashes", "tag", "prose", "last_number", "none")

END_TOKENS = ("<|eot_id|>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|end|>",
              "<|eos|>", "<eos>", "<end_of_turn>", "</s>")
_END = re.compile("|".join(map(re.escape, END_TOKENS)))
_SPECIAL = re.compile(r"<\|[^|<>\s]*\|>")


class Extraction(NamedTuple):
    """`answer` is the text that is compared (None: none found), `rung` the rule that found it."""

    answer: str | None
    rung: str


def split_end(output: str) -> tuple[str, bool]:
    """The text before the first end token, other special tokens removed, and whether it ended."""
    end = _END.search(output)
    text = output[: end.start()] if end else output
    return _SPECIAL.sub("", text), end is not None


_LOOKALIKES = str.maketrans({"−": "-", "‑": "-", "﹣": "-", "－": "-", "⁄": "/",
                             "\u00a0": " ", "\u202f": " ", "\u2009": " ", "，": ","})
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_LATEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!:; ]|,\\[,!:; ])(?=[0-9]{3}(?![0-9]))")
_LATEX_FRACTION = re.compile(
    r"([0-9])?\s*\\[dt]?frac\s*(?:\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9])([0-9]))")
# A sign counts only where no operand stands before it: "16-3" is a subtraction, "= -3" is not.
# Commas are thousands separators when three digits follow: "1,234.50", but "3, 4" and "3,45" are
# two numbers. A fraction needs its bar without spaces; "3 1/2" is a mixed number.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}%.])[-+])?[$€£]?(?P<inner>(?<=[$€£])-)?"
    r"(?P<whole>(?:[0-9]+(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:(?P<mixed> [0-9]+)?/(?P<denominator>0*[1-9][0-9]*)(?![0-9]|[/.][0-9]))?")
_UNIT_DETAIL = re.compile(r"(?<=[0-9]):00\b|(?<=[a-zA-Z}])\s*\^\s*\{?[0-9]\}?")
_NO_PLAIN_NUMBER = re.compile(r"\\(?:sqrt|pi)(?![a-z])|[√π]|\^(?!\s*\{?\s*\\circ)")


def _plain(text: str) -> str:
    """LaTeX and Unicode spellings of numbers as ASCII: 1{,}234 -> 1,234, 3\\frac{1}{2} -> 3 1/2."""
    text = text.translate(_LOOKALIKES)
    text = _VULGAR.sub(lambda m: " " + unicodedata.normalize("NFKC", m[0]), text).replace("⁄", "/")
    text = _LATEX_THOUSANDS.sub(",", text).replace("{.}", ".")
    text = text.replace(r"\$", "$").replace(r"\%", "%")

    def fraction(match: re.Match) -> str:
        whole, top, bottom, short_top, short_bottom = match.groups()
        joint = f"{whole} " if whole else ""
        return f"{joint}{top or short_top}/{bottom or short_bottom}"

    return _LATEX_FRACTION.sub(fraction, text)


def _value(match: re.Match) -> Fraction:
    whole = Fraction(match["whole"].replace(",", ""))
    if match["denominator"]:
        bottom = int(match["denominator"])
        whole = whole + Fraction(int(match["mixed"]), bottom) if match["mixed"] else whole / bottom
    negative = match["sign"] == "-" or match["inner"] is not None
    return -whole if negative else whole


def numbers_in(text: str) -> list[Fraction]:
    """All numbers of a text, in order and exact. Currency and percent signs are dropped."""
    return [_value(match) for match in _NUMBER.finditer(_plain(text))]


def single_number(fragment: str) -> Fraction | None:
    """The one number that a short answer states, units and words aside; after "=" if there is one.

    None without a number, with several ("4, 6", "48 - 10"), and with a root, a power or pi: that
    is no single number. Units may have powers (72 cm^2), and a full hour counts ("2:00 pm" is 2).
    """
    fragment = _UNIT_DETAIL.sub("", _plain(fragment))
    if _NO_PLAIN_NUMBER.search(fragment):
        return None
    found = numbers_in(re.split(r"=|\\approx|≈", fragment)[-1])
    return found[0] if len(found) == 1 else None


def format_number(value: Fraction) -> str:
    """Shortest exact text: "18", "-2.5", and "2/3" where no finite decimal exists."""
    bottom = value.denominator  # of a finite decimal it divides a power of 10
    places = range(bottom.bit_length())
    digits = bisect_left(places, True, key=lambda n: pow(10, n, bottom) == 0)
    if digits == len(places):
        return f"{value.numerator}/{bottom}"
    if digits == 0:
        return str(value.numerator)
    scaled = str(abs(value.numerator) * 10**digits // bottom).rjust(digits + 1, "0")
    return f"{'-' if value < 0 else ''}{scaled[:-digits]}.{scaled[-digits:]}"


def numbers_equal(first: str | None, second: str | None) -> bool:
    """Equal as exact values: "18.0", "$18" and "18 dollars" are 18; 0.1 + 0.2 traps don't exist."""
    if first is None or second is None:
        return False
    value = single_number(first)
    return value is not None and value == single_number(second)


_STATEMENT = re.compile(r"\banswer\s+is\s*:[ \t]*([^\n]*)", re.IGNORECASE)
_PROSE = re.compile(r"\banswer\s+is\b[ \t]*(?!:)([^\n]*)", re.IGNORECASE)
# Diffusion models lose characters: "boxed{5}" without its backslash is frequent in real outputs.
# The form without braces needs it: "she boxed 12 cookies" is prose.
_BOXED = re.compile(r"\\?\b(?:boxed|fbox)\s*\{|\\(?:boxed|fbox)\s*(?=[0-9$-])")
_TAG = re.compile(r"<answer>(.*?)(?=</|<answer>|\Z)", re.IGNORECASE | re.DOTALL)
# "#### 18", but neither of the Markdown headings "#### Step 1" and "#### 3. Add them".
_HASHES = re.compile(r"####[ \t]*(?![^\w\n]*[0-9]+[.:)][ \t]+\S)([^\w\n]*[0-9][^\n]*)")
_EMPTY_BOX = re.compile(r"\\?\b(?:boxed|fbox)\s*\{[\s.…]*\}")


def boxed_contents(text: str) -> list[str]:
    """What stands in \\boxed{...}, nested braces included, in order.

    A box that is never closed ends at its line or at the next tag.
    """
    contents = []
    for match in _BOXED.finditer(text):
        rest = text[match.end():]
        if match[0].endswith("{"):
            end = _closing_brace(rest)
            if end is None:
                end = re.search(r"\n|</|\Z", rest).start()
        else:
            end = re.search(r"[\s}]|\Z", rest).start()
        contents.append(rest[:end].strip())
    return contents


def _closing_brace(text: str) -> int | None:
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def _first_number(line: str, anywhere: bool) -> str | None:
    """The first number of a statement; unless `anywhere`, only markup may stand before it."""
    line = _plain((boxed_contents(line) or [line])[0])
    if anywhere:
        line = line.split("=")[-1]
    match = _NUMBER.search(line)
    if match is None or not (anywhere or re.fullmatch(r"[\s\\(\[*{$]*", line[: match.start()])):
        return None
    return format_number(_value(match))


def _settled(fragment: str) -> str:
    """A fragment's number in its shortest form; the fragment itself if it holds several."""
    value = single_number(fragment)
    return fragment.strip() if value is None else format_number(value)


def extract_gsm8k(text: str) -> Extraction:
    """The numeric answer of a text without end tokens; the first rung that holds a number wins.

    Rungs: "The answer is: N" (number after the last "=" of its line), the last box, "#### N", the
    last <answer> tag, "the answer is N" in prose, the last number. Where a rung fires several
    times its last occurrence with a number counts; empty boxes and words are passed over.
    """
    for line in reversed(_STATEMENT.findall(text)):
        if (number := _first_number(line, anywhere=True)) is not None:
            return Extraction(number, "statement")
    for rung, fragments in (("boxed", boxed_contents(text)), ("hashes", _HASHES.findall(text)),
                            ("tag", _TAG.findall(text))):
        for fragment in reversed(fragments):
            if numbers_in(fragment):
                return Extraction(_settled(fragment), rung)
    for line in reversed(_PROSE.findall(text)):
        # Prose goes on in many ways ("the answer is the sum of 5 and 6").
        if (number := _first_number(line, anywhere=False)) is not None:
            return Extraction(number, "prose")
    if found := numbers_in(text):
        return Extraction(format_number(found[-1]), "last_number")
    return Extraction(None, "none")


def _bare(fragment: str) -> str:
    """Mathematics without its delimiters ($, \\( \\)), placeholders and final stop."""
    fragment = _EMPTY_BOX.sub("", fragment)
    fragment = re.sub(r"(?<!\\)\$|(?<!\\)\\[()\[\]]", "", fragment)
    return fragment.strip().removesuffix(".").strip(" …\n")


def extract_math(text: str) -> Extraction:
    """The answer of a MATH output, as LaTeX without delimiters.

    Rungs: "The answer is: x" (its box, else the rest of the line), the last filled box, the last
    <answer> tag, and in prose "the answer is" directly followed by $x$ or \\(x\\).
    """
    statements = [(boxed_contents(line) or [line])[0] for line in _STATEMENT.findall(text)]
    inline = re.compile(r"\s*(\$.+?(?<!\\)\$|\\\(.+?\\\))")
    prose = [match[1] for line in _PROSE.findall(text) if (match := inline.match(line))]
    for rung, fragments in (("statement", statements), ("boxed", boxed_contents(text)),
                            ("tag", _TAG.findall(text)), ("prose", prose)):
        for fragment in reversed(fragments):
            if answer := _bare(fragment).strip("."):
                return Extraction(answer, rung)
    return Extraction(None, "none")


def reference_answer(text: str, task: str) -> str:
    """The answer that a reference text gives: a bare answer, or a worked solution that ends in one.

    Kept as written ("2,125", "18.50"): the strict rule compares strings.
    """
    if task == "math":
        found = extract_math(text)
        return found.answer if found.rung in ("statement", "boxed") else text.strip()
    stated = re.findall(rf"(?:{_HASHES.pattern})|(?i:{_STATEMENT.pattern})", text)
    return "".join(stated[-1]).strip() if stated else text.strip()


def strict_gsm8k(text: str, reference: str) -> bool:
    """Last number of the output, equal to the reference as a string.

    Commas between digits leave both sides: GSM8K's own references write 5,600 and 5600 alike.
    """
    bare = re.compile(r"(?<=[0-9]),(?=[0-9])")
    found = re.findall(r"-?[0-9]+(?:\.[0-9]+)?", bare.sub("", text))
    return bool(found) and found[-1] == bare.sub("", reference).strip()


def strict_math(text: str, reference: str) -> bool:
    """The whole output is the reference, white space at the ends aside; nothing is extracted."""
    return text.strip() == reference.strip()


def wilson(rate: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % score interval of a success rate over `count` independent questions.

    Chosen over the bootstrap: no random numbers, and right at 0 and 1 where a bootstrap collapses.
    """
    if count <= 0:
        raise ValueError("an interval needs at least one scored question")
    spread = z * z / count
    center = (rate + spread / 2) / (1 + spread)
    half = z * math.sqrt(rate * (1 - rate) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, center - half), min(1.0, center + half)
