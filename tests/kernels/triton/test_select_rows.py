"""The one launch that selects a loss's rows, against torch's select_rows."""

import pytest
import torch
from bwsft_kernels import _select_rows, _select_rows_triton
from bwsft_kernels._select_rows import select_rows as in_torch
from bwsft_kernels._select_rows_triton import BLOCK_T, select_rows

V = 50
EPS = torch.finfo(torch.float32).eps


def rows(size, ignored=0.5, dtype=torch.int64, supervised=None):
    """Targets and weights of `size` rows, some ignored, some of weight 0; none supervised after the
    first `supervised`."""
    generator = torch.Generator().manual_seed(size)
    target = torch.randint(1, V, (size,), generator=generator)
    target[torch.rand(size, generator=generator) < ignored] = -100
    if supervised is not None:
        target[supervised:] = -100
    weight = torch.rand(size, generator=generator) + 0.1
    weight[torch.rand(size, generator=generator) < 0.2] = 0.0
    return target.to(dtype), weight


def assert_same(target, weight, num_rows=None, normalize=False, excluded_id=None):
    expected = in_torch(target, weight, None, V, -100, excluded_id, normalize, num_rows,
                        torch.float32, "torch")
    index, *own, count = select_rows(target, weight, -100, V, excluded_id, normalize, num_rows)
    if num_rows is None:
        kept = torch.arange(len(target)) if expected.index is None else expected.index
        assert torch.equal(index, kept) and int(count) == len(index)
    else:
        assert index is None and int(count) == int((expected.weight != 0).sum())
    assert torch.equal(own[0], expected.target) and own[1].dtype == torch.float32
    if normalize:  # two sums of positive numbers, in any order: len terms round once each
        band = 2 * (len(target) + 1) * EPS
        torch.testing.assert_close(own[1], expected.weight, rtol=band, atol=0)
    else:
        assert torch.equal(own[1], expected.weight)


@pytest.mark.parametrize("size", [0, 1, 7, BLOCK_T, 2 * BLOCK_T + 13])
@pytest.mark.parametrize("weighted", [False, True])
def test_selects_what_torch_does(size, weighted):
    for normalize in (False, True):
        target, weight = rows(size)
        assert_same(target, weight if weighted else None, normalize=normalize)
        few = size // 3
        target, weight = rows(size, supervised=few)
        for excluded_id in (None, 0):
            assert_same(target, weight if weighted else None, few, normalize, excluded_id)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_any_integers_any_strides_and_all_ignored(dtype):
    target, weight = rows(100, dtype=dtype, supervised=40)
    for num_rows in (None, 40, 97):  # 97 rounds up to all 100
        assert_same(target, weight, num_rows)
        apart = torch.stack((target, target), 1)[:, 0], torch.stack((weight, weight), 1)[:, 1]
        assert_same(*apart, num_rows)
        assert_same(target, torch.tensor(0.5).expand(100), num_rows, normalize=True)
        assert_same(torch.full_like(target, -100), weight, num_rows, normalize=True)
    assert_same(target, torch.zeros(100), normalize=True)


def test_what_is_refused_is_said_as_in_torch(monkeypatch):
    good = torch.tensor([3, -100, 4, 5])
    cases = [
        (torch.tensor([3, V, 4, -1]), dict(), rf"target {V} of row 1 is outside \[0, {V}\)"),
        (torch.tensor([3, -100, -7, 4]), dict(), r"target -7 of row 2 is outside"),
        (good, dict(excluded_id=4), "target 4 of row 2 is the excluded_id"),
        (torch.cat((good, torch.full((9,), 2))), dict(num_rows=4), "rows after num_rows=4 are sup"),
    ]
    for target, changed, message in cases:
        arguments = dict(excluded_id=None, num_rows=None) | changed
        with pytest.raises(ValueError, match=message):
            in_torch(target, None, None, V, -100, normalize=False, dtype=torch.float32,
                     impl="torch", **arguments)
        with pytest.raises(ValueError, match=message):
            select_rows(target, None, -100, V, normalize=False, **arguments)
    # A GPU takes rows up to the next multiple of 8; none after num_rows may be supervised.
    monkeypatch.setattr(_select_rows_triton, "rows_to_multiply", lambda *_: 8)
    monkeypatch.setattr(_select_rows, "rows_to_multiply", lambda *_: 8)
    target = torch.full((13,), -100).index_fill(0, torch.arange(6), 2)
    assert_same(target, None, num_rows=6)
    for function in (lambda n: select_rows(target, None, -100, V, None, False, n),
                     lambda n: in_torch(target, None, None, V, -100, None, False, n, torch.float32,
                                        "torch")):  # fmt: skip
        with pytest.raises(ValueError, match="rows after num_rows=5 are supervised"):
            function(5)
    # A bad target that isn't supervised is nobody's business.
    assert_same(torch.tensor([3, V, 4]), torch.tensor([1.0, 0.0, 2.0]))
