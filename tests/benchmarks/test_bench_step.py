"""The training-step benchmark at a toy size: last line, counted FLOPs, and a gate that closes."""

import dataclasses
import json

import bench_step
import pytest
import torch
from lib import steps

TINY = "--size tiny --prompt 8 --gen 16 --block 4 --rank 2 --examples 2 --accumulate 2".split()
CPU = torch.device("cpu")
NAMES = ["naive", "exact", "exact_suffix", "exact_shared_k4", "cached_k1", "cached_k4",
         "block_causal", "block_causal_pair", "block_causal_k4", "block_causal_pair_dense"]


@pytest.fixture(autouse=True)
def made_up_peak(monkeypatch):
    peak = bench_step.harness.Peak(1e11, 1e10)
    monkeypatch.setattr(bench_step.harness, "peak_of", lambda device: peak)


def test_last_line_and_file(capsys, tmp_path):
    file, some = tmp_path / "out.json", ["naive", "exact_suffix", "cached_k4", "block_causal_pair"]
    asked = ["--rounds", "1", "--no-memory", "--variants", *some, "--json", str(file)]
    bench_step.main([*TINY, *asked])
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    assert set(last) == {"bench", "device", "commit", "variants", "speedup"}
    assert list(last["variants"]) == some and bench_step.parse(TINY).variants == NAMES
    for variant in last["variants"].values():
        assert set(variant) == {"median_s", "tokens_per_s", "supervised_tokens_per_s", "flops",
                                "operators"}
        assert variant["tokens_per_s"] == pytest.approx(2 * 24 / variant["median_s"])
    modes, padding = json.loads(file.read_text())["points"]
    assert modes["settings"]["accumulate"] == 2
    paper = modes["results"][-1]
    assert paper["name"] == "paper" and paper["tokens_per_s"] == 5100
    assert paper["extra"] == {"GB in all": 23.5} and "median_s" not in paper
    # Supervised on average: half of a block of 4, for each draw; or of the whole response.
    per_step = {r["name"]: r["supervised_tokens_per_s"] * r["median_s"]
                for r in modes["results"][:-1]}
    assert per_step == pytest.approx(
        {"naive": 4, "exact_suffix": 16, "cached_k4": 16, "block_causal_pair": 32})
    flops = {r["name"]: r["flops"] for r in padding["results"]}
    assert flops["naive"] > flops["exact_padded"] > flops["exact_fixed"] > flops["exact_packed"]


@pytest.mark.slow
def test_flops_are_those_of_a_real_step(monkeypatch):
    """Counted with two and three hollow layers; here the model has five."""
    sizes = bench_step.shapes.SIZES
    monkeypatch.setitem(sizes, "tiny", dict(sizes["tiny"], n_layers=5))
    args = bench_step.parse([*TINY, "--variants", *NAMES[:5], *NAMES[7:]])
    backbone = bench_step.models.random_backbone("tiny", torch.float32, CPU)
    bench_step.models.adapt(backbone, 2)
    for name, (mode, job) in bench_step.modes_of(args, 16).items():
        one = dataclasses.replace(job, batches=job.batches[:1])
        real = bench_step.harness.count_flops(bench_step.step_of(backbone, mode, one))
        assert bench_step.counted(args, mode, job) == 2 * real, name


def test_the_8b_model_is_counted_without_weights():
    args = bench_step.parse("--size 8b --count-only --prompt 8 --gen 32 --accumulate 1 "
                            "--variants naive exact".split())
    _, (naive, exact, _) = bench_step.run_modes(args, None, 32)
    assert naive.median_s is None and exact.flops < naive.flops
    # 7.5 G matrix weights, 671 M of LoRA; backward needs no gradient of the frozen ones.
    tokens, frozen, lora = 40, 6.98e9 + 0.518e9, 0.671e9
    assert naive.flops == pytest.approx(tokens * (4 * frozen + 6 * lora), rel=0.02)


@pytest.mark.parametrize("block, masked", [(1, range(12, 22)), (3, range(20, 22))])
def test_naive_masks_the_active_block_and_the_suffix(monkeypatch, block, masked):
    """Prompt 8, response 14 in blocks of 4, padded to 24; every token of the block marked."""
    job = bench_step.make_job("tiny", [(8, 14)], 1, 4, CPU, gen_length=16, canvas="padded",
                              max_length=24)
    backbone = bench_step.models.random_backbone("tiny", torch.float32, CPU)
    monkeypatch.setattr(steps.random, "randrange", lambda count: {4: block}[count])
    monkeypatch.setattr(steps.random, "random", lambda: 0.0)
    seen = {}
    monkeypatch.setattr(backbone.model, "forward", lambda input_ids: seen.update(ids=input_ids))
    with pytest.raises(AttributeError):  # None has no logits
        next(steps.naive_losses(backbone, None, job, job.batches[0]))
    (ids,) = seen["ids"].tolist()
    assert [i for i, token in enumerate(ids) if token == backbone.family.mask_id] == list(masked)
    assert ids[22:] == [backbone.family.eos_id] * 2


def test_nothing_is_timed_when_a_loss_is_wrong(monkeypatch):
    right = steps.mode_losses
    monkeypatch.setattr(steps, "mode_losses", lambda *args: (loss * 1.001 for loss in right(*args)))
    with pytest.raises(SystemExit, match="exact loss .* is not the full-logits loss"):
        bench_step.main(TINY)


def test_padding_lengths_without_data(monkeypatch):
    monkeypatch.delenv("BWSFT_DATA_DIR", raising=False)
    lengths, source = bench_step.shapes.gsm8k_lengths(40)
    assert source == "32 lengths of GSM8K train" and len(lengths) == 40
    assert lengths[:8] == lengths[32:] and max(map(sum, lengths)) <= 256
