"""The demo's drawing of an answer."""

import dataclasses

from bwsft.commands.demo import unmasked
from bwsft.decoding.result import Generation


def test_an_answer_is_drawn_up_to_its_end():
    trace = [(0, 1, 1, 0.5), (1, 0, 0, 0.5), (2, 2, 2, 0.5), (3, 3, 7, 0.9)]
    generation = dataclasses.replace(Generation([0, 1, 2], True, 4), trace=trace)
    drawn = unmasked(generation, lambda tokens: "abcdefgh"[tokens[0]], 2)
    assert drawn.plain == "a₂ b₁ │c₃ "
