"""linear_cross_entropy with impl="triton" in the interpreter, against float64 full logits.

An error may be 3x that of impl="torch" in the same dtype on the same numbers, plus a band of a few
roundings. bf16, which the interpreter multiplies wrongly, comes as fp32 numbers that bf16 can hold.
"""

import pytest
import torch
from bwsft_kernels import (
    _cross_entropy_triton,
    _linear_cross_entropy_fwd_triton,
    linear_cross_entropy,
    reference,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import EPS, ROADS, taking
from kernel_cases import head_problem as problem

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # soft-cap: 1 - 2 / exp(inf) is meant


@pytest.fixture(autouse=True)
def several_rounds(monkeypatch):
    """Tiles are merged two at a time, so that small vocabularies take several rounds."""
    monkeypatch.setattr(_cross_entropy_triton, "MERGE_TILES", 2)


def run(impl, x, weight, bias, target, upstream, backwards=1, **options):
    """[loss, gradients], all of one backward; `backwards` > 1 repeats it on the same graph."""
    if impl == "reference":
        x, weight, bias = (None if t is None else t.double() for t in (x, weight, bias))
        options = {
            name: value.double() if isinstance(value, torch.Tensor) else value
            for name, value in options.items()
        }
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    options["linear_bias"] = None if bias is None else leaves[2]
    if impl == "reference":
        loss = reference.linear_cross_entropy(*leaves[:2], target, **options)
    else:
        loss = linear_cross_entropy(*leaves[:2], target, impl=impl, **options)
    upstream = upstream.to(loss.dtype)
    first, *others = (
        torch.autograd.grad(loss, leaves, upstream, retain_graph=True) for _ in range(backwards)
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))
    return [loss.detach(), *first]


def check(assert_no_worse, x, weight, bias, target, upstream, **options):
    case = x, weight, bias, target, upstream
    own = run("triton", *case, backwards=2, **options)
    torchs, truth = (run(impl, *case, **options) for impl in ("torch", "reference"))
    logits = torch.nn.functional.linear(*(t if t is None else t.double() for t in case[:3]))
    size = min(float(logits.abs().max()), options.get("softcap") or 1e9) if logits.numel() else 0.0
    for index, (one, two, three) in enumerate(zip(own, torchs, truth, strict=True)):
        # Rounding a logit z moves a loss by EPS * z and a probability by its own EPS * z.
        scale = float(three.abs().max()) if three.numel() else 0.0
        band = 4 * EPS * (scale + size if index == 0 else scale * (1 + size))
        if index:  # a probability of 1 in float64 has lost the others, where they are below 2^-53
            largest = max(float(t.abs().max()) for t in (x, weight) if t.numel())
            band += 2.0**-53 * largest * float(upstream.abs().sum())
        assert_no_worse(one, two, three, band)
    with torch.no_grad():  # no logits in memory
        loss = linear_cross_entropy(x, weight, target, linear_bias=bias, impl="triton", **options)
    assert_no_worse(loss, torchs[0], truth[0], 4 * EPS * (float(truth[0].abs().sum()) + size))


@st.composite
def cases(draw, sizes, vocabularies, depths):
    n, v, d = (draw(st.sampled_from(choices)) for choices in (sizes, vocabularies, depths))
    seed, scale = draw(st.integers(0, 999)), draw(st.sampled_from([0.3, 1.0, 20.0]))
    dtype = draw(st.sampled_from(["fp32", "fp16", "bf16"]))
    x, weight, bias, target = problem(n, v, d, seed, dtype, scale)
    generator = torch.Generator().manual_seed(seed)
    options = dict(
        reduction=draw(st.sampled_from(["mean", "sum", "none"])),
        label_smoothing=draw(st.sampled_from([0.0, 0.1, torch.rand(n, generator=generator)])),
        softcap=draw(st.sampled_from([None, 5.0])),
        confidence=draw(st.sampled_from([0.0, 0.0, 0.5])),
        ignore_index=draw(st.sampled_from([-100, -1, 10**6])),
    )
    if draw(st.booleans()):
        options["row_weight"] = torch.rand(n, generator=generator) * (torch.arange(n) % 3)
    if v > 2 and draw(st.booleans()):
        options["excluded_id"] = draw(st.sampled_from([1, v - 2]))
        target[target == options["excluded_id"]] = 0
    ignored = torch.rand(n, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    target[ignored] = options["ignore_index"]
    layout = draw(st.sampled_from(["plain", "strided", "expanded", "column-major head"]))
    if layout == "strided":
        x = torch.stack([x, x], dim=-1)[..., 0]
    if layout == "expanded":
        x = x[:1].expand(n, d)
    if layout == "column-major head":
        weight = weight.t().contiguous().t()
    upstream = torch.randn(n if options["reduction"] == "none" else (), generator=generator)
    return (x, weight, bias if draw(st.booleans()) else None, target, upstream), options


@settings(max_examples=16, deadline=None, derandomize=True, phases=[Phase.generate])
@given(case=cases([0, 1, 2, 31, 33], [2, 63, 64, 507], [1, 5, 33]), road=st.sampled_from(ROADS))
def test_against_float64(assert_no_worse, case, road):
    with taking(road):
        check(assert_no_worse, *case[0], **case[1])


@pytest.mark.parametrize("vocabulary", [64, 65])
def test_a_column_as_bias(assert_no_worse, vocabulary):
    x, weight, bias, target = problem(9, vocabulary, 8, 0, "fp32")
    column = torch.stack((bias, bias + 1), -1)[:, 0]
    check(assert_no_worse, x, weight, column, target, torch.ones(()))


@pytest.mark.slow
@settings(max_examples=250, deadline=None, phases=[Phase.generate])
@given(
    case=cases([0, 1, 2, 31, 32, 33], [2, 63, 64, 507, 4096], [1, 5, 33, 64, 100]),
    road=st.sampled_from(ROADS),
)
def test_against_float64_many(assert_no_worse, case, road):
    with taking(road):
        check(assert_no_worse, *case[0], **case[1])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(513, 63, 16), (513, 507, 5), (2, 50257, 8)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("road", ROADS)
def test_large_shapes(assert_no_worse, shape, dtype, road):
    x, weight, bias, target = problem(*shape, 0, dtype)
    upstream = torch.randn(shape[0], generator=torch.Generator().manual_seed(0))
    with taking(road):
        check(assert_no_worse, x, weight, bias, target, upstream, reduction="none", softcap=20.0)


@pytest.mark.parametrize(
    "dtype, word", [(torch.bfloat16, "interpreter"), (torch.float64, "float64")]
)
def test_what_the_interpreter_and_triton_cannot_multiply(dtype, word):
    x, weight, target = torch.ones(2, 3).to(dtype), torch.ones(5, 3).to(dtype), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=word):
        linear_cross_entropy(x, weight, target, impl="triton")


def test_auto_on_a_cpu_is_torch(monkeypatch):
    """The interpreter is for tests: a CPU user with TRITON_INTERPRET set keeps the fast path."""
    monkeypatch.setattr(_linear_cross_entropy_fwd_triton, "head_loss", None)
    x, weight, _, target = problem(3, 7, 2, 0)
    assert linear_cross_entropy(x, weight, target, impl="auto").isfinite()


def test_inside_autocast():
    """fp32 parameters, fp16 products: as torch.nn.functional.linear in autocast."""
    x, weight, _, target = problem(5, 40, 8, 0)
    upstream = torch.ones(())
    with torch.autocast("cpu", dtype=torch.float16):
        results = [run(impl, x, weight, None, target, upstream) for impl in ("triton", "torch")]
    assert results[0][0].dtype == results[0][1].dtype == torch.float32
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-3, atol=5e-4)  # torch rounds logits


def test_chunks_and_a_host_count_change_nothing():
    x, weight, bias, target = problem(40, 63, 5, 3)
    target[30:] = -100
    whole = run("triton", x, weight, bias, target, torch.ones(()))
    for options in (dict(chunk_bytes=7 * 63 * 4), dict(num_rows=30), dict(num_rows=37)):
        part = run("triton", x, weight, bias, target, torch.ones(()), **options)
        for one, two in zip(part, whole, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)
