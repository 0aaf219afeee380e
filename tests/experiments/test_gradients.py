"""Noise and direction of gradients: estimates without bias, and the gradient of a real update."""

import csv
import dataclasses
import itertools

import pytest
import torch
from jsonl import write as write_jsonl

from bwsft import config as c
from bwsft.data.word_problems import generate
from bwsft.experiments import cells, dense_plans, gradients, measures, report, scales
from bwsft.experiments.runner import Contents, Meters, cells_of, measured
from bwsft.models.backbone import trainable
from bwsft.training.trainer import train_step


@pytest.fixture
def few(tmp_path):
    """Data of a config: few problems, which take no time to tokenize."""
    path = write_jsonl(tmp_path / "few.jsonl", *generate(32, 3))
    return {"data": str(path), "dataset": c.DataConfig(template="chat", holdout=4)}


def test_statistics_of_all_outcomes_are_exact():
    """Of gradients that take four values at random, the squares of the means and the products that
    are taken over pairs average to the true ones over every outcome of three draws."""
    values = torch.tensor([[3.0, 0, 1], [1, 2, 0], [2, -1, -1], [2, 1, 4]]).double()
    mean = values.mean(0)
    found = []
    for outcome in itertools.product(range(4), repeat=3):
        drawn = values[list(outcome)]
        found.append(gradients.square_of_mean(drawn @ drawn.T, torch.ones(3).double()))
    assert float(torch.stack(found).mean()) == pytest.approx(float(mean @ mean), rel=1e-12)
    # Weights are repetitions, and no draw is paired with itself.
    drawn, taken = values[:3], torch.tensor([2.0, 0, 1]).double()
    assert float(gradients.square_of_mean(drawn @ drawn.T, taken)) == float(drawn[0] @ drawn[2])


def test_noise_and_cosines_of_known_gradients():
    """Means at 60 degrees with noise of 4 times their power, in 4,000 dimensions."""
    chance = torch.Generator().manual_seed(3)
    size, away = 4000, 3**0.5 / 2
    target, mean = torch.zeros(2, size)
    target[0], mean[0], mean[1] = 5.0, 0.5, away

    def noisy(middle, count, power):
        return middle + torch.randn(count, size, generator=chance) * (power / size) ** 0.5

    found = gradients.compare(noisy(mean, 64, 4.0), noisy(target, 16, 5.0))
    # cos^2 of a gradient is 0.5^2 / (1 + 4), in so many dimensions nearly without spread
    for part, value in {"noise": 4.0, "cosine": 0.5, "squared": 0.25 / 5}.items():
        middle, low, high = found[part]
        assert low < value < high and low < middle < high
        assert middle == pytest.approx(value, rel=0.1)


@pytest.mark.parametrize("name", ["classical", "one pair, frozen"])
def test_it_is_the_gradient_of_an_update(few, name):
    arm = next(a for a in dense_plans.gradients(scales.debug()).arms if a.name == name)
    optim = dataclasses.replace(arm.config.optim, clip=0.0)
    config = dataclasses.replace(arm.config, optim=optim, batch_size=4, micro_batch_size=2)
    with gradients.opened(dataclasses.replace(config, **few)) as run:
        found, other = gradients.gradient(run, 0), gradients.gradient(run, 1)
        train_step(run, 0)
        grads = [w.grad.flatten() for w in trainable(run.backbone).values()]
    torch.testing.assert_close(found, torch.cat(grads), rtol=1e-5, atol=1e-7)
    assert torch.dist(found, other) > 0.1 * found.norm()


def test_references_do_not_depend_on_the_objective():
    plan = dense_plans.gradients(scales.debug())
    by_name = {arm.name: gradients.references(arm.config) for arm in plan.arms}
    assert len({cells.digest(found["exact"]) for found in by_name.values()}) == 1
    contents = Contents()
    own = {name: cells.digest(found["own"]) for name, found in by_name.items()}
    assert own["classical"] == own["exact"] != own["cached, k 4"]
    assert own["one copy"] == own["four copies, frozen"] != own["exact"]
    keys = {cell.key for arm in plan.arms for cell in cells_of(arm, arm.config, [0], contents)}
    assert len(keys) == 11


@pytest.mark.slow
def test_a_page_of_gradients(few, tmp_path, monkeypatch):
    for name, value in {"DRAWS": 3, "GROUPS": 2, "EACH": 1, "COUNTED": 1, "RESAMPLES": 20}.items():
        monkeypatch.setattr(gradients, name, value)
    scale = scales.debug()
    plan = dense_plans.gradients(scale)
    arm = next(arm for arm in plan.arms if arm.name == "one copy, frozen")
    arm = dataclasses.replace(arm, config=dataclasses.replace(arm.config, **few))
    plan = dataclasses.replace(plan, arms=[arm])
    (cell,) = cells_of(arm, arm.config, [0, 1], Contents())
    cells.run(tmp_path, cell, arm.measures, measures.TestSet())
    assert len(list(tmp_path.glob("reference-*.safetensors"))) == 2
    done = measured(arm, arm.config, [0, 1], tmp_path, Meters(tmp_path / "meters.json", Contents()))
    finished = report.Finished(plan, scale, [0, 1], measures.TestSet(), [done])
    (tmp_path / "page").mkdir()
    page = report.write(finished, tmp_path / "page")
    line = next(x for x in page.read_text().split("\n") if x.startswith("| one copy, frozen"))
    (found,) = csv.DictReader((tmp_path / "page/gradients.csv").open())
    noise, flops = float(found["noise"]), float(found["flops"])
    assert f"| {flops / 1e12:.4f} | {noise:.3g} [" in line
    assert f"| {noise * flops / 1e12:.3g} |" in line and flops > 1e9
    assert 0 < float(found["squared_own"]) < 1
