"""The demo decodes a model in the context mode it was trained in."""

import dataclasses

import pytest

from bwsft.checkpoints.resolve import Trained
from bwsft.commands import demo
from bwsft.data import word_problems as wordproblems
from bwsft.decoding.result import Generation
from bwsft.presets import debug


class Words:
    def decode(self, tokens):
        return "The answer is: 7" if tokens == [7] else "no"


@pytest.mark.parametrize("state, context", [
    (None, "exact"),
    ({"config": {"context": "cached"}}, "cached"),
    ({"config": {"context": "block_causal"}}, "block_causal"),
])  # fmt: skip
def test_problems_are_solved_in_the_trained_mode(monkeypatch, state, context):
    problems = wordproblems.generate(3, 1, split="test")
    problems[1] = {**problems[1], "response": "The answer is: 7"}

    def stream(backbone, prompts, config, *, trace):
        assert (config.context, config.block_size, trace) == (context, debug().block_size, True)
        assert prompts == [[0], [1], [2]]
        for index in (1, 0, 2):
            yield index, Generation([7] if index == 1 else [], True, 1)

    class Template:
        def __init__(self, tokenizer, name):
            assert name == debug().dataset.template

        def encode_prompts(self, questions):
            assert questions == [p["query"] for p in problems]
            return [[0], [1], [2]]

    monkeypatch.setattr(demo, "decode_stream", stream)
    monkeypatch.setattr(demo, "Template", Template)
    solved, generations = demo.solve(Trained(None, Words(), state, ""), problems, debug(), "x")
    assert solved == [False, True, False] and generations[1].tokens == [7]


def test_an_answer_is_drawn_up_to_its_end():
    class Letters:
        def decode(self, tokens):
            return "abcdefgh"[tokens[0]]

    trace = [(0, 1, 1, 0.5), (1, 0, 0, 0.5), (2, 2, 2, 0.5), (3, 3, 7, 0.9)]
    generation = dataclasses.replace(Generation([0, 1, 2], True, 4), trace=trace)
    assert demo.unmasked(generation, Letters(), 2).plain == "a₂ b₁ │c₃ "
