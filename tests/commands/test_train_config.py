"""`bwsft train --config FILE` and `--print-config`: round trips, who wins, and wrong files."""

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bwsft import config as c
from bwsft import presets
from bwsft.cli import main
from bwsft.commands.train import parse_train
from bwsft.objectives.config import MdlmConfig, ObjectiveConfig
from bwsft.utils import config_file


def printed(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", *argv, "--print-config"])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_printed_config_is_read_back(name, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(printed([name], capsys))
    assert parse_train(["--config", str(path)]) == presets.PRESETS[name]()
    assert "# Peak learning rate.\n  lr: " in path.read_text()


@pytest.mark.parametrize("name", ["debug", "released", "diffusiongemma-26b-lora"])
def test_a_printed_config_holds_what_was_changed(name, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(printed([name], capsys))
    words = ["--optim.lr", "3e-4", "--dataset.subset", "no", f"--config={path}"]
    changed = parse_train([name, *words])
    assert (changed.optim.lr, changed.dataset.subset) == (3e-4, "no")
    path.write_text(printed([name, *words], capsys))
    assert parse_train(["--config", str(path)]) == changed


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.floats(0, 1))
def test_any_text_and_number_are_read_back(tmp_path_factory, text, number):
    """Also 'on', '1e5', '- a', line ends and what no screen shows."""
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    for config in (c.DataConfig(exclude_type=text), c.OptimConfig(eps=number)):
        path.write_bytes(config_file.text(config).encode())
        assert config_file.update(type(config)(), config_file.read(path), "f") == config


@pytest.mark.parametrize("text", ["on", "no", "null", "~", "1", "1e5", ".5", "true", "- a", "a: b",
                                  "#", " a", "a\nb", "\u2028", "2025-05-01", "010", "1_0"])
def test_text_that_looks_like_something_else(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(config_file.text(c.Config(out=text)), encoding="utf-8")
    assert config_file.read(path)["out"] == text


FILE = """
# nested tables or dots, _ or -, and YAML's traps
preset: debug
steps: 7
optim.lr: 1e-4
fused-ops: on
eval: {every: 5, draws: 2}
dataset:
  cache-dir: 2025-05-01
  template: none
  on_bad: skip
watch:
objective:
  name: mdlm
  mdlm.normalise: sequence  # old spelling
"""


def test_names_and_values_of_a_file(tmp_path):
    path = tmp_path / "run.yml"
    path.write_text(FILE)
    base = presets.debug()
    expected = dataclasses.replace(
        base, steps=7, optim=c.OptimConfig(lr=1e-4), fused_ops="on",
        eval=c.EvalConfig(every=5, draws=2),
        dataset=dataclasses.replace(
            base.dataset, cache_dir="2025-05-01", template="none", on_bad="skip"
        ),
        objective=ObjectiveConfig(name="mdlm", mdlm=MdlmConfig(normalize="sequence")),
    )  # fmt: skip
    assert parse_train(["--config", str(path)]) == expected
    assert parse_train(["debug", f"--config={path}"]) == expected
    assert parse_train(["--steps", "9", "--config", str(path)]).steps == 9  # flags win
    path.write_text(FILE.replace("preset: debug", ""))
    assert parse_train(["debug", "--config", str(path)]) == expected


def test_the_config_of_a_run_starts_another(tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run/config.json"
    run = dataclasses.replace(
        presets.debug(), steps=3, out=str(path.parent), lora=c.LoraConfig(rank=2)
    )
    path.write_text(c.to_json(run))
    assert parse_train(["--config", str(path)]) == dataclasses.replace(run, out=None)
    other = tmp_path / "mine.json"
    other.write_text(json.dumps({"preset": "debug", "resume": str(path.parent), "seed": 5}))
    going_on = dataclasses.replace(run, out=None, resume=str(path.parent), seed=5)
    assert parse_train(["--config", str(other)]) == going_on  # over what the run has stored


@pytest.mark.parametrize(("text", "complaint"), [
    ("steps: 5", "names no preset: add one of debug, llada-8b-lora, llada-8b-dense,"),
    ("preset: debgu", "preset is none of debug, .*; did you mean debug?"),
    ("preset: [debug]", "preset is none of"),
    ("lr: 1", r"unknown setting lr; did you mean optim.lr\?"),
    ("dataset.templat: chat", r"unknown setting dataset.templat; did you mean dataset.template\?"),
    ("optim: {momentum: 0.9}", "unknown setting optim.momentum"),
    ("stesp: 5", r"unknown setting stesp; did you mean steps or "),
    ("optim: 5", "optim is a group of settings, not one"),
    ("steps: {a: 5}", "unknown setting steps.a"),
    ("5: 5", "5 is no name of a setting"),
    ("steps: '5'", "steps must be a whole number, not '5'"),
    ("steps: 1e3", "steps must be a whole number, not 1000.0"),
    ("steps: [5]", "steps must be a whole number, not a list"),
    ("grad_checkpointing: yes", "grad_checkpointing must be true or false, not 'yes'"),
    ("fused_ops: true", "fused_ops must be 'auto' or 'on' or 'off', not true"),
    ("optim.lr: .nan", "optim.lr must be a finite number, not '.nan'"),
    ("steps: 5\nsteps: 6", r"line 1, column 1 is not valid YAML \(steps is set twice\)"),
    ("micro-batch-size: 4\nmicro_batch_size: 8", "micro_batch_size is set twice"),
    ("optim: {lr: 1}\noptim.lr: 1", "optim.lr is set twice"),
    ("a: &a 5\nb: *a", r"line 2, column 4 is not valid YAML \(aliases are not read\)"),
    ("out: !!python/name:os.system", "is not valid YAML .could not determine a constructor"),
    ("out: {", "line 2, column 1 is not valid YAML|line 1, column 7 is not valid YAML"),
    ("out: \0", "is not valid YAML"),
    ("[" * 1500, "nested too deeply"),
    ("steps: " + "1" * 5000, "is not valid YAML .Exceeds the limit"),
    ("", "must hold settings, as lines of name: value"),
    ("- steps", "must hold settings, as lines of name: value"),
    ("steps: 0\npreset: debug", "--steps must be at least 1"),
])
def test_wrong_files_are_refused_in_one_sentence(tmp_path, capsys, text, complaint):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    named = [] if "preset" in complaint or "preset" in text else ["debug"]
    assert main(["train", *named, "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert re.search(complaint, said), said
    assert said.count("\n") == 1 and len(said) < 500
    assert str(path) in said or "--steps" in said


@pytest.mark.parametrize(("words", "complaint"), [
    (["paper", "--config", "a.yaml"], "starts from preset debug, the command line from paper"),
    (["--config"], "--config needs a value"),
    (["--config", "a.yaml", "--config=a.yaml"], "--config is given twice"),
    (["--config", "gone.yaml"], "gone.yaml is missing"),
    (["--config", "a.toml"], "a.toml: settings are read from a .yaml, .yml or .json file"),
])
def test_wrong_words_about_a_file(tmp_path, monkeypatch, capsys, words, complaint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("preset: debug")
    assert main(["train", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_help_names_both(capsys):
    for words in ([], ["debug"]):
        with pytest.raises(SystemExit):
            main(["train", *words, "--help"])
        said = capsys.readouterr().out
        assert "--config" in said and "--print-config" in said
