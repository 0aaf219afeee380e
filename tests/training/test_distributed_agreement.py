"""Processes that were started differently or read something else say so, name what and where, and
end; one that goes is noticed by the others; rank 0 may work alone for as long as it likes."""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jsonl
import pytest
from tiny_ranks import arguments, environment, free_ports

from bwsft.cli import main
from bwsft.training import distributed, setup

pytestmark = pytest.mark.slow  # eight runs of two processes


def rank_main(rank, port, file):
    """One process: its commands, each with a process group of its own, then a long wait."""
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    cases, own = json.loads(Path(file).read_text()), setup.versions
    for number, (name, commands) in enumerate(cases.items()):
        os.environ["MASTER_PORT"] = str(int(port) + number)
        other = {"torch": "0.1"} if name == "versions" and rank == "1" else {}
        setup.versions = lambda other=other: own() | other
        for stream in (sys.stdout, sys.stderr):
            print(f"== {name}", file=stream, flush=True)
        print(f"status {main(commands[int(rank)])}", flush=True)
    os.environ["MASTER_PORT"] = str(int(port) + len(cases))
    distributed.BEAT, distributed.PATIENCE = 0.05, datetime.timedelta(seconds=3)
    with distributed.join("ddp", "cpu") as world:
        world.on_main(time.sleep, 4.5)
        with world.main_first():
            time.sleep(4.5 if world.main else 0)
    print("waited", flush=True)
    return 0


@pytest.fixture(scope="module")
def said(tmp_path_factory, tokenizer_folder, data_file):
    """{case: [(status, stdout, stderr) of either rank]}, and whether both waited at the end."""
    folder = tmp_path_factory.mktemp("agreement")
    other = jsonl.write(folder / "other.jsonl", *reversed(jsonl.read(data_file)))
    words = folder / "words"
    words.mkdir()
    for file in tokenizer_folder.iterdir():
        content = file.read_bytes()
        (words / file.name).write_bytes(content.replace(b"}={%", b"}:{%"))

    def case(name, second=(), data=data_file, tokenizer=tokenizer_folder):
        ours = arguments(folder / name, tokenizer_folder, data_file, ["--lora.rank", "2"])
        theirs = arguments(folder / name, tokenizer, data, ["--lora.rank", "2", *second])
        return ours, theirs

    cases = {
        "rate": case("rate", ["--optim.lr", "1e-3"]),
        "interval": case("interval", ["--eval.every", "3"]),
        "records": case("records", data=other),
        "template": case("template", tokenizer=words),
        "base": case("base"),
        "versions": case("versions"),
        "lost": case("lost", data=folder / "missing.jsonl"),
    }
    for number, model in enumerate(bases(folder, tokenizer_folder)):
        at = cases["base"][number].index("--tokenizer")
        cases["base"][number][at : at + 2] = ["--model", str(model)]
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    port = str(free_ports(len(cases) + 1))
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), port, str(file)], env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        streams = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], streams
    found = {name: [] for name in cases}
    for out, err in streams:
        for name, *texts in zip(cases, *(re.split(r"== \w+\n", t)[1:] for t in (out, err)),
                                strict=True):  # fmt: skip
            found[name].append((int(re.search(r"status (\d)", texts[0])[1]), texts[1]))
    return found, [out.endswith("waited\n") for out, _ in streams], folder


def bases(folder, tokenizer_folder):
    """Two models that differ in one bit."""
    from bwsft.models.llada_config import LladaConfig
    from bwsft.models.loading import new_backbone

    config = LladaConfig(
        d_model=32, n_layers=2, n_heads=2, mlp_hidden_size=64, vocab_size=320,
        max_sequence_length=64, mask_token_id=257, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    for name in ("one", "two"):
        new_backbone(config, seed=1).model.save_pretrained(folder / name)
        shutil.copytree(tokenizer_folder, folder / name, dirs_exist_ok=True)
    weights = folder / "two" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return folder / "one", folder / "two"


@pytest.mark.parametrize(("name", "field"), [
    ("rate", "--optim.lr 0.001, process 0 has 0.003"),
    ("interval", "--eval.every 3, process 0 has 2"),
    ("records", "data '"),
    ("template", "tokenizer '"),
    ("base", "base '"),
    ("versions", "torch '0.1', process 0 has '"),
])
def test_the_first_difference_is_named_with_its_rank(said, name, field):
    found, _, folder = said
    (status, first), (other, second) = found[name]
    assert (status, other) == (2, 1)
    (line,) = (line for line in first.splitlines() if line.startswith("bwsft train:"))
    assert f"bwsft train: process 1 of 2 has {field}" in line
    assert "bwsft train:" not in second and "Traceback" not in first + second
    assert not (folder / name / "checkpoints").exists()


def test_a_process_that_ends_early_ends_the_other_in_a_sentence(said):
    (status, first), (other, second) = said[0]["lost"]
    assert (status, other) == (1, 2)
    assert "another process of the run has ended" in first and "Traceback" not in first + second
    assert "missing.jsonl doesn't exist" in second


def test_rank_0_may_work_for_longer_than_anyone_waits(said):
    assert said[1] == [True, True]


if __name__ == "__main__":  # one process
    sys.exit(rank_main(*sys.argv[1:]))
