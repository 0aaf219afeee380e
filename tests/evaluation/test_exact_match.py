"""A model is decoded in the context mode it was trained in."""

import dataclasses

import pytest

from bwsft.checkpoints.generation_config import DecodingContract
from bwsft.checkpoints.resolve import Trained
from bwsft.data import word_problems
from bwsft.decoding.result import Generation
from bwsft.evaluation import exact_match
from bwsft.models.backbone import Family
from bwsft.presets import debug


class Words:
    def decode(self, tokens):
        return "The answer is: 7" if tokens == [7] else "no"


@pytest.mark.parametrize("context", ["exact", "cached", "block_causal"])
def test_problems_are_solved_in_the_trained_mode(monkeypatch, context):
    problems = word_problems.generate(3, 1, split="test")
    problems[1] = {**problems[1], "response": "The answer is: 7"}

    def stream(backbone, prompts, config, *, trace):
        assert (config.context, config.block_size, trace) == (context, debug().block_size, True)
        assert prompts == [[0], [1], [2]]
        for index in (1, 0, 2):
            yield index, Generation([7] if index == 1 else [], True, 1)

    class Template:
        def __init__(self, tokenizer, name, args):
            assert (name, args) == (debug().dataset.template, None)

        def encode_prompts(self, questions):
            assert questions == [p["query"] for p in problems]
            return [[0], [1], [2]]

    monkeypatch.setattr(exact_match, "decode_stream", stream)
    monkeypatch.setattr(exact_match, "Template", Template)
    family = Family(mask_id=1, eos_id=0, end_ids=(0,), vocab_size=9, max_positions=9)
    contract = DecodingContract.of(dataclasses.replace(debug(), context=context), family)
    trained = Trained(None, Words(), None, "", contract)
    solved, generations = exact_match.solve(trained, problems, debug(), "x")
    assert solved == [False, True, False] and generations[1].tokens == [7]
