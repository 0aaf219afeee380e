"""The loss benchmark on a tiny shape: its last line, its memory figures, and a gate that closes."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import bench_loss
import pytest
import torch
from lib import heads, losses

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = "--batch 2 --length 32 --hidden 16 --rows 8 --vocab 20000 --rounds 2".split()


@pytest.mark.parametrize("memory", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_last_line_and_file(tmp_path, memory):
    file = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "bench_loss.py"), *SMALL, "--json", str(file),
               "--variants", "naive", "compact", "liger", "fused", "--head", "trainable",
               *([] if memory else ["--no-memory"])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == {"bench", "device", "commit", "variants", "speedup"}
    assert "liger" in done.stdout and "liger" not in last["variants"]
    naive, compact, fused = (last["variants"][name] for name in ("naive", "compact", "fused"))
    tokens, rows, hidden, vocabulary = 64, 8, 16, 20_000
    assert naive["flops"] == 3 * 2 * tokens * hidden * vocabulary
    assert fused["flops"] == compact["flops"] == 3 * 2 * rows * hidden * vocabulary
    assert naive["tokens_per_s"] == pytest.approx(tokens / naive["median_s"])
    assert fused["supervised_tokens_per_s"] == pytest.approx(rows / fused["median_s"])
    assert last["speedup"]["fused"] == pytest.approx(naive["median_s"] / fused["median_s"])
    if memory:  # full logits and their softmax are 2 x 4.9 MiB
        assert naive["peak_bytes"] > 2 * tokens * vocabulary * 4 * 0.9 > fused["peak_bytes"]
    content = json.loads(file.read_text())
    (point,) = content["points"]
    assert point["settings"]["rows"] == 8 and len(point["results"]) == 4
    (remark,) = content["remarks"]
    whole, dropped, own = (float(x) for x in re.findall(r"([\d.]+)x (?:naive|by)", remark))
    assert whole == pytest.approx(naive["median_s"] / fused["median_s"], abs=0.006)
    assert dropped == pytest.approx(naive["median_s"] / compact["median_s"], abs=0.006)
    assert own == pytest.approx(compact["median_s"] / fused["median_s"], abs=0.006)
    assert content["header"]["command"].startswith("python benchmarks/bench_loss.py --batch 2")
    assert str(tmp_path) not in content["header"]["command"]


@pytest.mark.slow
def test_sweep_changes_one_setting_at_a_time(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_loss, "SWEEP", {"rows": (4, 8, 16), "vocab": (50, 100)})
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    bench_loss.main([*SMALL[:-4], "--vocab", "200", "--rounds", "1", "--sweep", "--no-memory",
                     "--phase", "forward", "--variants", "naive", "fused",
                     "--json", str(file), "--plot", str(plot)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["variants"]["naive"]["flops"] == 2 * 64 * 16 * 200
    assert last["variants"]["fused"]["flops"] == 2 * 8 * 16 * 200
    shapes = [(p["settings"]["rows"], p["settings"]["vocab"])
              for p in json.loads(file.read_text())["points"]]
    assert shapes == [(8, 200), (4, 200), (16, 200), (8, 50), (8, 100)]
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_grid_is_every_shape_of_2048_tokens():
    args = bench_loss.parse(["--grid"])
    shapes = bench_loss.shapes_of(args)
    assert args.batch * args.length == 2048 and len(set(shapes)) == len(shapes) == 3 * 2 * 2 * 2
    assert {rows for rows, *_ in shapes} == {128, 512, 2048}
    # What a memory run is told overrides the grid.
    one = "--rows 512 --vocab 32000 --head trainable --dtype bf16 --data model".split()
    shapes = bench_loss.shapes_of(bench_loss.parse(["--grid", *one]))
    assert shapes == [(512, 32_000, "trainable", "bf16", "model")]


def test_a_trained_models_logits_are_kept_and_peaked():
    args = bench_loss.parse("--batch 4 --length 64 --hidden 160".split())
    args.dtype = torch.float32
    problem = heads.make_problem(args, 200, 2_000, "frozen", "model")
    hidden, head, target = heads._trained_states(256)
    logits = problem.x.detach() @ problem.weight.T
    real = problem.weight[:, head.shape[1]] == 0
    own = (hidden @ head.T).sort(dim=1).values
    torch.testing.assert_close(logits[:, real].sort(dim=1).values, own)
    # As likely as the model finds it, but for the share of the words that it doesn't have.
    kept = problem.target != -100
    assert kept.sum() == 200
    lost = logits.logsumexp(1) - own.logsumexp(1)
    assert 0 < lost.mean() < 3 * math.exp(-heads.RARER)
    chosen = logits[kept].gather(1, problem.target[kept, None])
    true = (hidden @ head.T)[kept].gather(1, target[kept, None])
    torch.testing.assert_close(chosen, true)
    assert logits.log_softmax(1).max(1).values.exp().median() > 0.5  # random ones: below 1 %


def test_a_missing_peer_says_why(monkeypatch):
    monkeypatch.setattr(losses.importlib.util, "find_spec", lambda name: None)
    for device in ("cpu", "cuda"):
        found = losses.losses(torch.device(device))
        assert set(found) - {"fused_torch"} == {
            "naive", "compiled", "compact", "chunked_nll", "torch_lce", "torch_lce_chunked",
            "liger", "cce", "cce_compile", "fused"}  # fmt: skip
        assert ("fused_torch" in found) is (device == "cuda")
        assert "pip install liger-kernel" in found["liger"]
        assert "pip install cut-cross-entropy" in found["cce"]
        assert "CUDA" not in found["cce_compile"]  # it runs on a CPU
    monkeypatch.setattr(losses.importlib.util, "find_spec", lambda name: object())
    found = losses.losses(torch.device("cpu"))
    assert "need a CUDA device" in found["liger"] and "need a CUDA device" in found["cce"]


def test_gate_refuses_a_wrong_loss_and_a_wrong_gradient():
    generator = torch.Generator().manual_seed(0)
    problem = heads.Problem(
        torch.randn(12, 4, generator=generator).requires_grad_(),
        torch.randn(30, 4, generator=generator),
        torch.randint(30, (12,), generator=generator),
    )
    problem.target[::2] = -100
    truth, naive = bench_loss.find_truth(problem), losses.naive
    for right in (naive, losses.compact, losses.chunked_nll, losses.linear_cross_entropy):
        assert bench_loss.check(right, problem, truth) == ""
    # What fp32 may lose here is below 1e-5.
    assert 2e-7 < min(truth.bounds) <= max(truth.bounds) < 1e-5
    assert "loss" in bench_loss.check(lambda *a: naive(*a) * 1.00002, problem, truth)
    halved = lambda *a: naive(*a).detach() / 2 + naive(*a) / 2  # noqa: E731
    assert "dx" in bench_loss.check(halved, problem, truth)


def test_nothing_is_timed_when_the_fused_loss_is_wrong(monkeypatch):
    right = losses.linear_cross_entropy
    monkeypatch.setattr(losses, "linear_cross_entropy", lambda *a, **k: right(*a, **k) * 1.01)
    timed = []
    monkeypatch.setattr(bench_loss.harness, "time_interleaved", lambda *a, **k: timed.append(a))
    with pytest.raises(SystemExit, match="fused failed the check: loss is off"):
        bench_loss.main([*SMALL, "--variants", "naive", "fused"])
    assert not timed


def test_one_round_of_a_slow_variant_is_one_step(monkeypatch):
    """Its forward pass before it isn't timed; a wrong gradient closes the gate."""
    monkeypatch.setattr(bench_loss, "SLOW_STEP", 0)
    calls = []

    def counted(x, weight, target):
        calls.append(losses.compact(x, weight, target))
        return calls[-1]

    args = bench_loss.parse([*SMALL[:-1], "1", "--head", "trainable"])
    args.dtype = torch.float32
    problem = heads.make_problem(args, 8, 20_000, "trainable", "random")
    truth = bench_loss.find_truth(problem, brief=True)
    monkeypatch.setattr(bench_loss, "losses", lambda *a, **k: {"fused": counted})
    results, right = bench_loss.choose(args, problem, truth)
    (result,) = results.values()
    assert not right and len(calls) == 2 and result.rounds == 1 and result.note == ""
    assert result.peak_bytes > 8 * 20_000 * 4 and set(result.phases) == {
        "forward", "backward", "total"}
    truth.values[1] *= 1.01
    with pytest.raises(SystemExit, match="dx is off"):
        bench_loss.choose(args, problem, truth)
