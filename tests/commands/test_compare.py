"""`bwsft compare`: its figures against two runs of the decoder, and its agreement by hand."""

import json
import math
from types import SimpleNamespace

import jsonl
import pytest

from bwsft.cli import main
from bwsft.commands.compare import agreement, check, divergence
from bwsft.commands.options import CompareOptions
from bwsft.commands.speed_curve import curves
from bwsft.data import word_problems
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.result import Commit, Generation
from bwsft.decoding.result_file import ResultFile
from bwsft.decoding.settings import DecoderOptions
from bwsft.evaluation.pass_at_1 import EvaluateOptions, evaluate
from bwsft.utils.flops import flop_counter
from bwsft.utils.parallelism import aup

WORDS = "--gen-length 12 --block-size 4 --steps 6 --template none --batch-size 3".split()


def generation(tokens, commits, steps):
    return Generation(tokens, False, steps, [Commit(*c, 0.5) for c in commits], steps)


def test_agreement_by_hand():
    a = generation([5, 6, 7, 8], [(0, 0, 5), (1, 1, 6), (2, 3, 8), (2, 2, 7)], 3)
    cases = [
        (generation([5, 6, 7, 8], [(0, 0, 5), (1, 1, 6), (2, 2, 7), (2, 3, 8)], 3), None, 4, 4),
        (generation([5, 6], [(0, 0, 5), (1, 1, 6)], 2), None, 2, 4),  # ends earlier
        (generation([5, 9, 7, 8], [(0, 0, 5), (1, 1, 9), (2, 3, 8), (2, 2, 7)], 3), 1, 3, 4),
        (generation([5, 6, 7, 8, 9], [(0, 1, 6), (1, 0, 5), (2, 3, 8)], 4), 0, 4, 5),
    ]
    for other, step, equal, total in cases:
        assert divergence(a, other) == divergence(other, a) == step
        found = agreement([a], [other])
        assert found["token_agreement"] == equal / total
        assert found["identical"] == (other.tokens == a.tokens)
        assert (found["first_divergence"], found["diverged"]) == (step, float(step is not None))
    together = agreement([a] * 4, [other for other, *_ in cases])
    assert together["token_agreement"] == 13 / 17 and together["diverged"] == 0.5
    assert together["first_divergence"] == 1 and together["identical"] == 0.25


def test_figures_are_those_of_the_decoder_and_of_evaluate(questions, model_folder, capsys):
    model = str(model_folder())
    command = ["--model", model, "--data", str(questions), "--dtype", "float64", *WORDS]
    assert main(["compare", "--modes", "cached,exact", *command, "--json", "c.json"]) == 0
    shown = capsys.readouterr().out
    result = json.loads((questions.parent / "c.json").read_text())
    assert result["questions"] == 4
    histories = []
    for row in result["modes"]:
        options = DecoderOptions(
            gen_length=12, block_size=4, steps=6, template="none", batch_size=3, dtype="float64",
            context=row["mode"],
        )  # fmt: skip
        decoder = Decoder.load(model, options)
        with flop_counter() as counter:
            found = list(decoder.answers(decoder.encode(["1+1", "What?", "7", "x"]), trace=True))
        histories.append(found)
        assert row["flops"] == counter.get_total_flops() / 4
        assert row["passes"] == row["steps"] == sum(g.steps for g in found) / 4
        rate = sum(len(g.tokens) for g in found) / sum(g.passes for g in found)
        assert row["tokens_per_forward"] == rate and f"{rate:.2f}" in shown
        assert f"{row['flops'] / 1e9:.3g}" in shown
        folder = questions.parent / f"{row['mode']}.jsonl"
        main(["evaluate", "--task", "gsm8k", "--context", row["mode"], *command, "--save",
              str(folder)])  # fmt: skip
        again = evaluate(EvaluateOptions("gsm8k", outputs=folder, data=questions))
        assert row["accuracy"] == again["accuracy"]
        assert row["mean_tokens"] == sum(len(g.tokens) for g in found) / 4
    first, second = result["modes"]
    assert (first["mode"], second["mode"]) == ("cached", "exact")
    assert (first["token_agreement"], first["first_divergence"]) == (1.0, None)
    expected = agreement(*histories)
    assert {name: second[name] for name in expected} == expected
    assert first["flops"] < second["flops"]


def test_the_curve_of_each_mode_over_thresholds(capsys, tmp_path):
    """Of the embedded base, which is sure of most tokens: a threshold of 1 takes one token a pass,
    a lower one several, and the AUP is that of the printed points."""
    rows = [
        {"question": p["query"], "answer": p["response"].replace("The answer is:", "####")}
        for p in word_problems.generate(4, split="test")
    ]
    data = jsonl.write(tmp_path / "q.jsonl", *rows)
    out, plot = tmp_path / "c.json", tmp_path / "c.png"
    words = ["--data", str(data), "--modes", "exact,cached", "--rule", "threshold", "--thresholds",
             "0.5,1", "--json", str(out), "--plot", str(plot)]  # fmt: skip
    assert main(["compare", *words]) == 0
    shown, result = capsys.readouterr().out, json.loads(out.read_text())
    points = {}
    for row in result["modes"]:
        points.setdefault(row["mode"], {})[row["threshold"]] = (
            row["tokens_per_forward"], 100 * row["accuracy"])
    best = max(accuracy for some in points.values() for _, accuracy in some.values())
    for mode in ("exact", "cached"):
        (slow, _), (fast, _) = points[mode][1.0], points[mode][0.5]
        assert slow <= 1 < 1.5 < fast
        assert result["aup"][mode] == pytest.approx(aup([*points[mode].values()], best))
        assert f"(AUP), {mode}: {result['aup'][mode]:.1f}" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_comparison_goes_on(questions, model_folder, monkeypatch, capsys):
    """Every answer is kept as it comes; what they cost is known of modes that ran in one go."""
    model, folder = str(model_folder()), questions.parent
    words = ["compare", "--model", model, "--data", str(questions), "--modes", "cached,exact",
             *WORDS, "--batch-size", "1", "--json"]  # fmt: skip
    assert main([*words, "whole.json"]) == 0
    whole = json.loads((folder / "whole.json").read_text())
    assert not (folder / "runs").exists()
    appended, decode, began = ResultFile.append, Decoder.answers, []

    def killed(kept, index, record):
        if index == 6:
            raise KeyboardInterrupt
        appended(kept, index, record)

    monkeypatch.setattr(ResultFile, "append", killed)
    assert main([*words, "c.json"]) == 130
    (kept,) = (folder / "runs/compare").iterdir()
    monkeypatch.setattr(ResultFile, "append", appended)
    monkeypatch.setattr(
        Decoder, "answers", lambda *a, **k: began.append(a[2]) or decode(*a, **k)
    )
    before = kept.read_bytes()
    kept.write_bytes(before.replace(b'"data": "', b'"data": "0'))
    assert main([*words, "c.json"]) == 2 and "written with other data" in capsys.readouterr().err
    kept.write_bytes(before)
    assert main([*words, "c.json"]) == 0
    assert began == [2] and not kept.exists()
    found = json.loads((folder / "c.json").read_text())
    assert found["run"] == whole["run"] and found["identity"] == whole["identity"]
    timed = {"flops", "seconds"}
    for one, other in zip(found["modes"], whole["modes"], strict=True):
        assert {k: one[k] for k in one.keys() - timed} == {k: other[k] for k in one.keys() - timed}
    assert found["modes"][0]["flops"] == whole["modes"][0]["flops"]
    assert found["modes"][1]["flops"] is found["modes"][1]["seconds"] is None


def test_modes_are_measured_by_the_best_of_all():
    """A mode that is nowhere as good as another loses by it; one that commits nothing has none."""
    figures = [("a", 1.0, 0.8), ("a", 2.0, 0.8), ("b", 1.0, 0.6), ("b", 2.0, 0.6), ("c", None, 0.0)]
    rows = [SimpleNamespace(mode=m, tokens_per_forward=t, accuracy=y) for m, t, y in figures]
    first, second, nothing = curves(rows)
    assert first.aup == pytest.approx(160) and nothing.aup is None
    assert second.aup == pytest.approx(60 + 60 * math.exp(-3 * (1 - 60 / 80)))


@pytest.mark.parametrize("words, message", [
    ("--modes exact,warm", "--modes has 'warm': choose from exact"),
    ("--modes exact", "at least two modes, each once"),
    ("--modes exact,exact", "at least two modes, each once"),
    ("--context exact", "leave it out"),
    ("--rule apd --mixture 1", "rule apd decodes under context exact alone"),
    ("--refresh 2", "--refresh does not fit every context mode"),
    ("--cfg-scale 1", "--cfg-scale does not fit"),
    ("--suffix absent", "--suffix does not fit"),
    ("--limit 0", "--limit must be at least 1"),
    ("--rule threshold --active-blocks 2 --model no", "--modes has cached: active_blocks 2 needs"),
    ("--thresholds 0.9,0.5", "--thresholds needs --rule threshold"),
    ("--thresholds 0.9,0.5 --recipe dream", "--thresholds needs --rule threshold"),
    ("--thresholds 0.9 --rule threshold --threshold 0.5", "takes the place of --threshold"),
    ("--thresholds 0.9,1.5 --rule threshold", "--thresholds has '1.5'"),
    ("--thresholds 0.9,0.9 --rule threshold", "--thresholds has '0.9'"),
    ("--thresholds 0.9 --rule threshold --modes exact", "at least two modes"),
    ("--plot x.png", "--plot draws the curve of --thresholds"),
])
def test_what_compares_nothing_is_one_line(questions, capsys, words, message):
    assert main(["compare", "--data", str(questions), *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_may_set_the_rule_of_thresholds(questions):
    options = CompareOptions(data=questions, modes="exact", recipe="llada2", thresholds="1,0.9")
    assert check(options) == ["exact"]


def test_data_is_needed(capsys):
    assert main(["compare"]) == 2
    assert "needs --data FILE" in capsys.readouterr().err
