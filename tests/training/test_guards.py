"""Spikes, kept batches and their replay, SIGUSR1, the profiler, advice for a full device."""

import dataclasses
import gzip
import json
import math
import os
import random
import shutil
import signal

import pytest
import torch
from tiny_runs import before_step, resumed

from bwsft import config as c
from bwsft import presets
from bwsft.cli import main
from bwsft.models.backbone import trainable
from bwsft.training import guards as w
from bwsft.training import signals
from bwsft.training import trainer as t
from bwsft.training.metrics import read_log
from bwsft.training.setup import train

LORA = c.LoraConfig(rank=3, alpha=6.0, dropout=0.3)
SKIP = c.WatchConfig(4.0, 4.0, spike_action="skip", spike_window=8)


def guard(values, window=8, factor=4.0, **more):
    found = w.SpikeGuard(c.WatchConfig(factor, factor, spike_window=window), {}, 1, 1)
    return [found.judge(loss=value, **more) for value in values]


def test_a_spike_is_a_multiple_of_the_running_90th_percentile():
    said = guard([1, 2, 3, 12.1, 1, 48, 48.5], grad_norm=1.0)
    # Percentiles 1, 2 (too few values: the guard waits for two), 3, 12.1, 12.1, 48
    assert [bool(s) for s in said] == [False, False, False, True, False, False, False]
    assert said[3] == "loss 12.1 is 4 times the 90th percentile of the last 3 updates"
    assert not any(guard([1, 1, 1, 100], factor=0.0, grad_norm=1.0))
    assert not any(guard([1, 5], grad_norm=1.0))  # a quarter of the window is two
    old = guard([100, 1, 1, 1, 1, 7], window=4, grad_norm=1.0)  # 100 has left the window
    assert [bool(s) for s in old] == [False] * 5 + [True]
    norm = w.SpikeGuard(SKIP, {"loss": [1] * 3, "grad_norm": [2] * 3}, 448, 1)
    assert norm.judge(loss=4 + math.log(448), grad_norm=8) is None
    assert norm.judge(loss=1, grad_norm=33).startswith("grad norm 33 is 4 times the 90th")
    lone = w.SpikeGuard(SKIP, {"loss": [1] * 20, "grad_norm": [1] * 19 + [100]}, 448, 1)
    assert lone.judge(loss=1, grad_norm=5) is None  # within a window of 8, one large value counts


@pytest.mark.parametrize("sequences", [8, 32])
def test_a_guessed_sequence_is_no_spike(sequences):
    """The losses of a model that knows nearly all: 0.02 nats a sequence, now and then what a guess
    costs. An update of nothing but guesses is a spike."""
    vocab, draw = 448, random.Random(5)
    cost = math.log(vocab)
    found = w.SpikeGuard(c.WatchConfig(), {}, vocab, sequences)
    for _ in range(600):
        guess = cost / sequences if draw.random() < 0.05 else 0.0
        assert found.judge(loss=0.02 * draw.uniform(0.5, 1.5) + guess) is None
    assert found.judge(loss=cost).startswith("loss 6.1")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_debug_preset_raises_no_alarm(seed, tmp_path, monkeypatch, capsys):
    """Nor does a small batch at a high rate, whose losses jump most; a lost update is seen."""
    monkeypatch.chdir(tmp_path)
    rough = dict(batch_size=8, micro_batch_size=8, optim=c.OptimConfig(lr=1e-3), out="rough")
    usual = dataclasses.replace(presets.debug(), seed=seed)
    for config in (usual, dataclasses.replace(usual, **rough)):
        assert train(config) == 0
        assert "times the" not in capsys.readouterr().out
        log = read_log(c.run_folder(config) / "metrics.jsonl")
        history = {name: [line[name] for line in log] for name in w.SpikeGuard.NAMES}
        found = w.SpikeGuard(config.watch, history, 448, config.batch_size)
        assert found.judge(loss=math.log(448)).startswith("loss 6.105 is")


def spoil(monkeypatch, number, factor, sample=None):
    """Multiply the loss in update `number` (of the micro-batch that begins with row `sample`)."""

    def act(run, index):
        def hook(module, arguments, total):
            mine = sample is None or int(arguments[0].sample_ids[0]) == sample
            return total * factor if mine and total.requires_grad else total

        if index == number:
            handle = run.backbone.register_forward_hook(hook)
            run.spoilt = handle
        elif hasattr(run, "spoilt"):
            run.spoilt.remove()

    before_step(monkeypatch, act)


@pytest.mark.parametrize("action", ["warn", "skip", "stop"])
def test_what_a_spike_does(tiny, monkeypatch, capsys, action):
    """Update 6 (from 0) has 1000 times its loss. Resumed before it, the run decides alike."""
    watch = dataclasses.replace(SKIP, spike_action=action)
    config = tiny(watch=watch, save_every=5, eval=c.EvalConfig(every=0))
    spoil(monkeypatch, 6, 1000.0)
    status = train(config)
    folder = c.run_folder(config)
    out, err = capsys.readouterr()
    lines = read_log(folder / "metrics.jsonl")
    repro = folder / "repro" / "step-7"
    facts = json.loads((repro / "repro.json").read_text())
    assert facts["step"] == 6 and len(facts["sample_ids"]) == facts["sequences"] == 4
    assert f"bwsft replay {repro}" in out + err
    assert (repro / "model.safetensors").exists()
    if action == "stop":
        assert status == 1 and len(lines) == 6 and "times the 90th percentile of the last 6" in err
        return
    assert main(["replay", str(repro)]) == 0  # with the weights that met the batch, not later ones
    assert f"weights of {repro}\nsamples" in capsys.readouterr().out
    skipped = [action == "skip" and i == 6 for i in range(10)]
    assert status == 0 and "step 7: grad norm" in out
    assert [bool(line.get("skipped")) for line in lines] == skipped
    if action == "skip":
        shutil.rmtree(folder / "checkpoints" / "step-10")
        assert train(resumed(config, folder)) == 0
        again = read_log(folder / "metrics.jsonl")
        assert [line["loss"] for line in again] == [line["loss"] for line in lines]
        assert [bool(line.get("skipped")) for line in again] == skipped


@pytest.mark.parametrize("action", ["warn", "skip"])
def test_a_skipped_update_changes_nothing(tiny, make_run, monkeypatch, action):
    run = make_run(tiny(watch=dataclasses.replace(SKIP, spike_action=action)))
    monkeypatch.setattr(run.guard, "judge", lambda **values: "odd")
    before = {name: p.clone() for name, p in trainable(run.backbone).items()}
    assert t.train_step(run, 0).skipped == (action == "skip") == (not run.optimizer.state)
    same = [torch.equal(p, before[name]) for name, p in trainable(run.backbone).items()]
    assert all(same) if action == "skip" else not any(same)


@pytest.mark.parametrize("lora", [LORA, c.LoraConfig(rank=0)], ids=["lora", "full"])
def test_a_kept_batch_gives_its_loss_again(tiny, make_run, monkeypatch, capsys, lora):
    """Without a checkpoint and with dropout: the kept weights met the kept sequences."""
    config = tiny(lora=lora)
    data = make_run(tiny(out=tiny().out + "-other")).data
    first = data.sample_ids(data.samples(2, 4, config.seed))[2]
    losses = []

    def act(run, index):
        def hook(module, arguments, total):
            if index == 2 and int(arguments[0].sample_ids[0]) == first and total.requires_grad:
                losses.append(total.item())
                return total * float("inf")
            return total

        run.backbone.register_forward_hook(hook)

    with monkeypatch.context() as patch:
        before_step(patch, act)
        assert train(config) == 1
    repro = c.run_folder(config) / "repro" / "step-3"
    assert f"run them again (bwsft replay {repro})" in capsys.readouterr().err
    assert json.loads((repro / "repro.json").read_text())["first"] == 2
    assert main(["replay", str(repro)]) == 0
    out = capsys.readouterr().out
    assert f"step 3: loss inf\nweights of {repro}\n" in out
    assert f"samples {first}, " in out and f": loss {losses[0] / 2:.6g}, " in out
    assert "not finite" not in out and "gradient norm" in out


def test_replay_names_the_first_bad_module_and_gradient(tiny, monkeypatch, capsys):
    config = tiny()

    def poison(run, step):
        blocks = run.backbone.base_model.model.transformer["blocks"]
        blocks[1].up_proj.weight.data[0] = torch.nan

    with monkeypatch.context() as patch:
        before_step(patch, poison, only=1)
        assert train(config) == 1
    repro = c.run_folder(config) / "repro" / "step-2"
    assert main(["replay", str(repro)]) == 0
    out = capsys.readouterr().out
    assert "first output that is not finite: model.model.transformer.blocks.1.up_proj\n" in out
    assert "gradient norm nan" in out
    (repro / "batch.safetensors").write_bytes(b"no")
    assert main(["replay", str(repro)]) == 2
    assert "batch.safetensors cannot be read" in capsys.readouterr().err


def test_a_full_disk_does_not_hide_a_nan(tiny, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bwsft.training.run_files.save_file", full)
    spoil(monkeypatch, 1, float("nan"))
    assert train(tiny()) == 1
    message = capsys.readouterr().err
    assert "loss nan at step 2" in message and "could not be kept ([Errno 28] No space" in message


def test_sigusr1_saves_and_goes_on(tiny, monkeypatch):
    previous = signal.getsignal(signal.SIGUSR1)
    before_step(monkeypatch, lambda *run: os.kill(os.getpid(), signal.SIGUSR1), only=4)
    config = tiny(save_every=100)
    assert train(config) == 0
    saved = sorted(p.name for p in (c.run_folder(config) / "checkpoints").iterdir())
    assert saved == ["step-10", "step-5"]
    assert signal.getsignal(signal.SIGUSR1) is previous


def test_repeats_of_a_launcher_are_no_second_wish(monkeypatch, usual_interrupt):
    """With several processes a signal comes from the terminal and from the launcher."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with signals.signals(several=True) as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.stop
        now[0] += 4
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 4
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_the_profile_holds_the_steps_after_warm_up(tiny, capsys):
    config = tiny(profile=2, steps=7, eval=c.EvalConfig(every=0))
    assert train(config) == 0
    path = c.run_folder(config) / "profile" / "steps-4-5" / "trace.json.gz"
    assert f"profile: {path}" in capsys.readouterr().out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"ProfilerStep#3", "ProfilerStep#4", "aten::mm"} <= names
    assert not {"ProfilerStep#2", "ProfilerStep#5"} & names
    short = tiny(profile=9, steps=3, out=f"{config.out}-short", eval=c.EvalConfig(every=0))
    assert train(short) == 0  # nothing is left after the warm-up
    assert not (c.run_folder(short) / "profile").exists()


def test_out_of_memory_advice_has_numbers_that_work(tiny, make_run):
    error = torch.OutOfMemoryError("CUDA out of memory.\nmore")
    run = make_run(tiny(batch_size=12, micro_batch_size=12))
    assert w.out_of_memory(run, error) == (
        "CUDA out of memory. Lower --micro-batch-size (now 12; try 6; --batch-size stays 12) or "
        "give --grad-checkpointing or give --parallel fsdp on several GPUs, and go on with "
        f"--resume {run.folder}"
    )
    run.world.size = 4  # of 12 sequences each has 3
    assert "(now 3; try 1; --batch-size stays 12)" in w.out_of_memory(run, error)
    run.config = tiny(micro_batch_size=1, grad_checkpointing=True)
    assert "Give --parallel fsdp on several GPUs or shorten" in w.out_of_memory(run, error)


def test_waiting_for_data_is_measured(tiny, make_run, monkeypatch):
    run = make_run(tiny())
    pack, clock = type(run.data).pack, [0.0]
    monkeypatch.setattr(t.time, "perf_counter", lambda: clock[0])

    def slow(self, slots):
        clock[0] += 2.5
        return pack(self, slots)

    monkeypatch.setattr(type(run.data), "pack", slow)
    assert t.train_step(run, 0).data_seconds == 5.0  # two micro-batches
    assert all(p.grad is not None for p in trainable(run.backbone).values())
