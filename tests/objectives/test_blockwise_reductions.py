"""Reductions: settings in which Blockwise SFT is another method, bit for bit, and how often
classical masks happen to be blockwise ones."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from bwsft_kernels import MaskSpec
from bwsft_kernels.philox import Stream, philox_u24
from tiny_modes import corrupt
from tiny_objectives import family_of, packed

MASK, ONE24 = 99, 1 << 24
LENGTHS = [(3, 16), (5, 1), (2, 6), (7, 13), (1, 21)]


def batch_of(lengths, visit=0):
    texts = [(np.arange(p) % 90, np.arange(r) * 7 % 90) for p, r in lengths]
    layout = {"block_size": 4, "gen_length": 32, "max_length": 64}
    return packed(family_of(MASK), texts, visits=visit, **layout)


def classical_by_hand(batch, spec):
    """Classical SFT, written down: (noisy ids, rows, targets, weights of N1, N2 and N3)."""
    row = torch.repeat_interleave(torch.arange(batch.num_sequences), batch.cu_seqlens.diff().long())
    low, high = round(spec.low * ONE24), round(spec.high * ONE24)
    ids, visits = batch.sample_ids, batch.visits
    u24 = philox_u24(0, visits, ids, seed=spec.seed, stream=Stream.RATE)
    rate24 = low + ((high - low) * u24 >> 24)
    mark = philox_u24(
        batch.position_ids, visits[row], ids[row], seed=spec.seed, stream=Stream.MARKS
    )
    marked = (mark < rate24[row]) & (batch.position_ids >= batch.prompt_lengths[row])
    rows, n = marked.nonzero()[:, 0], batch.response_lengths
    count = torch.zeros_like(n).index_add_(0, row, marked.long())
    weights = {
        "rate": 1 / (rate24.double() / ONE24 * n),
        "count": 1 / count.double(),
        "flat": 1 / n.double(),
    }
    weights = {name: w.float()[row[rows]] for name, w in weights.items()}
    return torch.where(marked, MASK, batch.ids), rows, batch.ids[rows], weights


@pytest.mark.parametrize("weight", ["count", "rate", "flat"])
@pytest.mark.parametrize("size", [21, 64])
def test_a_block_of_the_whole_response_is_classical_sft(weight, size):
    """B >= Lr: N2 (released), N1 (bound) and N3 (flat): the same ids, rows, targets and weights."""
    batch = batch_of(LENGTHS * 6, visit=range(30))
    spec = MaskSpec(size, MASK, seed=9, weight=weight, empty="skip")
    noisy, rows, target, weights = classical_by_hand(batch, spec)
    found, masked = corrupt(batch, spec)
    n = int(masked.num_rows)
    assert n == len(rows) > 100 and torch.equal(found.ids, noisy)
    assert torch.equal(masked.rows[:n], rows) and torch.equal(masked.row_target[:n], target)
    assert torch.equal(masked.row_weight[:n], weights[weight])


def test_ablations_at_zero_are_the_base_method():
    """A chance below 2^-25 goes through the ablation's code and must change no bit."""
    batch = batch_of(LENGTHS * 6, visit=range(30))
    base, masked = corrupt(batch, MaskSpec(4, MASK, seed=1))
    off = MaskSpec(4, MASK, seed=1, prefix_noise=1e-9, suffix_leak=1e-9)
    noisy, same = corrupt(batch, off)
    assert torch.equal(noisy.ids, base.ids)
    assert torch.equal(same.rows, masked.rows) and torch.equal(same.row_weight, masked.row_weight)


def test_ablations_at_one():
    """Prefix noise 1 hides every earlier response token and no prompt; leak 1 shows the suffix."""
    batch = batch_of(LENGTHS * 6, visit=range(30))
    base, masked = corrupt(batch, MaskSpec(4, MASK, seed=1))
    on = MaskSpec(4, MASK, seed=1, prefix_noise=1.0, suffix_leak=1.0)
    noisy, same = corrupt(batch, on)
    row = torch.repeat_interleave(torch.arange(30), batch.cu_seqlens.diff().long())
    offset = batch.position_ids - masked.block_start[row]
    before = (offset < 0) & (batch.position_ids >= batch.prompt_lengths[row])
    inside = (offset >= 0) & (offset < masked.block_length[row])
    expected = torch.where(before, MASK, torch.where(inside, base.ids, batch.ids))
    assert torch.equal(noisy.ids, expected) and before.any()
    assert torch.equal(same.rows, masked.rows) and torch.equal(same.row_weight, masked.row_weight)


def test_a_flat_pair_is_the_average_of_a_flat_row_and_its_complement():
    """Each half has the marks and twice the weight of a single flat row, the other half those of
    its complement: the average of the halves is the sum of m and not-m at 1 / |I_a|."""
    batch = batch_of(LENGTHS * 6, visit=range(30))
    flat = MaskSpec(4, MASK, seed=1, weight="flat", empty="skip")
    pair = MaskSpec(4, MASK, seed=1, weight="flat", empty="skip", pairs=True)
    for first in (0, 2):
        _, single = corrupt(batch, flat, "uniform", first, 4)
        halves = [corrupt(batch, pair, "uniform", first + i, 4)[1] for i in (0, 1)]
        assert torch.equal(halves[0].rows, single.rows)
        assert torch.equal(halves[0].row_weight, 2 * single.row_weight)
        weight = torch.zeros(len(batch.ids))
        for half in halves:
            weight.index_add_(0, half.rows, half.row_weight / 2)
        row = torch.repeat_interleave(torch.arange(30), batch.cu_seqlens.diff().long())
        offset = batch.position_ids - single.block_start[row]
        inside = (offset >= 0) & (offset < single.block_length[row])
        assert torch.equal(weight, torch.where(inside, 1 / single.block_length[row], 0.0))


def test_masked_tokens_of_a_classical_row():
    """Response 96: 0.5005 x 96 = 48.048 (blockwise at B 32: 48.016, test_block_mask_statistics.py);
    4.5 standard errors of a binomial whose rate is uniform."""
    batch = batch_of([(2, 96)] * 4000, visit=range(4000))
    noisy, _ = corrupt(batch, MaskSpec(96, MASK, seed=3, empty="skip"))
    hidden = int((noisy.ids == MASK).sum()) / 4000
    spread = 0.999**2 / 12
    variance = 96 * (0.5005 - 0.5005**2 - spread) + 96**2 * spread
    assert abs(hidden - 48.048) < 4.5 * math.sqrt(variance / 4000)


# --- how often classical masks look like decoding (Theorem 3.1) ---


def ideal_chance(prefix, suffix, low):
    """E over rate ~ U(low, 1) of (1 - rate)^prefix rate^suffix, as a fraction."""
    terms = (
        Fraction((-1) ** k * math.comb(prefix, k), suffix + k + 1)
        * (1 - low ** (suffix + k + 1))
        for k in range(prefix + 1)
    )
    return sum(terms) / (1 - low)


def test_probability_of_a_clean_prefix_and_a_hidden_suffix():
    """Bernoulli masks at one rate: the integral, its closed form at low = 0, and the sum over all
    masks of a small case. At the rate 0.3, 100 tokens stay clean once in 3e15 (Theorem 3.1)."""
    assert 0.7**100 == pytest.approx(3.23e-16, rel=2e-3)
    for prefix, suffix in [(0, 0), (3, 2), (32, 32), (100, 0)]:
        closed = Fraction(1, (prefix + suffix + 1) * math.comb(prefix + suffix, prefix))
        assert ideal_chance(prefix, suffix, Fraction(0)) == closed
    eps = Fraction(1, 1000)
    assert ideal_chance(100, 0, eps) == (1 - eps) ** 100 / 101  # averaged over rates: 0.9 %
    assert float(ideal_chance(32, 32, eps)) == pytest.approx(8.39e-21, rel=1e-2)

    nodes, weights = np.polynomial.legendre.leggauss(8)
    prefix, suffix, total = 3, 2, 0.0
    for rate, weight in zip((nodes * 0.999 + 1.001) / 2, weights / 2, strict=True):
        for mask in itertools.product((0, 1), repeat=prefix + suffix):
            chance = math.prod(rate if m else 1 - rate for m in mask)
            total += weight * chance * (not any(mask[:prefix]) and all(mask[prefix:]))
    assert total == pytest.approx(float(ideal_chance(prefix, suffix, eps)), rel=1e-12)


def test_classical_masks_rarely_show_what_the_decoder_sees_and_blockwise_always_does():
    """Middle block of three blocks of 2: 1 in 30 of 30,000 visits, 4.5 standard errors; and 1."""
    size = 30_000
    batch = batch_of([(2, 6)] * size, visit=range(size))
    spec = MaskSpec(2, MASK, seed=2, empty="skip")
    wide = MaskSpec(6, MASK, seed=2, empty="skip")

    def share(noisy):
        hidden = (noisy.ids == MASK).view(size, 8)[:, 2:]
        return ~hidden[:, :2].any(1) & hidden[:, 4:].all(1)

    likely = float(ideal_chance(2, 2, Fraction(1, 1000)))
    assert likely == pytest.approx(1 / 30, rel=0.01)
    found = share(corrupt(batch, wide)[0]).double().mean()
    assert abs(found - likely) < 4.5 * math.sqrt(likely * (1 - likely) / size)
    noisy, masked = corrupt(batch, spec)
    assert share(noisy)[masked.block == 1].all() and (masked.block == 1).sum() > size / 4
