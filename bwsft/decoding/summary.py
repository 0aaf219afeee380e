"""What is told of decoded responses: their tokens per forward pass (TPF), and a line of each."""

from __future__ import annotations

from collections.abc import Sequence

from bwsft.decoding.result import Generation
from bwsft.utils.parallelism import per_forward


def tokens_per_forward(found: Sequence[Generation]) -> float | None:
    """TPF of some answers, of which the tokens before the end token are kept."""
    return per_forward(sum(len(one.tokens) for one in found), sum(one.passes for one in found))


def line_of(found: Generation) -> str:
    """A line for the user."""
    ending = "" if found.ended else "; no end token, so --gen-length may be too short"
    rate = tokens_per_forward([found])
    figures = "" if rate is None else f" and {found.passes} forward passes, TPF {rate:.2f}"
    return f"[{len(found.tokens)} tokens in {found.steps} steps{figures}{ending}]"
