"""Presets, validation, JSON round trip and the command line."""

import dataclasses
import json

import pytest

from bwsft import config as c
from bwsft import presets
from bwsft.cli import main
from bwsft.commands.train import parse_train


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_valid_and_survive_json(name):
    config = presets.PRESETS[name]()
    c.validate(config)
    assert config.preset == name
    assert c.from_json(c.to_json(config)) == config


@pytest.mark.parametrize(("change", "word"), [
    ({"objective": c.ObjectiveConfig(low=0.9, high=0.1)}, "low <= high"),
    ({"objective": c.ObjectiveConfig(weight="rate")}, "--objective.empty skip"),
    ({"objective": c.ObjectiveConfig(prefix_noise=1.5)}, "prefix-noise"),
    ({"optim": c.OptimConfig(lr=0.0)}, "lr > 0"),
    ({"lora": c.LoraConfig(dropout=1.0)}, "dropout"),
    ({"lora": c.LoraConfig(alpha=0.0)}, "alpha > 0"),
    ({"lora": c.LoraConfig(rank=-1)}, "--lora.rank must be at least 0"),
    ({"eval": c.EvalConfig(draws=0)}, "--eval.draws must be at least 1"),
    ({"dataset": c.DataConfig(limit=0)}, "--dataset.limit must be at least 1"),
    ({"dataset": c.DataConfig(holdout=-1)}, "--dataset.holdout must be at least 0"),
    ({"optim": c.OptimConfig(clip=-1.0)}, "--optim.clip must be at least 0"),
    ({"keep_last": -1}, "--keep-last must be at least 0"),
])
def test_validation_names_the_field(change, word):
    with pytest.raises(ValueError, match=word.replace("(", r"\(")):
        c.validate(dataclasses.replace(presets.paper(), **change))


def test_unknown_field_in_stored_config():
    stored = json.loads(c.to_json(presets.debug()))
    stored["optim"]["momentum"] = 0.9
    with pytest.raises(ValueError, match=r"unknown field optim\.momentum"):
        c.from_json(json.dumps(stored))


def test_runs_that_did_not_say_masked_the_last_token():
    stored = json.loads(c.to_json(c.Config()))
    assert stored["objective"].pop("empty") == c.Config().objective.empty == "redraw"
    assert c.from_json(json.dumps(stored)).objective.empty == "last"


def test_flags_reach_nested_fields():
    config = parse_train(["debug", "--steps", "7", "--optim.lr", "0.5", "--lora.rank", "4"])
    assert (config.steps, config.optim.lr, config.lora.rank) == (7, 0.5, 4)


def test_differences_lists_paths():
    changed = dataclasses.replace(presets.debug(), optim=c.OptimConfig(lr=2.0), steps=9)
    assert c.differences(presets.debug(), changed) == ["steps: 300 -> 9", "optim.lr: 0.0003 -> 2.0"]


def test_interrupted_before_a_run_can_save(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("bwsft.cli._train", interrupt)
    assert main(["train", "debug"]) == 130
    assert capsys.readouterr().err == "bwsft train: interrupted\n"


def test_an_old_flag_works_and_names_the_new_one(capsys):
    old = ["--objective.name", "mdlm", "--objective.mdlm.normalise", "sequence"]  # old spelling
    assert parse_train(["debug", *old]).objective.mdlm.normalize == "sequence"
    flag = "--objective.mdlm.normalise"  # old spelling
    assert f"{flag} is called --objective.mdlm.normalize now" in capsys.readouterr().err
