"""What a run trains on and what it holds out, where its problems are generated."""

import dataclasses
import json
import shutil

import jsonl
import numpy as np
import pytest
from thinning import thinned

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import plan_model, plan_tokenizer
from bwsft.cli import main
from bwsft.data.tokenizer import load_tokenizer
from bwsft.data.word_problems import generate
from bwsft.training.metrics import read_log
from bwsft.training.run_data import GENERATED, follow_data, hold_out, plan_data, source_of
from bwsft.training.setup import train


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


@pytest.mark.parametrize("largest", thinned([9, 20]))
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


@pytest.mark.slow
def test_names_without_a_seed_are_those_of_earlier_versions():
    """The whole set of seed 0, whatever limit and hold-out are: checkpoints have its digest."""
    for data, largest in ((None, 9), ("wordproblems-20", 20)):
        config = dataclasses.replace(presets.debug(), data=data)
        source, tests = source_of(config)
        asked = generate(GENERATED, 0, largest=largest)
        assert tests == 0 and [row for _, row in source.rows()] == asked
    found, train, held_out = planned(None, limit=64, holdout=4)
    assert (len(train), len(held_out), found.holdout_index.max() < 64) == (60, 4, True)
    indices = np.concatenate([found.train_index, found.holdout_index])
    assert sorted(indices) == list(range(64))


def test_a_hold_out_of_everything_is_refused():
    with pytest.raises(ValueError, match="holdout 40 leaves nothing of 30 .* --dataset.holdout 3$"):
        planned("wordproblems-9-seed2", limit=30, holdout=40)


@pytest.mark.parametrize(("count", "asked", "held_out"), [
    (12, None, 1), (1, None, 0), (2, None, 1), (300, None, 30), (5000, None, 64), (12, 5, 5),
])
def test_a_hold_out_that_is_left_open_is_a_tenth(count, asked, held_out):
    config = c.Config(dataset=c.DataConfig(holdout=asked))
    assert hold_out(config, count) == held_out


def rows(lengths):
    """Records of so many bytes of prompt and response."""
    return [{"query": "p" * p, "response": "r" * (r - 1)} for p, r in lengths]  # and an end token


@pytest.mark.parametrize(("lengths", "given", "expected"), [
    ([(10, 5)] * 200 + [(10, 31)], {}, (8, 41)),  # 99 % need 5: two blocks of 4
    ([(10, 5)] * 50 + [(10, 31)], {}, (32, 41)),
    ([(10, 31)] * 9, {"max_length": 20}, None),
    ([(10, 5), (10, 31)], {"max_length": 20}, (8, 15)),
    ([(10, 5), (10, 31)], {"gen_length": 12}, (12, 41)),
    ([(40, 60)] * 9, {}, None),  # more than the model's 96 positions
    ([(40, 55)] * 9, {}, (56, 95)),
    ([(40, 56)] * 8 + [(90, 5)], {}, (56, 96)),
])
def test_lengths_follow_the_data(tiny, model_folder, tmp_path, lengths, given, expected):
    """gen_length holds 99 % of the responses, max_length every example, as far as the model goes;
    a resumed run finds both in its config."""
    path = jsonl.write(tmp_path / "own.jsonl", *rows(lengths))
    dataset = dataclasses.replace(tiny().dataset, template="none", holdout=None)
    config = tiny(
        model=str(model_folder(max_sequence_length=96)), tokenizer=None, data=str(path),
        dataset=dataset, **{"gen_length": None, "max_length": None} | given,
    )  # fmt: skip
    tokenizer = load_tokenizer(plan_tokenizer(config))
    family = plan_model(config, tokenizer, None).family
    with pytest.raises(ValueError, match="must be numbers"):
        plan_data(config, tokenizer, family)
    if expected is None:
        with pytest.raises(ValueError, match=r"left: 9 longer .* --m(odel with more|ax-length 41)"):
            follow_data(config, tokenizer, family)
        return
    found = follow_data(config, tokenizer, family)
    assert (found.gen_length, found.max_length) == expected
    assert follow_data(found, tokenizer, family) is found
    blocks = found.gen_length // config.block_size
    with pytest.raises(ValueError, match=f"--active-blocks {blocks + 1} are more than"):
        follow_data(dataclasses.replace(config, active_blocks=blocks + 1), tokenizer, family)
    assert len(plan_data(found, tokenizer, family).train_index) >= len(lengths) * 3 // 4 - 1


def test_a_run_with_lengths_of_its_data_goes_on_exactly(tiny, tmp_path, capsys):
    dataset = dataclasses.replace(tiny().dataset, holdout=None)
    config = tiny(gen_length=None, max_length=None, dataset=dataset, steps=6)
    assert train(config) == 0
    folder = c.run_folder(config)
    stored = json.loads((folder / "config.json").read_text())
    assert (stored["gen_length"], stored["max_length"]) == (16, 22)
    before = [line["loss"] for line in read_log(folder / "metrics.jsonl")]
    shutil.rmtree(folder / "checkpoints" / "step-6")
    assert main(["train", "debug", "--resume", str(folder)]) == 0
    assert "lengths of the data" in capsys.readouterr().out  # said once, at the start
    assert [line["loss"] for line in read_log(folder / "metrics.jsonl")] == before


def test_what_cannot_start_says_so_before_it_is_downloaded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", "qwen3-4b-lora"]) == 2
    message = capsys.readouterr().err
    assert "Qwen/Qwen3-4B needs data to train on" in message
    assert message.endswith("give bwsft train qwen3-4b-lora --data FILE --device cpu\n")
    assert main(["train", "sdar-4b-lora", "--data", "a/b"]) == 2
    message = capsys.readouterr().err
    assert "one 80 GB card, and no CUDA device is here (bwsft train debug needs none)" in message
    assert message.endswith("give bwsft train sdar-4b-lora --data a/b --device cpu\n")
    assert not list(tmp_path.iterdir())
