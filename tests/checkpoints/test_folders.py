"""Checkpoints appear whole or not at all, say what is wrong with them, and give back every bit."""

import dataclasses
import json
import os
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from bwsft import config as c
from bwsft.checkpoints import folders as k
from bwsft.checkpoints.optimizer_state import load_optimizer
from bwsft.checkpoints.resolve import load_trained, locate
from bwsft.checkpoints.state import read_state
from bwsft.models.loading import load_backbone
from bwsft.models.lora import ADAPTER, load_adapter_weights
from bwsft.training import trainer as t
from bwsft.utils import files

LORA = c.LoraConfig(rank=3, alpha=6.0, dropout=0.3)


def save_again(run, step):
    state = {"config": json.loads(c.to_json(run.config)), "data": "d", "base": run.files.base}
    model = run.backbone, run.files.tokenizer, run.optimizer
    return k.save_checkpoint(run.folder, step, *model, state)


@pytest.fixture
def saved(tiny, make_run):
    """saved(step, **changes) -> (run after two updates, its checkpoint folder)."""

    def save(step=2, **changes):
        run = make_run(tiny(**changes))
        for index in range(2):
            t.train_step(run, index)
        return run, save_again(run, step)

    return save


# --- atomic files ---


def test_write_atomic_replaces_or_keeps(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomic(path, "old")
    files.write_atomic(path, b"new")
    assert path.read_text() == "new"

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, "half")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_folder_atomic_leaves_nothing_of_a_failure(tmp_path, error):
    with pytest.raises(error), files.folder_atomic(tmp_path / "a" / "whole") as part:
        (part / "deep").mkdir()
        (part / "deep" / "file").write_text("x")
        assert not (tmp_path / "a" / "whole").exists()
        raise error
    assert os.listdir(tmp_path / "a") == []


def test_folder_atomic_appears_whole_and_replaces_nothing(tmp_path):
    with files.folder_atomic(tmp_path / "whole") as part:
        (part / "deep").mkdir()
        (part / "deep" / "file").write_text("x")
    assert (tmp_path / "whole" / "deep" / "file").read_text() == "x"
    with pytest.raises(OSError), files.folder_atomic(tmp_path / "whole") as part:
        (part / "other").write_text("y")
    assert os.listdir(tmp_path) == ["whole"] and os.listdir(tmp_path / "whole") == ["deep"]


# --- saving ---


def test_a_checkpoint_holds_the_documented_files(saved, capfd):
    _, full = saved()
    common = {
        "manifest.json", "optimizer.safetensors", "state.json", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
    }
    assert set(os.listdir(full)) == common | {"config.json", "model.safetensors"}
    run, adapter = saved(lora=LORA, out=f"{full.parent.parent}-lora")
    assert set(os.listdir(adapter)) == common | {"adapter_config.json", "adapter_model.safetensors"}
    assert k.problems(full) is None and k.problems(adapter) is None
    state = read_state(adapter)
    assert state["step"] == 2 and state["base"] == str(run.folder / "base")
    assert c.from_json(json.dumps(state["config"])) == run.config
    assert state["family"]["end_ids"] == [258, 256] and state["versions"]["torch"]
    assert "Writing model shards" not in capfd.readouterr().err


def test_every_bit_of_a_full_model_comes_back(saved):
    run, path = saved()
    loaded = load_backbone(path)
    for (name, ours), theirs in zip(
        run.backbone.named_parameters(), loaded.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    trained = load_trained(str(path), device="cpu")
    assert trained.backbone.family == run.backbone.family and not trained.backbone.training
    assert trained.contract.template == "chat" and not trained.assumed


def test_every_bit_of_an_adapter_comes_back(saved, make_run):
    run, path = saved(lora=LORA)
    again = make_run(dataclasses.replace(run.config, out=f"{run.folder}-again"))
    assert not same_weights(run, again)
    load_adapter_weights(path, again.backbone)
    load_optimizer(path, again.backbone, again.optimizer)
    assert same_weights(run, again)
    assert t.train_step(run, 2) == t.train_step(again, 2)  # dropout, moments, gradient
    assert same_weights(run, again)


def test_a_missing_base_is_named_as_the_adapters(saved):
    _, path = saved(lora=LORA)
    state = read_state(path)
    (path / "state.json").write_text(json.dumps({**state, "base": "/gone/base"}))
    shutil.rmtree(path.parent.parent / "base", ignore_errors=True)
    (path / k.MANIFEST).unlink()  # its checksums are those of the true state
    with pytest.raises(FileNotFoundError, match=f"gone/base .*base of the adapter in {path}"):
        load_trained(str(path))


def same_weights(a, b):
    pairs = zip(a.backbone.parameters(), b.backbone.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def assert_same_function(run, trained):
    run.backbone.eval()
    ids, cu = torch.arange(12), torch.tensor([0, 12])
    with torch.no_grad():
        ours, theirs = (b.hidden_states(ids, ids, cu) for b in (run.backbone, trained.backbone))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lora", [c.LoraConfig(rank=0), LORA], ids=["full", "lora"])
def test_tied_heads_train_save_and_load(model_folder, tiny, make_run, tokenizer_folder, lora):
    folder = model_folder(weight_tying=True)
    run = make_run(tiny(model=str(folder), tokenizer=None, lora=lora))
    head = run.backbone.head()[0]
    assert head is run.backbone.base_model.model.transformer["wte"].weight
    before = head.detach().clone()
    t.train_step(run, 0)
    assert torch.equal(head, before) == bool(lora.rank)
    state = {"config": json.loads(c.to_json(run.config)), "data": "d", "base": run.files.base}
    k.save_checkpoint(run.folder, 1, run.backbone, run.files.tokenizer, run.optimizer, state)
    trained = load_trained(str(run.folder), device="cpu")
    assert torch.equal(trained.backbone.head()[0], head)
    assert_same_function(run, trained)


@pytest.mark.parametrize("lora", [c.LoraConfig(rank=0), LORA], ids=["full", "lora"])
def test_a_run_folder_decodes_wherever_it_is_moved(saved, tmp_path, lora):
    run, _ = saved(lora=lora)
    moved = run.folder.rename(tmp_path / "moved")
    assert_same_function(run, load_trained(str(moved), device="cpu"))


def test_a_full_disk_leaves_the_old_checkpoints_alone(saved, monkeypatch, snapshot):
    run, path = saved()
    before = snapshot(run.folder)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(k, "save_file", fail)
    for step in (2, 3):
        message = f"step-{step} could not be written.*No space.*--resume {run.folder}"
        with pytest.raises(OSError, match=message):
            save_again(run, step)
        assert snapshot(run.folder) == before
    assert os.listdir(run.folder / "checkpoints") == ["step-2"]


def test_a_torn_folder_is_replaced(saved):
    run, path = saved()
    (path / "state.json").write_text("torn")
    (path / "stray").write_text("x")
    assert save_again(run, 2) == path and k.problems(path) is None and not (path / "stray").exists()


# --- finding ---


def _cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _drop_line(path):
    listed = json.loads(path.read_text())
    del listed["optimizer.safetensors"]
    path.write_text(json.dumps(listed))


DAMAGE = {
    "cut": ("model.safetensors", _cut, "instead of"),
    "flipped": ("optimizer.safetensors", _flip, "checksum differs"),
    "missing": ("tokenizer.json", os.remove, "is missing"),
    "no manifest": ("manifest.json", os.remove, "manifest.json cannot be read"),
    "manifest cut": ("manifest.json", _cut, "manifest.json cannot be read"),
    "not listed": ("manifest.json", _drop_line, "does not list optimizer"),
    "not an object": ("manifest.json", lambda p: p.write_text("[1]"), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named(saved, damage):
    run, whole = saved()
    name, act, word = DAMAGE[damage]
    _, torn = saved(10, out=str(run.folder) + "x")
    torn = torn.rename(run.folder / "checkpoints" / "step-10")
    act(torn / name)
    assert word in k.problems(torn)
    assert k.newest_complete(run.folder) == (whole, [k.problems(torn)])
    assert locate(str(run.folder))[0] == str(whole)
    if damage != "no manifest":
        with pytest.raises(ValueError, match=f"step-10 is not a whole checkpoint: .*{word}"):
            locate(str(torn))


def test_the_optimizer_may_be_left_out_for_decoding(saved):
    run, path = saved()
    (path / "optimizer.safetensors").unlink()
    assert "is missing" in k.problems(path)
    assert locate(str(path))[1]["step"] == 2
    with pytest.raises(ValueError, match="holds no complete checkpoint: .*optimizer"):
        locate(str(run.folder))


def test_steps_are_ordered_as_numbers(tmp_path):
    for name in ("step-9", "step-100", "step-20", "step-x", "other"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [p.name for p in k.step_folders(tmp_path)] == ["step-100", "step-20", "step-9"]


@pytest.mark.parametrize(
    ("keep_last", "left"),
    [(0, [3, 6, 9, 12]), (1, [12]), (2, [9, 12]), (9, [3, 6, 9, 12])],
)
def test_prune_keeps_the_newest_and_drops_what_is_beyond(tmp_path, keep_last, left):
    """A torn step-20, from before the run went on at 9, must not count as the newest."""
    folder = tmp_path / "checkpoints"
    for name in ("step-3", "step-6", "step-9", "step-12", "step-20", ".step-15.abcdef12.bwsft.tmp"):
        (folder / name).mkdir(parents=True)
    k.prune(folder / "step-12", keep_last)
    assert sorted(os.listdir(folder)) == sorted(f"step-{n}" for n in left)


def test_state_of_something_else_is_refused(tmp_path):
    for content in ("{", "[]", '{"step": 1}'):
        (tmp_path / "state.json").write_text(content)
        with pytest.raises(ValueError, match="is not a bwsft checkpoint state"):
            read_state(tmp_path)


@pytest.mark.parametrize(("edit", "message"), [
    (lambda w, n: w.pop(n), "lacks tensor .*lora_A"),
    (lambda w, n: w.update(extra=w[n].clone()), "has an unknown tensor extra"),
    (lambda w, n: w.update({n: w[n][:1]}), r"has shape \(1, 32\), the run needs \(3, 32\)"),
])
def test_an_adapter_that_does_not_fit_is_refused(saved, edit, message):
    run, path = saved(lora=LORA)
    tensors = load_file(path / ADAPTER)
    name = next(n for n in tensors if "blocks.1.k_proj.lora_A" in n)
    edit(tensors, name)
    save_file(tensors, path / ADAPTER)
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        warnings.simplefilter("error")
        load_adapter_weights(path, run.backbone)
    (path / ADAPTER).write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged or cut short"):
        load_adapter_weights(path, run.backbone)
