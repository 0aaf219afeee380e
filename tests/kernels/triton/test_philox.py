"""Philox's launches: the bits of torch, for every kind of argument."""

import pytest
import torch
from bwsft_kernels import _philox_triton, philox, philox_uniform
from bwsft_kernels.philox import Stream, gumbel_key, gumbel_rows, philox_u24, split_seed

ROW, COLUMN = torch.arange(700), torch.tensor([[0], [5], [2**32 + 3]])
WHERE = {
    "a row": (ROW, 3, 9),
    "a grid": (ROW, COLUMN, 2**55 + 1),
    "large numbers": (2**40 + 7, 2**31 - 1, torch.tensor([2**56 - 1, 2**32, 0])),
    "one number": (torch.tensor(4), 5, 6),
    "int32": (ROW.int(), COLUMN.int(), 0),
    "every second": (ROW[::2], COLUMN.expand(3, 350), 1),
    "four dimensions": (ROW[:6].view(3, 1, 2), COLUMN[None], torch.arange(5).view(5, 1, 1, 1)),
    "none": (ROW[:0], 1, 2),
}


@pytest.mark.parametrize("seed", [0, 2**63 + 5, -1])
@pytest.mark.parametrize("where", WHERE)
def test_bits_are_those_of_torch(where, seed):
    for function in (philox_u24, philox_uniform):
        for stream in (Stream.BLOCK, Stream.REPLACE):
            own, expected = (
                function(*WHERE[where], seed=seed, stream=stream, impl=impl)
                for impl in ("triton", "torch")
            )
            assert torch.equal(own, expected) and own.dtype == expected.dtype
            assert own.shape == expected.shape


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_what_gumbel_noise_is_made_of(size, monkeypatch):
    request = torch.arange(size) * 2**33 + 5
    position, step = torch.arange(size).flip(0), torch.tensor(3).expand(size)
    key = split_seed(2**63 + 11)
    own, expected = (
        gumbel_rows(position, step, request, key, impl) for impl in ("triton", "torch"))
    assert torch.equal(own, expected)
    assert torch.equal(torch.stack(gumbel_key(2**63 + 11, request)), expected[3:])
    monkeypatch.setattr(philox, "triton_implementation", lambda *_: _philox_triton)
    assert torch.equal(torch.stack(gumbel_key(2**63 + 11, request)), expected[3:])


@pytest.mark.parametrize("sample_id", [-1, 2**56])
def test_sample_ids_out_of_range(sample_id):
    """Where values are looked at; test_compile_offline.py has the device-side assertion."""
    with pytest.raises(ValueError, match="sample_id must lie in"):
        philox_u24(ROW, 0, torch.tensor(sample_id), seed=0, stream=0, impl="triton")
