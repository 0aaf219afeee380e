"""Soft-masked diffusion: importance, buckets, rates and weights against closed forms."""

import collections
import math

import numpy as np
import pytest
import torch
from tiny_objectives import family_of, objective_of, packed

from bwsft.objectives import soft_masked
from bwsft.objectives.base import ONE24, response_rows, times
from bwsft.objectives.config import SoftMaskedConfig

MASK = 99
FAMILY = family_of(MASK)
# Token 98 ends every text, 7 stands in all but one, 50 to 59 once each, 0 twice in one text.
TEXTS = [[7, 50 + i, 7, 98] for i in range(10)] + [[0, 1, 0, 98]]


def batch_of(responses):
    return packed(FAMILY, [((50, 51), response) for response in responses])


def prepare(*group, texts=TEXTS, **fields):
    texts, group = (np.array(t, dtype=np.int32) for t in texts), SoftMaskedConfig(*group)
    return objective_of("soft_masked", FAMILY, group, texts, {"seed": 8}, **fields)


def draw(batch, options):
    return next(options.draws(batch, None, None))


def importance(batch, options):
    rows = response_rows(batch)
    found = soft_masked.importance(batch, rows, options)
    return [found[rows.inside & (rows.owner == s)] for s in range(batch.num_sequences)]


def by_hand(response, texts):
    """The definition in plain Python."""
    tokens = collections.Counter(t for text in texts for t in text)
    total, here = sum(tokens.values()), collections.Counter(response)
    tfidf, entropy = [], []
    for t in response:
        holders = sum(t in text for text in texts)
        idf = max(0.0, math.log(len(texts) / (1 + holders)))
        tfidf.append(here[t] / len(response) * idf)
        p = tokens[t] / total
        entropy.append(-p * math.log(p) if p else 0.0)
    shares = []
    for part in (tfidf, entropy):
        size = sum(part)
        shares.append([x / size if size else 1 / len(part) for x in part])
    return [a + b for a, b in zip(*shares, strict=True)]


@pytest.mark.parametrize("response", [
    [7, 50, 7, 98],
    [50, 51, 52, 50, 98],
    [0, 1, 3, 3, 3, 98, 98, 98],  # 3 was never seen
    [3, 4],  # nor was 4: no entropy at all, equal shares
    [98, 98],  # in every text: no tf-idf, equal shares
    [0],
])
def test_importance_is_tf_idf_plus_entropy_and_adds_up_to_two(response):
    neighbours = [[7, 7, 7], response, [50] * 5]
    found = importance(batch_of(neighbours), prepare())
    assert found[1].tolist() == pytest.approx(by_hand(response, TEXTS), rel=1e-6)
    for part in found:
        assert float(part.sum()) == pytest.approx(2, rel=1e-12)


def test_statistics_of_chunks_and_of_an_unseen_token(monkeypatch):
    whole = prepare().table
    monkeypatch.setattr(soft_masked, "CHUNK", 3)
    assert torch.equal(prepare().table, whole)
    idf, entropy = whole[:, 3].tolist()  # df 0: log N
    assert idf / 2**24 == pytest.approx(math.log(11), rel=1e-7) and entropy == 0
    assert whole[0, 98] == 0 and whole[1, 98] > 0
    assert (prepare(texts=[]).table == 0).all()  # nothing to count: equal shares


def test_important_tokens_come_first_and_ties_by_position():
    """Buckets of one token each, halfway through bucket k: k - 1 or k tokens of the order."""
    response = [7, 50, 98, 1, 98, 50, 7]
    weights = by_hand(response, TEXTS)
    order = sorted(range(7), key=lambda i: (-weights[i], i))
    assert order != sorted(order)
    for k in range(1, 8):
        t = (k - 0.5) / 7
        batch = batch_of([response])
        noisy = draw(batch, prepare(1.0, 7, low=t, high=t)).noisy.ids[2:]
        hidden = set((noisy == MASK).nonzero()[:, 0].tolist())
        assert set(order[: k - 1]) <= hidden <= set(order[:k])


def test_without_statistics_the_first_tokens_come_first():
    """Equal shares; the prompt takes no part in the order."""
    drawn = draw(batch_of([TWELVE] * 5), prepare(1.0, 4, texts=[], low=0.25, high=0.25))
    hidden = (drawn.noisy.ids == MASK).view(5, 14)
    assert hidden[:, 2:5].all() and hidden.sum() == 15


@pytest.mark.parametrize("softness", [0.1, 0.3, 0.7, 1.0])
def test_one_bucket_has_the_rate_t_to_the_last_bit(softness):
    batch, options = batch_of([TWELVE] * 2000), prepare(softness, 1)
    rows = response_rows(batch)
    p, slope = soft_masked.rates(batch, rows, options)
    assert torch.equal(p[rows.inside], times(batch, options)[rows.owner][rows.inside])
    assert (slope[rows.inside] == 1).all()


def rates(response, options):
    """(p, slope) of the tokens of one response, most important first."""
    batch = batch_of([response])
    rows = response_rows(batch)
    p, slope = soft_masked.rates(batch, rows, options)
    order = importance(batch, options)[0].argsort(stable=True, descending=True)
    return (p[rows.inside][order].double() / ONE24).tolist(), slope[rows.inside][order].tolist()


TWELVE = [7, 50, 51, 0, 0, 1, 3, 3, 3, 98, 98, 98]


@pytest.mark.parametrize("k", range(1, 5))
def test_hard_buckets_fill_one_after_another(k):
    """softness 1, m = 4 at t = k / 4: buckets 1..k masked, the others clean, whatever the draw."""
    options = prepare(1.0, 4, low=k / 4, high=k / 4)
    assert rates(TWELVE, options)[0] == [1.0] * 3 * k + [0.0] * 3 * (4 - k)
    drawn = draw(batch_of([TWELVE] * 50), options)
    assert drawn.num_rows == 50 * 3 * k
    assert drawn.weight[: 150 * k].tolist() == pytest.approx([1 / (3 * k)] * 150 * k)


def test_rates_inside_a_bucket():
    assert rates(TWELVE, prepare(1.0, 2, low=0.25, high=0.25))[0] == [0.5] * 6 + [0.0] * 6
    p, slope = rates(TWELVE, prepare(0.5, 2, low=0.25, high=0.25))
    assert p == [0.375] * 6 + [0.125] * 6 and slope == [1.5] * 6 + [0.5] * 6


@pytest.mark.parametrize("softness", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("buckets", [1, 3, 4, 12])
def test_equal_buckets_keep_the_mean_rate(softness, buckets):
    for t in (0.001, 0.2, 0.37, 0.9, 1.0):
        p, _ = rates(TWELVE, prepare(softness, buckets, low=t, high=t))
        assert sum(p) / 12 == pytest.approx(t, abs=2**-23)
        assert p == sorted(p, reverse=True)


def test_elbo_weights():
    """softness 1, m = 4, t = 0.3: bucket 2 has p 0.2 and slope 4, so weight 20 / N; the masked
    tokens of bucket 1 are not supervised, and are no supervised rows."""
    options = prepare(1.0, 4, "elbo", low=0.3, high=0.3)
    drawn = draw(batch_of([TWELVE] * 300), options)
    n = int(drawn.num_rows)
    assert int((drawn.noisy.ids == MASK).sum()) == n + 300 * 3
    assert (drawn.weight[:n] * 12).tolist() == pytest.approx([20.0] * n, rel=1e-5)
    assert abs(n / 900 - 0.2) < 5 * math.sqrt(0.16 / 900)


@pytest.mark.parametrize(("softness", "buckets"), [(0.0, 3), (0.5, 3), (1.0, 3), (1.0, 12)])
def test_the_elbo_weight_is_unbiased_for_the_bound(softness, buckets):
    """Under constant CE the expectation is the mean of (p_i(1) - p_i(low)) / (1 - low) = 1."""
    count = 8000
    drawn = draw(batch_of([TWELVE] * count), prepare(softness, buckets, "elbo"))
    loss = torch.zeros(count, dtype=torch.double)
    loss.index_add_(0, drawn.rows // 14, drawn.weight.double())
    error = float(loss.std()) / math.sqrt(count)
    assert abs(float(loss.mean()) - 1) < 5 * error and error < 0.05


def test_count_weights_lose_the_empty_draws_alone():
    """N = 4, softness 0: 1 less P(nothing masked) = (1 - eps)^4 / 5, 5 standard errors."""
    count, eps = 20_000, 1e-3
    drawn = draw(batch_of([[7, 50, 7, 98]] * count), prepare(0.0, 3))
    empty = (1 - eps) ** 4 / 5
    mean = float(drawn.weight.double().sum()) / count
    assert abs(mean - (1 - empty)) < 5 * math.sqrt(empty * (1 - empty) / count)
