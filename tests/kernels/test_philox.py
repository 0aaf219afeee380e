"""Philox numbers: known answers, the counter layout that runs depend on, Gumbel noise."""

import math

import pytest
import torch
from bwsft_kernels import philox_uniform
from bwsft_kernels.philox import Stream, gumbel, gumbel_key, gumbel_u24, philox_u24, philox_words
from kernel_cases import ONES, PHILOX


@pytest.mark.parametrize("counter, key, words", PHILOX)
def test_known_answers(counter, key, words):
    assert philox_words(counter, key) == words


def test_known_answers_in_one_batch_with_one_key_per_row():
    counters = torch.tensor([counter for counter, _, _ in PHILOX])
    keys = torch.tensor([key for _, key, _ in PHILOX]).unbind(-1)
    own = torch.stack(philox_words(counters.unbind(-1), keys), dim=-1)
    assert own.tolist() == [list(words) for _, _, words in PHILOX]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 5, -1])
@pytest.mark.parametrize("stream", Stream)
def test_counter_layout(seed, stream):
    position, draw, sample_id = 77, 3, (5 << 32) | 9
    counter = (position, draw, 9, 5 | stream << 24)
    word = philox_words(counter, (seed & ONES, (seed >> 32) & ONES))[0]
    assert philox_u24(position, draw, sample_id, seed=seed, stream=stream).item() == word >> 8


def test_streams_are_numbered_for_good():
    names = "BLOCK RATE MARKS PREFIX SUFFIX DROPOUT ORDER GUMBEL"
    assert [Stream(value).name for value in range(8)] == names.split()


def test_every_argument_matters_and_broadcasts():
    base = dict(position=torch.arange(50), draw=1, sample_id=2, seed=3, stream=Stream.MARKS)
    u24 = philox_u24(**base)
    for change in (
        dict(draw=2), dict(sample_id=3), dict(sample_id=2 + 2**32), dict(seed=4),
        dict(seed=3 + 2**32), dict(stream=Stream.PREFIX), dict(position=torch.arange(1, 51)),
    ):
        assert (philox_u24(**{**base, **change}) == u24).sum() <= 1
    grid = philox_u24(torch.arange(4), torch.arange(3)[:, None], 2, seed=3, stream=0)
    assert grid.shape == (3, 4)
    assert grid[1, 2] == philox_u24(2, 1, 2, seed=3, stream=0)


@pytest.mark.parametrize("sample_id", [-1, 2**56])
def test_sample_ids_that_would_change_the_stream_are_refused(sample_id):
    with pytest.raises(ValueError, match="sample_id"):
        philox_u24(0, 0, torch.tensor([0, sample_id]), seed=0, stream=0)
    assert philox_u24(0, 0, 2**56 - 1, seed=0, stream=0) >= 0


def test_uniform_is_the_integer_exactly():
    where = dict(position=torch.arange(1000, dtype=torch.int32), draw=0, sample_id=4)
    u24 = philox_u24(**where, seed=8, stream=1)
    uniform = philox_uniform(**where, seed=8, stream=1)
    assert uniform.dtype == torch.float32 and u24.dtype == torch.int64
    assert torch.equal(uniform.double() * 2**24, u24.double())


@pytest.mark.parametrize("axis", ["position", "draw", "sample_id", "seed"])
def test_numbers_are_uniform_along_each_axis(axis):
    n, bins = 4096, 16
    where = dict(position=5, draw=6, sample_id=7, seed=11, stream=Stream.RATE)
    if axis == "seed":
        u = torch.stack([philox_uniform(**{**where, "seed": seed}) for seed in range(n)])
    else:
        u = philox_uniform(**{**where, axis: torch.arange(n)})
    chi2 = ((torch.histc(u, bins, 0, 1) - n / bins) ** 2 / (n / bins)).sum()
    assert chi2 < 15 + 4.5 * math.sqrt(2 * 15)  # mean and deviation of chi-square with 15 degrees
    serial = ((u[1:] - 0.5) * (u[:-1] - 0.5)).mean() * 12
    assert abs(serial) < 4.5 / math.sqrt(n)


def test_gumbel_words_follow_the_documented_counter():
    seed, request = 42, torch.tensor([7, (3 << 32) | 8])
    step, position = torch.tensor([2, 5]), torch.tensor([100, 101])
    noise = gumbel_u24(10, position, step, request, gumbel_key(seed, request))
    assert noise.shape == (2, 10)
    for row in range(2):
        high, low = int(request[row]) >> 32, int(request[row]) & ONES
        key = philox_words((0, 0, high, Stream.GUMBEL << 24), (seed, 0))[:2]
        for token in range(10):
            counter = (token // 4, int(position[row]), int(step[row]), low)
            assert noise[row, token] == philox_words(counter, key)[token % 4] >> 8


def exact_gumbel(u24: int) -> float:
    # log1p keeps the digits near u = 1, where float64 itself would lose some.
    rest = (2**24 - u24 - 0.5) / 2**24
    return -math.log(-math.log1p(-rest))


def test_gumbel_is_finite_and_accurate_at_the_ends():
    ends = [0, 1, 2, 2**23 - 1, 2**23, 2**23 + 1, 2**24 - 3, 2**24 - 2, 2**24 - 1]
    u24 = torch.tensor(ends)
    truth = torch.tensor([exact_gumbel(u) for u in ends], dtype=torch.float64)
    torch.testing.assert_close(gumbel(u24, torch.float64), truth, rtol=1e-12, atol=1e-12)
    # Two logs of fp32: a few units in the last place of values of size 1 to 17.
    torch.testing.assert_close(gumbel(u24, torch.float32).double(), truth, rtol=4e-7, atol=4e-7)
    assert truth.max() < 17.4 and gumbel(u24, torch.float32).isfinite().all()


def test_gumbel_has_the_moments_of_its_distribution():
    n = 40_000
    u24 = philox_u24(torch.arange(n), 0, 0, seed=1, stream=Stream.GUMBEL)
    noise = gumbel(u24, torch.float64)
    variance = math.pi**2 / 6
    assert abs(noise.mean() - 0.5772156649) < 4.5 * math.sqrt(variance / n)
    # The fourth central moment is 27/5 of the squared variance.
    assert abs(noise.var() / variance - 1) < 4.5 * math.sqrt((27 / 5 - 1) / n)
