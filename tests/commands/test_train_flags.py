"""The flags of `bwsft train`: short names, the help that comes first, and what resume needs."""

import dataclasses
import re

import pytest

from bwsft import config as c
from bwsft import presets
from bwsft.cli import main
from bwsft.commands.train import parse_train
from bwsft.commands.train_flags import COMMON, ELSEWHERE, spelled, spellings
from bwsft.utils.config_check import flat

SHORT = {
    "--lr": "--optim.lr", "--lora-rank": "--lora.rank", "--warmup": "--optim.warmup",
    "--eval-every": "--eval.every", "--template": "--dataset.template", "--weight-decay":
    "--optim.weight-decay", "--objective": "--objective.name", "--no-context-grad":
    "--objective.no-context-grad", "--lora_alpha": "--lora.alpha", "--steps": "--steps",
    "--objective-discrete-steps": "--objective.discrete.steps", "--columns": "--dataset.columns",
}  # fmt: skip


@pytest.mark.parametrize("flag", SHORT)
def test_short_names(flag):
    assert spelled([flag, "5", f"{flag}=-1", "x"]) == [SHORT[flag], "5", f"{SHORT[flag]}=-1", "x"]


def test_every_setting_answers_to_its_own_name_alone():
    for path in flat(dataclasses.asdict(c.Config())):
        flag = f"--{path}".replace("_", "-")
        assert spellings()[flag] == flag
    assert "--name" not in spellings()  # of a run, one would think
    assert set(ELSEWHERE.values()) <= spellings().keys()
    assert not ELSEWHERE.keys() & spellings().keys()


def test_short_names_set_what_they_say():
    words = ["--lr", "3e-4", "--lora-rank=4", "--warmup", "0.2", "--eval-every", "7"]
    config = parse_train(["debug", *words, "--epochs", "2"])
    assert (config.optim.lr, config.lora.rank, config.optim.warmup) == (3e-4, 4, 0.2)
    assert (config.eval.every, config.epochs) == (7, 2.0)
    with pytest.raises(ValueError, match="--epochs must be above 0"):
        parse_train(["debug", "--epochs", "0"])


def shown(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(["train", *words])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    return out, set(re.findall(r"^\W (--[\w.-]+)", out, re.M))


def test_help_shows_what_matters_and_names_the_rest(capsys):
    names = [name for group in COMMON.values() for name in group]
    common = {f"--{name}" for name in names}
    assert len(common) == 20 and common <= spellings().keys()
    for words in (["--help"], ["debug", "-h"], ["debug", "--steps", "5", "--help"]):
        out, flags = shown(capsys, *words)
        assert flags == common and "--help-all" in out
    assert f"(default: {presets.debug().optim.lr})" in out
    out, flags = shown(capsys, "debug", "--help-all")
    every = {f"--{path}".replace("_", "-") for path in flat(dataclasses.asdict(c.Config()))}
    assert every <= flags
    out, _ = shown(capsys, "--help")
    assert all(name in out for name in presets.PRESETS)


def test_a_run_is_all_that_resume_needs(tmp_path):
    run = dataclasses.replace(presets.paper(), steps=9, out=str(tmp_path), preset="paper")
    (tmp_path / "config.json").write_text(c.to_json(run))
    going_on = dataclasses.replace(run, out=None, resume=str(tmp_path))
    for words in ([], ["paper"]):
        assert parse_train([*words, "--resume", str(tmp_path)]) == going_on
    more = parse_train([f"--resume={tmp_path}", "--steps", "20"])
    assert more == dataclasses.replace(going_on, steps=20)
    (tmp_path / "config.json").unlink()  # killed before it was written
    with pytest.raises(ValueError, match="has no config.json yet: name a preset"):
        parse_train(["--resume", str(tmp_path)])
    assert parse_train(["debug", "--resume", str(tmp_path)]).preset == "debug"


def test_a_file_says_how_long_and_flags_win(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("preset: debug\nepochs: 2")
    assert parse_train(["--config", str(path)]).epochs == 2
    config = parse_train(["--config", str(path), "--steps", "5"])
    assert (config.steps, config.epochs) == (5, None)
    path.write_text("preset: debug\nepochs: 2\nsteps: 5")
    with pytest.raises(ValueError, match="a.yaml: steps and epochs both say"):
        parse_train(["--config", str(path)])
