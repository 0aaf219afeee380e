"""`bwsft prepare`: the token cache of a training, made before the training and without its model's
weights."""

from __future__ import annotations

import dataclasses
import shlex

from bwsft import config as c
from bwsft.commands.train import parse_train, take
from bwsft.data import word_problems
from bwsft.utils.lines import say

CACHE = "--dataset.cache-dir"
ABOUT = f"""usage: bwsft prepare PRESET --data SOURCE --out DIR [FLAGS of bwsft train]

Tokenizes the data of `bwsft train PRESET --data SOURCE [FLAGS]` into the folder DIR, on all cores,
and prints the command that trains from there ({CACHE} DIR). Of the model only config and
tokenizer are read, and no GPU is needed. Interrupted, it goes on when it is given again."""


def run_prepare(words: list[str]) -> int:
    """Run `bwsft prepare` and return the exit status; ValueError or OSError for bad input."""
    if not words or {"-h", "--help"} & set(words):
        say(ABOUT)
        return 0 if words else 2
    rest, out = take(words, "--out")
    if out is None:
        raise ValueError("--out DIR is missing: the folder of the token cache")
    if take(rest, CACHE)[1] is not None:
        raise ValueError(f"{CACHE} is what --out is here: leave it out")
    config = parse_train(rest)
    if config.data is None or word_problems.named(config.data) is not None:
        raise ValueError("--data FILE is missing; generated problems need no preparation")
    data = dataclasses.replace(config.dataset, cache_dir=out)
    say(tokenize(dataclasses.replace(config, dataset=data)))
    say(f"train on it: {shlex.join(['bwsft', 'train', *rest, CACHE, out])}")
    return 0


def tokenize(config: c.Config) -> str:
    """Make the token cache of a run; a summary of it. OSError where nothing can be written."""
    # These import torch, which --help does without.
    import numpy as np

    from bwsft.checkpoints.resolve import plan_model, plan_tokenizer
    from bwsft.data.dataset import load_set
    from bwsft.data.tokenizer import load_tokenizer
    from bwsft.training.run_data import data_options, follow_data

    tokenizer = load_tokenizer(plan_tokenizer(config))
    family = plan_model(config, tokenizer, c.run_folder(config)).family
    config = follow_data(config, tokenizer, family)
    out = config.dataset.cache_dir
    examples = load_set(config.data, tokenizer, data_options(config, family), out)
    if not isinstance(examples.tokens, np.memmap):
        raise OSError(f"nothing can be written in {out}: choose another --out")
    return examples.summary()
