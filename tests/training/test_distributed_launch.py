"""`torchrun -m bwsft train`: signals to one process reach all, a lost process ends all."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tiny_runs import before_step, resumed

from bwsft import config as c
from bwsft.training.metrics import read_log
from bwsft.training.setup import train

PATIENCE = 240


@pytest.fixture
def long(tiny):
    """A run of some minutes, to be stopped."""
    return tiny(
        steps=4000, batch_size=8, micro_batch_size=2, save_every=1000, keep_last=2,
        eval=c.EvalConfig(every=0), device="cpu", lora=c.LoraConfig(rank=3, alpha=6.0, dropout=0.0),
    )  # fmt: skip


@pytest.fixture
def launched(flags):
    """launched(config, *launcher) -> (launcher's process, its workers) after two updates; all of
    them end with the test."""
    started = []

    def start(config, *launcher):
        launcher = launcher or ("-m", "torch.distributed.run", "--nproc-per-node", "2",
                                "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m")
        process = subprocess.Popen(
            [sys.executable, *launcher, "bwsft", *flags(config)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        started.append(process)
        log = c.run_folder(config) / "metrics.jsonl"
        wait(lambda: log.exists() and log.read_bytes().count(b"\n") >= 2, process)
        workers = psutil.Process(process.pid).children()
        return process, sorted(workers, key=lambda worker: int(worker.environ()["RANK"]))

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait(ready, process):
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def checkpoints(config):
    return sorted((c.run_folder(config) / "checkpoints").glob("step-*"))


def assert_saved_at_the_last_line(config, output):
    folder = c.run_folder(config)
    done = len(read_log(folder / "metrics.jsonl"))
    assert f"stopped after step {done} of 4000; go on with bwsft train --resume {folder}" in output
    assert (folder / "checkpoints" / f"step-{done}" / "manifest.json").exists()


@pytest.mark.slow
def test_signals_to_one_process_reach_all(long, launched):
    """SIGUSR1 to either process: a checkpoint, and the run goes on; then SIGTERM to the second: a
    checkpoint, and torchrun's status is 0."""
    process, workers = launched(long)
    assert f"process {workers[0].pid}\n" == (c.run_folder(long) / ".lock").read_text()
    for count, worker in enumerate(workers, start=1):
        worker.send_signal(signal.SIGUSR1)
        wait(lambda count=count: len(checkpoints(long)) == count, process)
    workers[1].send_signal(signal.SIGTERM)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, output
    assert_saved_at_the_last_line(long, output)
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_and_all(long, launched, number):
    """As a terminal or a batch system sends it, to the whole group: each process has it from there
    and from the launcher, whose own status says that it was stopped."""
    process, workers = launched(long)
    os.killpg(process.pid, number)
    output = process.communicate(timeout=PATIENCE)[0]
    assert_saved_at_the_last_line(long, output)
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_process_ends_the_others(long, launched, monkeypatch, parallel):
    """With an error and soon, and the run goes on from its checkpoint on one process."""
    config = dataclasses.replace(long, parallel=parallel)
    process, workers = launched(config)
    workers[0].send_signal(signal.SIGUSR1)
    wait(lambda: checkpoints(config), process)
    (saved,) = checkpoints(config)
    workers[1].kill()
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode != 0
    assert "another process of the run has ended; go on with --resume" in output
    folder, done = c.run_folder(config), int(saved.name.split("-")[1])
    before_step(monkeypatch, lambda *run: os.kill(os.getpid(), signal.SIGTERM), only=done + 1)
    assert train(resumed(config, folder)) == 0
    assert [line["step"] for line in read_log(folder / "metrics.jsonl")] == [*range(1, done + 3)]


@pytest.mark.slow
def test_accelerate_launches_it_too(tiny, launched):
    """--multi_gpu is its name for torchrun: without a GPU the processes find none and use gloo."""
    config = tiny(steps=3)
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m")
    process, _ = launched(config, *launcher)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, output
    assert "batch 4 shared by 2 processes (ddp), 2 at a time" in output
    assert len(read_log(c.run_folder(config) / "metrics.jsonl")) == 3
