"""The device helpers alone: Philox words, the down-cast, soft-cap, Gumbel noise."""

import contextlib
import importlib
import math

import pytest
import torch
import triton
import triton.language as tl
from bwsft_kernels import (
    MaskSpec,
    block_mask,
    linear_argmax,
    linear_cross_entropy,
    philox,
    range_attention,
    range_plan,
    rms_norm,
    rotary,
    swiglu,
)
from bwsft_kernels._device_triton import (
    _gumbel_word,
    down_cast,
    gumbel_tile,
    philox_words,
    round_bf16,
    soft_cap,
)
from bwsft_kernels.philox import gumbel, gumbel_key, gumbel_u24
from kernel_cases import PHILOX, ROADS, taking
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _words_kernel(counter_ptr, out_ptr, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < N
    c0 = tl.load(counter_ptr + 6 * i, mask=inside, other=0)
    c1 = tl.load(counter_ptr + 6 * i + 1, mask=inside, other=0)
    c2 = tl.load(counter_ptr + 6 * i + 2, mask=inside, other=0)
    c3 = tl.load(counter_ptr + 6 * i + 3, mask=inside, other=0)
    k0 = tl.load(counter_ptr + 6 * i + 4, mask=inside, other=0)
    k1 = tl.load(counter_ptr + 6 * i + 5, mask=inside, other=0)
    a, b, c, d = philox_words(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr + 4 * i, a.to(tl.int64), mask=inside)
    tl.store(out_ptr + 4 * i + 1, b.to(tl.int64), mask=inside)
    tl.store(out_ptr + 4 * i + 2, c.to(tl.int64), mask=inside)
    tl.store(out_ptr + 4 * i + 3, d.to(tl.int64), mask=inside)


def words(counters_and_keys: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(len(counters_and_keys), 4, dtype=torch.int64)
    block = triton.next_power_of_2(len(out))
    _words_kernel[(1,)](counters_and_keys, out, len(out), BLOCK=block)
    return out


def test_philox_is_that_of_torch():
    """Known answers among them, which torch gives (test_philox.py)."""
    known = torch.tensor([counter + key for counter, key, _ in PHILOX])
    cells = torch.randint(2**32, (500, 6), generator=torch.Generator().manual_seed(0))
    cells = torch.cat([known, cells])
    c0, c1, c2, c3, *key = cells.unbind(-1)
    expected = torch.stack(philox.philox_words((c0, c1, c2, c3), key), dim=-1)
    assert torch.equal(words(cells), expected)
    assert torch.equal(words(cells - 2**32), expected)  # the same 32 bits, negative


@triton.jit
def _cast_kernel(x_ptr, rounded_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(rounded_ptr + i, round_bf16(x))
    tl.store(out_ptr + i, down_cast(x, out_ptr.dtype.element_ty))


@pytest.mark.filterwarnings("ignore:overflow")  # fp32 -> fp16 in the interpreter's numpy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_down_cast_is_that_of_torch(dtype):
    """Every bf16 number, and its neighbors on both sides of the rounding boundary."""
    high = torch.arange(2**16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high + low[:, None]).flatten()
    x = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
    rounded, out = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    _cast_kernel[(6,)](x, rounded, out, BLOCK=2**16)
    for own, expected in ((out, x.to(dtype)), (rounded, x.bfloat16().float())):
        assert torch.equal(own.isnan(), x.isnan())
        assert torch.equal(own[~x.isnan()], expected[~x.isnan()])


@triton.jit
def _soft_cap_kernel(x_ptr, out_ptr, CAP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, soft_cap(tl.load(x_ptr + i), CAP))


@pytest.mark.filterwarnings("ignore:overflow")  # exp(2y) = inf is meant: 1 - 2 / inf
@pytest.mark.parametrize("cap", [0.0, 0.5, 30.0])
def test_soft_cap(cap):
    size = torch.logspace(-30, 6, 2046, dtype=torch.float32)
    extremes = torch.tensor([0.0, float("inf"), -float("inf"), 0.5 * cap])
    x = torch.cat([size, -size, extremes])
    out = torch.empty_like(x)
    _soft_cap_kernel[(1,)](x, out, CAP=cap, BLOCK=4096)
    if cap == 0:
        assert torch.equal(out, x)
        return
    truth = cap * torch.tanh(x.double() / cap)
    # Relative to each value: the series below 1/2, and 4 roundings near 1 above.
    error = ((out.double() - truth).abs() / truth.abs().clamp(min=1e-37)).max()
    assert error < 6 * torch.finfo(torch.float32).eps, float(error)


@triton.jit
def _gumbel_kernel(word_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, _gumbel_word(tl.load(word_ptr + i).to(tl.uint32)))


def test_gumbel_of_a_word_to_the_very_ends():
    """(u24 + 1/2) / 2^24 rounds to 1 in fp32 at the top end, whose noise would be +inf."""
    ends = [0, 255, 256, 0xFFFFFFFF, 0xFFFFFF00, 0xFFFFFE00, 0x7FFFFFFF, 0x7FFFFF00, 0x80000000]
    word = torch.randint(2**32, (2048,), generator=torch.Generator().manual_seed(1))
    word[: len(ends)] = torch.tensor(ends)
    out = torch.empty(2048)
    _gumbel_kernel[(2,)](word, out, BLOCK=1024)
    u = ((word >> 8).double() + 0.5) * 2.0**-24
    truth = -torch.log(-torch.log(u))
    assert out.max() > 17 and out.min() < -2.8
    # E = -log u has a relative error of some 3 roundings, an absolute one for -log E.
    error = (out.double() - truth).abs() / truth.abs().clamp(min=1)
    assert error.max() < 4 * torch.finfo(torch.float32).eps


@triton.jit
def _gumbel_tile_kernel(noise_ptr, out_ptr, N, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    tile = tl.program_id(0)
    rows = tl.arange(0, BLOCK_N)
    noise = gumbel_tile(noise_ptr, rows, tile, N, BLOCK_V)
    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    tl.store(out_ptr + rows[:, None] * 128 + cols[None, :], noise, mask=(rows < N)[:, None])


def test_gumbel_tile_numbers_the_vocabulary_like_torch():
    rows = 5
    request = torch.tensor([0, 1, 2**31, 2**40 + 7, 2**62])
    step, position = torch.arange(rows) + 3, torch.arange(rows) * 1000
    key = gumbel_key(2**63 + 11, request)
    noise = torch.stack([position, step, request, *key])
    out = torch.full((rows, 128), math.nan)
    _gumbel_tile_kernel[(4,)](noise, out, rows, BLOCK_N=8, BLOCK_V=32)
    truth = gumbel(gumbel_u24(128, position, step, request, key), torch.float64)
    torch.testing.assert_close(out.double(), truth, rtol=1e-6, atol=1e-6)


def test_every_launch_is_made_on_the_device_of_its_tensors(monkeypatch):
    """Liger-Kernel#1303, triton#2441. test_tuning.py checks what on_device itself does."""
    modules = [
        importlib.import_module(f"bwsft_kernels._{name}_triton")
        for name in (
            "block_mask", "cross_entropy", "linear_argmax", "linear_cross_entropy_bwd",
            "linear_cross_entropy_fwd", "range_attention_bwd", "range_attention_fwd", "rms_norm",
            "rotary", "select_rows", "swiglu",
        )
    ]
    guarded, launched = [], []

    @contextlib.contextmanager
    def guard(tensor):
        guarded.append(tensor)
        yield
        guarded.pop()

    run = InterpretedFunction.run

    def checked_run(self, *args, **options):
        assert guarded, f"{self.__name__} was launched on whatever device was current"
        launched.append(self.__name__)
        return run(self, *args, **options)

    for module in modules:
        monkeypatch.setattr(module, "on_device", guard)
    monkeypatch.setattr(InterpretedFunction, "run", checked_run)
    x, head, target = torch.randn(3, 8, requires_grad=True), torch.randn(40, 8), torch.arange(3)
    for road in ROADS:
        with taking(road):
            linear_cross_entropy(x, head, target, impl="triton")
            with torch.no_grad():
                linear_cross_entropy(x, head, target, impl="triton")
    linear_argmax(x, head, impl="triton")
    block_mask(target[None], [1], [2], MaskSpec(2, 39), impl="triton")
    rms_norm(x, torch.ones(8), 1e-5, impl="triton").sum().backward()
    swiglu(x, x, impl="triton").sum().backward()
    plan = range_plan(torch.tensor([1]), torch.tensor([1]), 1)[0]
    range_attention(*[x[:, None]] * 3, plan, impl="triton").sum().backward()
    rotary(x[:, None], None, *torch.ones(2, 3, 1, 4), impl="triton")
    assert len(set(launched)) == 17  # the ten files' kernels, all of them
