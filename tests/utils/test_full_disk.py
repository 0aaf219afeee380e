"""Real full and read-only disks: a small tmpfs, where the machine lets us mount one. (Without it,
training/test_stops.py limits the size of files instead.)"""

import dataclasses
import errno
import json
import os
import subprocess

import pytest

from bwsft import config as c
from bwsft.checkpoints import folders as k
from bwsft.cli import main
from bwsft.training import trainer as t
from bwsft.training.metrics import JsonLog, read_log
from bwsft.training.setup import train
from bwsft.utils.files import write_atomic


@pytest.fixture
def disk(tmp_path):
    """disk(options) -> a folder on a disk of its own; called again, it changes the options."""
    folder, mounted = tmp_path / "disk", []

    def mount(options):
        folder.mkdir(exist_ok=True)
        how = f"remount,{options}" if mounted else options
        command = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"a disk of its own needs the right to mount: {done.stderr.strip()}")
        mounted.append(options)
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder, leave=0):
    """Write until the disk is full, then give `leave` bytes back."""
    with open(folder / "filler", "ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(max(file.tell() - leave, 0))


def test_training_into_a_full_disk_and_on_when_there_is_room(tiny, flags, disk, capsys):
    config = tiny(save_every=2, eval=c.EvalConfig(every=0))
    assert train(config) == 0
    reference = c.run_folder(config)
    run = disk("size=1600k") / "run"
    capsys.readouterr()
    assert main(flags(dataclasses.replace(config, out=str(run)))) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    left = k.step_folders(run)
    assert 1 <= len(left) < 5 and not any(k.problems(folder) for folder in left)
    failed = f"step-{k.step_of(left[0]) + 2}"
    assert failed in message and "No space left on device" in message
    assert f"make room, then go on with --resume {run}" in message
    assert sorted(os.listdir(run / "checkpoints")) == sorted(folder.name for folder in left)

    assert main(["train", "debug", "--resume", str(run)]) == 2  # still no room: nothing is lost
    assert k.step_folders(run) == left
    disk("size=64m")
    assert main(["train", "debug", "--resume", str(run)]) == 0
    ours, theirs = (
        [(r["step"], r["loss"], r["grad_norm"]) for r in read_log(f / "metrics.jsonl")]
        for f in (run, reference)
    )
    assert ours == theirs
    files = [json.loads((f / "checkpoints/step-10/manifest.json").read_text())["model.safetensors"]
             for f in (run, reference)]  # fmt: skip
    assert files[0] == files[1]


def test_wherever_the_room_ends(tiny, make_run, disk):
    """Whichever file of a checkpoint doesn't fit, in torch, safetensors, tokenizers or here."""
    run = make_run(tiny())
    t.train_step(run, 0)
    state = {"config": {}, "data": "d", "base": None}
    folder = disk("size=8m")
    k.save_checkpoint(folder, 1, run.backbone, run.files.tokenizer, run.optimizer, state)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    refused = 0
    for room in range(0, size + 40_000, 16_384):
        fill(folder, room)
        try:
            k.save_checkpoint(folder, 2, run.backbone, run.files.tokenizer, run.optimizer, state)
        except OSError as error:
            refused += 1
            assert "step-2" in str(error) and "make room" in str(error)
            assert os.listdir(folder / "checkpoints") == ["step-1"]
    assert refused >= size // 16_384 and k.problems(folder / "checkpoints" / "step-2") is None
    assert k.problems(folder / "checkpoints" / "step-1") is None


def test_a_log_and_a_small_file_name_themselves(disk):
    folder = disk("size=256k")
    log = JsonLog(folder / "metrics.jsonl", 0)
    log.append({"step": 1})
    write_atomic(folder / "config.json", "old")
    fill(folder)
    with pytest.raises(OSError, match="No space left on device.*metrics.jsonl"):
        log.append({"step": 2, "long": "x" * 8192})
    log.close()
    with pytest.raises(OSError, match="No space left on device.*config.json'"):
        write_atomic(folder / "config.json", "x" * 8192)
    assert (folder / "config.json").read_text() == "old"
    assert read_log(folder / "metrics.jsonl") == [{"step": 1}]
    assert sorted(os.listdir(folder)) == ["config.json", "filler", "metrics.jsonl"]


def test_a_read_only_disk(tiny, flags, disk, snapshot, capsys):
    """Root writes wherever permissions forbid it, but not here."""
    run = disk("size=64m") / "run"
    config = tiny(steps=4, save_every=2, out=str(run))
    assert main(flags(config)) == 0
    before = snapshot(run)
    disk("ro")
    capsys.readouterr()
    assert main(["train", "debug", "--resume", str(run)]) == 2
    assert main(flags(dataclasses.replace(config, out=str(run) + "2"))) == 2
    messages = [m for m in capsys.readouterr().err.splitlines() if m.startswith("bwsft train:")]
    assert len(messages) == 2 and all("Read-only file system" in m for m in messages)
    assert str(run) in messages[0] and f"{run}2" in messages[1]
    assert snapshot(run) == before
    disk("rw")
    assert main(["train", "debug", "--resume", str(run)]) == 0
