"""Content is identity: whatever is named by a path is recognized by what is in it, whatever its
size and times say, by every command that goes on with something."""

import dataclasses
import gzip
import hashlib
import json
import os
import shutil
from concurrent.futures import Executor, Future

import huggingface_hub
import jsonl
import pytest
from safetensors.torch import load_file, save_file
from tiny_runs import resumed
from tiny_tokenizer import byte_tokenizer

from bwsft import config as c
from bwsft.cli import main
from bwsft.data import file_formats
from bwsft.data.dataset import load_set
from bwsft.data.examples import DataOptions
from bwsft.experiments import plans, runner, scales
from bwsft.experiments.measures import TestSet
from bwsft.training.setup import train

LORA = c.LoraConfig(rank=2, alpha=4.0, dropout=0.0)
COMMIT = "0123456789abcdef" * 2 + "01234567"
PLAIN = DataOptions(template="none", max_length=40, gen_length=8)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BWSFT_CACHE", str(tmp_path / "kept"))


@pytest.fixture
def failing(capsys):
    """failing(*words): what a command that must refuse its input says at last, in one line."""

    def run(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said.splitlines()[-1]

    return run


def in_place(path, act):
    """Change a file, or each file of a folder, keeping its size and its time of modification."""
    before = os.stat(path)
    act(path)
    assert os.stat(path).st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def negate(path):
    """Other weights under the same names, shapes and size."""
    save_file({name: -t for name, t in load_file(path).items()}, path, {"format": "pt"})


def flip(path):
    """One bit of the last weight."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap(old, new):
    assert len(old) == len(new)
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


def interrupted(folder):
    """The run as it was after its step 6."""
    shutil.rmtree(folder / "checkpoints" / "step-9")
    shutil.rmtree(folder / "checkpoints" / "step-10")


# --- runs ---


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_base_alone(tiny, model_folder, failing, capsys):
    base = model_folder()
    config = tiny(model=str(base), tokenizer=None, lora=LORA)
    run = c.run_folder(config)
    assert train(config) == 0
    interrupted(run)
    prompt = ("generate", "--model", run, "--prompt", "1+1")
    weights, kept = base / "model.safetensors", (base / "model.safetensors").read_bytes()
    assert main(["train", "--resume", str(run)]) == main([str(w) for w in prompt]) == 0
    interrupted(run)
    in_place(weights, negate)
    for words in (("train", "--resume", run), prompt):
        said = failing(*words)
        assert f"{weights} has changed" in said and "put back what it was" in said
    weights.write_bytes(kept)
    assert main(["train", "--resume", str(run)]) == 0
    assert "digests" not in capsys.readouterr().out


def test_one_bit_of_the_random_base_of_a_run(tiny, failing):
    config = tiny(lora=LORA)
    run = c.run_folder(config)
    assert train(config) == 0
    interrupted(run)
    weights = run / "base" / "model.safetensors"
    in_place(weights, flip)
    for words in (("train", "--resume", run), ("generate", "--model", run, "--prompt", "1+1"),
                  ("export", "--model", run, "--out", run.with_name("out"))):
        assert f"{weights} has changed" in failing(*words)
    in_place(weights, flip)
    assert train(resumed(config, run)) == 0


def test_the_tokenizer_of_a_run(tiny, tokenizer_folder, tmp_path, failing):
    words = shutil.copytree(tokenizer_folder, tmp_path / "words")
    config = tiny(tokenizer=str(words))
    assert train(config) == 0
    run = c.run_folder(config)
    interrupted(run)
    template = words / "chat_template.jinja"
    # What it prints of these records is the same, what it prints of others is not.
    in_place(template, swap(b"m.role == 'assistant'", b"m.role != 'user'     "))
    assert f"{template} has changed" in failing("train", "--resume", run)


def test_a_run_of_an_earlier_release_goes_on_with_a_note(tiny, model_folder, capsys):
    config = tiny(model=str(model_folder()), tokenizer=None, lora=LORA)
    run = c.run_folder(config)
    assert train(config) == 0
    interrupted(run)
    newest = run / "checkpoints" / "step-6"
    state = json.loads((newest / "state.json").read_text())
    assert state.pop("identity")
    (newest / "state.json").write_text(json.dumps(state))
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["state.json"] = {
        "bytes": (newest / "state.json").stat().st_size,
        "sha256": hashlib.sha256((newest / "state.json").read_bytes()).hexdigest(),
    }
    (newest / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert train(resumed(config, run)) == 0
    noted = [line for line in capsys.readouterr().out.split("\n") if "digests" in line]
    assert len(noted) == 1 and "an earlier release" in noted[0]
    assert "identity" in json.loads((run / "checkpoints/step-10/state.json").read_text())


def test_the_commit_of_a_model_from_the_hub(tiny, model_folder, tmp_path, monkeypatch, failing):
    """A run stays at the commit that it began at, and says it when that is gone."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--some--model"
    first, second = (repository / "snapshots" / name for name in (COMMIT, COMMIT[::-1]))
    shutil.copytree(model_folder(), first)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    config = tiny(model="some/model", tokenizer=None, lora=LORA)
    run = c.run_folder(config)
    assert train(config) == 0
    state = json.loads((run / "checkpoints/step-10/state.json").read_text())
    assert state["identity"]["base"]["commit"] == COMMIT
    assert state["identity"]["tokenizer"]["commit"] == COMMIT
    interrupted(run)
    # The repository goes on.
    shutil.copytree(first, second)
    negate(second / "model.safetensors")
    (repository / "refs" / "main").write_text(second.name)
    assert train(resumed(config, run)) == 0
    assert main(["generate", "--model", str(run), "--prompt", "1+1"]) == 0
    interrupted(run)
    shutil.rmtree(first)
    for words in (("train", "--resume", run), ("generate", "--model", run, "--prompt", "1+1")):
        assert f"some/model@{COMMIT} is neither" in failing(*words)


# --- answers and results ---


def test_answers_of_two_models_or_templates_are_not_mixed(
    tiny, model_folder, tmp_path, failing, capsys
):
    model = model_folder()
    prompts = jsonl.write(tmp_path / "p.jsonl", *({"question": q} for q in ("1+1", "2+2", "3")))
    out = tmp_path / "out.jsonl"
    words = ["generate", "--model", model, "--prompts", prompts, "--out", out, "--gen-length", "8",
             "--block-size", "4", "--template", "chat"]
    assert main([str(w) for w in words]) == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    files = {
        "weights": (model / "model.safetensors", negate),
        "tokenizer": (model / "chat_template.jinja", swap(b"}={%", b"}:{%")),
    }
    for name, (file, act) in files.items():
        kept = file.read_bytes()
        out.write_bytes(b"".join(lines[:2]))
        in_place(file, act)
        assert file.read_bytes() != kept
        said = failing(*words, "--resume")
        assert f"other {name}" in said and "--out" in said
        assert out.read_bytes() == b"".join(lines[:2])
        file.write_bytes(kept)
        assert main([str(w) for w in [*words, "--resume"]]) == 0
        assert out.read_bytes() == whole


def test_answers_of_an_earlier_release_go_on_with_a_note(model_folder, tmp_path, capsys):
    model, out = model_folder(), tmp_path / "out.jsonl"
    prompts = jsonl.write(tmp_path / "p.jsonl", *({"question": q} for q in ("1+1", "2+2", "3")))
    words = [str(w) for w in ("generate", "--model", model, "--prompts", prompts, "--out", out,
                              "--gen-length", "8", "--block-size", "4", "--template", "chat")]
    assert main(words) == 0
    whole = jsonl.read(out)
    old = [{name: value for name, value in row.items() if name != "identity"} for row in whole[:2]]
    jsonl.write(out, *old)
    capsys.readouterr()
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().err.count("an earlier release") == 1
    assert jsonl.read(out) == [*old, whole[2]]


def test_results_of_two_steps_are_two_files(tiny, questions, failing):
    config = tiny(model=None, steps=4, save_every=4)
    run = c.run_folder(config)
    words = ["evaluate", "--task", "gsm8k", "--model", run, "--data", questions, "--gen-length",
             "4", "--block-size", "4"]
    folder = questions.parent / "runs" / "evaluate"
    assert train(config) == 0
    assert main([str(w) for w in [*words, "--json", "step.json"]]) == 0
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert train(dataclasses.replace(resumed(config, run), steps=8)) == 0
    assert "other weights" in failing(*words, "--json", "step.json")
    assert main([str(w) for w in words]) == 0
    assert len(list(folder.iterdir())) == 2
    assert all(path.read_bytes() == content for path, content in before.items())
    # Other questions under the same name.
    in_place(questions, swap(b"1+1", b"1+2"))
    assert main([str(w) for w in words]) == 0
    assert len(list(folder.iterdir())) == 3


def test_scores_of_a_rewritten_file_of_outputs(questions, failing):
    rows = [{"question": "1+1", "output": "#### 3"}, {"question": "7", "output": "#### 1"}]
    outputs = jsonl.write(questions.parent / "outputs.jsonl", *rows)
    words = ["evaluate", "--task", "gsm8k", "--outputs", outputs, "--data", questions]
    assert main([str(w) for w in [*words, "--json", "a.json"]]) == 0
    assert main([str(w) for w in [*words, "--json", "a.json"]]) == 0
    in_place(outputs, swap(b"#### 1", b"#### 4"))
    assert "other outputs" in failing(*words, "--json", "a.json")
    assert main([str(w) for w in words]) == 0
    assert len(list((questions.parent / "runs" / "evaluate").iterdir())) == 2


# --- cells of experiments ---


class Here(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, act, *arguments):
        future = Future()
        future.set_result(act(*arguments))
        return future


def test_cells_are_named_by_what_they_read(
    tiny, data_file, model_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(runner, "ProcessPoolExecutor", lambda *_: Here())
    data = shutil.copy(data_file, tmp_path / "data.jsonl")
    config = tiny(data=str(data), model=str(model_folder()), tokenizer=None, out=None, steps=2,
                  save_every=2, eval=c.EvalConfig(every=0), device="cpu")
    plan = dataclasses.replace(
        plans.table(scales.mini()), arms=(plans.Arm("one", config, ("nelbo@4",)),), claims=()
    )
    tests = TestSet(problems=4, draws=1, nelbo_data=str(data_file))
    out = tmp_path / "cells"

    def run():
        (arm,) = runner.run_plan(plan, [0], out, tests, 1).arms
        return {path.name for path in out.glob("blockwise*.json")}, arm

    first, before = run()
    assert len(first) == 1 and run() == (first, before)
    in_place(data, swap(b"ok so", b"no no"))
    second, after = run()
    assert len(second) == 2 and first < second and after.cells != before.cells
    # A cell of an earlier release, whose name tells the settings alone.
    (new,) = second - first
    old = runner.cells.Cell(dataclasses.replace(config, seed=0)).key
    for path in out.glob(f"{new.removesuffix('.json')}*"):
        path.rename(out / path.name.replace(new.removesuffix(".json"), old))
    capsys.readouterr()
    third, again = run()
    assert third == second and again == after
    assert capsys.readouterr().out.count("an earlier release") == 1


# --- data ---


@pytest.fixture(scope="module")
def words():
    return byte_tokenizer(eos_token="<|eos|>")


def responses(found, tokenizer):
    return [tokenizer.decode(found.response(i)).removesuffix("<|eos|>") for i in range(len(found))]


@pytest.mark.parametrize("form", ["csv", "parquet", "saved"])
def test_tables_that_are_edited_under_the_same_time(words, tmp_path, form):
    import datasets

    path = tmp_path / (form if form == "saved" else f"d.{form}")
    old_answer = None
    for answer in ("3", "4", "3"):
        rows = [{"query": "1+2", "response": f"{answer}!?"}]
        table = datasets.Dataset.from_list(rows)
        old = path.stat() if path.exists() else None
        if form == "csv":
            path.write_text(f"query,response\n1+2,{answer}!?\n")
        elif form == "parquet":
            table.to_parquet(path)
        elif old is None:
            table.save_to_disk(path)
        else:
            (file,) = path.glob("*.arrow")  # answers of a length of their own, found once
            in_place(file, swap(f"{old_answer}!?".encode(), f"{answer}!?".encode()))
        if old:
            os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
        found = load_set(str(path), words, PLAIN, tmp_path / "cache")
        assert responses(found, words) == [f"{answer}!?"]
        old_answer = answer


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "jsonl.gz"])
def test_a_file_that_is_rewritten_between_hashing_and_reading(words, tmp_path, monkeypatch, form):
    """It is not taken, and nothing of it stays in the cache of tokens under the wrong name."""
    import datasets

    path = tmp_path / f"d.{form}"

    def put(answer):
        rows = [{"query": "1+2", "response": answer}]
        if form == "csv":
            path.write_text(f"query,response\n1+2,{answer}\n")
        elif form == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(path)
        else:
            line = json.dumps(rows[0]).encode() + b"\n"
            path.write_bytes(gzip.compress(line) if form.endswith("gz") else line)

    original = file_formats.digest

    def late(*arguments):
        found = original(*arguments)
        put("4")
        return found

    put("3")
    monkeypatch.setattr(file_formats, "digest", late)
    with pytest.raises(ValueError, match=rf"d\.{form} has changed while it was read"):
        load_set(str(path), words, PLAIN, tmp_path / "cache")
    monkeypatch.undo()
    for answer in ("3", "4"):
        put(answer)
        found = load_set(str(path), words, PLAIN, tmp_path / "cache")
        assert responses(found, words) == [answer]
