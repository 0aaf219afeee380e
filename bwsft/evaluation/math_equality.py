"""When two MATH answers are the same: first as normalized strings, then by math-verify.

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

SOFT_SECONDS = 5  # math-verify's own limit for one parse or one comparison
HARD_SECONDS = 20.0  # two parses and a comparison, each at its own limit, plus margin
START_SECONDS = 120.0  # importing sympy takes 1-3 s, much more on a busy disk
MEMORY_BYTES = 4 << 30

_WORDS = r"\\(?:text|textbf|textrm|textit|mbox|mathrm|mathbf|hbox)\s*\{([^{}]*)\}"
_REWRITES = [(re.compile(pattern), by) for pattern, by in (
    # Pure layout: delimiters' size, thin spaces, display style, unit signs.
    (r"\\(?:left|right|big|Big|bigg|Bigg)(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])", ""),
    (r"(?<!\\)\\[!,;: ]|\\q?quad(?![a-zA-Z])|~|\u00a0", " "),
    (r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree(?![a-zA-Z])|\\?%|\\?\$", ""),
    # A unit after a value goes (with its power: cm^2); words that are the answer stay.
    (r"(?<=[0-9a-zA-Z})\]])\s*" + _WORDS + r"\s*(?:\^\s*\{?\s*[0-9]\s*\}?)?\s*$", ""),
    (_WORDS, r"\1"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\frac\s*([0-9a-zA-Z])", r"\\frac{\1}"),
    (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
    (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
    (r"([_^])\s*\{\s*([0-9a-zA-Z])\s*\}", r"\1\2"),
    (r"^\s*(-?)\s*([0-9]+)\s*/\s*([0-9]+)\s*$", r"\1\\frac{\2}{\3}"),
    (r"(?<![0-9.])\.(?=[0-9])", "0."),
    (r"^\s*\(\s*([A-Z])\s*\)\s*$", r"\1"),
    (r"\s+", ""),
    (r"\.$", ""),
)]
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:\{?,\}?[0-9]{3})+(?:\.[0-9]+)?")
_NAMED = re.compile(r"[a-zA-Z](?:=|\\in(?![a-zA-Z]))(.+)")


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


def same_spelling(reference: str, answer: str) -> bool:
    """Equal after normalization; "x = 5" and "5" are equal if only one side names a variable."""
    first, second = normalize_math(reference), normalize_math(answer)
    named = _NAMED.fullmatch(first), _NAMED.fullmatch(second)
    if (named[0] is None) != (named[1] is None):
        first = named[0][1] if named[0] else first
        second = named[1][1] if named[1] else second
    return bool(second) and first == second


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
        if self.child is None or self.child.poll() is not None:
            self._start()
        reply = self._ask(json.dumps([reference, answer]), self.seconds)
        if reply is None:
            self.close()
        return reply

    def _start(self) -> None:
        self.close()
        # The file runs as a script, so that the child imports sympy and not the whole package.
        self.child = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)], text=True, encoding="utf-8",
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


def _serve() -> None:
    """The child: per line of JSON [reference, answer] one line true, false or null."""
    # A script's own folder leads sys.path; sympy must not find this package's modules there.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except (ImportError, ValueError, OSError):  # no such limits on this system
        pass
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        verdict = True
        if line.strip():
            try:
                gold, guess = (parse(f"${text}$", parsing_timeout=SOFT_SECONDS)
                               for text in json.loads(line))
                verdict = bool(verify(gold, guess, timeout_seconds=SOFT_SECONDS))
            except Exception:  # sympy raises anything on garbage; the caller counts None
                verdict = None
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    _serve()
