"""MDLM on the response: times, mask rates and weights against closed forms."""

import math

import pytest
import torch
from tiny_objectives import family_of, objective_of, packed

from bwsft.objectives import mdlm
from bwsft.objectives.base import ONE24, Place
from bwsft.objectives.config import MdlmConfig

EPS, N = 1e-3, 32
FAMILY = family_of(99)


def batch_of(count, first=0, length=N):
    return packed(FAMILY, [(range(2), range(length))] * count, ids=range(first, first + count))


def prepare(group=None, **fields):
    return objective_of("mdlm", FAMILY, group or MdlmConfig(), run={"seed": 6}, **fields)


def draw(batch, options):
    tokens = int(batch.response_lengths.sum())
    return next(options.draws(batch, Place(0, 0, batch.num_sequences, tokens), None))


@pytest.mark.parametrize("t", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_rate_and_weight_are_those_of_log_linear_noise(t):
    """sigma = -log(1 - (1 - eps) t): rate 1 - e^-sigma, weight sigma' / (e^sigma - 1) = 1/t. The
    grid of times moves t by at most 2^-25."""
    sigma, slope = -math.log1p(-(1 - EPS) * t), (1 - EPS) / (1 - (1 - EPS) * t)
    t24 = torch.tensor([round(t * ONE24)])
    assert float(mdlm.mask_rate(t24)) / ONE24 == pytest.approx(-math.expm1(-sigma), abs=2**-23)
    (weight,) = set(draw(batch_of(400), prepare(low=t, high=t)).weight.tolist()) - {0.0}
    assert weight * N == pytest.approx(slope / math.expm1(sigma), rel=2**-25 / t + 2**-23)
    assert weight * N == pytest.approx(1 / t, rel=2**-25 / t + 2**-23)


def test_at_time_one_a_thousandth_stays_visible():
    """20,000 tokens at rate 0.999: 20 visible, 5 standard errors either way."""
    visible = 20_000 - int(draw(batch_of(625), prepare(low=1.0)).num_rows)
    assert abs(visible - 20) < 5 * math.sqrt(20)


@pytest.mark.parametrize("sequences", [1, 7, 64])
def test_every_stratum_holds_one_time_in_any_micro_batches(sequences):
    options = prepare()
    batch = batch_of(sequences)
    whole = mdlm.times(batch, options, Place(0, 0, sequences, 1))
    e = (whole - options.low).double() / (options.high - options.low)
    assert (e * sequences).floor().tolist() == list(range(sequences))
    parts = [
        mdlm.times(batch_of(1, first), options, Place(0, first, sequences, 1))
        for first in range(sequences)
    ]
    assert torch.equal(torch.cat(parts), whole)
    if sequences == 1:  # plain uniform
        plain = prepare(MdlmConfig(stratify=False))
        assert torch.equal(mdlm.times(batch, plain, Place(0, 0, 1, 1)), whole)


def test_the_marginal_of_a_stratified_time_is_uniform():
    """The second of 4 strata: mean 3/8, 5 standard errors of a uniform on a quarter."""
    options = prepare()
    t24 = mdlm.times(batch_of(4000), options, Place(0, 0, 4000, 1))
    one = torch.cat([mdlm.times(batch_of(1, i), options, Place(0, 1, 4, 1)) for i in range(500)])
    e = (one - options.low).double() / (options.high - options.low)
    assert ((e >= 0.25) & (e < 0.5)).all()
    assert abs(float(e.mean()) - 0.375) < 5 * 0.25 / math.sqrt(12 * 500)
    assert float(t24.double().mean()) / ONE24 == pytest.approx((1 + EPS) / 2, abs=1 / 4000)


@pytest.mark.parametrize(("rate", "loss"), [("mdlm", 1 - EPS), ("llada", 1.0)])
def test_expected_loss_under_constant_cross_entropy(rate, loss):
    """Given t the expectation is rate / t, for MDLM 1 - eps, for LLaDA 1: exactly, but for the
    grid. Over draws: 5 standard errors of sqrt((E[1/p] - 1) / N) / sqrt(draws)."""
    t24 = torch.arange(1, 1 << 24, 997)
    t24 = t24[t24 >= EPS * ONE24]
    rate24 = mdlm.mask_rate(t24) if rate == "mdlm" else t24
    ratio = rate24.double() / t24
    assert (ratio - loss).abs().max() <= 0.5 / float(t24[0]) + 1e-6  # eps24 is a rounded eps
    group = MdlmConfig(stratify=False, normalize="sequence", rate=rate)
    count = 20_000
    drawn = draw(batch_of(count), prepare(group))
    error = math.sqrt((math.log(1000) / 0.999 - 1) / N / count)
    assert abs(float(drawn.weight.double().sum()) / count - loss) < 5 * error
    # Mean share of masked tokens: (1 - eps^2) / 2, for LLaDA (1 + eps) / 2.
    mean = (1 - EPS**2) / 2 if rate == "mdlm" else (1 + EPS) / 2
    spread = math.sqrt(1 / 12 + 1 / 6 / N)  # Var p + E[p (1 - p)] / N
    assert abs(int(drawn.num_rows) / (count * N) - mean) < 5 * spread / math.sqrt(count)


def test_token_normalization_is_the_mean_over_the_tokens_of_the_update():
    """Every token masked at t = 1: the summed loss over sequences is the mean CE of all tokens,
    also if a long and a short response lie in different micro-batches."""
    options = prepare(MdlmConfig(rate="llada"), low=1.0)
    total = 0.0
    for first, length in ((0, 3), (1, 29)):
        batch = batch_of(1, first, length)
        drawn = next(options.draws(batch, Place(0, first, 2, 32), None))
        assert drawn.num_rows == length
        ce = drawn.rows[:length].double()  # a cross-entropy that tells the rows apart
        total += float((drawn.weight[:length].double() * ce).sum()) / 2
    assert total == pytest.approx((sum(range(2, 5)) + sum(range(2, 31))) / 32, rel=1e-6)
    own = prepare(MdlmConfig(rate="llada", normalize="sequence"), low=1.0)
    drawn = next(own.draws(batch_of(1, 0, 3), Place(0, 0, 2, 32), None))
    assert drawn.weight[:3].tolist() == pytest.approx([1 / 3] * 3)
