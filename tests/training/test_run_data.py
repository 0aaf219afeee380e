"""What a run trains on and what it holds out, where its problems are generated."""

import dataclasses

import numpy as np
import pytest

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import plan_model, plan_tokenizer
from bwsft.data.tokenizer import load_tokenizer
from bwsft.data.word_problems import generate
from bwsft.training.run_data import GENERATED, plan_data, source_of


def planned(data, **dataset):
    """(data of a run of the debug preset, its training responses, its held-out responses)."""
    config = dataclasses.replace(
        presets.debug(), data=data, dataset=c.DataConfig(template="chat", **dataset)
    )
    tokenizer = load_tokenizer(plan_tokenizer(config))
    found = plan_data(config, tokenizer, plan_model(config, tokenizer, None).family)
    parts = found.train_index, found.holdout_index
    texts = ([tokenizer.decode(found.examples.response(i)) for i in part] for part in parts)
    return found, *texts


@pytest.mark.parametrize("largest", [9, 20])
def test_held_out_problems_have_numbers_of_their_own(largest):
    """The response spells out a problem's numbers and operations."""
    found, train, held_out = planned(f"wordproblems-{largest}-seed3", limit=3000, holdout=100)
    assert (len(train), len(held_out)) == (2900, 100)
    assert not {*train} & {*held_out} and len({*held_out}) > 80
    _, longer, same = planned(f"wordproblems-{largest}-seed3", limit=3100, holdout=100)
    assert same == held_out and longer[:2900] == train
    _, _, other = planned(f"wordproblems-{largest}-seed4", limit=3000, holdout=100)
    assert other != held_out


def test_too_long_problems_leave_both_parts_alike():
    """Records that are dropped move no test problem into the training part."""
    config = dataclasses.replace(
        presets.debug(), data="wordproblems-20-seed3", max_length=56,
        dataset=c.DataConfig(template="chat", limit=600, holdout=200),
    )  # fmt: skip
    tokenizer = load_tokenizer(plan_tokenizer(config))
    found = plan_data(config, tokenizer, plan_model(config, tokenizer, None).family)
    ids = found.examples.sample_ids
    assert 0 < len(found.train_index) < 400 and 0 < len(found.holdout_index) < 200
    assert ids[found.train_index].max() < 400 <= ids[found.holdout_index].min()


def test_names_without_a_seed_are_those_of_earlier_versions():
    """The whole set of seed 0, whatever limit and hold-out are: checkpoints have its digest."""
    for data, largest in ((None, 9), ("wordproblems-20", 20)):
        config = dataclasses.replace(presets.debug(), data=data)
        assert source_of(config) == (generate(GENERATED, 0, largest=largest), 0)
    found, train, held_out = planned(None, limit=64, holdout=4)
    assert (len(train), len(held_out), found.holdout_index.max() < 64) == (60, 4, True)
    indices = np.concatenate([found.train_index, found.holdout_index])
    assert sorted(indices) == list(range(64))


def test_a_hold_out_of_everything_is_refused():
    with pytest.raises(ValueError, match="--dataset.holdout 40 leaves nothing of 30 examples"):
        planned("wordproblems-9-seed2", limit=30, holdout=40)
