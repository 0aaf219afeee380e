"""One training, and whoever reads what it wrote gives the same answers: checkpoint, exported
folder and the Trainer's; generate, chat, evaluate, compare, report and lm-eval."""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import jsonl
import pytest
from thinning import thinned
from tiny_trainer import trainer_of

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import load_trained
from bwsft.commands.chat import Conversation
from bwsft.commands.compare import run_compare
from bwsft.commands.evaluate import run_evaluate
from bwsft.commands.export import run_export
from bwsft.commands.generate import run_generate
from bwsft.commands.options import (
    CompareOptions,
    EvaluateCommand,
    ExportOptions,
    GenerateOptions,
    SampleOptions,
)
from bwsft.commands.report.samples import ask_models
from bwsft.data import word_problems
from bwsft.decoding.pipeline import AskedModel, Decoder
from bwsft.decoding.settings import DecoderOptions
from bwsft.training.setup import train

COUNT = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: folder} of a short training of the embedded base, with settings that none would
    guess."""
    root = tmp_path_factory.mktemp("same")
    records = jsonl.write(root / "train.jsonl", *word_problems.generate(40))
    config = dataclasses.replace(
        presets.debug(), data=str(records), out=str(root / "run"), steps=2, context="cached",
        block_size=10, optim=c.OptimConfig(lr=1e-5), eval=c.EvalConfig(every=0),
        dataset=c.DataConfig(template="chat", holdout=2, cache_dir=str(root / "cache")),
    )  # fmt: skip
    assert train(config) == 0
    assert run_export(ExportOptions(str(root / "run"), root / "out", dtype="float32")) == 0
    exported = load_trained(str(root / "out"))
    trainer, _ = trainer_of(exported.backbone, config, exported.tokenizer, root / "trainer")
    trainer.save_model(str(root / "trainer"))
    bare = root / "bare"
    shutil.copytree(root / "out", bare)
    (bare / "generation_config.json").unlink()
    return {kind: str(root / kind) for kind in ("run", "out", "trainer", "bare")}, config


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [
        {"question": p["query"], "answer": p["response"].replace("The answer is:", "####")}
        for p in word_problems.generate(COUNT, split="test")
    ]
    return jsonl.write(tmp_path_factory.mktemp("questions") / "test.jsonl", *rows)


@pytest.fixture(scope="module")
def expected(folders, data):
    """The answers of the checkpoint in memory, with settings that are spelled out."""
    options = DecoderOptions(template="chat", context="cached", block_size=10, gen_length=40)
    decoder = Decoder.load(folders[0]["run"], options)
    asked = [row["question"] for row in jsonl.read(data)]
    return [decoder.text(g.tokens) for g in decoder.answers(decoder.encode(asked))]


kinds = pytest.mark.parametrize("kind", ["run", "out", "trainer"])


@kinds
def test_generate_and_chat(folders, data, expected, tmp_path, kind):
    model, out = folders[0][kind], tmp_path / "out.jsonl"
    run_generate(GenerateOptions(model=model, prompts=data, out=out))
    assert [row["output"] for row in jsonl.read(out)] == expected
    talk = Conversation(Decoder.load(model, DecoderOptions()))
    for row, answer in list(zip(jsonl.read(data), expected, strict=True))[:3]:
        ids, _ = talk.prompt(row["question"])  # of a conversation that begins
        assert talk.decoder.text(talk.decode(ids).tokens) == answer


def accuracy_of(model, data, folder):
    json_file = folder / f"{Path(model).name}.json"
    command = EvaluateCommand(
        task="gsm8k", model=Path(model), data=data, json=json_file, save=folder / "saved.jsonl"
    )
    run_evaluate(command)
    saved = [row["output"] for row in jsonl.read(folder / "saved.jsonl")]
    (folder / "saved.jsonl").unlink()
    return json.loads(json_file.read_text())["accuracy"], saved


@pytest.mark.parametrize("kind", thinned(["out", "run", "trainer"]))
def test_evaluate_compare_and_the_harness(folders, data, expected, tmp_path, kind):
    model = folders[0][kind]
    accuracy, saved = accuracy_of(model, data, tmp_path)
    assert saved == expected and accuracy > 0
    compared = tmp_path / "compared.json"
    run_compare(CompareOptions(model=model, data=data, modes="cached,prefix", json=compared))
    assert json.loads(compared.read_text())["modes"][0]["accuracy"] == accuracy
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-evaluation-harness is missing: pip install 'bwsft[lm-eval]'")
    from lm_eval.api.instance import Instance

    from bwsft.evaluation.lm_eval import BwsftLM

    harness = BwsftLM(pretrained=model)
    asked = [
        Instance("generate_until", {}, (row["question"], {"until": []}), number)
        for number, row in enumerate(jsonl.read(data))
    ]
    assert harness.generate_until(asked) == expected


def test_report(folders, data):
    """Of the run, and of one that starts from the exported folder: the same held-out answers."""
    models, config = folders
    checkpoint = Path(models["run"]) / "checkpoints" / "step-2"
    found = ask_models(config, Path(models["run"]), checkpoint, SampleOptions())
    later = dataclasses.replace(config, model=models["out"])
    own = found.samples
    base = ask_models(later, Path(models["run"]), None, SampleOptions()).samples
    assert not found.notes and len(own) == len(base) == 2
    for sample, again in zip(own, base, strict=True):
        trained, start = sample["answers"][-1], again["answers"][0]
        assert trained["name"] == "step-2" and trained["context"] == start["context"] == "cached"
        assert trained["commits"] and [c[:3] for c in trained["commits"]] == [
            c[:3] for c in start["commits"]
        ]


def test_without_its_settings_a_folder_answers_otherwise_and_says_so(
    folders, data, expected, capsys
):
    capsys.readouterr()
    asked = [row["question"] for row in jsonl.read(data)][:2]
    answers = AskedModel(folders[0]["bare"], DecoderOptions()).decode(asked)
    assert [answer.text for answer in answers] != expected[:2]
    assert "assumed: --template metamath, --context exact, --block-size 32" in (
        capsys.readouterr().err
    )
