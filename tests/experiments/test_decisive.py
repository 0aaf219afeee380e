"""The decisive experiment: equal FLOPs, learning rates, claims on known numbers, and its pieces."""

import csv
import dataclasses
import json
import math

import pytest
from scipy import stats as scipy_stats

from bwsft.cli import main
from bwsft.experiments import decisive, estimate, measures, pilots, primary, scales
from bwsft.experiments.arms import Plan, Primary, only
from bwsft.experiments.primary_report import section
from bwsft.experiments.report import Finished
from bwsft.experiments.results import Measured
from bwsft.experiments.runner import Meters, settle

SCALE = scales.shifted()
PLAN = decisive.decisive(SCALE)
BUDGETS = (200, 800)


def around(mean, spread=0.01, seeds=10):
    """Ten values with this mean."""
    return [mean + spread * (2 * i / (seeds - 1) - 1) for i in range(seeds)]


def plan_of(*claims):
    return Plan("x", "x", "x", (), (), claims, BUDGETS)


def test_every_arm_gets_the_flops_of_its_budget(tmp_path):
    """Counted: what an update costs is read from the meters, and only rounding is left."""
    meters = Meters(tmp_path / "meters.json")
    trained = [arm for arm in PLAN.arms if arm.trained]
    for arm in trained:
        draws = arm.config.draws_per_context
        cost = {"tokens": 10.0, "flops_per_token": 1.0 + 0.37 * draws}
        meters.known.setdefault(meters.key(arm.config), cost)
    rates = {arm.name: 1e-3 for arm in trained if arm.rates}
    for arm in trained:
        config = settle(arm, PLAN, meters, rates)
        budget = int(arm.name.rpartition(", ")[2])
        spent = config.steps * meters.flops(config)
        assert spent == pytest.approx(budget * 13.7, abs=meters.flops(config) / 2)
        assert config.save_every == config.steps and config.optim.clip == 0
    assert {len(arm.rates) for arm in trained} == {0, 5}
    assert len({meters.key(arm.config) for arm in trained}) == len(trained) / 2


def test_the_formula_gives_equal_flops_too():
    """At 8b as at mini, what --dry-run prints."""
    for scale in (SCALE, scales.eight_b()):
        plan = decisive.decisive(scale)
        for budget in plan.budgets:
            ends = f", {budget}"
            found = [estimate.estimate(a, plan) for a in plan.arms if a.name.endswith(ends)]
            flops = [x.flops for x in found]
            assert len(flops) == 10 and max(flops) / min(flops) < 1 + 1 / min(
                x.updates for x in found
            )


def test_arms_differ_in_their_way_alone():
    """Canvas, batch, schedule and clipping are those of Classical; the paper's recipe has its sum
    and its last token."""
    configs = decisive.configs(SCALE)
    ways = ("objective", "context", "draws_per_context", "shared_context")
    for config in configs.values():
        plain = {name: getattr(configs["classical"], name) for name in ways}
        assert dataclasses.replace(config, **plain) == configs["classical"]
    paper = configs["paper"].objective
    assert (paper.weight, paper.empty) == ("sum", "last")
    assert configs["suffix"].objective.suffix_weight == 1 and configs["one pair"].objective.pairs


def test_the_lowest_mean_chooses_the_learning_rate(tmp_path):
    found = {1e-3: [0.5, 0.7], 2e-3: [0.4, 0.6], 4e-3: [0.1, math.nan]}
    assert pilots.chosen(found) == 2e-3
    with pytest.raises(ValueError, match="diverged"):
        pilots.chosen({1e-3: [math.nan]})
    meters = Meters(tmp_path / "meters.json")
    one, other = (a for a in PLAN.arms if a.name.startswith("paper"))
    for arm in PLAN.arms:
        if arm.trained:
            cost = {"tokens": 1.0, "flops_per_token": 1.0}
            meters.known[meters.key(arm.config)] = cost
    rates = {one.name: 7e-4}
    assert [settle(a, PLAN, meters, rates).optim.lr for a in (one, other)] == [7e-4, 7e-4]


CLAIM = Primary("x", ("a", "b"), "c")
TIMES = Primary("y", ("a", "b"), "c", multiplier=2.0)


@pytest.mark.parametrize(
    "ends, verdict",
    [((0.5, 0.9), "accepted"), ((0.9, 0.9), "falsified"), ((0.9, 0.7), "undecided")],
)
def test_one_better_variant_is_enough_and_all_must_be_worse(ends, verdict):
    values = {"a": [[], around(ends[0])], "b": [[], around(ends[1])], "c": [[], around(0.7)]}
    values = {way: [around(1.0), large] for way, (_, large) in values.items()}
    (judged,) = primary.judge(plan_of(CLAIM), values)
    assert judged.verdict == verdict
    p = scipy_stats.ttest_ind(values["a"][1], values["c"][1], equal_var=False).pvalue
    if verdict == "accepted":  # the better of two
        assert judged.best == "a" and judged.p_for == pytest.approx(2 * p, abs=0)
    else:
        assert judged.p_for == 1


def test_nine_seeds_decide_nothing_and_say_so():
    means = {"a": 0.1, "b": 0.2, "c": 0.7}
    values = {way: [around(1.0), around(mean)] for way, mean in means.items()}
    values["b"][0] = values["b"][0][:9]
    (judged,) = primary.judge(plan_of(CLAIM), values)
    assert judged.verdict == "undecided: 9 of 10 seeds" and judged.found["a"].mean < -0.5
    values["b"] = [[], []]
    for plan in (plan_of(CLAIM), plan_of(TIMES), plan_of(CLAIM, TIMES)):
        for judged in primary.judge(plan, values):
            assert judged.verdict == "undecided: 0 of 10 seeds" and math.isnan(judged.p_for)


def test_the_claims_are_one_family():
    """Holm: the smaller of two p-values counts twice, and none below it gets away with less."""
    means = {"a": 0.7 - 0.0072, "b": 0.8, "c": 0.7}
    values = {way: [around(1.0), around(mean)] for way, mean in means.items()}
    alone = primary.judge(plan_of(CLAIM), values)[0].p_for
    both = primary.judge(plan_of(CLAIM, dataclasses.replace(CLAIM, variants=("b",))), values)
    assert both[0].p_for == pytest.approx(min(1, 2 * alone)) and both[1].p_for == 1


def test_multipliers_of_known_curves():
    """Straight over log FLOPs; ends of the curves are the ends of what is said."""
    assert primary.crossing(1.0, 0.5, 0.9, 0.75, 4) == pytest.approx(2)  # half-way in log FLOPs
    assert primary.crossing(0.7, 0.5, 0.9, 0.75, 4) == 4  # with the smallest budget already
    assert primary.crossing(1.0, 0.75, 0.9, 0.75, 4) == 1
    assert primary.crossing(1.0, 0.85, 0.95, 0.75, 4) == pytest.approx(0.5)
    assert primary.crossing(1.0, 0.96, 0.95, 0.75, 4) == 0.25
    assert primary.crossing(0.8, 0.8, 0.7, 0.75, 4) == 0.25  # a curve that rises


@pytest.mark.parametrize(
    "small, verdict", [(0.76, "accepted"), (0.99, "falsified"), (0.895, "undecided")]
)
def test_the_multiplier_is_judged_by_its_bound(small, verdict):
    """The variant ends 0.1 below the other's 0.8 and reaches that early, late, or near half of the
    FLOPs: at (0.9, 0.7) it would be exactly half."""
    own = [around(small), around(0.7)]
    values = {"a": own, "b": [around(1.0), around(0.79)], "c": [around(0.95), around(0.8)]}
    (judged,) = primary.judge(plan_of(TIMES), values)
    found = judged.found["a"]
    assert judged.best == "a" and judged.verdict == verdict
    assert found.low <= found.mean <= found.high
    share = max(0.0, (small - 0.8) / (small - 0.7))
    assert found.mean == pytest.approx(4 ** (1 - share))
    if verdict == "accepted":
        assert found.low >= 2


def test_seeds_are_solved_on_problems_of_their_own(monkeypatch):
    one, two = (measures.test_problems(20, SCALE.base.data, first=i) for i in (0, 20))
    assert one != two and measures.test_problems(40, SCALE.base.data) == one + two
    monkeypatch.setattr(measures, "load_trained", lambda *_, **__: None)
    monkeypatch.setattr(measures, "solved", lambda trained, config, tests, first: first)
    asked = (None, dataclasses.replace(SCALE.base, seed=3), measures.TestSet(problems=20), "stem")
    for name, first in (("own@8", 60), ("solved@8", 0)):
        assert measures.measure(name, *asked) == first


def test_what_the_whole_costs(capsys):
    """About 10 core-hours at the rates of the first cells, and hours on a GPU at two lengths."""
    assert main(["experiment", "decisive", "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    hours = float(out.partition("about ")[2].partition(" hours on one core")[0])
    assert 9 < hours < 12 and "250 cells with pilots" in out and PLAN.primary[1].text in out
    assert main(["experiment", "decisive", "--scale", "8b", "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "rows of 128 + 512 tokens" in out and "on one H100" in out


def test_some_arms_take_their_pilots_and_their_claims_along():
    plan = only(PLAN, ["one copy, 800", "one pair, 800"])
    kept = [arm.name for arm in plan.arms]
    assert kept == ["classical, 200", "one copy, 200", "one pair, 200", "classical, 800",
                    "one copy, 800", "one pair, 800"]  # fmt: skip
    assert not plan.primary
    names = [f"{w}, {b}" for w in ("one copy", "one pair", "four copies") for b in BUDGETS]
    some = only(PLAN, names)
    assert some.primary == [PLAN.primary[2]]
    arms = [Measured(arm.name, [], None) for arm in some.arms]
    page = "\n".join(section(Finished(some, SCALE, [], None, arms)))
    assert "block_causal with several copies" in page and "FLOPs of" not in page


@pytest.fixture
def small(monkeypatch):
    """Three ways, a start of two updates and two learning rates."""
    monkeypatch.setattr(decisive, "START_UPDATES", 2)
    monkeypatch.setattr(decisive, "FACTORS", (1.0, 2.0))
    ways = {name: decisive.EXACT[name] for name in ("paper", "suffix")}
    for name, value in {"EXACT": ways, "CACHED": {}, "COPIES": {}}.items():
        monkeypatch.setattr(decisive, name, value)
    claims = (Primary("x", tuple(ways), "classical"), Primary("y", ("suffix",), "paper", 2.0))
    monkeypatch.setattr(decisive, "PRIMARY", claims)


@pytest.mark.slow
def test_in_pieces_to_a_page(small, tmp_path, capsys):
    """Cut short before the pilots, then with one seed, then whole; a finished cell stays."""
    out = tmp_path / "cells"
    arguments = ["experiment", "decisive", "--steps", "2", "--problems", "4", "--out", str(out),
                 "--report", str(tmp_path)]  # fmt: skip
    assert main([*arguments, "--seeds", "1", "--minutes", "0"]) == 0
    assert "run the command again" in capsys.readouterr().out
    assert not (tmp_path / "decisive.md").exists() and (out / "plan-decisive.json").exists()
    assert main([*arguments, "--seeds", "1"]) == 0
    before = {path: path.stat().st_mtime_ns for path in out.glob("*-u*.json")}
    assert main([*arguments, "--seeds", "2", "--minutes", "0"]) == 0
    page = (tmp_path / "decisive.md").read_text()
    assert "2 seeds planned, 1 finished by every arm" in page
    assert page.count("undecided: 1 of 10 seeds") == 2
    assert main([*arguments, "--seeds", "2"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}
    page = (tmp_path / "decisive.md").read_text()
    assert page.count("undecided: 2 of 10 seeds") == 2 and "The start solves" in page
    lines = list(csv.DictReader((tmp_path / "decisive.csv").open()))
    assert len(lines) == 3 + 2 * 2 * 3  # the untouched base in three modes; ways, budgets, seeds
    flops = {line["arm"]: float(line["flops"]) for line in lines if line["flops"]}
    assert flops["suffix, 8"] == pytest.approx(flops["classical, 8"], rel=0.1)
    rates = [json.loads(path.read_text())["config"]["optim"]["lr"] for path in before]
    assert {1e-3, 2e-3} <= {*rates}
    assert (tmp_path / "decisive.png").read_bytes()[:4] == b"\x89PNG"
