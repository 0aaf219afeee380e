"""The kernels of linear_cross_entropy one by one, in Triton's interpreter.

Truth is float64 from the same rounded numbers; an error may be 3x that of the torch implementation
in the same dtype, plus a band of a few roundings. The interpreter multiplies bf16 wrongly, so where
there is a dot, bf16 comes as fp32 numbers that bf16 can hold; the row kernel has none and takes it.
"""

import contextlib
import functools

import kernel_cases as cases
import pytest
import torch
from bwsft_kernels import _cross_entropy_torch as rows_torch
from bwsft_kernels import _cross_entropy_triton as rows_triton
from bwsft_kernels import _linear_cross_entropy_bwd_triton as grad_triton
from bwsft_kernels import _linear_cross_entropy_fwd_triton as loss_triton
from bwsft_kernels import _tuning
from bwsft_kernels._matmul import product
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, EPS

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # soft-cap: 1 - 2 / exp(inf) is meant


normal = functools.partial(cases.normal, dtype=torch.float32)


def copy_with_stride(x, stride):
    """The same values, rows `stride` apart, so that rows don't touch."""
    out = torch.zeros(len(x), stride, dtype=x.dtype)[:, : x.shape[1]]
    return out.copy_(x)


def check_rows(assert_no_worse, logits, target, weight, *options):
    """Loss and gradient of the row kernel, torch's rows and float64; returns the kernel's."""
    results = []
    for kernel, given_logits in (
        (rows_triton, copy_with_stride(logits, logits.shape[1] + 3)),
        (rows_torch, logits.clone()),
        (rows_torch, logits.double()),
    ):
        loss = kernel.cross_entropy_rows_(given_logits, target, weight, *options, True)
        results.append((torch.where(weight == 0, 0, loss), given_logits))
    (loss, grad), (torch_loss, torch_grad), (true_loss, true_grad) = results
    # A loss is a difference of numbers as large as the logits; a gradient is at most a weight.
    assert_no_worse(loss, torch_loss, true_loss, 8 * EPS * (1 + float(logits.double().abs().max())))
    assert_no_worse(grad, torch_grad, true_grad, 8 * EPS * float(weight.abs().max()))
    return loss, grad


@st.composite
def row_cases(draw, sizes=(1, 2, 31, 33), vocabularies=(2, 63, 64, 507, 4097)):
    n, v = draw(st.sampled_from(sizes)), draw(st.sampled_from(vocabularies))
    seed, dtype = draw(st.integers(0, 999)), draw(st.sampled_from(DTYPES))
    logits = normal(n, v, seed=seed, scale=draw(st.sampled_from([0.1, 3.0, 300.0]))).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(v, (n,), generator=generator)
    target[0] = draw(st.sampled_from([0, v - 1]))  # first and last class
    weight = torch.rand(n, generator=generator) * torch.randint(3, (n,), generator=generator)
    smoothing = draw(st.sampled_from([0.0, 0.1, 1.0, torch.rand(n, generator=generator)]))
    excluded = draw(st.sampled_from([None, v // 2])) if v > 2 else None
    target[target == excluded] = 0
    return logits, target, weight, smoothing, draw(st.sampled_from([None, 4.0])), excluded


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
@given(case=row_cases())
def test_row_kernel(assert_no_worse, case):
    logits, target, weight, *options = case
    _, grad = check_rows(assert_no_worse, logits, target, weight, *options)
    assert not grad[weight == 0].any()
    if options[2] is not None:
        assert not grad[:, options[2]].any()


@pytest.mark.slow
@settings(max_examples=300, deadline=None, phases=[Phase.generate])
@given(case=row_cases(sizes=(1, 3, 32), vocabularies=(2, 63, 507, 4096, 50257)))
def test_row_kernel_many(assert_no_worse, case):
    check_rows(assert_no_worse, *case)


def test_a_sure_row_keeps_the_digits_of_its_gradient():
    """p - 1 of the target is 1e-7 here: from the sum of the others, not from 1 - 0.9999999."""
    logits = torch.zeros(2, 300)
    logits[:, 7] = torch.tensor([16.0, 22.0])
    truth = logits.double()
    target, weight = torch.tensor([7, 7]), torch.ones(2)
    rows_torch.cross_entropy_rows_(truth, target, weight, 0.0, None, None, True)
    rows_triton.cross_entropy_rows_(logits, target, weight, 0.0, None, None, True)
    assert -1e-4 < truth[0, 7] < -1e-5 and truth[1, 7] > -1e-7
    torch.testing.assert_close(logits.double(), truth, rtol=1e-5, atol=0)


def test_a_row_without_weight_is_zero_whatever_its_logits():
    logits = torch.tensor([[float("nan"), 1.0, 2.0], [float("inf"), 0.0, 1.0], [1.0, 2.0, 3.0]])
    weight = torch.tensor([0.0, 0.0, 1.0])
    loss = rows_triton.cross_entropy_rows_(
        logits, torch.zeros(3).long(), weight, 0.0, None, None, True
    )
    assert not logits[:2].any() and not loss[:2].any() and loss[2] > 0 and logits[2].any()


def test_a_nan_row_has_a_nan_loss():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    one = torch.ones(2), 0.0, None, None, True
    loss = rows_triton.cross_entropy_rows_(logits, torch.tensor([0, 0]), *one)
    assert loss.isnan().tolist() == [True, False]


def test_rows_past_2_31():
    far = cases.past_2_31()
    values, x = normal(5, 100).half(), normal(5, 100, seed=1).half()
    rest = torch.arange(5), torch.ones(5), 0.0, None, None, True
    plain, logits = values.clone(), far(values)
    loss = rows_triton.cross_entropy_rows_(logits, *rest)
    assert torch.equal(loss, rows_triton.cross_entropy_rows_(plain, *rest))
    assert torch.equal(logits, plain)
    g = copy_with_stride(values[:, :5], 8)
    assert torch.equal(grad_triton.grad_input(g, far(values)), grad_triton.grad_input(g, values))
    right = grad_triton.grad_input(values, x.t())
    assert torch.equal(grad_triton.grad_input(far(values), x.t()), right)
    case = None, torch.tensor([4, 0, 1, 2, 3]), 0.0, None, None
    right = loss_triton.head_loss(x, values, *case)
    assert torch.equal(loss_triton.head_loss(x, far(values), *case), right)
    assert torch.equal(loss_triton.head_loss(far(x), values, *case), right)


@st.composite
def product_cases(draw):
    n, v = draw(st.sampled_from([1, 2, 31, 33])), draw(st.sampled_from([2, 63, 64, 507, 1500]))
    d, seed = draw(st.sampled_from([1, 5, 64, 100])), draw(st.integers(0, 999))
    # What the row kernel leaves: mostly small numbers and one large one in a row.
    g, w = normal(n, v, seed=seed, scale=1e-3), normal(v, d, seed=seed + 1)
    g[:, seed % v] -= 1
    dtype = draw(st.sampled_from(DTYPES))
    g, w = g.to(dtype), w.to(dtype)
    return (g.float(), w.float()) if dtype == torch.bfloat16 else (g, w)


@contextlib.contextmanager
def processors(count):
    """Inside, the chip has `count` SMs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tuning, "processors", lambda device: count)
        yield


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
@given(case=product_cases(), count=st.sampled_from([1, 4, 60]))
def test_grad_input(assert_no_worse, case, count):
    g, w = case
    with processors(count):
        own = grad_triton.grad_input(copy_with_stride(g, g.shape[1] + 5), w)
        again = grad_triton.grad_input(g, w)
    assert own.dtype == torch.float32
    truth = g.double() @ w.double()
    band = 4 * EPS * float((g.double().abs() @ w.double().abs()).max())
    assert_no_worse(own, product(g, w), truth, band)
    assert torch.equal(own, again)


def test_splits_fill_the_chip():
    """Figures of an A100 and an H100 for N 512, D 4096: 640 of 648 and 128 of 132 programs."""
    for arch, count, splits in ((80, 108, 5), (90, 132, 2)):
        tile = _tuning.TABLE["grad_input", arch, 2][-1][1]
        tiles = -(-512 // tile.rows) * -(-4096 // tile.cols)
        with processors(count):
            assert _tuning.choose_splits(tile, tiles, 126464 // 64, torch.device("cpu")) == splits


def test_head_loss_is_the_row_kernel_without_logits(assert_no_worse):
    for case, (n, v, d) in enumerate([(1, 2, 1), (33, 129, 40), (2, 507, 64), (70, 63, 33)]):
        for dtype in DTYPES:
            x, w, b = (normal(*s, seed=case).to(dtype) for s in ((n, d), (v, d), (v,)))
            if dtype == torch.bfloat16:
                x, w, b = x.float(), w.float(), b.float()
            target = torch.arange(n) % v
            for options in ((0.0, None, None), (torch.rand(n), 3.0, v - 1 if v > 2 else None)):
                target[target == options[2]] = 0
                own = loss_triton.head_loss(x, w, b, target, *options)
                results, rest = [], (target, torch.ones(n), *options, False)
                for wide in (dtype if dtype == torch.float16 else torch.float32, torch.float64):
                    logits = torch.nn.functional.linear(x.to(wide), w.to(wide), b.to(wide))
                    results.append(rows_torch.cross_entropy_rows_(logits, *rest))
                band = 8 * EPS * (1 + float(logits.abs().max()))
                assert_no_worse(own, *results, band)
