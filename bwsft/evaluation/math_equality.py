"""When two MATH answers are the same: by spelling, by exact value, then by math-verify.

math-verify (sympy underneath) can hang or eat memory on what a model writes ("9^{9^{9}}"), and its
own time limit needs SIGALRM, which only a main thread may use. So it runs in a child process that
reads questions line by line and is killed and replaced when an answer takes too long: any thread
may call it, and no output can stop an evaluation.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from fractions import Fraction

from bwsft.evaluation.answer_parts import Parts, take_apart
from bwsft.evaluation.math_verify_child import ROUNDED
from bwsft.evaluation.numerals import DAMAGED, MASK, format_number, whole_number

HARD_SECONDS = 20.0  # two parses and a comparison, each at its own limit, plus margin
START_SECONDS = 120.0  # importing sympy takes 1-3 s, much more on a busy disk
LONGEST = 2000  # characters of an answer or a reference; none of MATH has a tenth of them

_WORDS = r"\\(?:text|textbf|textrm|textit|mbox|mathrm|mathbf|hbox)\s*\{([^{}]*)\}"
_REWRITES = [(re.compile(pattern), by) for pattern, by in (
    # Pure layout: delimiters' size, thin spaces, display style, unit signs.
    (r"\\(?:left|right|big|Big|bigg|Bigg)(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])", ""),
    (r"(?<!\\)\\[!,;: ]|\\q?quad(?![a-zA-Z])|~|\u00a0", " "),
    (r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree(?![a-zA-Z])|\\?%|\\?\$", ""),
    (_WORDS, r"\1"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\frac\s*([0-9a-zA-Z])", r"\\frac{\1}"),
    (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
    (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
    (r"([_^])\s*\{\s*([0-9a-zA-Z])\s*\}", r"\1\2"),
    (r"^\s*(-?)\s*([0-9]+)\s*/\s*([0-9]+)\s*$", r"\1\\frac{\2}{\3}"),
    (r"(?<![0-9.])\.(?=[0-9])", "0."),
    (r"^\s*\(\s*([A-Z])\s*\)\s*$", r"\1"),
    (r"(?<![0-9])\s+|\s+(?![0-9])", ""),  # "1 2" is not 12
    (r"\.+$", ""),
)]
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:\{?,\}?[0-9]{3})+(?:\.[0-9]+)?")
_NAMED = re.compile(r"[a-zA-Z](?:=|\\in(?![a-zA-Z]))(.+)")
_RELATION = re.compile(r"\s*(?:[<>]|\\(?:leq?|geq?|neq?|lt|gt)(?![a-z]))")
_PRODUCT = re.compile(r"-?[0-9.]+[a-zA-Z]")  # to math-verify the letter may be a unit
_DIGITS_BASE = re.compile(r"(?<=[0-9])\)?_\{?([0-9]+)")


def normalize_math(answer: str) -> str:
    """One spelling for the usual variants of a LaTeX answer (after Hendrycks et al.'s grader).

    Idempotent: rewrites until nothing changes. Values are not touched ("0.50" stays).
    """
    text = answer.strip()
    while True:
        changed = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", text, flags=re.DOTALL)
        for pattern, by in _REWRITES:
            changed = pattern.sub(by, changed)
        if _THOUSANDS.fullmatch(changed):
            changed = re.sub(r"[{},]", "", changed)
        if changed == text:
            return text
        text = changed


def _without_name(first: str, second: str) -> tuple[str, str]:
    """"x = 5" and "5" are equal if only one side names a variable."""
    named = _NAMED.fullmatch(first), _NAMED.fullmatch(second)
    if (named[0] is None) != (named[1] is None):
        return (named[0][1], second) if named[0] else (first, named[1][1])
    return first, second


def _comparable(reference: str, answer: str) -> tuple[Parts, Parts] | None:
    """The parts of both sides; None where no reading of the answer equals the reference.

    So it is with masks left in it, another unit or base, one relation (x > 5 is not 5), a set
    against a point, or "3, 500" against 3500. A unit or base that the reference names may be
    missing: the question asked for it. A base that only the answer names must be 10.
    """
    if MASK in answer or DAMAGED in answer or not answer.strip():
        return None
    if max(len(reference), len(answer)) > LONGEST:  # the rules below may take quadratic time
        return None
    unknowns = re.search("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", reference))
    gold, guess = take_apart(reference, False), take_apart(answer, letters=not unknowns)
    if gold.unit and guess.unit and gold.unit != guess.unit:
        return None
    if guess.base and guess.base != (gold.base or 10):
        return None
    bodies = [re.sub(r"\\(?:left|right)|\s", "", part.body) for part in (gold, guess)]
    if len({bool(_RELATION.match(body)) for body in bodies}) > 1:
        return None
    if _PRODUCT.fullmatch(bodies[0]) and not re.search("[a-zA-Z]", bodies[1]):
        return None
    opened = {r"\{" if body.startswith(r"\{") else body[:1] for body in bodies}
    if opened in ({r"\{", "("}, {r"\{", "["}):
        return None
    listed = [bool(re.search(r"[0-9], +[0-9]", part.body)) for part in (gold, guess)]
    if listed[0] != listed[1] and re.fullmatch("-?[0-9.]+", bodies[listed[0]]):
        return None
    bases = [sorted(_DIGITS_BASE.findall(body)) for body in bodies]
    return (gold, guess) if bases[0] == bases[1] else None


def same_spelling(reference: str, answer: str) -> bool:
    """Equal after normalization, units and an unknown's name aside."""
    parts = _comparable(reference, answer)
    if parts is None:
        return False
    first, second = _without_name(*(normalize_math(part.body) for part in parts))
    return bool(second) and first == second


def same_value(reference: str, answer: str) -> bool | None:
    """Whether two plain numbers are equal, exactly; None where a side is anything else.

    50 percent may be 50 or 0.5. A decimal fraction for a number that has none (0.333333 for 1/3)
    is left to math-verify if it has six right digits.
    """
    parts = _comparable(reference, answer)
    if parts is None:
        return False
    if parts[0].base:
        return same_spelling(reference, answer)
    spaced = (re.sub(r"\s+", " ", part.body).strip() for part in parts)
    bodies = _without_name(*(body.replace(" = ", "=") for body in spaced))
    percent = [body.endswith("%") for body in bodies]
    values = [whole_number(re.sub(r"\s?\\?%$", "", body)) for body in bodies]
    if None in values:
        return None
    gold, guess = values
    if gold == guess or (percent[0] != percent[1] and gold in (100 * guess, guess / 100)):
        return True
    near = abs(gold - guess) <= Fraction(ROUNDED) * abs(gold)  # a float holds no 1e400
    if near and any("/" in format_number(v) for v in values):
        return None
    return False


class MathVerifier:
    """math-verify in a child process; a context manager.

    `equal(reference, answer)` gives True, False, or None where there was no verdict in
    `seconds` or the child died (the caller counts those). ImportError without math-verify.
    """

    def __init__(self, seconds: float = HARD_SECONDS):
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("scoring MATH needs math-verify: pip install 'bwsft[eval]'")
        self.seconds = seconds
        self.child: subprocess.Popen | None = None

    def __enter__(self) -> MathVerifier:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None

    def equal(self, reference: str, answer: str) -> bool | None:
        """The verdict: by exact values where both are plain numbers, else math-verify's."""
        if (known := same_value(reference, answer)) is not None:
            return known
        if self.child is None or self.child.poll() is not None:
            try:
                self._start()
            except RuntimeError:  # as for an answer that it cannot take: the next one tries again
                return None
        bodies = [part.body for part in _comparable(reference, answer)]
        reply = self._ask(json.dumps(bodies), self.seconds)
        if reply is None:
            self.close()
        return reply

    def _start(self) -> None:
        self.close()
        # Run as a script, so that the child imports sympy and not the whole package.
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "math_verify_child.py")
        self.child = subprocess.Popen(
            [sys.executable, script], text=True, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if self._ask("", START_SECONDS) is None:
            self.close()
            raise RuntimeError("the math-verify process did not start; try `import math_verify`")

    def _ask(self, line: str, seconds: float) -> bool | None:
        """One line out, one line in; killing the child ends the wait."""
        alarm = threading.Timer(seconds, self.child.kill)
        alarm.start()
        try:
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
            reply = self.child.stdout.readline()
        except OSError:  # the child is gone: out of memory, or killed from outside
            return None
        finally:
            alarm.cancel()
        return json.loads(reply) if reply.endswith("\n") else None
