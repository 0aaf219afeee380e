"""Exact match on generated word problems: decode them and compare the final numbers."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from bwsft import config as c
from bwsft.checkpoints.resolve import Trained
from bwsft.data.chat_template import Template
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import decode_stream
from bwsft.decoding.result import Generation
from bwsft.evaluation import answers as scoring

TEST_SEED = 1  # of the test problems: another seed than the training data's, and another split


def solve(
    trained: Trained, problems: list[dict], config: c.Config, name: str, **changes: Any
) -> tuple[list[bool], list[Generation]]:
    """Decode the problems, one token a step; returns (which are right, the generations).

    Block size, canvas and template come from `config`, the context mode from the model; `changes`
    are fields of DecodeConfig that are others. `name` stands at the progress bar.
    """
    template = Template(trained.tokenizer, config.dataset.template, config.dataset.template_args)
    prompts = template.encode_prompts([p["query"] for p in problems])
    options = {"context": trained.contract.context, "batch_size": 50} | changes
    decode = DecodeConfig(config.gen_length, config.block_size, **options)
    stream = decode_stream(trained.backbone, prompts, decode, trace=True)
    found = dict(tqdm(stream, total=len(problems), desc=f"decoding, {name}"))
    generations = [found[i] for i in range(len(problems))]
    solved = []
    for problem, generation in zip(problems, generations, strict=True):
        answer, _ = scoring.extract_gsm8k(trained.tokenizer.decode(generation.tokens))
        truth, _ = scoring.extract_gsm8k(problem["response"])
        solved.append(scoring.numbers_equal(truth, answer))
    return solved, generations
