"""The decoding benchmark at a toy size: last line, counted FLOPs, and a gate that closes."""

import json

import bench_generate
import pytest
import torch

from bwsft.utils.flops import decode_flops

TINY = "--size tiny --prompt 8 --gen 16 --block 4 --rounds 1 --no-memory".split()
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A made-up peak, and two trained problems in place of eight."""
    trained, peak = bench_generate.trained_problem, bench_generate.harness.Peak(1e11, 1e10)
    monkeypatch.setattr(bench_generate.harness, "peak_of", lambda device: peak)
    monkeypatch.setattr(bench_generate, "trained_problem", lambda device: trained(device, 2))


@pytest.mark.parametrize(
    "some", [["exact", "threshold"],
             pytest.param(list(bench_generate.VARIANTS), marks=pytest.mark.slow)]
)  # fmt: skip
def test_last_line_and_file(capsys, tmp_path, monkeypatch, some):
    monkeypatch.setattr(bench_generate, "SWEEP", ((8,), (8,), (1, 2)))
    file = tmp_path / "out.json"
    bench_generate.main([*TINY, "--sweep", "--variants", *some, "--json", str(file)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last) == {"bench", "device", "commit", "variants", "speedup"}
    assert list(last["variants"]) == some
    for variant in last["variants"].values():
        assert set(variant) == {"median_s", "tokens_per_s", "flops", "operators"}
        assert variant["tokens_per_s"] == pytest.approx(4 / variant["median_s"])
    one, two, trained = json.loads(file.read_text())["points"]
    assert (one["settings"]["batch"], two["settings"]["batch"]) == (1, 2)
    extra = {r["name"]: r["extra"] for r in trained["results"]}
    assert extra["threshold"]["steps"] < 20  # sure of most tokens
    if "naive" not in some:
        return
    assert extra["exact"]["agreement"] == 1 and extra["naive"]["steps"] == 40
    assert extra["cached"]["agreement"] > 0.9  # the cheaper context changes few
    assert extra["block_causal"]["passes"] == 40  # prompt and finished blocks beside them


@pytest.mark.slow
def test_flops_are_those_of_a_real_decoding(monkeypatch):
    """Counted with two and three hollow layers; here the model has four."""
    sizes = bench_generate.shapes.SIZES
    monkeypatch.setitem(sizes, "tiny", dict(sizes["tiny"], n_layers=4))
    model = bench_generate.models.random_backbone("tiny", torch.float32, CPU)
    shape, grid = (8, 8, 2), (2, 2)
    problem = bench_generate.make_problem(model, shape, *grid)
    for name in ("naive", "exact", "prefix", "cached", "block_causal", "cached_threshold",
                 "first_hitting", "routed", "rcr"):
        real = bench_generate.harness.count_flops(bench_generate.step_of(problem, name, {}))
        options = bench_generate.planned(name)
        assert bench_generate.hollow_flops("tiny", shape, *grid, options) == real, name


def test_the_formulas_of_a_whole_decoding():
    """Counted over all blocks. block_causal's formula has a commit of the last block too, and not
    the prompt's one pass."""
    cost = decode_flops(bench_generate.shapes.cost_of("tiny"), 4, 8, 4)
    model = bench_generate.models.random_backbone("tiny", torch.float32, CPU)
    problem = bench_generate.make_problem(model, (4, 8, 1), 4, 2)
    for name, per_step in cost.items():
        counted = bench_generate.harness.count_flops(bench_generate.step_of(problem, name, {}))
        within = 0.05 if name == "block_causal" else 0.005
        assert counted == pytest.approx(8 * per_step, rel=within), name


def test_the_8b_model_is_counted_without_weights(capsys):
    bench_generate.main("--size 8b --count-only --prompt 8 --gen 8 --block 4 "
                        "--variants naive cached".split())
    variants = json.loads(capsys.readouterr().out.splitlines()[-1])["variants"]
    weights = 6.98e9 + 0.518e9
    assert variants["naive"]["flops"] == pytest.approx(4 * 16 * 2 * weights, rel=0.01)
    assert variants["cached"]["flops"] < variants["naive"]["flops"] / 2


@pytest.mark.slow
def test_the_rules_of_the_related_work(capsys):
    related = list(bench_generate.EVERY)[-5:]
    bench_generate.main([*TINY, "--variants", *related])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last["variants"]) == related
    assert all(variant["median_s"] > 0 for variant in last["variants"].values())
    flops = {name: variant["flops"] for name, variant in last["variants"].items()}
    assert flops["routed"] == flops["rcr"] > flops["first_hitting"]  # not of [MASK]s alone


@pytest.mark.parametrize("name", ["first_hitting", "routed", "rcr", "edit", "apd"])
def test_nothing_is_timed_when_a_rule_does_not_reduce(name, monkeypatch):
    right = bench_generate.decode_by

    def wrong(problem, options):
        found = right(problem, options)
        found.tokens[0, 0] += options.get("rule") == name
        return found

    monkeypatch.setattr(bench_generate, "decode_by", wrong)
    bench_generate.gate(CPU)
    with pytest.raises(SystemExit, match=f"the check failed: {name} with .* nothing was timed"):
        bench_generate.gate(CPU, bench_generate.EVERY)


def test_nothing_is_timed_when_exact_commits_other_tokens(monkeypatch):
    right = bench_generate.decode

    def wrong(problem, name):
        found = right(problem, name)
        if name == "exact":
            found.tokens[0, 0] += 1
        return found

    monkeypatch.setattr(bench_generate, "decode", wrong)
    with pytest.raises(SystemExit, match="the check failed: exact agrees .* on 97%"):
        bench_generate.main(TINY)
