"""Every file in examples/ runs, offline, and shows what it says."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TESTED = {"loss.py", "train.py", "trainer.py", "trl_script.py", "benchmark.sh"}


def test_every_example_is_tested_and_named_in_itself():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == TESTED
    for name in TESTED - {"benchmark.sh"}:
        assert f"python examples/{name}" in (EXAMPLES / name).read_text(encoding="utf-8")


@pytest.fixture
def output_of(capsys, monkeypatch, tmp_path):
    """output_of(name) -> what the example prints."""
    monkeypatch.setenv("BWSFT_CACHE", str(tmp_path))

    def run(name):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_loss(output_of):
    out = output_of("loss.py")
    found = re.findall(r"loss (\S+) of (\d+) tokens, (\S+) of all 768", out)
    own, rows, naive = (list(map(float, column)) for column in zip(*found, strict=True))
    assert len(found) == 5 and own == pytest.approx(naive, abs=2e-4)  # printed with 4 digits
    assert own[-1] < 0.2 * own[0] and max(rows) < 768 / 4


def test_train(output_of):
    out = output_of("train.py")
    curve = [float(x) for x in re.findall(r"NELBO (\S+) nats", out)]
    assert len(curve) == 3 and curve[-1] < 0.2 * curve[0]
    assert re.search(r"^9 \+ 4 -> 'The answer is: \d+' \(\d+ tokens\)$", out, re.M)


def test_trainer(output_of):
    out = output_of("trainer.py")
    before, after = map(float, re.search(r"NELBO: (\S+) before, (\S+) after", out).groups())
    assert after < 0.3 * before


def test_trl_script(output_of, monkeypatch, tmp_path):
    """TRL's parser fills its own arguments and BlockwiseConfig from one command line."""
    pytest.importorskip("trl", reason="pip install trl: its own arguments and parser run here")
    sums = [{"prompt": f"{a} + 4", "completion": f"The answer is: {a + 4}"} for a in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums))
    out = tmp_path / "out"
    words = f"--dataset_name {tmp_path}/sums.jsonl --use_peft --lora_r 4 --max_steps 6 --use_cpu "
    words += "--block_size 8 --gen_length 40 --learning_rate 1e-2 --report_to none --output_dir"
    monkeypatch.setattr("sys.argv", ["trl_script.py", *words.split(), str(out)])
    assert re.search(r": 6 updates, .*'train_loss': \d", output_of("trl_script.py"))
    adapter = json.loads((out / "adapter_config.json").read_text())
    contract = json.loads((out / "generation_config.json").read_text())
    assert (adapter["r"], contract["block_size"]) == (4, 8)


@pytest.mark.slow
def test_benchmark():
    found = subprocess.run(
        [EXAMPLES / "benchmark.sh"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    last = json.loads(found.stdout.splitlines()[-1])
    assert set(last["variants"]) == {"naive", "fused"} and last["speedup"]["naive"] == 1
