"""Bad input through the command line: one clear message, status 2, no traceback, nothing written
or overwritten. (Malformed records of every kind: test_records.py; checkpoints: tests/checkpoints.)
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file
from tiny_folders import edit

from bwsft import config as c
from bwsft.checkpoints.folders import _write_manifest
from bwsft.cli import main
from bwsft.utils.claims import lock_folder

GOOD_LINE = json.dumps({"query": "1+1", "response": "2"}) + "\n"


def refused(argv, capsys):
    """The message of a command that must be refused."""
    capsys.readouterr()
    try:
        status = main(argv)
    except SystemExit as stop:  # tyro's own complaints
        status = stop.code
    message = capsys.readouterr().err
    assert status == 2 and "Traceback" not in message
    return " ".join(message.split())


@pytest.fixture
def refuse(tiny, flags, capsys, snapshot, tmp_path):
    """refuse(**changes) -> the message; checks that no file appeared or changed."""

    def run(**changes):
        before = snapshot(tmp_path)
        message = refused(flags(tiny(**changes)), capsys)
        assert snapshot(tmp_path) == before
        assert message.startswith("bwsft train: ") and len(message) < 500
        return message.removeprefix("bwsft train: ")

    return run


def test_the_command_works_without_the_faults(tiny, flags, capsys):
    assert main(flags(tiny())) == 0


@pytest.mark.parametrize(("arguments", "word"), [
    (["train"], "name a preset (debug, llada-8b-lora, llada-8b-dense, dream-7b-lora"),
    (["train", "debgu"], "released; did you mean debug?"),
    (["train", "debug", "--stesp=5"], "unknown flag --stesp; did you mean --steps?"),
    (["train", "debug", "--learning-rate", "1"], "--learning-rate: it is called --lr here"),
    (["train", "debug", "--steps", "5", "--epochs", "1"], "--steps and --epochs both say"),
    (["chta"], "unknown command 'chta'; did you mean chat?"),
    (["train", "nonsense"], "nonsense"),
    (["train", "debug", "--optim.momentum", "0.9"], "--optim.momentum"),
    (["train", "debug", "--steps", "many"], "invalid"),
    (["train", "debug", "--dataset.canvas", "round"], "round"),
    (["retrain"], "unknown command 'retrain'"),
])
def test_unknown_words(arguments, word, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert word in refused(arguments, capsys)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("changes", "word"), [
    ({"block_size": 5}, "--block-size 5 must divide --gen-length 16; try --gen-length 20"),
    ({"steps": 0}, "--steps must be at least 1"),
    ({"micro_batch_size": 3}, "--micro-batch-size 3 must divide --batch-size 4"),
    ({"seed": -1}, "--seed must lie in"),
    ({"device": "tpu9"}, "--device tpu9: use auto, cpu, cuda"),
    ({"tokenizer": "/nowhere/at/all"}, "/nowhere/at/all doesn't exist"),
    ({"dataset": c.DataConfig(split="test")}, "sums.jsonl is one file: --dataset.split"),
    ({"dataset": c.DataConfig(subset="main")}, "sums.jsonl is one file: --dataset.subset"),
    ({"dataset": c.DataConfig(template="chat", holdout=40)}, "--dataset.holdout 40 leaves"),
])
def test_values_that_no_run_can_use(refuse, changes, word):
    assert word in refuse(**changes)


@pytest.mark.parametrize(("content", "word"), [
    (None, "data.jsonl doesn't exist"),
    ("", "data.jsonl is empty"),
    ("\n\n", "there are no records in"),
    (GOOD_LINE + GOOD_LINE[:20], "data.jsonl, line 2 is not valid JSON"),
    (GOOD_LINE + '{"query": "1+1"}\n', "data.jsonl, line 2 has 'query' but no 'response'"),
    (GOOD_LINE.replace("1+1", "1" * 40), "1 longer than max_length 40"),
])
def test_data_files(refuse, tmp_path, content, word):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    assert word in refuse(data=str(path))


# --- models ---


def shard(folder):
    """Split the weights in two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def shard_and_lose_one(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


# One of each kind; test_loading.py has the others.
BROKEN_MODELS = {
    "an option": (lambda f: edit(f / "config.json", alibi=True), "alibi=True is not implemented"),
    "no config": (lambda f: os.remove(f / "config.json"), "config.json is missing"),
    "lost shard": (shard_and_lose_one, "names model-00002-of-00002.safetensors, which is not"),
    "cut": (cut_weights, "is damaged or cut short"),
    "wrong shape": (lambda f: edit(f / "config.json", mlp_hidden_size=8), "has shape"),
}


@pytest.mark.parametrize("fault", BROKEN_MODELS)
def test_broken_models(refuse, model_folder, fault):
    folder = model_folder()
    spoil, word = BROKEN_MODELS[fault]
    spoil(folder)
    assert word in refuse(model=str(folder), tokenizer=None)


@pytest.mark.parametrize(("fields", "word"), [
    ({"max_sequence_length": 17}, "longer than the model's 17 positions; give --gen-length 12 or"),
    ({"vocab_size": 258}, "token id 258, outside the model's vocabulary of 258"),
    ({"mask_token_id": 300}, "the model's mask id is 300, the tokenizer's is 257"),
])
def test_models_that_do_not_fit_data_or_tokenizer(refuse, model_folder, fields, word):
    assert word in refuse(model=str(model_folder(**fields)), tokenizer=None)


def test_a_sharded_model_trains(tiny, flags, model_folder):
    """So the faults above are what stopped the others."""
    folder = model_folder()
    shard(folder)
    assert main(flags(tiny(model=str(folder), tokenizer=None, steps=1))) == 0


# --- run folders and checkpoints ---


@pytest.fixture
def finished(tiny, flags):
    """finished(**changes) -> folder of a run of four updates with checkpoints after 2 and 4."""

    def run(**changes):
        config = tiny(steps=4, save_every=2, **changes)
        assert main(flags(config)) == 0
        return c.run_folder(config)

    return run


def test_an_existing_output_folder_is_not_touched(refuse, finished, tmp_path):
    folder = finished()
    message = refuse(steps=4)
    assert f"{folder} exists; choose another --out, or go on with it by --resume" in message
    (tmp_path / "empty").mkdir()
    assert "exists" in refuse(out=str(tmp_path / "empty"))
    (tmp_path / "file").write_text("x")
    assert "exists" in refuse(out=str(tmp_path / "file"))
    assert "Not a directory" in refuse(out=str(tmp_path / "file" / "run"))


def resume(folder, capsys, snapshot, *more):
    before = snapshot(folder.parent)
    message = refused(["train", "debug", "--resume", str(folder), *more], capsys)
    assert snapshot(folder.parent) == before
    return message


@pytest.mark.parametrize(("more", "word"), [
    (["--block-size", "8"], "block_size: 4 -> 8"),
    (["--seed", "9", "--optim.lr", "0.5"], "seed: 3 -> 9; optim.lr: 0.003 -> 0.5"),
    (["--lora.rank", "4"], "lora.rank: 0 -> 4"),
])
def test_resume_with_other_options(finished, capsys, snapshot, more, word):
    folder = finished()
    assert f"{folder / 'config.json'} was started otherwise: {word};" in resume(
        folder, capsys, snapshot, *more
    )


def test_resume_with_other_data(finished, capsys, snapshot, tmp_path, data_file):
    folder = finished()
    other = tmp_path / "other.jsonl"
    other.write_text(data_file.read_text().replace("8", "9", 1))
    message = resume(folder, capsys, snapshot, "--data", str(other))
    assert f"{other} is not what {folder} was trained on" in message
    other.unlink()
    assert "doesn't exist" in resume(folder, capsys, snapshot, "--data", str(other))


def test_resume_from_a_checkpoint_of_another_config(finished, capsys, snapshot, tmp_path):
    folder = finished()
    other = finished(out=str(tmp_path / "other"), optim=c.OptimConfig(lr=0.25))
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(other / "checkpoints", folder / "checkpoints")
    message = resume(folder, capsys, snapshot)
    assert "step-4 was started otherwise: optim.lr: 0.25 -> 0.003" in message


def test_resume_of_what_is_no_run(finished, capsys, snapshot, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.txt").write_text("meow")
    assert "this is not a run folder" in resume(tmp_path / "photos", capsys, snapshot)
    assert "this is not a run folder" in resume(tmp_path / "photos" / "cat.txt", capsys, snapshot)
    folder = finished()
    typo = folder.with_name(folder.name + "x")
    said = f"--resume {typo}: there is no such run; did you mean {folder}?"
    assert said in resume(typo, capsys, snapshot) and said in refused(
        ["train", "--resume", str(typo)], capsys
    )
    (folder / "config.json").write_text('{"steps": ')
    assert "config.json is not valid JSON" in resume(folder, capsys, snapshot)
    (folder / "config.json").write_text('{"steps": 3, "speed": 4}')
    assert "unknown field speed" in resume(folder, capsys, snapshot)


WRONG_FIELDS = {
    "steps": ("4", "steps must be a whole number, not '4'"),
    "grad_checkpointing": (1, "grad_checkpointing must be true or false, not 1"),
    "seed": (None, "seed must be a whole number, not null"),
    "optim": ([], "optim must be an object"),
    "lora": ({"rank": True}, "lora.rank must be a whole number, not true"),
    "dataset": ({"canvas": "round"}, "dataset.canvas must be 'fixed' or 'response' or 'padded'"),
    "data": ("a\0b", "data must be text or null"),
    "save_every": (10**30, "save_every must be a whole number, not a number too large"),
}


def test_resume_with_wrong_types(finished, capsys, snapshot):
    """In the run's config, and in that of a checkpoint whose manifest agrees with it."""
    folder = finished()
    config, checkpoint = folder / "config.json", folder / "checkpoints" / "step-4"
    good = config.read_text(), (checkpoint / "state.json").read_text()
    for field, (value, word) in WRONG_FIELDS.items():
        config.write_text(json.dumps(json.loads(good[0]) | {field: value}))
        assert f"config.json: {word}" in resume(folder, capsys, snapshot)
        config.write_text(good[0])

        state = json.loads(good[1])
        state["config"][field] = value
        (checkpoint / "state.json").write_text(json.dumps(state))
        (checkpoint / "manifest.json").unlink()
        _write_manifest(checkpoint)
        message = resume(folder, capsys, snapshot)
        assert f"{checkpoint / 'state.json'} is not a bwsft checkpoint state" in message
        assert f"config.{word}" in message
        (checkpoint / "state.json").write_text(good[1])
    config.write_text(good[0].replace('"steps": 4', '"steps": 4, "steps": 4'))
    assert "config.json is not valid JSON (key 'steps' stands twice" in resume(
        folder, capsys, snapshot
    )


def test_a_run_that_another_process_writes(finished, capsys, snapshot, monkeypatch):
    """Said before a checkpoint is chosen: the writer may prune it meanwhile."""
    folder = finished()
    with lock_folder(folder), monkeypatch.context() as patched:
        name = "bwsft.training.run_files.newest_complete"
        patched.setattr(name, lambda run: pytest.fail("chosen"))
        message = resume(folder, capsys, snapshot)
    assert f"{folder} is being written by process {os.getpid()}: wait until it has" in message
    assert main(["train", "debug", "--resume", str(folder)]) == 0


def test_any_name_will_do_for_a_folder(tiny, flags, tmp_path, data_file):
    """Blanks, quotes, other scripts: nothing goes through a shell or an ASCII table."""
    folder = tmp_path / "données d'Émile; $(rm -rf) 実験 \U0001f980"
    folder.mkdir()
    shutil.copy(data_file, folder / "süm 1.jsonl")
    config = tiny(
        steps=2, lora=c.LoraConfig(rank=2),
        data=str(folder / "süm 1.jsonl"), out=str(folder / "run ü"),
        dataset=c.DataConfig(template="chat", holdout=6, cache_dir=str(folder / "cache é")),
    )  # fmt: skip
    assert main(flags(config)) == 0
    assert main(["train", "debug", "--resume", str(folder / "run ü")]) == 0
    out = folder / "exported ü"
    assert main(["export", "--model", str(folder / "run ü"), "--out", str(out)]) == 0
    assert (out / "model.safetensors").stat().st_size > 10_000


def test_resume_with_a_damaged_log(finished, capsys, snapshot):
    folder = finished()
    log = folder / "metrics.jsonl"
    good = log.read_text()
    log.write_text(good.replace('"loss"', '"lost"', 1))
    assert f"{log}, step 1 has no number 'loss'" in resume(folder, capsys, snapshot)
    log.write_text(good.replace('{"step": 2', "{"))
    assert "metrics.jsonl, line 2 is not a record" in resume(folder, capsys, snapshot)


@pytest.mark.parametrize("as_run", [True, False])
def test_a_cut_checkpoint_is_no_model(finished, refuse, as_run):
    folder = finished()
    for weights in folder.rglob("model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-100])
    model = folder if as_run else folder / "checkpoints" / "step-4"
    message = refuse(model=str(model), tokenizer=None, out=str(folder) + "2")
    assert "checkpoint" in message and "bytes instead of" in message


def test_an_adapter_is_no_model_to_train(finished, refuse):
    folder = finished(lora=c.LoraConfig(rank=2))
    message = refuse(model=str(folder), tokenizer=None, out=str(folder) + "2")
    assert "is an adapter: merge it first" in message


def test_the_status_reaches_the_shell():
    done = subprocess.run(
        [sys.executable, "-m", "bwsft", "retrain"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "unknown command 'retrain'" in done.stderr
