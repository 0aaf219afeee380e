"""Launched operators of a denoising step: constant over the steps, and linear in the layers."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def operators(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return pytest.importorskip("lib.operators")


@pytest.mark.parametrize("context", ["exact", "cached", "prefix", "block_causal"])
def test_steps_launch_the_same_operators_whatever_the_batch(operators, context):
    config = operators.DecodeConfig(12, 4, context=context)
    counts = {}
    for layers in (1, 2, 3):
        model = operators.narrow_model(layers, 32)
        counts[layers] = operators.operators_per_step(model, [[3] * 8], config)
        batch = operators.operators_per_step(model, [[3] * 8] * 3, config)
        assert batch[1:] == counts[layers][1:]  # the prompts are laid out one by one
    per_layer = counts[3][1] - counts[2][1]
    assert per_layer == counts[2][1] - counts[1][1]
    # As written 40 or 42 operators in a layer and about 115 beside the layers.
    assert per_layer <= 44 and counts[1][1] <= 44 + 125
    first, later, following = ({counts[2][at + i] for at in (0, 4, 8) for i in span}
                               for span in ((0,), (1, 2, 3), (0,)))  # fmt: skip
    assert len(later) == 1
    if context == "exact":
        assert first == later == following
