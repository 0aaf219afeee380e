"""Two processes train as one does, through the command line: DDP, FSDP2, uneven shares, idle
processes, resume on another number of processes. One pair of processes runs all commands."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_ranks import arguments, environment, free_ports

from bwsft import config as c
from bwsft.cli import main
from bwsft.training.distributed import World, shares
from bwsft.training.metrics import read_log

# Flags of a run beside those of `arguments`. Two processes share its 8 sequences as 2 x 2 x 2.
RUNS = {
    "ddp": ["--lora.rank", "3", "--lora.alpha", "6", "--context", "block_causal",
            "--draws-per-context", "2", "--objective.pairs"],
    # Shares of 2 and 1, with as many losses as their responses have blocks.
    "ddp-uneven": ["--objective.blocks", "all", "--active-blocks", "2", "--batch-size", "3",
                   "--micro-batch-size", "3"],
    # One example to train on, and nothing to do for the second process.
    "ddp-idle": ["--batch-size", "1", "--micro-batch-size", "1", "--dataset.limit", "2",
                 "--dataset.holdout", "1"],
    "fsdp": ["--parallel", "fsdp", "--grad-checkpointing"],
}  # fmt: skip
MORE = {
    "fsdp-uneven": ["--parallel", "fsdp", "--lora.rank", "3", "--lora.alpha", "6", "--context",
                    "cached", "--draws-per-context", "2", "--objective.blocks", "all",
                    "--batch-size", "3", "--micro-batch-size", "1"],
    "fsdp-idle": ["--parallel", "fsdp", "--context", "block_causal", "--draws-per-context",
                  "2", "--objective.no-context-grad", "--batch-size", "1", "--micro-batch-size",
                  "1"],
    "fsdp-predict": ["--parallel", "fsdp", "--objective.name", "two_step", "--batch-size", "4",
                     "--micro-batch-size", "1"],
}  # fmt: skip
RESUMED = ("ddp", "fsdp")


def leave(source, target):
    """A copy of a run as it was after its second update, for every rank to go on with."""
    if os.environ["RANK"] == "0":
        shutil.copytree(source, f"{target}.part")
        shutil.rmtree(f"{target}.part/checkpoints/step-4")
        os.rename(f"{target}.part", target)
    while not Path(target).exists():
        time.sleep(0.01)


def rank_main(rank, size, port, file):
    """One process: the commands of a JSON file, each with a process group of its own. A command
    `stopped` is a training that must end itself."""
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1")
    for number, (command, *words) in enumerate(json.loads(Path(file).read_text())):
        os.environ["MASTER_PORT"] = str(int(port) + number)
        if command == "leave":
            leave(*words)
        elif main(["train", *words]) != (command == "stopped"):
            return 3
    return 0


def launch(commands, folder, size):
    """Run the commands in `size` processes; returns what they said."""
    file = folder / f"commands-{size}.json"
    file.write_text(json.dumps(commands))
    port = str(free_ports(len(commands)))
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(size), port, str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)
    return said


def curves(folder):
    """Every number of the run but times, as {name: values}."""
    lines, evals = read_log(folder / "metrics.jsonl"), read_log(folder / "eval.jsonl")
    names = ("step", "loss", "grad_norm", "lr", "tokens", "supervised_tokens", "region_tokens")
    return {name: [line[name] for line in lines] for name in names} | {
        "nelbo": [line["nelbo"] for line in evals]
    }


def assert_equal(found, expected):
    """Up to the order of fp32 sums; counts exactly."""
    for name, values in expected.items():
        rel = {"loss": 1e-5, "grad_norm": 1e-5, "nelbo": 1e-5}.get(name, 0)
        assert found[name] == pytest.approx(values, rel=rel, abs=0), name


@pytest.fixture(scope="module")
def single(tmp_path_factory, tokenizer_folder, data_file):
    """Folder of the runs by one process."""
    folder = tmp_path_factory.mktemp("single")
    for name, flags in RUNS.items():
        assert main(arguments(folder / name, tokenizer_folder, data_file, flags)) == 0
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tokenizer_folder, data_file, single):
    """(folder of the same runs by two processes, and what those said). `NAME-again` goes on from
    the second update of the pair's own run, `NAME-one` from that of the single process."""
    folder = tmp_path_factory.mktemp("pair")

    def command(name, flags, resume=False):
        return arguments(folder / name, tokenizer_folder, data_file, flags, resume)

    commands = [command(name, flags) for name, flags in RUNS.items()]
    for target, source in (("ddp-again", folder), ("fsdp-again", folder), ("fsdp-one", single)):
        name = target.partition("-")[0]
        commands.append(["leave", str(source / name), str(folder / target)])
        commands.append(command(target, RUNS[name], resume=True))
    bad = command("bad", ["--parallel", "fsdp", "--optim.lr", "1e30", "--eval.every", "0"])
    commands.append(["stopped", *bad[1:]])
    return folder, launch(commands, folder, 2)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(single, pair, name):
    folder, _ = pair
    assert_equal(curves(folder / name), curves(single / name))
    assert len(curves(folder / name)["loss"]) == 4
    files = [
        sorted(str(p.relative_to(f / name)) for p in (f / name).rglob("*"))
        for f in (folder, single)
    ]
    assert files[0] == files[1]


def test_rank_0_alone_speaks(pair):
    _, (first, second) = pair
    assert first.count("loss curve:") == len(RUNS) + 3
    assert "batch 8 shared by 2 processes (fsdp), 2 at a time" in first
    assert "batch 1 shared by 2 processes (ddp, 1 of them idle: raise --batch-size)" in first
    for text in ("loss curve", "kept ", "step/s", "NELBO"):
        assert text not in second, second


@pytest.mark.parametrize("name", RESUMED)
def test_resume_on_the_same_processes_is_bit_for_bit(pair, name):
    folder, _ = pair
    assert curves(folder / f"{name}-again") == curves(folder / name)
    ours, whole = (
        json.loads((folder / n / "checkpoints/step-4/manifest.json").read_text())
        for n in (f"{name}-again", name)
    )
    weights = [file for file in whole if file.endswith("safetensors")]
    assert len(weights) == 2
    for file in weights:
        assert ours[file] == whole[file]


def test_resume_on_another_number_of_processes(pair, single, tokenizer_folder, data_file):
    """Two go on from one, and one goes on from two, which sharded the model."""
    folder, _ = pair
    assert_equal(curves(folder / "fsdp-one"), curves(single / "fsdp"))
    alone = folder / "alone"
    shutil.copytree(folder / "fsdp", alone)
    shutil.rmtree(alone / "checkpoints" / "step-4")
    assert main(arguments(alone, tokenizer_folder, data_file, RUNS["fsdp"], resume=True)) == 0
    assert_equal(curves(alone), curves(single / "fsdp"))


def test_a_loss_that_is_no_number_stops_both(pair):
    """Rank 0 says so and keeps the batch, with the weights gathered from the shards."""
    folder, (first, second) = pair
    stop = [line for line in (first + second).splitlines() if "bwsft train: stopped: " in line]
    # Weights of 1e30 make hidden states of 0, whose loss is a number: then the gradient is none.
    assert len(stop) == 1 and stop[0] in first
    assert re.search("(loss|gradient norm) nan at step 2; sample ids", stop[0])
    repro = folder / "bad" / "repro" / "step-2"
    assert f"bwsft replay {repro}" in stop[0]
    names = {"batch.safetensors", "repro.json", "model.safetensors", "config.json"}
    assert names <= {p.name for p in repro.iterdir()}
    assert len(read_log(folder / "bad" / "metrics.jsonl")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_more_layouts_are_one_too(single, pair, tmp_path, tokenizer_folder, data_file, size):
    """4 x 1 of the layouts 1 x 4, 2 x 2, 4 x 1; three processes share 8 as 3, 3, 2; and both go on
    from what two have begun."""
    runs = {2: MORE, 3: RUNS | MORE, 4: RUNS}[size]
    for name in runs.keys() - RUNS.keys():
        one = arguments(tmp_path / f"{name}-one", tokenizer_folder, data_file, runs[name])
        assert main(one) == 0
    commands = [arguments(tmp_path / n, tokenizer_folder, data_file, runs[n]) for n in runs]
    for name in RESUMED:
        target = tmp_path / f"{name}-two"
        commands.append(["leave", str(pair[0] / name), str(target)])
        commands.append(arguments(target, tokenizer_folder, data_file, RUNS[name], True))
    launch(commands, tmp_path, size)
    for name in runs:
        truth = single / name if name in RUNS else tmp_path / f"{name}-one"
        assert_equal(curves(tmp_path / name), curves(truth))
    for name in RESUMED:
        assert_equal(curves(tmp_path / f"{name}-two"), curves(single / name))


def test_shares_cover_every_sequence_once_and_evenly():
    for count in range(1, 20):
        for size in range(1, 7):
            for micro in (1, 2, 3, 8):
                found = shares(count, micro, size)
                assert [i for rank in found for part in rank for i in part] == list(range(count))
                totals = [sum(map(len, rank)) for rank in found]
                assert len(found) == size and max(totals) - min(totals) <= 1
                assert all(0 < len(part) <= micro for rank in found for part in rank)
    assert shares(8, 2, 1) == [[range(0, 2), range(2, 4), range(4, 6), range(6, 8)]]


class Lone(World):
    """One rank of `size` whose gradients and sums stay its own."""

    def finish(self, idle):
        pass

    def sum(self, values):
        return values

    def max(self, value):
        return value


@pytest.mark.parametrize("layout", [(2, 2), (4, 2), (4, 1), (3, 2), (9, 1)])
def test_the_ranks_gradients_add_up(tiny, make_run, layout):
    """In float64, without communication: processes x micro-batch against one process."""
    import torch

    from bwsft.models.backbone import trainable
    from bwsft.training.trainer import train_step

    size, micro = layout
    config = tiny(batch_size=8, micro_batch_size=8, optim=c.OptimConfig(lr=0.0, clip=0.0))
    run = make_run(config, torch.float64)

    def step():
        result = train_step(run, 2)
        return result, {n: p.grad.clone() for n, p in trainable(run.backbone).items()
                        if p.grad is not None}

    whole, truth = step()
    run.config = tiny(batch_size=8, micro_batch_size=micro, optim=config.optim)
    total, tokens = 0.0, 0
    left = {name: grad.clone() for name, grad in truth.items()}
    for rank in range(size):
        run.world = Lone(rank, size)
        part, grads = step()
        total, tokens = total + part.loss, tokens + part.tokens
        for name, grad in grads.items():
            left[name] -= grad
    assert total == pytest.approx(whole.loss, rel=1e-12) and tokens == whole.tokens
    norm = sum(g.square().sum() for g in truth.values()).sqrt()
    assert sum(g.square().sum() for g in left.values()).sqrt() < 1e-12 * norm


if __name__ == "__main__":  # one process
    sys.exit(rank_main(*sys.argv[1:]))
