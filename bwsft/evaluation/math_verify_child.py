"""The process that runs math-verify, and the check of what it calls equal.

math-verify rounds to six decimals, so that 0.0000012 and 0.0000014 are one number to it; here
numbers are equal relative to their size. Run as a script, it imports sympy and nothing of bwsft.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympy import Basic

SOFT_SECONDS = 5  # math-verify's own limit for one parse or one comparison
MEMORY_BYTES = 4 << 30
DIGITS = 60  # of an evaluation
ROUNDED = 5e-6  # half a unit in the sixth digit: "1.41421" may stand for the root of 2
EXACT = 1e-40


def _parts(value: Basic) -> list[Basic]:
    """What a set, list, interval or matrix holds; nothing for other values."""
    import sympy

    if isinstance(value, sympy.MatrixBase):
        return list(value.flat())
    if isinstance(value, sympy.Interval):
        return [value.start, value.end]
    several = isinstance(value, (sympy.FiniteSet, sympy.Tuple, sympy.Union))
    return list(value.args) if several else []


def agree(gold: Basic, guess: Basic, percent: bool = False) -> bool:
    """Whether two values that math-verify calls equal are so relative to their size.

    `percent`: 50 percent may be 50 or 0.5. True where there is nothing to compute.
    """
    import sympy

    gold, guess = (value.rhs if isinstance(value, sympy.Eq) and value.lhs.is_Symbol else value
                   for value in (gold, guess))
    first, second = _parts(gold), _parts(guess)
    if first or second:
        if len(first) != len(second):
            return True
        if any(isinstance(value, (sympy.FiniteSet, sympy.Union)) for value in (gold, guess)):
            return all(any(agree(a, b, percent) for b in second) for a in first) and all(
                any(agree(a, b, percent) for a in first) for b in second)
        return all(agree(a, b, percent) for a, b in zip(first, second, strict=True))
    numbers = _numbers(gold, guess)
    if numbers is None:
        return True
    rounded = any(value.atoms(sympy.Float) for value in (gold, guess))
    ratios = (1, 100, sympy.Rational(1, 100)) if percent else (1,)
    return any(_close(numbers[0], ratio * numbers[1], rounded) for ratio in ratios)


def _close(first: Basic, second: Basic, rounded: bool) -> bool:
    size = max(abs(first), abs(second))
    return bool(abs(first - second) <= (ROUNDED if rounded else EXACT) * size)


def _numbers(*values: Basic) -> list[Basic] | None:
    """Numeric values, unknowns set to fixed fractions; None where one has none that is finite."""
    import sympy

    if not all(isinstance(value, sympy.Expr) for value in values):
        return None
    unknowns = sorted(set().union(*(value.free_symbols for value in values)), key=str)
    point = {name: sympy.Rational(7 * index + 13, 11) for index, name in enumerate(unknowns)}
    numbers = [sympy.N(value.subs(point).doit(), DIGITS) for value in values]
    return numbers if all(n.is_number and n.is_finite for n in numbers) else None


def compare(reference: str, answer: str) -> bool:
    """math-verify's verdict, a yes confirmed by `agree`."""
    from math_verify import parse, verify

    gold, guess = (parse(f"${text}$", parsing_timeout=SOFT_SECONDS) for text in (reference, answer))
    if not verify(gold, guess, timeout_seconds=SOFT_SECONDS):
        return False
    if any(isinstance(values[0], str) for values in (gold, guess)):
        return True
    return agree(gold[0], guess[0], percent="%" in reference + answer)


def serve() -> None:
    """Per line of JSON [reference, answer] one line true, false or null."""
    # A script's own folder leads sys.path; sympy must not find this package's modules there.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except (ImportError, ValueError, OSError):  # no such limits on this system
        pass
    import math_verify  # noqa: F401  (before the first answer: it takes seconds)

    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        verdict = True
        if line.strip():
            try:
                verdict = compare(*json.loads(line))
            except Exception:  # sympy raises anything on garbage; the caller counts None
                verdict = None
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    serve()
