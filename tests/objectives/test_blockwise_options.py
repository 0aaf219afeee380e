"""Blockwise options that choose times, rates and blocks: discrete times, block distributions, the
band of the rates, and what each refuses. (All blocks, draws and pairs: test_blockwise_draws.py.)"""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask
from tiny_modes import corrupt

from bwsft import config as c
from bwsft import presets
from bwsft.objectives import block_choice, blockwise
from bwsft.objectives.config import DiscreteConfig

MASK, EOS, ONE24 = 49, 1, 1 << 24
LENGTHS = [(3, 16), (5, 1), (2, 6), (7, 13), (1, 21)]


# --- discrete times ---

LEVELS = [
    DiscreteConfig(steps, omega, sample)
    for steps in (1, 7, 1000, 1 << 16)
    for omega in ("elbo", "one")
    for sample in ("uniform", "omega")
]


@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_one_time_estimates_the_sum_over_times_exactly(levels):
    """Chance x weight is omega_t for every t, so any f(t) has the right expectation; the weight is
    T omega_t, or the constant Z, up to the grid of the chances."""
    edges, rates, weights = blockwise.level_tables(levels, torch.device("cpu"))
    t = torch.arange(1, levels.steps + 1).double()
    omega = 1 / t if levels.omega == "elbo" else torch.ones_like(t)
    chance = edges.diff(prepend=torch.zeros(1).long()).double() / ONE24
    assert edges[-1] == ONE24 and (chance > 0).all()
    torch.testing.assert_close(chance * weights, omega, rtol=1e-15, atol=0)
    named = omega.sum() if levels.sample == "omega" else levels.steps * omega
    grid = 1 / (chance.min() * ONE24)  # a chance is off by half a step at each end
    torch.testing.assert_close(weights, named.expand(len(t)), rtol=float(grid), atol=0)
    torch.testing.assert_close(rates.double() / ONE24, t / levels.steps, rtol=0, atol=2.0**-25)
    # Where the tables change from t to t + 1, and both ends.
    u24 = torch.cat([edges[:-1], edges - 1])
    rate, weight = blockwise.draw_level(levels, u24)
    expected = torch.cat([torch.arange(1, levels.steps), torch.arange(levels.steps)])
    assert torch.equal(rate, rates[expected]) and torch.equal(weight, weights[expected])


def test_times_by_omega_mask_little():
    """Z = H_1000 = 7.48547, and 4.27 of 32 tokens are masked on average."""
    levels = DiscreteConfig(1000, "elbo", "omega")
    edges, rates, weights = blockwise.level_tables(levels, torch.device("cpu"))
    chance = edges.diff(prepend=torch.zeros(1).long()).double() / ONE24
    assert float((chance * weights).sum()) == pytest.approx(7.48547, abs=5e-6)
    assert 32 * float((chance * rates).sum()) / ONE24 == pytest.approx(32 / 7.48547, rel=1e-6)
    uniform = blockwise.level_tables(DiscreteConfig(1000), torch.device("cpu"))
    assert uniform[2][0] == pytest.approx(1000, rel=1e-4)  # T / k
    assert uniform[2][499] == pytest.approx(2, rel=1e-4)


@pytest.mark.parametrize("factor", ["mean", "sum"])
@pytest.mark.parametrize(
    "levels",
    [DiscreteConfig(8), DiscreteConfig(8, "one", "omega"), DiscreteConfig(5, "one")],
    ids=str,
)
def test_discrete_times_mask_at_t_over_T_and_weigh_omega_over_the_block(
    levels, factor, batch_of, sums
):
    batch = batch_of([(3, 14)] * 400)
    spec = MaskSpec(4, MASK, seed=3, weight="flat", empty="skip", block_factor=factor)
    _, masked = corrupt(batch, spec, levels=levels)
    t = (masked.rate * levels.steps).round()
    assert set(t.tolist()) == set(range(1, levels.steps + 1))
    torch.testing.assert_close(masked.rate, t / levels.steps, rtol=0, atol=2.0**-24)
    omega = 1 / t if levels.omega == "elbo" else torch.ones_like(t)
    z = levels.steps if levels.sample == "uniform" else 1
    if levels.sample == "omega":
        omega = torch.full_like(t, levels.steps)  # Z of equal weights
    expected = masked.count * omega * z * (4 if factor == "sum" else 1) / masked.block_length
    torch.testing.assert_close(sums(batch, masked), expected.double(), rtol=1e-6, atol=0)
    # The marks are those of the given rates: block_mask alone gives them too.
    rate = (masked.rate.double() * ONE24).long()
    alone = block_mask(
        batch.ids, batch.prompt_lengths, batch.response_lengths, spec,
        cu_seqlens=batch.cu_seqlens, sample_ids=batch.sample_ids, draw=batch.visits, rate=rate,
    )
    assert torch.equal(alone.labels, masked.labels)


def test_the_elbo_on_a_grid_is_the_rate_weight(batch_of):
    """T a power of two: omega = 1/t drawn uniformly is exactly 1 / (rate x length)."""
    batch = batch_of([(3, 14)] * 300)
    spec = MaskSpec(4, MASK, seed=3, weight="flat", empty="skip")
    _, discrete = corrupt(batch, spec, levels=DiscreteConfig(1 << 14))
    rate = (discrete.rate.double() * ONE24).long()
    given = block_mask(
        batch.ids, batch.prompt_lengths, batch.response_lengths,
        dataclasses.replace(spec, weight="rate"), cu_seqlens=batch.cu_seqlens,
        sample_ids=batch.sample_ids, draw=batch.visits, rate=rate,
    )
    assert torch.equal(given.rows, discrete.rows)
    torch.testing.assert_close(given.row_weight, discrete.row_weight, rtol=1.2e-7, atol=0)


def test_the_config_reaches_the_kernel_and_the_times():
    objective = c.ObjectiveConfig(
        weight="discrete", empty="skip", discrete=DiscreteConfig(7, "one", "omega")
    )
    config = dataclasses.replace(presets.debug(), objective=objective)
    c.validate(config)
    family = SimpleNamespace(mask_id=MASK, block_origin="response")
    spec = blockwise.mask_spec(config, family)
    assert (spec.weight, spec.empty) == ("flat", "skip")
    assert blockwise.Blockwise.of(config, family).levels == DiscreteConfig(7, "one", "omega")
    assert blockwise.Blockwise.of(presets.debug(), family).levels is None


# --- block distributions ---


@pytest.mark.parametrize("origin", ["response", "absolute"])
def test_chances_in_numbers(origin, batch_of):
    batch = batch_of(LENGTHS, origin=origin)
    spec = MaskSpec(4, MASK, block_origin=origin)
    assert block_choice.chances(batch, spec, "uniform") is None
    into = [0] * 5 if origin == "response" else [p % 4 for p, _ in LENGTHS]
    for s, ((_, length), before) in enumerate(zip(LENGTHS, into, strict=True)):
        blocks = math.ceil((before + length) / 4)
        edges = np.clip(np.arange(blocks + 1) * 4 - before, 0, length)
        expected = {
            "length": np.diff(edges).tolist(),
            "rising": list(range(1, blocks + 1)),
            "falling": list(range(blocks, 0, -1)),
        }
        for order, row in expected.items():
            assert block_choice.chances(batch, spec, order)[s, :blocks].tolist() == row, order


@pytest.mark.parametrize("order", ["length", "rising", "falling"])
@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize("factor", ["mean", "sum"])
def test_block_distributions_are_followed_and_undone(order, draws, factor, batch_of, sums):
    """Blocks of 4, 4, 4 and 2 tokens: every block comes as often as rho says (4.5 standard errors),
    and rho x weight is the same for all, 1/M or 1. The draws of a visit share the block."""
    size = 2000
    batch = batch_of([(3, 14)] * size, visit=range(size))
    spec = MaskSpec(4, MASK, seed=5, block_factor=factor)
    parts = [corrupt(batch, spec, order, d, draws)[1] for d in range(draws)]
    rho = {"length": (4, 4, 4, 2), "rising": (1, 2, 3, 4), "falling": (4, 3, 2, 1)}[order]
    rho = torch.tensor(rho).double() / sum(rho)
    share = torch.bincount(parts[0].block, minlength=4) / size
    assert ((share - rho).abs() < 4.5 * (rho * (1 - rho) / size).sqrt()).all()
    for masked in parts:
        assert torch.equal(masked.block, parts[0].block)
        undone = sums(batch, masked) * rho[masked.block] * (4 if factor == "mean" else 1)
        torch.testing.assert_close(undone, torch.ones(size).double(), rtol=1e-6, atol=0)
    assert draws == 1 or not torch.equal(parts[0].labels, parts[1].labels)


# --- the band of the rates ---


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.8), (0.125, 1.0), (0.5, 0.5)])
def test_rates_stay_in_their_band(low, high, batch_of):
    """LLaDA2's band 0.3 to 0.8; 1/B and more, so that one mask is expected."""
    spec = MaskSpec(8, MASK, seed=4, low=low, high=high, empty="skip")
    batch = batch_of([(2, 8)] * 4000, visit=range(4000))
    _, masked = corrupt(batch, spec)
    assert masked.rate.min() >= low - 2.0**-25 and masked.rate.max() <= high
    spread = (high - low) / math.sqrt(12)
    mean, middle = float(masked.rate.double().mean()), (low + high) / 2
    assert abs(mean - middle) <= 4.5 * spread / math.sqrt(4000) + 2.0**-25
    variance = 8 * (middle - middle**2 - spread**2) + 64 * spread**2
    count = float(masked.count.double().mean())
    assert abs(count - 8 * middle) < 4.5 * math.sqrt(variance / 4000)


# --- the command line ---

BAD = {
    "empty skip": dict(weight="discrete"),
    "pairs can't go with": dict(weight="discrete", empty="skip", pairs=True),
    "objective.pairs": dict(weight="rate", empty="skip", pairs=True),
    "continuous rates": dict(weight="discrete", empty="skip", low=0.1),
    "needs --objective.weight discrete": dict(discrete=DiscreteConfig(steps=5)),
    r"\[1, 65536\]": dict(weight="discrete", empty="skip", discrete=DiscreteConfig(steps=65537)),
    "belongs to blockwise": dict(name="mdlm", blocks="rising"),
    "suffix-weight must be 0": dict(suffix_weight=-1.0),
    "suffix-decay needs": dict(suffix_decay=True),
    "masks the whole response": dict(name="classical", suffix_weight=1.0),
}


@pytest.mark.parametrize("word", BAD)
def test_bad_objectives_say_what_is_wrong(word):
    config = dataclasses.replace(presets.debug(), draws_per_context=2)
    objective = c.ObjectiveConfig(**BAD[word])
    draws = 1 if objective.name == "mdlm" else 2
    with pytest.raises(ValueError, match=word):
        c.validate(dataclasses.replace(config, objective=objective, draws_per_context=draws))


@pytest.mark.parametrize(("word", "more"), [
    ("draws-per-context", dict(objective=c.ObjectiveConfig(context_grad=False))),
    ("block_causal: in the other modes", dict(block_size_schedule=0.5)),
    ("lie in", dict(context="block_causal", block_size_schedule=1.5)),
    ("causal is for --context", dict(clean_attention="causal")),
    ("0 or positive", dict(context="block_causal", clean_attention="causal", ar_weight=-1.0)),
    ("sees what it predicts", dict(context="block_causal", ar_weight=0.5)),
    ("in any case", dict(context="cached", objective=c.ObjectiveConfig(context_grad=False))),
    ("draws-per-context", dict(objective=c.ObjectiveConfig(name="mdlm"))),
    ("shared-context", dict(shared_context=True, draws_per_context=1)),
    ("shared-context", dict(shared_context=True, context="cached")),
    ("shared-context", dict(shared_context=True, objective=c.ObjectiveConfig(suffix_weight=1.0))),
    ("shared-context", dict(shared_context=True, objective=c.ObjectiveConfig(name="classical"))),
    ("or absent", dict(context="block_causal", objective=c.ObjectiveConfig(suffix_weight=1.0))),
    ("or absent", dict(context="cached", objective=c.ObjectiveConfig(suffix_weight=1.0))),
    (
        "a constant",
        dict(
            draws_per_context=1,
            objective=c.ObjectiveConfig(suffix_weight=1.0, context_grad=False),
        ),
    ),
    ("cannot go with --objective.name distill",
     dict(active_blocks=2, objective=c.ObjectiveConfig(name="distill"))),
    ("cannot go with --context cached", dict(active_blocks=2, context="cached")),
    ("cannot go with --shared-context", dict(active_blocks=2, shared_context=True)),
    *((f"cannot go with --objective.{name.replace('_', '-')}",
       dict(active_blocks=2, objective=c.ObjectiveConfig(**{name: value}, **more)))
      for name, value, more in [
        ("pairs", True, {}), ("weight", "discrete", {"empty": "skip"}), ("suffix_weight", 1.0, {}),
        ("prefix_noise", 0.1, {}), ("suffix_leak", 0.1, {})]),
    ("more than --gen-length 40 has, at --block-size 8", dict(active_blocks=6)),
    ("--active-blocks must be at least 1", dict(active_blocks=0)),
    ("even", dict(draws_per_context=3, objective=c.ObjectiveConfig(pairs=True))),
    (
        "exact and cached",
        dict(
            context="block_causal", draws_per_context=1,
            objective=c.ObjectiveConfig(weight="discrete", empty="skip"),
        ),
    ),
])
def test_bad_contexts_say_what_is_wrong(word, more):
    with pytest.raises(ValueError, match=word):
        c.validate(dataclasses.replace(presets.debug(), **{"draws_per_context": 2, **more}))
