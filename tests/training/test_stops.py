"""What ends a run early: losses that are not finite, memory, signals, a full disk."""

import io
import os
import resource
import signal
import sys

import pytest
import torch
from tiny_runs import before_step, resumed

from bwsft import config as c
from bwsft.checkpoints import folders
from bwsft.training import run_files, setup
from bwsft.training.metrics import read_log
from bwsft.training.setup import train
from bwsft.training.signals import signals


def poison_one_micro_batch(run, step):
    """NaN for the second micro-batch of update 4."""
    first = run.data.sample_ids(run.data.samples(4, 4, run.config.seed))[2]

    def spoil(module, arguments, total):
        return total * float("nan") if arguments[0].sample_ids[0] == first else total

    run.backbone.register_forward_hook(spoil)


def poison_weight(run, step):
    run.backbone.head()[0].data[:, 3] = float("nan")


def poison_gradient(run, step):
    run.backbone.head()[0].register_hook(lambda grad: grad * float("inf"))


@pytest.mark.parametrize(("poison", "what", "spoilt"), [
    (poison_weight, "loss nan", slice(0, 2)),
    (poison_one_micro_batch, "loss nan", slice(2, 4)),
    (poison_gradient, "gradient norm nan", slice(0, 4)),
])
def test_nan_stops_with_step_samples_and_checkpoint(
    tiny, make_run, monkeypatch, capsys, poison, what, spoilt
):
    config = tiny()
    before_step(monkeypatch, poison, only=4)
    assert train(config) == 1
    folder = c.run_folder(config)
    message = capsys.readouterr().err.split("bwsft train: stopped: ")[1]
    data = make_run(tiny(out=f"{folder}-again")).data
    ids = data.sample_ids(data.samples(4, 4, config.seed))[spoilt]
    assert message.startswith(
        f"{what} at step 5; sample ids (rows of the data, from 0): {', '.join(map(str, ids))}; "
        f"the last good checkpoint is {folder / 'checkpoints' / 'step-3'}. "
    )
    assert message.count("\n") == 1  # no traceback
    assert [r["step"] for r in read_log(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-3"]


def test_nan_before_the_first_checkpoint_says_so(tiny, monkeypatch, capsys):
    before_step(monkeypatch, poison_weight, only=0)
    assert train(tiny(eval=c.EvalConfig(every=0))) == 1
    assert "there is no checkpoint yet" in capsys.readouterr().err


def test_out_of_memory_says_what_to_change(tiny, monkeypatch, capsys):
    def exhaust(run, step):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    before_step(monkeypatch, exhaust, only=2)
    assert train(tiny()) == 1
    message = capsys.readouterr().err
    assert "Tried to allocate 2 GiB. Lower --micro-batch-size" in message and "more" not in message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_after_the_running_step(tiny, monkeypatch, capfd, number):
    """And at once: the evaluation that is due then is left to the resumed run."""
    if signal.getsignal(number) is signal.SIG_IGN:  # under nohup, which stays in force
        signal.signal(number, signal.SIG_DFL)
    previous = signal.getsignal(number)
    before_step(monkeypatch, lambda *run: os.kill(os.getpid(), number), only=3)
    config = tiny()
    assert train(config) == 0
    folder = c.run_folder(config)
    captured = capfd.readouterr()
    assert f"stopped after step 4 of 10; go on with bwsft train --resume {folder}" in captured.out
    assert f"signal {int(number)}: saving after this step" in captured.err
    assert (folder / "checkpoints" / "step-4").is_dir()
    assert len(read_log(folder / "metrics.jsonl")) == 4
    assert [r["step"] for r in read_log(folder / "eval.jsonl")] == [0]
    assert signal.getsignal(number) is previous


def test_nohup_stays_in_force(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "gone"), None])
def test_a_reader_or_terminal_that_goes_away_ends_nothing(tiny, monkeypatch, error):
    class Gone(io.StringIO):
        def write(self, text):
            raise error

        def flush(self):
            raise error

    config = tiny(steps=4)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", error and Gone())  # None: closed by the shell
        patched.setattr(sys, "stderr", error and Gone())
        assert train(config) == 0
    assert len(read_log(c.run_folder(config) / "metrics.jsonl")) == 4


def test_what_fails_beside_the_run_is_said_at_its_end(tiny, monkeypatch, capsys):
    """An old checkpoint that can't be deleted, as on NFS, and a curve that can't be drawn."""

    def busy(path):
        raise OSError(16, "Device or resource busy", str(path / ".nfs01"))

    monkeypatch.setattr(folders, "remove_folder", busy)
    monkeypatch.setattr(setup, "plot_run", lambda folder: 1 / 0)
    config = tiny(save_every=3, keep_last=1)
    assert train(config) == 0
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("failed beside")]
    old = [f"step-{step} could not be deleted: [Errno 16] Device" for step in (3, 6, 9)]
    for line, part in zip(said, [*old, "curve could not be drawn: division"], strict=True):
        assert part in line
    assert len(list((c.run_folder(config) / "checkpoints").iterdir())) == 4


def test_any_name_of_a_run_stands_over_its_curve(tiny, tmp_path, capsys):
    config = tiny(steps=2, out=str(tmp_path / r"r $x_{$ \frac $"))
    assert train(config) == 0
    assert (c.run_folder(config) / "loss.png").exists() and "failed" not in capsys.readouterr().err


def test_a_second_signal_takes_its_usual_course(tiny, monkeypatch, usual_interrupt):
    def twice(run, step):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    before_step(monkeypatch, twice, only=4)
    with pytest.raises(KeyboardInterrupt):
        train(tiny())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_two_fresh_runs_do_not_share_a_folder(tiny, monkeypatch):
    """The second one comes between the first one's look at the folder and its first file; and a
    start that fails leaves the name free."""
    with pytest.raises(ValueError, match="doesn't exist"):
        train(tiny(data="gone.jsonl"))
    config, built = tiny(steps=2), setup.setup
    assert not c.run_folder(config).exists()

    def second(*arguments):
        monkeypatch.setattr(setup, "setup", built)
        with pytest.raises(ValueError, match=f"is being written by process {os.getpid()}"):
            train(tiny(steps=2, seed=4))
        return built(*arguments)

    monkeypatch.setattr(setup, "setup", second)
    assert train(config) == 0
    assert c.stored(c.run_folder(config)).seed == 3


def test_a_full_disk_stops_and_the_run_goes_on_later(tiny, monkeypatch):
    """Files may not grow past 100 kB while the checkpoint is written."""
    write, config = run_files.save_checkpoint, tiny(steps=4)

    def limited(*arguments):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            return write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    folder = c.run_folder(config)
    with monkeypatch.context() as patch:
        patch.setattr(run_files, "save_checkpoint", limited)
        message = f"step-3 could not be written .*make room, then go on with --resume {folder}"
        with pytest.raises(OSError, match=message):  # the command line prints it, status 2
            train(config)
    assert os.listdir(folder / "checkpoints") == []
    assert train(resumed(config, folder)) == 0
    assert [r["step"] for r in read_log(folder / "metrics.jsonl")] == [1, 2, 3, 4]
