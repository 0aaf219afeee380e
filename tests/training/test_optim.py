"""Learning-rate schedule against hand-computed values, and the optimizer state's round trip."""

import math

import pytest
import torch

from bwsft.checkpoints.optimizer_state import moments, restore_moments
from bwsft.config import OptimConfig
from bwsft.training.optim import lr_at, make_optimizer


def test_linear_warmup_then_cosine_to_the_floor():
    config = OptimConfig(lr=2.0, warmup=0.1, floor=0.1)
    rates = [lr_at(i, 200, config) for i in range(200)]
    assert rates[0] == pytest.approx(2.0 / 20)
    assert rates[19] == pytest.approx(2.0)
    assert rates[20] == pytest.approx(2.0)
    assert rates[110] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # half of the cosine
    assert rates[199] == pytest.approx(0.2, rel=2e-2)
    assert all(a >= b for a, b in zip(rates[20:], rates[21:], strict=False))


def test_log_warmup_is_deepspeeds_default():
    config = OptimConfig(lr=1.0, warmup=0.1, warmup_shape="log")
    assert lr_at(5, 200, config) == pytest.approx(math.log(6) / math.log(20))  # 0.60, linear 0.25
    assert lr_at(0, 200, config) == 0.0


def test_no_warmup_and_one_step():
    assert lr_at(0, 1, OptimConfig(lr=3.0, warmup=0.0)) == pytest.approx(3.0)


def test_moments_round_trip_continues_bit_for_bit():
    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, make_optimizer(model, OptimConfig(lr=0.1))

    def update(model, optimizer, i):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(i))).square().sum().backward()
        optimizer.step()

    straight, optimizer = build()
    for i in range(4):
        update(straight, optimizer, i)
    first, optimizer = build()
    for i in range(2):
        update(first, optimizer, i)
    saved = {k: v.clone() for k, v in moments(first, optimizer).items()}
    second, optimizer = build()
    second.load_state_dict(first.state_dict())
    restore_moments(second, optimizer, saved)
    for i in range(2, 4):
        update(second, optimizer, i)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(),
                                                 strict=True))


def test_moments_of_another_model_are_refused():
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimConfig())
    with pytest.raises(ValueError, match="another model"):
        restore_moments(model, optimizer, {"other.exp_avg": torch.zeros(1)})
    state = {f"{n}.{k}": torch.zeros(5) for n in ("weight", "bias")
             for k in ("exp_avg", "exp_avg_sq", "step")}
    with pytest.raises(ValueError, match="shape"):
        restore_moments(model, optimizer, state)
