"""`bwsft evaluate` from the command line: a file of outputs, and a model that answers first."""

import json

import jsonl
import pytest
import tyro

from bwsft.cli import main
from bwsft.commands import evaluate as evaluate_command
from bwsft.commands.evaluate import run_evaluate
from bwsft.commands.options import EvaluateCommand
from bwsft.decoding.pipeline import AskedModel, Decoder
from bwsft.decoding.settings import DecoderOptions
from bwsft.evaluation import pass_at_1
from bwsft.evaluation.pass_at_1 import EvaluateOptions, evaluate


def parsed(words):
    return tyro.cli(EvaluateCommand, args=words)


def fail(*args):
    raise MemoryError


def test_outputs_are_scored_as_by_the_function(questions, tmp_path, capsys):
    rows = [{"question": "1+1", "output": "#### 3"}, {"question": "What?", "output": "#### 4"},
            {"question": "unasked", "output": "5"}]
    outputs = jsonl.write(tmp_path / "out.jsonl", *rows)
    words = ["--outputs", str(outputs), "--data", str(questions), "--json", "r.json"]
    assert main(["evaluate", "--task", "gsm8k", *words]) == 0
    shown = capsys.readouterr().out
    for part in ("accuracy, ladder rule", "accuracy, strict rule", "50.00 %", "missing reference",
                 "answers from: hashes", "runs/evaluate/gsm8k-out-"):
        assert part in shown
    found = json.loads((tmp_path / "r.json").read_text())
    again = evaluate(EvaluateOptions("gsm8k", outputs=outputs, data=questions))
    assert (found["run"], found["accuracy"], found["count"]) == (again["run"], 0.5, 2)
    # A decoder's setting is none of a file's score.
    assert found["settings"].keys() == again["settings"].keys()


def test_a_model_answers_with_the_options_given(questions, tmp_path, model_folder):
    folder = model_folder()
    words = "--gen-length 12 --block-size 4 --steps 6 --template none --batch-size 2 --limit 3"
    command = ["--task", "gsm8k", "--model", str(folder), "--data", str(questions), *words.split()]
    assert main(["evaluate", *command, "--save", "s.jsonl", "--json", "r.json"]) == 0
    options = DecoderOptions(gen_length=12, block_size=4, steps=6, template="none")
    expected = list(AskedModel(str(folder), options).decode(["1+1", "What?", "7"]))
    rows = jsonl.read(tmp_path / "s.jsonl")
    assert [(r["output"], r["tokens"], r["truncated"], r["passes"]) for r in rows] == [
        (text, tokens, not ended, passes) for text, tokens, ended, passes in expected
    ]
    settings = json.loads((tmp_path / "r.json").read_text())["settings"]
    assert (settings["steps"], settings["limit"]) == (6, 3)  # part of the run's name
    # The same settings may write again, others may not.
    assert main(["evaluate", *command, "--save", "s.jsonl"]) == 0
    assert main(["evaluate", *command, "--save", "s.jsonl", "--seed", "2"]) == 2


def test_an_interrupted_evaluation_goes_on_with_its_answers(
    questions, tmp_path, model_folder, monkeypatch
):
    words = "--gen-length 8 --block-size 4 --template none --batch-size 1 --temperature 1"
    words = [*words.split(), "--task", "gsm8k", "--data", str(questions), "--save", "s.jsonl"]
    command = ["evaluate", "--model", str(model_folder()), *words]
    assert main(command) == 0
    whole, kept = (tmp_path / "s.jsonl").read_bytes(), tmp_path / "s.answers.jsonl"
    (tmp_path / "s.jsonl").unlink()
    assert not kept.exists()
    real, asked = Decoder.text, []

    def text(self, tokens):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(tokens)
        return real(self, tokens)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Decoder, "text", text)
        run_evaluate(parsed(command[1:]))
    assert len(jsonl.read(kept)) == 2
    with monkeypatch.context() as patch, pytest.raises(MemoryError):  # nor is a failed score a loss
        patch.setattr(pass_at_1, "score", fail)
        run_evaluate(parsed(command[1:]))
    assert len(jsonl.read(kept)) == 4
    assert main([*command, "--seed", "2"]) == 2  # another run's answers are not taken
    monkeypatch.setattr(Decoder, "load", None)
    assert main(command) == 0
    assert (tmp_path / "s.jsonl").read_bytes() == whole
    assert not kept.exists()


def test_mistakes_are_found_before_a_model_is_read(questions, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Decoder, "load", None)
    for words, message in (
        ("--model m", "--model needs --data FILE"),
        ("", "give either --outputs FILE"),
        ("--model m --data gone.jsonl", "gone.jsonl: no such file"),
        ("--model m --data gsm8k.jsonl --limit 0", "--limit must be at least 1"),
    ):
        assert main(["evaluate", "--task", "gsm8k", *words.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_math_verify_that_does_not_work_is_one_line(questions, monkeypatch, capsys, error):
    def fail(*args):
        raise error("math-verify is not here: do this")

    monkeypatch.setattr(evaluate_command, "evaluate", fail)
    assert main(["evaluate", "--task", "math", "--outputs", "x"]) == 2
    assert capsys.readouterr().err == "bwsft evaluate: math-verify is not here: do this\n"
    monkeypatch.setattr(evaluate_command, "evaluate", lambda *a: [][0])
    with pytest.raises(IndexError):  # other failures keep their traceback
        run_evaluate(EvaluateCommand("math", outputs=questions))
