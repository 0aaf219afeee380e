"""The study of fewer passes: its figures from known points, its page, and a small run of it."""

import dataclasses
import json

import pytest

from bwsft.experiments import measures, plans, report, results, scales, thresholds
from bwsft.experiments.arms import Claim, Plan
from bwsft.experiments.runner import run_plan
from bwsft.experiments.thresholds import Point, figure_of

PLAN = plans.PLANS["fewer-chains"](scales.mini())


def test_figures_of_known_points():
    points = [Point(1.0, 0.9, 0.80, 30), Point(0.9, 3.0, 0.795, 9), Point(0.7, 4.0, 0.79, 7),
              Point(0.5, 5.0, 0.785, 6), Point(0.3, 6.0, 0.30, 5)]  # fmt: skip
    assert figure_of("careful", points) == 0.80
    assert figure_of("tpf", points) == 4.0  # the last within a point
    assert figure_of("kept", points) == 0.79
    turned = [*points[:-1], Point(0.3, 6.0, 0.81, 5)]  # no order is taken
    assert (figure_of("tpf", turned), figure_of("kept", turned)) == (6.0, 0.81)
    worth = figure_of("aup", points)
    assert worth == thresholds.aup([(0.9, 80), (3.0, 79.5), (4.0, 79), (5.0, 78.5)], best=100)
    assert figure_of("aup", [*points[:-1], Point(0.3, 6.0, 0.78, 5)]) > worth


def test_studies_report_on_problems_that_no_setting_was_chosen_on(monkeypatch):
    seen, data = [], "chains-6-seed4"
    monkeypatch.setattr(measures, "load_trained", lambda *_, **__: None)
    monkeypatch.setattr(thresholds, "measure", lambda kind, trained, some, *_: seen.extend(some))
    measures.measure("tpf@16", None, PLAN.start, measures.TestSet(5, generated=data), "")
    every = measures.test_problems(thresholds.PILOTED + 5, data)
    assert seen == every[thresholds.PILOTED :] and len(seen) == 5


def cell(*points, plan=PLAN):
    shown = [list(point) for point in points]
    taken = {name: {"value": figure_of(name.partition("@")[0], points), "points": shown}
             for name in plan.arms[0].measures}  # fmt: skip
    return {"measures": taken, "train": {"updates": 60, "supervised_tokens": 1, "region_tokens": 2}}


def test_a_claim_of_twice_as_much_is_judged_by_twice():
    """From 1.5 to 3.5 and 3.7 is more than twice, from 1.5 to 2.9 and 2.8 is not."""
    for rates, verdict in (((3.5, 3.7), "reproduced"), ((2.9, 2.8), "opposite")):
        cells = [cell(Point(1.0, rate, 0.8, 9)) for rate in rates]
        arms = [results.Measured("before", [cell(Point(1.0, 1.5, 0.8, 9))], None),
                results.Measured("own", cells, 1.0)]  # fmt: skip
        claim = Claim("", (("before", "tpf@16"),), (("own", "tpf@16"),), 2.0)
        (judged,) = results.judge(Plan("a", "", "", (), [claim]), arms, 2)
        assert judged.found.mean == pytest.approx(3 - sum(rates) / 2)
        assert judged.found.mean < 0 if verdict == "reproduced" else judged.found.mean > 0


def test_the_page_shows_every_threshold(tmp_path):
    names = [arm.name for arm in PLAN.arms]
    curves = {name: [cell(*(Point(t, 1 + n + s, 0.8 - n / 10, 9) for t in (1.0, 0.5)))
                     for s in range(2)] for n, name in enumerate(names)}  # fmt: skip
    arms = [results.Measured(name, curves[name], 1e12) for name in names]
    finished = report.Finished(PLAN, scales.mini(), [0, 1], measures.TestSet(), arms, {}, 0.5)
    page = report.write(finished, tmp_path).read_text()
    assert "| before | B 16 | 1 | 80.0% | 1.50 | 9.0 |" in page
    assert "| distill | B 16 | 0.5 | 50.0% | 4.50 | 9.0 |" in page
    assert "solves 50.0% of problems like" in page
    assert page.count("has at least 2 times the TPF") == 3
    # 100 problems, of which some come several times.
    assert "100 test problems, 87 of which differ in more than names" in page
    assert "error of up to 6 points" in page


def test_a_study_of_active_blocks_decodes_with_one_and_with_several(tmp_path):
    plan = plans.PLANS["active-blocks"](scales.mini())
    trained = {arm.name: arm.config.active_blocks for arm in plan.arms if arm.trained}
    assert trained == {"blockwise": 1, "several blocks": 4, "several blocks + confidence": 4}
    arms = [results.Measured(arm.name, [cell(Point(1.0, 2.0, 0.8, 9), plan=plan)] * 2, 1e12)
            for arm in plan.arms]  # fmt: skip
    finished = report.Finished(plan, scales.mini(), [0, 1], measures.TestSet(), arms, {}, 0.5)
    page = report.write(finished, tmp_path).read_text()
    assert "| several blocks | B 4, 4 active | 1 | 80.0% | 2.00 | 9.0 |" in page
    assert "| TPF, B 4, 4 active | exact match of that TPF, B 4, 4 active | AUP, B 4, 4" in page
    assert "4 active blocks are decoded from the first pass on. 2 seeds" in page
    assert plan.traces == 0 and "peak learning rate of 0.002, on wordproblems-9-seed5;" in page
    assert {arm.config.data for arm in plan.arms} != {plan.start.data}
    assert "several blocks at that TPF solves at least 99% of what before solves" in page
    text = "several blocks has a higher AUP than blockwise"
    for own, at in (("", "aup@4"), (" with several active blocks", "aup@4x4")):
        (claim,) = (claim for claim in plan.claims if claim.text == text + own)
        assert claim.smaller == (("blockwise", at),)
        assert claim.larger == (("several blocks", "aup@4x4"),)


@pytest.mark.slow
def test_a_small_study_runs(tmp_path):
    """Start, traces of it, an arm that is trained on them, and their measures."""
    plan = plans.PLANS["fewer"](scales.mini())

    def short(config):
        return dataclasses.replace(config, steps=1, save_every=1)

    several = ("tpf@16", "tpf@16x2", "careful@16")
    arms = [dataclasses.replace(arm, config=short(arm.config), measures=several)
            for arm in plan.arms if arm.name in ("before", "distill")]  # fmt: skip
    small = dataclasses.replace(plan, arms=arms, claims=(), start=short(plan.start), traces=30)
    tests = measures.TestSet(problems=8, generated=plan.start.data)
    ran = run_plan(small, [0], tmp_path, tests, jobs=1)
    (traces,) = tmp_path.glob("*-traces30")
    lines = (traces / "traces-00000.jsonl").read_text().splitlines()
    assert 0 < len(lines) < 30 and all("steps" in json.loads(line) for line in lines)
    assert ran.plan.arms[1].config.data == str(traces) and ran.plan.arms[0].config.data
    for arm in ran.arms:
        for name in several[:2]:
            points = thresholds.mean_curve(arm.cells, name)
            assert [point.threshold for point in points] == list(thresholds.THRESHOLDS)
            assert arm.values(name)[0] >= points[0].tpf > 0
    files = sorted(tmp_path.glob("*-thresholds*.json"))
    before = [(file.stat().st_mtime_ns, file) for file in files]
    run_plan(small, [0], tmp_path, tests, jobs=1)
    assert [(file.stat().st_mtime_ns, file) for file in files] == before and len(files) == 4
