"""A resumed run is the uninterrupted one, bit for bit: every loss, every weight, every log line
but the seconds."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from thinning import thinned
from tiny_runs import resumed

from bwsft import config as c
from bwsft.checkpoints import resolve as models
from bwsft.checkpoints.state import read_state
from bwsft.cli import main
from bwsft.training import trainer as t
from bwsft.training.metrics import read_log
from bwsft.training.optim import lr_at
from bwsft.training.run_files import RunFiles, open_run
from bwsft.training.setup import setup, train

LORA = c.LoraConfig(rank=3, alpha=6.0, dropout=0.3)
KINDS = {
    "full": {"active_blocks": 2},
    "lora": {"lora": LORA},
    "traversal": {"objective": c.ObjectiveConfig(blocks="traversal", prefix_noise=0.1)},
    "cached": {"context": "cached", "draws_per_context": 2, "lora": LORA},
    "block_causal": {
        "context": "block_causal", "draws_per_context": 2,
        "objective": c.ObjectiveConfig(pairs=True), "block_size_schedule": 0.7,
    },
}


def history(folder):
    """All that a run says about its course."""
    lines = read_log(folder / "metrics.jsonl")
    seconds = [line.pop("seconds") - line.pop("data_seconds") for line in lines]
    assert all(s > 0 for s in seconds)
    return lines, read_log(folder / "eval.jsonl")


def end_state(folder, step=10):
    """Digests of the weights and moments of a checkpoint, and of all else that must agree."""
    path = folder / "checkpoints" / f"step-{step}"
    files = json.loads((path / "manifest.json").read_text())
    del files["state.json"]  # it names the run folder
    files.pop("adapter_config.json", None)  # it names the base's folder
    return files, read_state(path)["data"], read_state(path)["family"]


def assert_same(folder, reference):
    assert history(folder) == history(reference)
    assert end_state(folder) == end_state(reference)


def leave_only(reference, folder, step):
    """A copy of the run as a kill soon after checkpoint `step` leaves it: logs go on a little."""
    shutil.copytree(reference, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[: step + 2]) + lines[step][:20])
    (folder / "loss.png").unlink()


@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_from_any_checkpoint(tiny, tmp_path, kind):
    """Ten updates over two epochs; checkpoints after 3, 6 and 9."""
    config = tiny(**KINDS[kind])
    reference = c.run_folder(config)
    assert train(config) == 0
    losses = [line["loss"] for line in history(reference)[0]]
    assert len(losses) == len(set(losses)) == 10
    for step in (3, 6, 9) if kind in ("full", "lora") else (6,):
        folder = tmp_path / f"from-{step}"
        leave_only(reference, folder, step)
        assert train(resumed(config, folder)) == 0
        assert_same(folder, reference)
        assert (folder / "loss.png").exists()


def test_from_the_start_if_there_is_no_checkpoint(tiny, tmp_path, capsys):
    config = tiny()
    assert train(config) == 0
    reference, folder = c.run_folder(config), tmp_path / "early"
    leave_only(reference, folder, 0)
    assert train(resumed(config, folder)) == 0
    assert_same(folder, reference)
    # An empty folder is a run that was killed before it wrote anything.
    (tmp_path / "fresh").mkdir()
    assert train(resumed(config, tmp_path / "fresh")) == 0
    assert_same(tmp_path / "fresh", reference)
    assert capsys.readouterr().out.count("has no complete checkpoint: starting at step 0") == 2


def test_a_run_that_takes_more_steps(tiny, tmp_path, capsys):
    """It follows the new schedule from where it goes on, and remembers it."""
    config = tiny(steps=4, save_every=2)
    folder = c.run_folder(config)
    assert train(config) == 0
    assert main(["train", "--resume", str(folder), "--steps", "8"]) == 0
    assert "steps 4 -> 8, which is a new schedule: the learning rate of step 5 is" in (
        capsys.readouterr().out
    )
    rates = [line["lr"] for line in history(folder)[0]]
    expected = [lr_at(i, 4 if i < 4 else 8, config.optim) for i in range(8)]
    assert rates == pytest.approx(expected)
    assert c.stored(folder) == dataclasses.replace(config, steps=8)
    assert main(["train", "--resume", str(folder), "--steps", "7"]) == 2
    assert "--steps 7: the run has done 8 already" in capsys.readouterr().err
    assert c.stored(folder).steps == 8


def test_epochs_become_steps(tiny, capsys):
    config = tiny(epochs=1.5, dataset=c.DataConfig(template="none", limit=14, holdout=4))
    config = dataclasses.replace(config, batch_size=2, micro_batch_size=2)
    assert train(config) == 0
    assert "8 steps = 1.60 epochs of 10 examples" in capsys.readouterr().out  # 7.5 are no steps
    folder = c.run_folder(config)
    assert (c.stored(folder).steps, c.stored(folder).epochs) == (8, None)
    assert main(["train", "--resume", str(folder), "--epochs", "2"]) == 0
    assert c.stored(folder).steps == len(history(folder)[0]) == 10


def test_a_model_folder_is_no_different(tiny, model_folder, tmp_path):
    """The uninterrupted run maps the model's file, the resumed one the checkpoint's."""
    config = tiny(model=str(model_folder(d_model=48, n_heads=3)), tokenizer=None)
    assert train(config) == 0
    reference, folder = c.run_folder(config), tmp_path / "resumed"
    leave_only(reference, folder, 6)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    assert train(resumed(config, folder)) == 0
    assert_same(folder, reference)


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_trained_weights_are_aligned(tiny, make_run, model_folder, from_checkpoint):
    config = tiny(model=str(model_folder()), tokenizer=None)
    if from_checkpoint:
        assert train(config) == 0
        config = resumed(config, c.run_folder(config))
        run = setup(config, *open_run(config))
        assert run.first == 10
    else:
        run = make_run(config)
    assert all(p.data_ptr() % 64 == 0 for p in run.backbone.parameters())


def signal_during(monkeypatch, name, steps):
    """Send SIGTERM at the start of `name` when it is called for one of `steps`."""
    place = RunFiles if name == "save" else t
    original = getattr(place, name)

    def interrupted(*arguments):
        done = next(a for a in arguments if isinstance(a, int))
        if done in steps:
            os.kill(os.getpid(), signal.SIGTERM)
            steps.remove(done)
        return original(*arguments)

    monkeypatch.setattr(place, name, interrupted)


@pytest.mark.parametrize(("where", "steps", "kind"), thinned([
    ("save", (3, 9, 10), "traversal"),
    ("train_step", (4, 6), "lora"),
    ("report_eval", (0, 4, 10), "full"),
]))
def test_signals_at_any_place_several_times(tiny, tmp_path, monkeypatch, where, steps, kind):
    """During an update, an evaluation or a save; an evaluation that a signal left out is made up
    for."""
    config = tiny(**KINDS[kind])
    assert train(config) == 0
    folder = tmp_path / "stopped"
    left = list(steps)
    signal_during(monkeypatch, where, left)
    rounds = 0
    while left:
        again = resumed(config, folder) if rounds else dataclasses.replace(config, out=str(folder))
        assert train(again) == 0
        rounds += 1
        done = len(read_log(folder / "metrics.jsonl"))
        assert done == 0 or (folder / "checkpoints" / f"step-{done}").is_dir()
    assert train(resumed(config, folder)) == 0
    assert rounds == len(steps)
    assert_same(folder, c.run_folder(config))


def test_a_finished_run_stays_as_it_is(tiny, snapshot, capsys):
    config = tiny()
    assert train(config) == 0
    folder = c.run_folder(config)
    before = snapshot(folder)
    before.pop("loss.png")
    # Of a process that was killed while it removed an old checkpoint.
    half = folder / "checkpoints" / ".step-2.0123abcd.bwsft.tmp"
    half.mkdir()
    (half / "state.json").write_text("{}")
    assert train(resumed(config, folder)) == 0
    after = snapshot(folder)
    after.pop("loss.png")
    assert after == before


def test_a_torn_newest_checkpoint_is_skipped_reported_and_replaced(tiny, tmp_path, capsys):
    config = tiny(keep_last=1, save_every=2)
    assert train(dataclasses.replace(config, keep_last=0)) == 0
    reference, folder = c.run_folder(config), tmp_path / "torn"
    leave_only(reference, folder, 8)
    torn = folder / "checkpoints" / "step-8" / "optimizer.safetensors"
    torn.write_bytes(torn.read_bytes()[:-7])
    (folder / "checkpoints" / ".step-10.12345678.bwsft.tmp").mkdir()
    capsys.readouterr()
    # Another rhythm: the run passes step 8 without saving, and must not keep the torn one.
    assert train(dataclasses.replace(resumed(config, folder), save_every=7)) == 0
    out = capsys.readouterr().out
    assert f"skipping a checkpoint that is not whole: {torn} has" in out
    assert f"resuming from {folder / 'checkpoints' / 'step-6'}" in out
    assert_same(folder, reference)
    assert os.listdir(folder / "checkpoints") == ["step-10"]


def test_a_random_base_is_kept_and_not_drawn_again(tiny, tmp_path, monkeypatch):
    config = tiny(lora=LORA)
    assert train(config) == 0
    folder = tmp_path / "again"
    leave_only(c.run_folder(config), folder, 6)
    monkeypatch.setattr(models, "new_backbone", None)
    assert train(resumed(config, folder)) == 0
    shutil.rmtree(folder / "base")
    with pytest.raises(TypeError):
        train(resumed(config, folder))


@pytest.mark.parametrize("change", thinned(
    [{"micro_batch_size": 4}, {"grad_checkpointing": True}, {"save_every": 1, "keep_last": 1}]
))
def test_what_may_change_on_resume(tiny, tmp_path, change):
    """Layout and housekeeping; the losses stay, up to summation order."""
    config = tiny(lora=dataclasses.replace(LORA, dropout=0.0))
    assert train(config) == 0
    reference, folder = c.run_folder(config), tmp_path / "changed"
    leave_only(reference, folder, 6)
    moved = tmp_path / "moved.jsonl"
    shutil.copy(config.data, moved)
    again = dataclasses.replace(resumed(config, folder), data=str(moved), **change)
    assert train(again) == 0
    ours, theirs = ([r["loss"] for r in history(f)[0]] for f in (folder, reference))
    assert ours == pytest.approx(theirs, rel=1e-5) and ours[:6] == theirs[:6]
    assert c.from_json((folder / "config.json").read_text()) == config


# --- real processes ---


def start(arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, "-m", "bwsft", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )


def wait_for_lines(process, path, count):
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def long(tiny):
    """A run whose 16 updates take a few seconds, to be stopped in the middle."""
    return tiny(
        steps=16, batch_size=10, micro_batch_size=1, save_every=3, keep_last=2, lora=LORA,
        eval=c.EvalConfig(every=8, draws=2),
    )


@pytest.mark.slow
def test_sigterm_then_sigkill_then_resume(long, flags, tmp_path):
    """A real process is stopped politely, the next one killed; a third, here, ends the run."""
    assert train(long) == 0
    reference, folder = c.run_folder(long), tmp_path / "killed"
    log = folder / "metrics.jsonl"

    process = start(flags(dataclasses.replace(long, out=str(folder))))
    wait_for_lines(process, log, 3)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    done = len(read_log(log))
    assert process.returncode == 0 and "Traceback" not in output
    assert 3 <= done < 13 and f"stopped after step {done} of 16; go on with" in output
    assert (folder / "checkpoints" / f"step-{done}").is_dir()

    process = start(["train", "debug", "--resume", str(folder)])
    wait_for_lines(process, log, done + 3)
    process.kill()
    process.communicate(timeout=120)
    killed_at = log.read_bytes().count(b"\n")
    assert process.returncode == -signal.SIGKILL and done + 3 <= killed_at < 16

    assert train(resumed(long, folder)) == 0
    assert history(folder) == history(reference)
    assert end_state(folder, 16) == end_state(reference, 16)
    kept = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert kept == ["step-15", "step-16"]
