"""block_mask: closed-form expectations of the marks, the weights and the ablations.

Bounds are 4.5 standard errors of the exact distribution, at fixed seeds: a right sampler fails one
such check in 150,000, and a wrong constant of a few percent always does.
"""

import math

import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask
from bwsft_kernels.philox import Stream, philox_u24

MASK, EPS = 99, 1e-3
MEAN_RATE = (1 + EPS) / 2  # 0.5005
S = 20_000


def draw(spec, response, prompt=2, size=S, **options):
    ids = torch.zeros(size, prompt + response, dtype=torch.int64)
    lengths = torch.full((size,), prompt), torch.full((size,), response)
    return block_mask(ids, *lengths, spec, **options)


def loss_of_constant(batch):
    """Per-sequence loss if every row's cross-entropy is 1."""
    width = batch.labels.shape[1]
    sequence = batch.rows // width
    return torch.zeros(len(batch.count)).index_add_(0, sequence, batch.row_weight)


def assert_mean(sample, mean, deviation):
    error = abs(float(sample.double().mean()) - mean)
    assert error < 4.5 * deviation / math.sqrt(len(sample)), (error, deviation)


def deviation_of_count(n):
    """Of a binomial whose rate is uniform on [EPS, 1]."""
    variance_of_rate = (1 - EPS) ** 2 / 12
    mean_square = variance_of_rate + MEAN_RATE**2
    return math.sqrt(n * (MEAN_RATE - mean_square) + n * n * variance_of_rate)


def chance_of_none(n):
    """E[(1 - rate)^n]: 11.02 % at 8 tokens, 2.93 % at 32."""
    return (1 - EPS) ** n / (n + 1)


@pytest.mark.parametrize("n", [1, 8, 32, 128])
def test_masked_count_of_the_block(n):
    batch = draw(MaskSpec(n, MASK, seed=n, empty="skip"), n)
    assert_mean(batch.rate, MEAN_RATE, (1 - EPS) / math.sqrt(12))
    assert batch.rate.min() >= EPS * 0.9999 and batch.rate.max() < 1
    assert_mean(batch.count, MEAN_RATE * n, deviation_of_count(n))
    none = chance_of_none(n)
    assert_mean(batch.count == 0, none, math.sqrt(none * (1 - none)))


def test_marks_are_independent_coins_at_a_fixed_rate():
    batch = draw(MaskSpec(16, MASK, low=0.3, high=0.3, empty="skip", seed=3), 16)
    marks = (batch.labels != -100)[:, 2:].double() - 0.3
    assert_mean(marks.flatten(), 0, math.sqrt(0.21))
    pairs = (marks.T @ marks / S).fill_diagonal_(0) / 0.21
    assert pairs.abs().max() < 5.5 / math.sqrt(S)  # 120 pairs
    assert torch.equal(batch.rate, torch.full((S,), round(0.3 * 2**24) / 2**24))


def test_a_token_is_marked_iff_its_number_is_below_the_rate():
    u24 = int(philox_u24(2, 0, 0, seed=3, stream=Stream.MARKS))
    for rate24, marked in ((u24, False), (u24 + 1, True)):
        rate = rate24 / 2**24
        spec = MaskSpec(1, MASK, seed=3, low=rate, high=rate, empty="skip")
        assert bool(draw(spec, 1, size=1).count) is marked


def test_masked_tokens_of_the_whole_row():
    """Response 96, B 32: 16.016 in the block and 32 in the suffix on average."""
    batch = draw(MaskSpec(32, MASK, seed=4, empty="skip"), 96)
    hidden = (batch.noisy_ids == MASK).sum(1)
    variance = deviation_of_count(32) ** 2 + 32**2 * 2 / 3
    assert_mean(hidden, MEAN_RATE * 32 + 32, math.sqrt(variance))


@pytest.mark.parametrize("n", [1, 8, 32])
def test_loss_of_a_constant_cross_entropy(n):
    none = chance_of_none(n)
    released = loss_of_constant(draw(MaskSpec(n, MASK, seed=1, empty="skip"), n))
    torch.testing.assert_close(released, (released > 0).float(), rtol=1e-6, atol=0)
    assert_mean(released, 1 - none, math.sqrt(none * (1 - none)))
    for empty in ("last", "redraw"):
        filled = loss_of_constant(draw(MaskSpec(n, MASK, seed=1, empty=empty), n))
        torch.testing.assert_close(filled, torch.ones(S), rtol=1e-6, atol=0)

    bound = loss_of_constant(draw(MaskSpec(n, MASK, seed=1, weight="rate", empty="skip"), n))
    inverse_rate = math.log(1 / EPS) / (1 - EPS)  # E[1 / rate] = 6.91467
    assert_mean(bound, 1, math.sqrt((inverse_rate - 1) / n))
    flat = loss_of_constant(draw(MaskSpec(n, MASK, seed=1, weight="flat", empty="skip"), n))
    assert_mean(flat, MEAN_RATE, deviation_of_count(n) / n)


@pytest.mark.parametrize("n", [1, 8])
def test_fallback_masks_the_last_token_and_only_when_nothing_is(n):
    skip = draw(MaskSpec(n, MASK, seed=6, empty="skip"), n)
    last = draw(MaskSpec(n, MASK, seed=6, empty="last"), n)
    empty = skip.count == 0
    assert empty.any() and torch.equal(skip.labels[~empty], last.labels[~empty])
    assert (last.labels[empty][:, :-1] == -100).all() and (last.labels[empty][:, -1] == 0).all()


@pytest.mark.parametrize("empty, ratio", [("last", 1.991), ("redraw", 1.0), ("skip", 1.0)])
def test_weight_of_the_last_token_of_eight_against_the_others(empty, ratio):
    """At rates on [0.001, 1]; test_block_mask_distribution.py has what is exact on (0, 1)."""
    n = 8
    none = chance_of_none(n)
    assert ratio == pytest.approx(1 + n * none / (1 - none) if empty == "last" else 1, abs=5e-4)
    batch = draw(MaskSpec(n, MASK, seed=12, empty=empty), n)
    weight = torch.zeros(S * (2 + n)).index_add_(0, batch.rows, batch.row_weight)
    weight = weight.view(S, 2 + n)[:, 2:].double()
    own = (1 - none) / n if empty != "redraw" else 1 / n
    mean = torch.full((n,), own).double()
    mean[-1] *= ratio
    # Each weight is in [0, 1] with this mean, so its variance is below mean (1 - mean).
    for token in range(n):
        assert_mean(weight[:, token], mean[token], math.sqrt(mean[token] * (1 - mean[token])))


@pytest.mark.parametrize("n", [2, 8])
def test_a_redraw_replaces_empty_draws_only(n):
    skip, redraw = (draw(MaskSpec(n, MASK, seed=6, empty=e), n) for e in ("skip", "redraw"))
    empty = skip.count == 0
    assert torch.equal(skip.labels[~empty], redraw.labels[~empty])
    assert torch.equal(skip.rate[~empty], redraw.rate[~empty])
    count = redraw.count[empty]
    for k in range(1, n + 1):  # uniform; rates from 0.001 on move it by less than 0.001
        assert_mean(count == k, 1 / n, math.sqrt((n - 1) / n**2))
    assert (redraw.rate[empty] >= skip.rate[empty]).all()


def test_blocks_are_uniform_and_sum_weights_carry_their_number():
    """Response 100, B 32: 4 blocks, the last one short."""
    spec = MaskSpec(32, MASK, seed=2, block_factor="sum")
    batch = draw(spec, 100)
    for block in range(4):
        assert_mean(batch.block == block, 1 / 4, math.sqrt(3 / 16))
    assert (batch.block_length == torch.where(batch.block == 3, 4, 32)).all()
    torch.testing.assert_close(loss_of_constant(batch), torch.full((S,), 4.0))


@pytest.mark.parametrize("factor, target", [("sum", 1 + 10 + 100), ("mean", 37.0)])
def test_chosen_blocks_follow_their_weights_and_stay_unbiased(factor, target):
    """Losses 1, 10, 100 of three blocks: any weights estimate their sum, or their mean."""
    weights = torch.tensor([[5, 3, 2, 7]]).expand(S, 4)  # the fourth block doesn't exist
    spec = MaskSpec(4, MASK, seed=8, block_factor=factor)
    batch = draw(spec, 12, block_weights=weights)
    for block, share in enumerate((0.5, 0.3, 0.2)):
        assert_mean(batch.block == block, share, math.sqrt(share * (1 - share)))
    estimate = loss_of_constant(batch) * 10.0**batch.block
    share, loss = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 10.0, 100.0])
    scale = 1 if factor == "sum" else 3
    spread = ((loss / share / scale) ** 2 * share).sum() - target**2
    assert_mean(estimate, target, math.sqrt(spread))
    zero = draw(spec, 12, size=500, block_weights=torch.tensor([[0, 1, 0]]).expand(500, 3))
    assert (zero.block == 1).all()


def test_given_blocks_are_taken():
    block = torch.arange(300) % 3
    batch = draw(MaskSpec(4, MASK), 12, size=300, block=block)
    assert torch.equal(batch.block, block) and torch.equal(batch.block_start, 2 + 4 * block)


@pytest.mark.parametrize("noise", [0.0, 0.25, 1.0])
def test_prefix_noise_and_suffix_leak(noise):
    spec = MaskSpec(8, MASK, seed=5, prefix_noise=noise, suffix_leak=noise)
    plain = draw(MaskSpec(8, MASK, seed=5), 24, prompt=6, size=4000)
    batch = draw(spec, 24, prompt=6, size=4000)
    assert torch.equal(batch.labels, plain.labels)  # never supervised, never moves the marks
    hidden, position = batch.noisy_ids == MASK, torch.arange(30)
    assert not hidden[:, :6].any()
    start, end = batch.block_start[:, None], (batch.block_start + batch.block_length)[:, None]
    deviation = math.sqrt(noise * (1 - noise)) + 1e-9
    assert_mean(hidden[(position >= 6) & (position < start)], noise, deviation)
    assert_mean(~hidden[position >= end], noise, deviation)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("empty", ["redraw", "last", "skip"])
def test_pairs_supervise_every_token_once(size, empty):
    """The even half is the draw without pairs, and weighs as both if the odd one is empty."""
    spec, plain = (MaskSpec(size, MASK, seed=7, empty=empty, pairs=p) for p in (True, False))
    first, second = (draw(spec, 3 * size, draw=10 + half) for half in (0, 1))
    single = draw(plain, 3 * size, draw=10)
    position = torch.arange(3 * size + 2) - first.block_start[:, None]
    inside = (position >= 0) & (position < size)
    marks = [batch.labels != -100 for batch in (first, second)]
    assert torch.equal(first.labels, single.labels) and torch.equal(first.rate, single.rate)
    assert torch.equal(marks[1], inside & ~marks[0]) and torch.equal(first.rate, second.rate)
    whole = first.count == size
    assert whole.any() and torch.equal(whole, second.count == 0)
    losses = [loss_of_constant(batch) for batch in (first, second)]
    filled = empty != "skip"
    expected = (first.count > 0).float() * torch.where(whole & filled, 2.0, 1.0)
    torch.testing.assert_close(losses[0], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses[1], (second.count > 0).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_flat_pairs_supervise_every_token_once_whatever_was_drawn(size):
    """1 / B for both halves, also where one of them is empty: a constant loss is exactly 1 a pair,
    so the pair has no variance from the count and no draw is lost."""
    spec = MaskSpec(size, MASK, seed=3, weight="flat", empty="skip", pairs=True)
    first, second = (draw(spec, 2 * size + 1, draw=half) for half in (0, 1))
    assert ((first.count == 0) | (first.count == size)).any()
    assert torch.equal(first.block, second.block) and torch.equal(first.rate, second.rate)
    position = torch.arange(2 * size + 3) - first.block_start[:, None]
    inside = (position >= 0) & (position < first.block_length[:, None])
    assert torch.equal((first.labels != -100) ^ (second.labels != -100), inside)
    assert not ((first.labels != -100) & (second.labels != -100)).any()
    total = loss_of_constant(first) + loss_of_constant(second)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=3e-7, atol=0)
    alone = draw(MaskSpec(size, MASK, seed=3, weight="flat", empty="skip"), 2 * size + 1)
    assert torch.equal(first.labels, alone.labels) and torch.equal(first.rate, alone.rate)
