"""The paper's comparisons: plans, cells that are done once, protocols, statistics, reports."""

import csv
import dataclasses
import json
import math
import statistics

import pytest
from scipy import stats as scipy_stats

from bwsft import config as c
from bwsft import presets
from bwsft.cli import main
from bwsft.experiments import cells, estimate, measures, plans, report, results, scales
from bwsft.experiments import statistics as st
from bwsft.experiments.arms import only
from bwsft.experiments.runner import Contents, Meters, cells_of, check_test_set, measured, settle
from bwsft.utils.flops import flop_counter

MINI, BIG = scales.mini(), scales.eight_b()
SCALES = [MINI, scales.debug(), BIG, scales.eight_b("released")]


@pytest.mark.parametrize("scale", SCALES, ids=lambda s: s.name)
@pytest.mark.parametrize("name", plans.PLANS)
def test_every_plan_resolves(scale, name):
    plan = plans.PLANS[name](scale)
    assert plan.name == name
    names = [arm.name for arm in plan.arms]
    assert len(set(names)) == len(names)
    for arm in plan.arms:
        c.validate(arm.config)
        for measure in arm.measures:
            block = measure.partition("@")[2].partition("x")[0]
            assert results.is_of_training(measure) or arm.config.gen_length % int(block) == 0
    taken = {arm.name: arm.measures for arm in plan.arms}
    for claim in plan.claims:
        for arm, measure in (*claim.smaller, *claim.larger):
            assert measure in taken[arm] or results.is_of_training(measure), claim.text


def test_a_report_replaces_an_older_one_and_nothing_else(tmp_path):
    plan, page = plans.PLANS["dynamics"](MINI), tmp_path / "dynamics.md"
    page.with_suffix(".csv").write_text("mine")
    for mine in (None, "# My dynamics"):
        if mine:
            page.write_text(mine)
        with (
            pytest.raises(ValueError, match="name another folder by --report"),
            report.held(plan, tmp_path),
        ):
            pass
    assert page.read_text() == "# My dynamics"
    page.write_text(f"{report.title(plan)}mini)")
    with report.held(plan, tmp_path):
        pass


def test_arms_change_one_thing():
    plan = plans.table(MINI)
    by_name = {arm.name: arm.config for arm in plan.arms}
    rates = {line.split(":")[0] for line in c.differences(by_name["classical"], by_name["mdlm"])}
    assert rates <= {"objective.name", "objective.empty", "optim.lr"}  # MDLM has no use for empty
    changed = c.differences(by_name["blockwise"], by_name["cached, k 4"])
    assert {line.split(":")[0] for line in changed} <= {"context", "draws_per_context", "optim.lr"}
    for name in ("prefix_noise", "suffix_leak"):
        arms = plans.PLANS[name.replace("_", "-")](MINI).arms[1:]
        values = [getattr(arm.config.objective, name) for arm in arms]
        assert values == list(plans.SHARES)


def test_experiments_share_their_cells():
    """The table's blockwise is the grid's B 10 and the grid's B 5 the ablations' zero."""
    key = {
        (plan, arm.name): cells.Cell(dataclasses.replace(arm.config, seed=3)).key
        for plan in plans.PLANS
        for arm in plans.PLANS[plan](MINI).arms
    }
    table = key["table", "blockwise"]
    assert table == key["block-grid", "B 10"] == key["equal-flops", "blockwise"]
    assert table == key["dynamics", "blockwise"]
    for arm in ("classical", "blockwise, equal FLOPs"):
        assert key["suffix", arm] == key["equal-flops", arm]
    for arm in ("blockwise, equal FLOPs", *plans.MODES):
        assert key["table", arm] == key["equal-flops", arm]
    assert key["block-grid", "B 5"] == key["prefix-noise", "0%"] == key["suffix-leak", "0%"]
    assert len({key["table", name] for name in plans.OBJECTIVES}) == len(plans.OBJECTIVES)
    assert key["table", "classical"] != key["equal-tokens", "classical, tau 1"]


def test_what_is_claimed():
    """Modes are compared at equal FLOPs; of a model that solves nothing, only the NELBO."""
    for make, arms in (
        (plans.table, plans.MODES), (plans.equal_flops, plans.MODES), (plans.suffix, plans.SUFFIX)
    ):  # fmt: skip
        for mode in arms:
            found = [claim for claim in make(MINI).claims if claim.smaller[0][0] == mode]
            larger = sorted(claim.larger[0][0] for claim in found)
            assert larger == ["blockwise, equal FLOPs", "classical"]
    for scale in (MINI, BIG):
        claims = [claim for make in plans.PLANS.values() for claim in make(scale).claims]
        kinds = {measure.split("@")[0] for claim in claims for _, measure in claim.smaller}
        others = {"gsm8k", "math"} if scale is BIG else set()
        assert kinds == {"nelbo", "curve", "cpu_seconds", "tpf", "aup", "careful"} | others


def test_the_papers_settings_row_by_row():
    """reference: the paper's table of settings and its released code."""
    paper, released = scales.eight_b("paper").base, scales.eight_b("released").base
    for base in (paper, released):
        assert base.model == "GSAI-ML/LLaDA-8B-Instruct"
        assert base.data == "meta-math/MetaMathQA"
        assert (base.lora.rank, base.lora.alpha, base.lora.dropout) == (256, 512, 0.05)
        assert (base.batch_size, base.steps, base.seed) == (32, 200, 42)
        assert (base.block_size, base.gen_length, base.max_length) == (32, 128, 256)
        assert (base.optim.lr, base.optim.weight_decay, base.optim.clip) == (1e-5, 0, 1.0)
        assert (base.objective.low, base.objective.high) == (1e-3, 1.0)
        assert base.optim.warmup == 0.1 and base.dataset.template == "metamath"
    assert (paper.optim.beta1, paper.optim.beta2, paper.optim.floor) == (0.95, 0.99, 0.1)
    assert (released.optim.beta1, released.optim.beta2, released.optim.floor) == (0.9, 0.95, 0.01)
    assert (paper.optim.warmup_shape, released.optim.warmup_shape) == ("linear", "log")
    assert (paper.objective.empty, released.objective.empty) == ("last", "skip")
    assert (paper.objective.blocks, released.objective.blocks) == ("uniform", "traversal")
    assert (paper.lora.targets, released.lora.targets) == ("all", "released")
    assert (paper.dataset.canvas, released.dataset.canvas) == ("response", "padded")
    assert released.dataset.exclude_type == "GSM" and paper.dataset.exclude_type is None
    assert released.dataset.limit == 6400
    assert presets.llada_8b_lora().dataset.canvas == "fixed"
    assert BIG.grid == (8, 16, 32, 64) and BIG.grid[0] == 8


def test_statistics_against_scipy():
    a, b = [0.31, 0.29, 0.33, 0.30, 0.28], [0.35, 0.30, 0.36, 0.33, 0.31]
    found = st.contrast(a, b)
    reference = scipy_stats.ttest_ind(a, b, equal_var=False)
    interval = reference.confidence_interval()
    assert found.p == pytest.approx(reference.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    constant, one_sample = st.contrast(a, [0.35] * 5), scipy_stats.ttest_1samp(a, 0.35)
    assert constant.p == pytest.approx(one_sample.pvalue, rel=1e-9)
    assert constant.low == pytest.approx(one_sample.confidence_interval().low - 0.35, rel=1e-9)
    assert st.contrast([0.5, 0.5], [0.25, 0.25]).p == 0 and st.contrast([1, 1], [1, 1]).p == 1
    assert st.holm([0.01, 0.04, math.nan, 0.03])[:2] == pytest.approx([0.03, 0.06])
    assert st.holm([0.01, 0.04, math.nan, 0.03])[3] == pytest.approx(0.06)
    assert found.mean < 0 and st.verdict(found, 0.04) == "reproduced"
    assert st.verdict(dataclasses.replace(found, mean=-found.mean), 0.04) == "opposite"
    assert st.verdict(found, 0.2) == "undecided"
    single = st.contrast([0.5], [0.6])
    assert single.n == 1 and math.isnan(single.p) and st.verdict(single, single.p) == "undecided"


def cell_record(value, evals=((0, 1.0), (10, 0.5))):
    values = {"nelbo@10": {"value": value}, "gsm8k@10": {"value": 1 - value}}
    return {"measures": values, "train": {"evals": list(evals)}}


def test_claims_are_judged_in_families():
    """Welch's test of the two sides; each kind of measure is a family of its own."""
    good, bad = (0.50, 0.61, 0.55), (0.70, 0.80, 0.76)
    rows = [
        results.Measured("base", [cell_record(0.9)], None),
        results.Measured("good", [cell_record(v) for v in good], 1.0),
        results.Measured("bad", [cell_record(v) for v in bad], 1.0),
    ]
    claims = (
        plans.Claim("good", (("good", "nelbo@10"),), (("bad", "nelbo@10"),)),
        plans.Claim("wrong", (("base", "nelbo@10"),), (("bad", "nelbo@10"),)),
        plans.Claim("match", (("bad", "gsm8k@10"),), (("good", "gsm8k@10"),)),
    )
    plan = plans.Plan("x", "x", "x", (), claims)
    first, second, match = results.judge(plan, rows, 3)
    p = scipy_stats.ttest_ind(good, bad, equal_var=False).pvalue
    assert first.found.p == pytest.approx(p) and match.adjusted_p == pytest.approx(p)
    assert first.adjusted_p == pytest.approx(2 * p)  # one of two
    assert first.found.mean == pytest.approx(-0.2) and first.verdict == "reproduced"
    assert second.found.mean == pytest.approx(statistics.fmean([0.2, 0.1, 0.14]))
    assert second.verdict in ("undecided", "opposite")
    assert rows[1].values("curve@100") == [0.5] * 3 and rows[1].values("solved@10") is None


def test_arms_with_rates_of_their_own_and_their_cpu_seconds():
    """A column of each; a claim about seconds is judged apart from those about the NELBO."""
    plan = plans.copies(scales.debug())
    arms = []
    for i, arm in enumerate(plan.arms):
        assert arm.equal_flops_of == (None if i == 0 else plan.arms[0].name)
        counted = {"updates": 9, "supervised_tokens": 9, "region_tokens": 9}
        records = [
            {"measures": {"nelbo@8": {"value": 0.1 + 0.01 * i + 1e-4 * seed}},
             "train": {**counted, "cpu_seconds": 50.0 - i + seed}}
            for seed in range(3)
        ]  # fmt: skip
        arms.append(results.Measured(arm.name, records, 1e12))
    different = [dataclasses.replace(plan.arms[0].config, optim=c.OptimConfig(lr=5e-4))]
    different += [arm.config for arm in plan.arms[1:]]
    pairs = zip(plan.arms, different, strict=True)
    plan = dataclasses.replace(plan, arms=[dataclasses.replace(a, config=x) for a, x in pairs])
    finished = report.Finished(plan, scales.debug(), [0, 1, 2], measures.TestSet(), arms)
    heads, first, *_ = report.table(finished)
    shown = dict(zip(heads, first, strict=True))
    assert shown["peak lr"] == "0.0005" and shown["CPU s"] == "51.0 ± 0.6"
    assert "peak learning rate" not in report.settings(finished)
    (line, *_) = csv.DictReader(report.csv_text(finished).split("\n"))
    assert line["cpu_seconds"] == "50.0"
    judged = {j.claim.text: j for j in results.judge(plan, arms, 3)}
    worse = judged["one pair has a lower NELBO than one copy"]
    assert worse.verdict == "opposite" and worse.found.mean == pytest.approx(0.01)
    cheaper = judged["one copy, blocks shrink has fewer CPU seconds than one copy"]
    assert cheaper.found.mean == pytest.approx(-5) and cheaper.adjusted_p < 0.05


def test_some_arms_of_a_plan(capsys):
    """With the arm that their FLOPs equal, and with the claims about them alone."""
    plan = only(plans.copies(MINI), ["one pair", "four copies"])
    assert [arm.name for arm in plan.arms] == ["one copy", "one pair", "four copies"]
    assert len(plan.claims) == 4
    assert main(["experiment", "copies", "--arms", "one pear", "--dry-run"]) == 2
    assert "'one pear': copies has 'one copy', 'one pair'" in capsys.readouterr().err


def test_a_page_names_data_without_the_way_there():
    base = dataclasses.replace(MINI.base, data="/home/somebody/sets/gsm8k/train.jsonl")
    plan, scale = plans.PLANS["dynamics"](MINI), dataclasses.replace(MINI, base=base)
    finished = report.Finished(plan, scale, [0], measures.TestSet(), [])
    found = report.settings(finished)
    assert "on gsm8k/train.jsonl, 1 seeds" in found and "somebody" not in found


def test_halves_of_the_test_set_share_no_numbers():
    found, pilot = (measures.test_problems(100, "wordproblems-20", pilot=p) for p in (False, True))
    assert len(found) == len(pilot) == 100
    numbers = [{"".join(ch for ch in p["query"] if not ch.isalpha()) for p in x}
               for x in (found, pilot)]
    assert not numbers[0] & numbers[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run: (arguments, folder). Two updates of `blockwise, equal FLOPs` cost nearly what
    two of `classical` do, so that these are the cells of `blockwise`."""
    out = tmp_path_factory.mktemp("experiments")
    arguments = ["experiment", "dynamics", "--steps", "2", "--seeds", "2", "--problems", "6",
                 "--out", str(out / "cells"), "--report", str(out / "report")]
    assert main(arguments) == 0
    return arguments, out


@pytest.mark.slow
def test_a_run_writes_page_csv_and_figure(finished):
    _, out = finished
    page = (out / "report/dynamics.md").read_text()
    assert "| blockwise | 2 |" in page and "verdict" in page and "dynamics.png" in page
    assert (out / "report/dynamics.png").read_bytes()[:4] == b"\x89PNG"
    lines = list(csv.DictReader((out / "report/dynamics.csv").open()))
    names = ("classical", "blockwise", "blockwise, equal FLOPs")
    assert [line["arm"] for line in lines] == [name for name in names for _ in range(2)]
    for line in lines:
        assert float(line["flops"]) > 0
        evals = json.loads(line["evals"])
        assert len(evals) == int(line["updates"]) + 1
        assert 0 < evals[-1][1] < 0.8 * evals[0][1] and float(line["nelbo@10"]) > 0
    classical, own, equal = (float(line["flops"]) for line in lines[::2])
    assert equal == own < 0.9 * classical
    trained = [json.loads(p.read_text()) for p in sorted((out / "cells").glob("*-u2-*.json"))]
    assert [t["train"]["updates"] for t in trained] == [2] * 4
    assert len({t["measures"]["nelbo@10"]["value"] for t in trained}) == 4
    stored = json.loads((out / "cells/plan-dynamics.json").read_text())
    assert len(stored["plan"]["claims"]) == 2


def test_the_untouched_base_is_a_cell(tmp_path):
    """Measured once for all seeds; a page has no training figures of it."""
    arm, seeds = plans.base_arm(MINI, ("nelbo@10",)), [0, 1]
    (cell,) = cells_of(arm, arm.config, seeds, Contents())
    cells.run(tmp_path, cell, ("nelbo@10",), measures.TestSet(problems=6))
    done = measured(arm, arm.config, seeds, tmp_path, Meters(tmp_path / "meters.json"))
    plan = dataclasses.replace(plans.equal_flops(MINI), arms=[arm])
    _, texts = report.table(report.Finished(plan, MINI, seeds, measures.TestSet(), [done]))
    assert texts[:3] == ["base", "-", "-"] and f"{done.values('nelbo@10')[0]:.4f}" in texts


@pytest.mark.slow
def test_finished_cells_are_not_redone_and_a_lost_one_is(finished):
    arguments, out = finished
    before = {p: p.stat().st_mtime_ns for p in (out / "cells").glob("*.json")}
    lost = next((out / "cells").glob("classical*-s1-*.json"))
    record = json.loads(lost.read_text())
    # As a process killed between training and its second measure left it.
    kept = {"nelbo@10": record["measures"]["nelbo@10"]}
    lost.write_text(json.dumps({**record, "measures": kept}))
    assert main(arguments) == 0
    again = json.loads(lost.read_text())
    values = {k: v["value"] for k, v in again["measures"].items()}
    assert values == {k: v["value"] for k, v in record["measures"].items()}
    unchanged = [p for p, at in before.items() if p != lost and p.stat().st_mtime_ns != at]
    assert not unchanged


@pytest.mark.slow
def test_another_test_set_in_the_same_folder_is_refused(finished, capsys):
    arguments, _ = finished
    other = [*arguments]
    other[other.index("--problems") + 1] = "7"
    assert main(other) == 2
    assert "problems = 6, not 7" in capsys.readouterr().err


@pytest.mark.parametrize("name, missing", [("table", "--gsm8k"), ("context-modes", "CPU seconds")])
def test_8b_asks_for_what_it_measures(capsys, name, missing):
    assert main(["experiment", name, "--scale", "8b"]) == 2
    assert missing in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["paper", "released", "llada-8b-lora"])
def test_8b_dry_run_prints_updates_tokens_flops_and_hours(preset, capsys):
    assert main(["experiment", "table", "--scale", "8b", "--preset", preset, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "classical" in out and "1,638,400" in out and "A100 hours" in out


@pytest.mark.slow
def test_shrinking_blocks_are_metered_at_every_size(tiny, tmp_path):
    """Three updates, three and six of the sizes 16, 8 and 4: at most four of each stand for all."""
    config = tiny(context="block_causal", block_size_schedule=0.5, steps=12,
                  eval=c.EvalConfig(every=0))  # fmt: skip
    found = cells.meter(config)
    with flop_counter() as flops:
        done = cells.train_cell(tmp_path / "whole", config)
    assert found["tokens"] == pytest.approx(done["tokens"] / 12, rel=0.02)
    per_token = flops.get_total_flops() / done["tokens"]
    assert found["flops_per_token"] == pytest.approx(per_token, rel=0.02)


@pytest.mark.slow
def test_estimate_agrees_with_counted_flops(finished):
    """At real row lengths the formula is within a tenth of the counter."""
    _, out = finished
    meters = Meters(out / "cells/meters.json")
    for name in ("classical", "blockwise"):
        arm = next(a for a in plans.equal_flops(shortened()).arms if a.name == name)
        counted = meters.known[meters.key(arm.config)]
        rows = counted["tokens"] / arm.config.batch_size
        canvas = arm.config.gen_length
        shape = estimate.shape_of(arm.config)
        per_update = estimate.update_flops(arm.config, shape, rows - canvas, canvas)
        # The formula masks half of the whole canvas; responses fill about three blocks of four.
        assert per_update / counted["tokens"] == pytest.approx(counted["flops_per_token"], rel=0.1)


def shortened():
    base = dataclasses.replace(
        MINI.base, steps=2, save_every=2, eval=dataclasses.replace(MINI.base.eval, every=1)
    )
    return dataclasses.replace(MINI, base=base)


def test_8b_adapters_are_those_of_the_paper():
    """671 M parameters on all seven matrices, 335.5 M on the four that the released list hits."""
    shape = estimate.shape_of(presets.paper())
    assert estimate.adapters(presets.paper(), shape) == 2 * 671_088_640
    assert estimate.adapters(presets.released(), shape) == 2 * 335_544_320


def test_equal_flops_scales_updates(tmp_path):
    """An arm at strictly equal FLOPs gets updates in inverse proportion to what they cost."""
    plan = plans.table(MINI)
    meters = Meters(tmp_path / "meters.json")
    costs = {"classical": 2.0, "rdm, equal FLOPs": 4.0, "cached, k 1": 1.0, "blockwise": 1.6}
    for arm in plan.arms:
        if arm.trained:
            key = meters.key(arm.config)
            meters.known.setdefault(key, {"tokens": 1.0, "flops_per_token": 2.0})
            if arm.name in costs:
                meters.known[key] = {"tokens": 1.0, "flops_per_token": costs[arm.name]}
    updates = {arm.name: settle(arm, plan, meters).steps for arm in plan.arms}
    assert updates["rdm, equal FLOPs"] == 100 and updates["rdm"] == 200
    assert updates["cached, k 1"] == 400
    assert updates["blockwise, equal FLOPs"] == 250 and updates["blockwise"] == 200


def test_equal_time_gives_as_many_updates_as_fit(tmp_path):
    """What is timed is stored with the FLOPs; FLOPs alone are not enough for such an arm."""
    plan = plans.context_modes(dataclasses.replace(scales.debug(), cpu_seconds=3))
    meters = Meters(tmp_path / "meters.json")
    arms = [arm for arm in plan.arms if arm.trained]
    for arm in arms:
        found = meters.known[meters.key(arm.config)] = {"tokens": 1.0, "flops_per_token": 2.0}
        assert not meters.has(arm) and meters.has(dataclasses.replace(arm, cpu_seconds=None))
        found["cpu_seconds"] = 0.4 if arm.config.draws_per_context == 2 else 0.5
    updates = {arm.name: settle(arm, plan, meters).steps for arm in arms}
    assert updates == {
        "exact": 6, "block_causal": 6, "cached, k 1": 6, "cached, k 2": 7, "cached, k 4": 6
    }  # fmt: skip


def test_traversals_count_blocks(tmp_path):
    """tau 1: classical sees every example once, blockwise every block of every example once."""
    plan = plans.equal_tokens(MINI)
    by_name = {arm.name: arm for arm in plan.arms}
    classical = settle(by_name["classical, tau 1"], plan, None)
    assert classical.steps == 800 / 16
    one, three = (settle(by_name[f"blockwise, tau {t}"], plan, None).steps for t in (1, 3))
    assert three == pytest.approx(3 * one, abs=3)
    assert 2.5 * classical.steps < one < 4 * classical.steps


def test_a_folder_remembers_its_test_set(tmp_path):
    check_test_set(tmp_path, measures.TestSet(problems=3))
    check_test_set(tmp_path, measures.TestSet(problems=3, batch_size=1))
    with pytest.raises(ValueError, match="draws"):
        check_test_set(tmp_path, measures.TestSet(problems=3, draws=2))
