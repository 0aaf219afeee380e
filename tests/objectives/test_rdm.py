"""RDM on the response: levels, weights, label smoothing and coupled masks against closed forms."""

import math

import numpy as np
import pytest
import torch
from bwsft_kernels import linear_cross_entropy
from tiny_objectives import family_of, objective_of, packed

from bwsft.objectives import rdm
from bwsft.objectives.base import response_rows
from bwsft.objectives.config import RdmConfig

MASK, N = 49, 32
FAMILY = family_of(MASK, vocab_size=50)


def batch_of(count, length=N):
    return packed(FAMILY, [(range(2), np.arange(length) % 40)] * count)


def prepare(*group):
    return objective_of("rdm", FAMILY, RdmConfig(*group))


def at_level(k, options, marks=None):
    """The corruption of one example at level k; without marks everything is masked."""
    batch = batch_of(1)
    marks = torch.zeros_like(batch.ids) if marks is None else marks
    return rdm.corrupt(batch, response_rows(batch), options, torch.tensor([k]), marks)


def expected_loss(weight, levels):
    """T times the expected loss under a cross-entropy of 1."""
    return {
        "linear": (levels + 1) * (levels + 2) / (6 * levels),
        "reciprocal": 1.0,
        "none": (levels + 1) / 2,
    }[weight]


@pytest.mark.parametrize("levels", [1, 10, 50])
@pytest.mark.parametrize("weight", ["linear", "reciprocal", "none"])
def test_lambda_and_expected_loss_over_all_levels(weight, levels):
    """Exact over k: mean of lambda(k) (k + 1) / T. T = 10, 50: 2.2, 8.84 for "linear"."""
    options = prepare(levels, weight, 0.0, False)
    total = 0.0
    for k in range(levels):
        drawn = at_level(k, options)
        assert drawn.num_rows == N and drawn.smoothing == 0
        (lam,) = set(drawn.weight[:N].tolist())
        law = {"linear": 1 - k / levels, "reciprocal": 1 / (k + 1), "none": 1}[weight]
        assert lam * N == pytest.approx(law, rel=2**-23)
        # The highest word masked at this level is the rate in units of 2^-24, less 1.
        edge = round((k + 1) / levels * 2**24)
        below, above = torch.full((N + 2,), edge - 1), torch.full((N + 2,), edge)
        assert at_level(k, options, below).num_rows == N
        assert at_level(k, options, above).num_rows == 0
        total += lam * N * (k + 1) / levels
    assert total == pytest.approx(expected_loss(weight, levels), rel=1e-6)
    assert levels != 10 or expected_loss("linear", 10) == pytest.approx(2.2)
    assert levels != 50 or expected_loss("linear", 50) == pytest.approx(8.84)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("weight", ["linear", "reciprocal", "none"])
def test_expected_loss_over_draws(weight, coupled):
    """The mean of 8,000 draws within 5 of its standard errors; they are below 2 %."""
    count, levels = 8000, 10
    options = prepare(levels, weight, 0.0, coupled)
    batch = batch_of(count)
    loss = torch.zeros(count, dtype=torch.double)
    for drawn in options.draws(batch, None, None):
        loss.index_add_(0, drawn.rows // (N + 2), drawn.weight.double())
    error = float(loss.std()) / math.sqrt(count)
    truth = expected_loss(weight, levels) / levels
    assert abs(float(loss.mean()) - truth) < 5 * error and error < 0.02 * truth


def test_levels_are_uniform():
    options, batch = prepare(10, "linear", 0.0, False), batch_of(20_000, 1)
    shares = torch.bincount(rdm.level(batch, options, batch.visits), minlength=10) / 20_000
    assert len(shares) == 10
    assert ((shares - 0.1).abs() < 5 * math.sqrt(0.09 / 20_000)).all()


def test_coupled_masks_are_nested_and_independent_at_equal_levels():
    count, levels = 12_000, 4
    options, batch = prepare(levels, "linear", 0.1, True), batch_of(count)
    one, two = (rdm.level(batch, options, 2 * batch.visits + half) for half in (0, 1))
    high, low = torch.maximum(one, two), torch.minimum(one, two)
    views = list(options.draws(batch, None, None))
    assert len(views) == 2
    first, second = ((v.noisy.ids == MASK).view(count, N + 2)[:, 2:] for v in views)
    unequal = one != two
    assert not (second & ~first)[unequal].any()
    assert (first != second)[unequal].any(1).double().mean() > 0.9
    for mask, level in ((first, high), (second, low)):  # the marginal rate of either mask
        for k in range(levels):
            mine = mask[level == k].double()
            rate, size = (k + 1) / levels, mine.numel()
            assert abs(float(mine.mean()) - rate) <= 5 * math.sqrt(rate * (1 - rate) / size)
    for k in range(levels - 1):  # equal levels: both mask a token with the square of the rate
        both = (first & second)[(one == k) & (two == k)].double()
        rate = ((k + 1) / levels) ** 2
        assert abs(float(both.mean()) - rate) < 5 * math.sqrt(rate * (1 - rate) / both.numel())
    # Scored with its own lambda(k), at half the weight: both terms by hand.
    for view, level in zip(views, (high, low), strict=True):
        n = int(view.num_rows)
        lam = (1 - level.double() / levels)[view.rows[:n] // (N + 2)]
        joint = (0.9 * lam + 0.1) / (2 * N)
        torch.testing.assert_close(view.weight[:n].double(), joint, rtol=2**-23, atol=0)
        shared = (view.weight * view.smoothing)[:n].double()
        expected = torch.full((n,), 0.1 / (2 * N), dtype=torch.double)
        torch.testing.assert_close(shared, expected, rtol=2**-22, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weight", ["linear", "reciprocal", "none"])
def test_the_smoothing_term_does_not_carry_lambda(weight, smoothing):
    """(1 - s) lambda CE + s mean over v of -log p, in float64 from full logits. The weights are
    fp32: a few units of 2^-24."""
    options = prepare(10, weight, smoothing, False)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N + 2, 8, generator=generator, dtype=torch.double)
    head = torch.randn(50, 8, generator=generator, dtype=torch.double)
    log_p = (hidden @ head.T).log_softmax(-1)
    for k in (0, 4, 9):
        drawn = at_level(k, options)
        rows, target = drawn.rows[:N], drawn.target[:N]
        law = {"linear": 1 - k / 10, "reciprocal": 1 / (k + 1), "none": 1}[weight]
        plain, flat = -log_p[rows, target].sum() / N, -log_p[rows].mean(-1).sum() / N
        expected = (1 - smoothing) * law * plain + smoothing * flat
        found = linear_cross_entropy(
            hidden[drawn.rows], head, drawn.target, reduction="sum", row_weight=drawn.weight,
            label_smoothing=drawn.smoothing,
        )
        assert float(found) == pytest.approx(float(expected), rel=1e-6)
        # A uniform model: the smoothing term is log V as well.
        found = linear_cross_entropy(
            hidden[drawn.rows] * 0, head, drawn.target, reduction="sum",
            row_weight=drawn.weight, label_smoothing=drawn.smoothing,
        )
        share = (1 - smoothing) * law + smoothing
        assert float(found) == pytest.approx(share * math.log(50), rel=1e-6)
        assert weight != "none" or share == 1
