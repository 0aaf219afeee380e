"""From a model's text to an answer, and from two answers to right or wrong: pure functions.

Two rules stand side by side. The ladder looks for the answer where models state it and compares
values; the strict rule is the one the Blockwise SFT paper describes (GSM8K: last number, equal as
a string; MATH: the whole output equals the reference), which also punishes "18.00" for "18" and
credits a number that merely stands last. Compare models under one rule, never across the two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from bwsft.evaluation.answer_leads import (
    HASHES,
    PROSE,
    STATEMENT,
    TAG,
    answer_lines,
    bare,
    below,
    rests,
)
from bwsft.evaluation.answer_scope import boxed_contents, one_mask, scopes
from bwsft.evaluation.numerals import (
    DAMAGED,
    find_numbers,
    format_number,
    numbers_in,
    plain,
    single_number,
)

RUNGS = ("statement", "boxed", "hashes", "tag", "answer_line", "display", "prose", "last_number",
         "none")

END_TOKENS = ("<|eot_id|>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|end|>", "<|eos|>",
              "<|eom_id|>", "<eos>", "<end_of_turn>", "</s>", "<｜end▁of▁sentence｜>", "[SEP]")
_END = re.compile("|".join(map(re.escape, END_TOKENS)))
_TURN = re.compile(
    r"<\|(?:im_start|start_header_id|start)\|>\s{0,4}(?:user|human|system)\b"
    r"|<\|(?:user|human)\|>|<start_of_turn>\s{0,4}user\b|\[INST\]")


class Extraction(NamedTuple):
    """`answer` is the text that is compared (None: none found), `rung` the rule that found it."""

    answer: str | None
    rung: str


def split_end(output: str) -> tuple[str, bool]:
    """The text before the first end token or invented turn, and whether it ended in the former.

    What is left of masks reads [MASK]; other special tokens go.
    """
    end, turn = _END.search(output), _TURN.search(output)
    cut = min((match.start() for match in (end, turn) if match), default=len(output))
    return one_mask(output[:cut]), end is not None and end.start() == cut


def numbers_equal(first: str | None, second: str | None) -> bool:
    """Equal as exact values: "18.0", "$18" and "18 dollars" are 18; 0.1 + 0.2 traps don't exist."""
    if first is None or second is None:
        return False
    value = single_number(first)
    return value is not None and value == single_number(second)


_WORDS_THEN_MATHS = re.compile(
    r"[^$\\0-9]{0,80}[A-Za-z]{2}[^$\\0-9]{0,20}(\$[^$]+\$|\\\(.+?\\\))")
# What may stand between "the answer is" and its number.
_MARKUP = re.compile(
    r"(?:[\s\\(\[*_{}$>:→~≈`]|[a-zA-Z]\s?=|(?i:about|approximately|around|exactly|simply|just|"
    r"therefore|thus|approx)\b)*")
_EQUATION = re.compile(
    r"\A(?:(?:[^A-Za-z=]|\\(?:times|cdot|div|d?frac)(?![a-z])|(?<=[0-9] )[xX](?= [0-9]))*=)+")
# What makes a number the first of several: "4, 6", "5 to 7", "2 hours and 30 minutes", "3 + 4".
_SEVERAL = re.compile(
    r"(?:[ \t]{1,3}[A-Za-z]{1,15}){0,2}[ \t$})]{0,3}(?:,[ \t]?(?:(?:and|or)\b)?|;|\b(?:and|or|to)\b"
    r"|[-+*/×÷·^_]|:(?!00\b)|\\(?:times|cdot|div|pm)(?![a-z]))[ \t]{0,3}[-$€£\\({]{0,3}[0-9]"
    r"|[ \t$]{0,3}(?:\\sqrt|\\pi|[√π])")


def _settled(fragment: str) -> str | None:
    """A fragment's number in its shortest form; the fragment itself if it holds several."""
    if not numbers_in(fragment) and DAMAGED not in plain(fragment):
        return None
    value = single_number(fragment)
    return fragment.strip() if value is None else format_number(value)


def _first_number(line: str, anywhere: bool) -> str | None:
    """The first number of a statement; unless `anywhere`, only markup may stand before it.

    Where it is the first of several ("4, 6"), or masks stand in it, the text itself: no number.
    """
    stated = (boxed_contents(line) or [line])[0]
    line = plain(stated)
    if anywhere:
        line = line.split("=")[-1]
    found = find_numbers(line)
    damaged = line.find(DAMAGED)
    start = found[0][0].start() if found else len(line)
    if damaged >= 0:
        start = min(start, damaged)
    if start == len(line) or not (anywhere or _MARKUP.fullmatch(line[:start])):
        return None
    if start == damaged or _SEVERAL.match(line, found[0][0].end()):
        return stated.strip()
    return format_number(found[0][1])


def _anywhere(line: str) -> str | None:
    return _first_number(line, anywhere=True)


def _leading(line: str) -> str | None:
    """The number that leads a line, or ends the equation without words that leads it."""
    return _first_number(_EQUATION.sub("", line), anywhere=False)


def _on_line(line: str) -> str | None:
    """The only number of an answer's line, or the one that leads it."""
    value = None if boxed_contents(line) else single_number(line)
    return _leading(line) if value is None else format_number(value)


Rung = tuple[str, list[str], Callable[[str], str | None]]


def _climb(text: str, rungs: Callable[[str], Iterable[Rung]]) -> Extraction:
    """The first part of a text with an answer gives it, on its first rung, at its last place."""
    for part in scopes(text):
        for rung, fragments, read in rungs(part):
            for fragment in reversed(fragments):
                if answer := read(fragment):
                    return Extraction(answer, rung)
    return Extraction(None, "none")


def _gsm8k_rungs(text: str) -> Iterable[Rung]:
    yield "statement", rests(text, STATEMENT), _anywhere
    yield "boxed", boxed_contents(text), _settled
    yield "hashes", HASHES.findall(text), _leading
    yield "tag", TAG.findall(text), _settled
    final, lines = answer_lines(text)
    yield "answer_line", final, _on_line
    yield "answer_line", lines, _leading
    yield "display", below(text), _on_line
    yield "prose", rests(text, PROSE), _leading  # "the answer is the sum of 5 and 6" has none
    text = plain(text)
    found = find_numbers(text)
    if found and DAMAGED not in text[found[-1][0].end() :]:
        yield "last_number", [format_number(found[-1][1])], str


def extract_gsm8k(text: str) -> Extraction:
    """The numeric answer of a text without end tokens; the first rung that holds a number wins.

    Rungs: "The answer is: N" (number after the last "=" of its line), the last box, "#### N", the
    last <answer> tag, "Answer: N", a line or display maths below an empty one of these leads, "the
    answer is N" in prose, the last number. Where a rung fires several times its last occurrence
    with a number counts; empty boxes and words are passed over. A rung with several numbers, or
    with masks between digits, gives its text, which equals no number.
    """
    return _climb(text, _gsm8k_rungs)


def _after_lead(line: str) -> str:
    """The mathematics of a line that a lead opens, without a preamble and the next sentence."""
    if boxes := boxed_contents(line):
        return bare(boxes[0])
    if inline := _WORDS_THEN_MATHS.match(line):
        return bare(inline[1])
    line = re.split(r"(?<=[^\s.])\.[*_]{0,3}\s+(?=[A-Z])", line)[0]
    return bare(re.sub(r"^[A-Z][^$\\=0-9]{1,80}\b(?:is|are|equals)\s+(?=[-+]?[0-9(.])", "", line))


def _no_sentence(line: str) -> str:
    """As `_after_lead`; nothing where four words in a row show that a solution begins."""
    answer = _after_lead(line)
    return "" if re.search(r"(?<![\\{a-zA-Z])(?:[A-Za-z]{2,20}[ ,]{1,2}){4}", answer) else answer


def _after_prose(line: str) -> str:
    """Maths that follows directly, $x$ or \\(x\\), or a number that leads its sentence."""
    if inline := re.match(r"[*_\s]*(\$.+?(?<!\\)\$|\\\(.+?\\\))", line):
        return bare(inline[1])
    sentence = bare(re.split(r"[.!,;](?:\s|$)", line)[0])
    leads = re.match(r"[-+]?\s?[$€£]?\.?[0-9]", sentence.replace("\\$", "$"))
    return sentence if leads and single_number(sentence) is not None else ""


def _math_rungs(text: str) -> Iterable[Rung]:
    yield "statement", rests(text, STATEMENT), _after_lead
    yield "boxed", boxed_contents(text), bare
    yield "tag", TAG.findall(text), bare
    for lines in answer_lines(text):
        yield "answer_line", lines, _no_sentence
    yield "display", below(text), _no_sentence
    yield "prose", rests(text, PROSE), _after_prose


def extract_math(text: str) -> Extraction:
    """The answer of a MATH output, as LaTeX without delimiters.

    Rungs: "The answer is: x" (its box, else the rest of the line), the last filled box (boxes of
    one list are joined), the last <answer> tag, "Answer: x", a line or display maths below an
    empty one of these leads, and in prose "the answer is" directly followed by $x$, \\(x\\) or a
    number.
    """
    return _climb(text, _math_rungs)


def reference_answer(text: str, task: str) -> str:
    """The answer that a reference text gives: a bare answer, or a worked solution that ends in one.

    Kept as written ("2,125", "18.50"): the strict rule compares strings.
    """
    if task == "math":
        found = extract_math(text)
        return found.answer if found.rung in ("statement", "boxed") else text.strip()
    stated = re.findall(rf"(?:{HASHES.pattern})|(?:{STATEMENT.pattern})([^\n]*)", text)
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
