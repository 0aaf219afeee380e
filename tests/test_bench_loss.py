"""The loss benchmark on a tiny shape: its last line, its memory figures, and a gate that closes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SMALL = "--batch 2 --length 32 --hidden 16 --rows 8 --vocab 20000 --rounds 2".split()


@pytest.fixture
def bench_loss(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return pytest.importorskip("bench_loss")


def test_last_line_and_file(tmp_path):
    file = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "bench_loss.py"), *SMALL, "--json", str(file),
               "--variants", "naive", "liger", "fused", "--head", "trainable"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == {"bench", "device", "commit", "variants", "speedup"}
    assert "liger" in done.stdout and "liger" not in last["variants"]
    naive, fused = last["variants"]["naive"], last["variants"]["fused"]
    tokens, rows, hidden, vocabulary = 64, 8, 16, 20_000
    assert naive["flops"] == 3 * 2 * tokens * hidden * vocabulary
    assert fused["flops"] == 3 * 2 * rows * hidden * vocabulary
    assert naive["tokens_per_s"] == pytest.approx(tokens / naive["median_s"])
    assert fused["supervised_tokens_per_s"] == pytest.approx(rows / fused["median_s"])
    assert last["speedup"]["fused"] == pytest.approx(naive["median_s"] / fused["median_s"])
    # Full logits and their softmax are 2 x 4.9 MiB.
    assert naive["peak_bytes"] > 2 * tokens * vocabulary * 4 * 0.9 > fused["peak_bytes"]
    (point,) = json.loads(file.read_text())["points"]
    assert point["settings"]["rows"] == 8 and len(point["results"]) == 3


def test_gate_refuses_a_wrong_loss_and_a_wrong_gradient(bench_loss):
    generator = torch.Generator().manual_seed(0)
    problem = bench_loss.Problem(
        torch.randn(12, 4, generator=generator).requires_grad_(),
        torch.randn(30, 4, generator=generator),
        torch.randint(30, (12,), generator=generator),
    )
    problem.target[::2] = -100
    truth, naive = bench_loss.float64_truth(problem), bench_loss.naive
    for right in (naive, bench_loss.chunked_nll, bench_loss.linear_cross_entropy):
        assert bench_loss.check(right, problem, truth) == ""
    assert "loss" in bench_loss.check(lambda *a: naive(*a) * 1.001, problem, truth)
    halved = lambda *a: naive(*a).detach() / 2 + naive(*a) / 2  # noqa: E731
    assert "dx" in bench_loss.check(halved, problem, truth)
