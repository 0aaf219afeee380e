"""The any-order bound by its definition, over all orders, and estimates of it."""

import dataclasses
import itertools
import math

import pytest
import torch

from bwsft.evaluation.likelihood import (
    LikelihoodConfig,
    check,
    log_likelihoods,
    masks_of,
    sampled_sets,
)
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone

MASK, EOS, VOCAB = 11, 1, 12
PROMPT, RESPONSE = [4, 7, 2], [5, 3, 9, 6, 2, 8, 3, 10, 4, 7]


def make(shift):
    config = LladaConfig(
        d_model=16, n_layers=2, n_heads=2, mlp_hidden_size=24, vocab_size=VOCAB,
        max_sequence_length=24, mask_token_id=MASK, eos_token_id=EOS, pad_token_id=EOS,
        init_fn="normal", init_std=0.6,
    )
    found = new_backbone(config, 3, dtype=torch.float64)
    found.family = dataclasses.replace(found.family, logit_shift=shift)
    return found.eval()


@pytest.fixture(scope="module")
def backbone():
    return make(shift=0)


def by_orders(backbone, prompt, response, block, canvas):
    """Mean over all orders of decoding the blocks one token at a time, with full logits."""
    shift, total = backbone.family.logit_shift, 0.0
    for start in range(0, len(response), block):
        places = range(start, min(start + block, len(response)))
        orders = list(itertools.permutations(places))
        for order in orders:
            known = response[:start] + [MASK] * (canvas - start)
            for place in order:
                with torch.no_grad():
                    logits = backbone.model(torch.tensor([prompt + known])).logits[0]
                row = logits[len(prompt) + place - shift].log_softmax(0)
                total += float(row[response[place]]) / len(orders)
                known[place] = response[place]
    return total


@pytest.mark.parametrize("shift", [0, 1])
def test_the_exact_bound_is_the_mean_over_all_orders(shift):
    backbone = make(shift)
    short = RESPONSE[:4]
    config = LikelihoodConfig()
    expected = by_orders(backbone, PROMPT, short, block=4, canvas=4)
    ((value, error),) = log_likelihoods(backbone, [(PROMPT, short)], config)
    assert value == pytest.approx(expected, rel=1e-10) and error == 0
    assert value < -4  # far from certain, and not uniform:
    assert abs(value + 4 * math.log(VOCAB)) > 0.5


def test_blockwise_hides_everything_after_the_block(backbone):
    config = LikelihoodConfig(block_size=2, gen_length=8)
    expected = by_orders(backbone, PROMPT, RESPONSE[:5], block=2, canvas=8)
    ((value, _),) = log_likelihoods(backbone, [(PROMPT, RESPONSE[:5])], config)
    assert value == pytest.approx(expected, rel=1e-10)
    wider = by_orders(backbone, PROMPT, RESPONSE[:5], block=2, canvas=6)
    assert abs(wider - expected) > 1e-3  # the canvas counts


def test_blocks_of_an_absolute_grid(backbone):
    """A prompt of 3 leaves one place in the first block of 4."""
    family = dataclasses.replace(backbone.family, block_origin="absolute")
    config = LikelihoodConfig(block_size=4, gen_length=8, draws=10)
    found = masks_of((PROMPT, RESPONSE[:5]), family, config)
    stops = sorted(found.stop.tolist())
    assert stops == [1] * 2 + [5] * 8 and not found.exact
    for masked, stop in zip(found.masked.tolist(), found.stop.tolist(), strict=True):
        assert masked[0] == (stop == 1) and not (stop == 1 and any(masked[1:]))
    sets = masks_of((PROMPT, RESPONSE[:5]), family, dataclasses.replace(config, draws=16))
    assert sets.exact and len(sets.weight) == 1 + 15


@pytest.mark.parametrize("blocks", [[(0, 10)], [(0, 4), (4, 8), (8, 10)]], ids=["one", "three"])
def test_counts_are_spread_evenly(blocks):
    """30 draws over 10 tokens: every (block, count) three times."""
    found = sampled_sets(blocks, 10, 1, LikelihoodConfig(draws=30))
    seen = {}
    for masked, stop, weight in zip(found.masked, found.stop.tolist(), found.weight, strict=True):
        count = int(masked.sum())
        assert float(weight) == pytest.approx(10 / count / 30)
        seen[stop, count] = seen.get((stop, count), 0) + 1
    assert seen == {(b, n): 3 for a, b in blocks for n in range(1, b - a + 1)}


@pytest.mark.parametrize("estimator", ["count", "rate"])
@pytest.mark.parametrize("block", [None, 5])
def test_estimates_converge_to_the_exact_value(backbone, estimator, block):
    """40 seeds of 10 draws are unbiased within 4 standard errors; 1,000 draws come closer."""
    request, shape = [(PROMPT, RESPONSE)], {"block_size": block, "gen_length": 10}
    exact = log_likelihoods(backbone, request, LikelihoodConfig(draws=1023, **shape))[0]
    assert exact.error == 0
    shape |= {"estimator": estimator, "batch_size": 64}
    few = torch.tensor([
        log_likelihoods(backbone, request, LikelihoodConfig(draws=10, seed=seed, **shape))[0].value
        for seed in range(40)
    ])  # fmt: skip
    assert abs(float(few.mean()) - exact.value) < 4 * float(few.std()) / math.sqrt(40)
    draws = 1000 if block is None else 60  # 62 sets are exact with blocks of 5
    many = log_likelihoods(backbone, request, LikelihoodConfig(draws=draws, **shape))[0]
    assert many.error > 0
    assert abs(many.value - exact.value) < 4 * many.error
    assert many.error < float(few.std())


def test_counts_have_less_variance_than_rates(backbone):
    spread = {}
    for estimator in ("count", "rate"):
        values = [
            log_likelihoods(
                backbone,
                [(PROMPT, RESPONSE)],
                LikelihoodConfig(draws=20, seed=seed, estimator=estimator),
            )[0].value
            for seed in range(20)
        ]
        spread[estimator] = float(torch.tensor(values).std())
    assert spread["count"] < spread["rate"]


def test_no_estimate_depends_on_its_company(backbone):
    requests = [(PROMPT, RESPONSE), (PROMPT[:1], RESPONSE[:2]), (PROMPT, RESPONSE[::-1])]
    together = log_likelihoods(backbone, requests, LikelihoodConfig(draws=12, batch_size=7))
    alone = [
        log_likelihoods(backbone, [(prompt[:], text[:])], LikelihoodConfig(draws=12))[0]
        for prompt, text in reversed(requests)
    ]
    for a, b in zip(together, reversed(alone), strict=True):
        assert a == pytest.approx(b, rel=1e-10)
    assert len({value for value, _ in together}) == 3


def test_mistakes_are_named(backbone):
    for request, message in (
        ((PROMPT, []), "request 0 has an empty response"),
        (([MASK], RESPONSE), r"request 0 contains \[MASK\]"),
        ((PROMPT, RESPONSE * 3), "needs 33 positions, the model has 24"),
    ):
        with pytest.raises(ValueError, match=message):
            log_likelihoods(backbone, [request])
    causal = dataclasses.replace(backbone.family, attention="block_causal")
    with pytest.raises(ValueError, match=r"from block to block does not have: .*bwsft evaluate"):
        check(0, (PROMPT, RESPONSE), causal, LikelihoodConfig())
    for fields, message in (
        ({"draws": 0}, "draws must be at least 1"),
        ({"estimator": "best"}, "estimator must be count or rate"),
    ):
        with pytest.raises(ValueError, match=message):
            LikelihoodConfig(**fields)
    with pytest.raises(ValueError, match="block_size 3 doesn't divide"):
        log_likelihoods(backbone, [(PROMPT, RESPONSE)], LikelihoodConfig(block_size=3))
