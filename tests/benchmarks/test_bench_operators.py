"""Launches of a layer and of a denoising step, fused and not; the gate; the counter itself."""

import json

import bench_operators as bench
import pytest
import torch
from bwsft_kernels import philox_uniform, rms_norm
from lib import models
from lib import small_counts as counts

CPU = torch.device("cpu")


def test_a_layer_launches_its_matmuls_and_five_more():
    """Forward 12: 7 matmuls, attention, 2 norms, rotary, SwiGLU. Backward 16: the same, three
    sums of the gradients that meet at the two normed inputs, and a copy of the one gradient that
    the layer's two summands share, which are leaves here."""
    args = bench.parse(["--count-only", "--size", "tiny", "--rows", "64"])
    settings, (naive, fused) = bench.timed_layer(args)
    kept = fused.extra.pop("MiB kept in bf16")
    assert fused.extra == {"forward operators": 12, "backward operators": 16}
    # Rows of 32: the two sums, q, k, v and what attention made; of 48: gate and up. 4 bytes of each
    # head for attention's log-sum-exp. Frozen matrices keep nothing.
    assert kept * 2**20 == 64 * (2 * (6 * 32 + 2 * 48) + 4 * 2)
    assert naive.extra["MiB kept in bf16"] > 1.3 * kept
    assert naive.extra["forward operators"] > 40 and naive.operators > 100
    assert naive.flops == fused.flops > 0 and naive.median_s is None
    assert settings["size"] == "tiny"


KINDS = ("naive", "fused", "graphs")


@pytest.mark.parametrize("context, naive, fused", [("exact", 46, 12), ("cached", 48, 14)])
def test_layers_of_a_denoising_step(context, naive, fused):
    """cached: keys and values are written into the cache besides."""
    found = counts.counted([context], counts.decoding_operators, 32, KINDS)
    assert [r.name for r in found] == [f"{context}_{kind}" for kind in KINDS]
    assert [r.extra["per layer"] for r in found] == [naive, fused, 0]
    for result in found:
        assert 32 * result.extra["per layer"] < result.operators
        assert result.operators < 32 * result.extra["per layer"] + 200


def test_counted_layers_are_those_of_a_deeper_model():
    (result,) = counts.counted(["exact"], counts.decoding_operators, 5, ["fused"])
    with counts.fused_launches():
        later, first = counts.decoding_operators("exact", 5, "fused")
    assert (result.operators, result.extra["first step"]) == (later, first)


@pytest.mark.parametrize("context", counts.CONTEXTS)
def test_steps_launch_the_same_operators_whatever_the_batch(context):
    """Constant over the steps of a block, and linear in the layers."""
    config = counts.DecodeConfig(12, 4, context=context)
    found = {}
    for layers in (1, 2, 3):
        model = models.random_backbone("tiny", torch.float32, CPU, layers)
        found[layers] = counts.operators_per_step(model, [[3] * 8], config)
        batch = counts.operators_per_step(model, [[3] * 8] * 3, config)
        # The prompts are laid out one by one; so is, on a CPU, the attention of a pass that stores
        # a block and enters the next.
        rest = [i for i in range(1, 12) if context != "block_causal" or i % 4]
        assert [batch[i] for i in rest] == [found[layers][i] for i in rest]
    per_layer = found[3][1] - found[2][1]
    assert per_layer == found[2][1] - found[1][1]
    # As written 40 or 42 operators in a layer and about 115 beside the layers.
    assert per_layer <= 44 and found[1][1] <= 44 + 125
    first, later, following = ({found[2][at + i] for at in (0, 4, 8) for i in span}
                               for span in ((0,), (1, 2, 3), (0,)))  # fmt: skip
    assert len(later) == 1
    if context == "exact":
        assert first == later == following


def test_a_training_step():
    job = counts.make_job("tiny", [(16, 32)] * 4, 4, 8, CPU, gen_length=32)
    with counts.fused_launches():
        few, many = (counts.training_operators(counts.MODES["exact"], job, 2, fused)[0]
                     for fused in (True, False))
    # Two layers: the last is pruned, and turns queries and keys apart.
    assert many - few > 2 * 70


def test_fused_calls_have_their_numbers_while_they_are_counted():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    expected, upstream = rms_norm(x, weight, 1e-5), torch.ones(3, 8)
    with counts.fused_launches():
        with counts.Launches() as forward:
            out = rms_norm(x, weight, 1e-5)
        with counts.Launches() as backward:
            out.backward(upstream)
    assert torch.equal(out, expected)
    for grad, leaf in ((x.grad, x), (weight.grad, weight)):
        plain = rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(grad, torch.autograd.grad(plain, leaf, upstream)[0])
    # The partial sums of the weight's gradient are added up by a second launch.
    assert forward.count == 1 and backward.count == 2
    position, draw = torch.arange(8), torch.arange(3)[:, None]
    with counts.Launches() as numbers:
        philox_uniform(position, draw, 7, seed=1, stream=2)
    assert numbers.count == 1
    with counts.Launches() as nothing:
        torch.promote_types(torch.float16, torch.float32)
        x.view(-1)[:3].t()
        torch.empty(3).new_empty(4)
    assert nothing.count == 0


def test_lora_needs_no_more_products_than_any_implementation():
    _, (base, peft, dropout) = counts.lora_linear()
    assert base.flops == 4 * 256 * 64 * 96 and base.extra["rank products"] == 0
    assert peft.extra["rank products"] == dropout.extra["rank products"] == 6


def test_the_gate(monkeypatch):
    args = "tiny", 64, torch.float32, CPU
    assert bench.check(*args) == ""
    right = bench.bwsft_kernels.swiglu
    monkeypatch.setattr(bench.bwsft_kernels, "swiglu", lambda gate, up: right(gate, up) * 1.001)
    assert "a fused layer is off by" in bench.check(*args)
    with pytest.raises(SystemExit, match="nothing was measured"):
        bench.main(["--count-only"])


def test_last_line_and_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.harness, "peak_of", lambda device: bench.harness.Peak(1e11, 1e10))
    monkeypatch.setattr(bench, "counted_points", lambda layers: [])
    file = tmp_path / "out.json"
    bench.main(["--size", "tiny", "--rows", "64", "--rounds", "2", "--no-memory",
                "--json", str(file)])  # fmt: skip
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["bench"] == "operators" and set(last["variants"]) == {"naive", "fused"}
    assert set(last["variants"]["fused"]) == {"median_s", "tokens_per_s", "flops", "operators"}
    layer, alone, host, lora = json.loads(file.read_text())["points"]
    assert set(layer["results"][0]["phases"]) == {"forward", "backward", "total"}
    assert [r["name"] for r in alone["results"]] == [
        f"{name}_{kind}" for name in ("rms_norm", "rotary", "swiglu") for kind in ("naive", "fused")
    ]
    assert [r["name"] for r in host["results"]] == [
        "rms_norm", "rms_norm of a sum", "rotary", "swiglu"]
    assert all(len(r["extra"]) == 4 and min(r["extra"].values()) > 0 for r in host["results"])
    assert lora["settings"]["part"] == "LoRA linear"
