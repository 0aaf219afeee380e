"""The kernels of linear_cross_entropy one by one, in Triton's interpreter, by either road.

Truth is float64 from the same rounded numbers. Bounds are derived: fp32 accumulators and one
rounding of each stored number. The interpreter multiplies bf16 wrongly, so where there is a dot,
bf16 comes as fp32 numbers that bf16 can hold; the row kernels have none and take it.
"""

import contextlib
import functools

import kernel_cases as cases
import pytest
import torch
from bwsft_kernels import _cross_entropy_triton as rows_triton
from bwsft_kernels import _linear_cross_entropy_bwd_triton as grad_triton
from bwsft_kernels import _linear_cross_entropy_fwd_triton as loss_triton
from bwsft_kernels import _tuning, reference
from bwsft_kernels._matmul import wide_product
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, EPS, ROADS, taking
from thinning import thinned

pytestmark = [  # soft-cap: 1 - 2 / exp(inf) is meant, and so are rows of NaN
    pytest.mark.filterwarnings(f"ignore:{text}") for text in ("overflow", "invalid", "All-NaN")
]


normal = functools.partial(cases.normal, dtype=torch.float32)


@pytest.fixture(autouse=True)
def several_rounds(monkeypatch):
    """Two tiles of a row at a time, so that small vocabularies take several rounds."""
    monkeypatch.setattr(rows_triton, "BLOCK_V", 128)
    monkeypatch.setattr(rows_triton, "MERGE_TILES", 2)


def truth(logits, target, weight, smoothing, softcap, excluded_id):
    """(loss, weighted gradient of the logits) by autograd, in the dtype of logits."""
    logits = logits.detach().requires_grad_()
    if isinstance(smoothing, torch.Tensor):
        smoothing = smoothing.to(logits.dtype)
    loss = reference.linear_cross_entropy(
        logits, torch.eye(logits.shape[1], dtype=logits.dtype), target, reduction="none",
        label_smoothing=smoothing, softcap=softcap, excluded_id=excluded_id,
    )
    (grad,) = torch.autograd.grad(loss, logits, weight.to(logits.dtype))
    return loss.detach(), grad


def run(x, w, bias, target, weight, *options):
    """loss_and_grad by this road, in scratch full of an earlier chunk."""
    smooth = isinstance(options[0], torch.Tensor) or options[0] != 0
    need = loss_triton.row_bytes(len(w), x.dtype, len(x), x.device, options[1], smooth)
    scratch = torch.full((len(x) + 1, need), 0xFF, dtype=torch.uint8)
    loss, grad, scale = loss_triton.loss_and_grad(x, w, bias, target, weight, *options, scratch)
    assert loss.dtype == torch.float32 and grad.dtype == x.dtype
    assert grad.shape == (len(x), -(-len(w) // 64) * 64) and not grad[:, len(w):].any()
    # Where `finish` looks for the gradient of a row: where the row's scratch begins.
    assert not len(x) or grad.data_ptr() == scratch.data_ptr()
    assert not len(x) or grad.stride() == (need // x.element_size(), 1)
    assert scale is None
    return loss, grad[:, : len(w)]


def check_rows(loss, grad, logits, target, weight, *options):
    """Bounds on what loss_and_grad made of these float64 logits."""
    keep = weight != 0
    assert not loss[~keep].any() and not grad[~keep].any()
    loss, grad, logits, target, weight = (t[keep] for t in (loss, grad, logits, target, weight))
    options = [o[keep] if isinstance(o, torch.Tensor) else o for o in options]
    if not len(loss):
        return
    true_loss, true_grad = truth(logits, target, weight, *options)
    same_loss, same_grad = truth(logits.float(), target, weight, *options)
    # A loss is a difference of numbers as large as the logits.
    size = 1 + float(logits.abs().max())
    error = (loss - true_loss).abs().max()
    assert error <= 2 * (same_loss - true_loss).abs().max() + 8 * EPS * size, float(error)
    # Two roundings, of the exponential and of the gradient; smoothing then subtracts its share.
    eps = torch.finfo(grad.dtype).eps
    share = weight[:, None].abs() * torch.as_tensor(options[0]).reshape(-1, 1) / grad.shape[1]
    bound = eps * (true_grad.abs() + 2 * share) + 8 * EPS * size * weight.abs().max()
    bound += 2 * (same_grad - true_grad).abs().max() + (2.0**-24 if eps == 2.0**-10 else 0)
    worst = ((grad - true_grad).abs() - bound).max()
    assert worst <= 0, float(worst)


@st.composite
def head_cases(draw, sizes=(1, 2, 31, 33), vocabularies=(2, 63, 64, 129, 507)):
    n, v, d = (draw(st.sampled_from(s)) for s in (sizes, vocabularies, (1, 5, 40)))
    seed, dtype = draw(st.integers(0, 999)), draw(st.sampled_from([torch.float32, torch.float16]))
    x, w = normal(n, d, seed=seed, scale=draw(st.sampled_from([0.1, 1.0, 30.0]))), normal(v, d)
    bias = normal(v, seed=seed + 1).to(dtype) if draw(st.booleans()) else None
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(v, (n,), generator=generator)
    target[0] = draw(st.sampled_from([0, v - 1]))  # first and last class
    weight = torch.rand(n, generator=generator) * torch.randint(3, (n,), generator=generator)
    smoothing = draw(st.sampled_from([0.0, 0.1, 1.0, torch.rand(n, generator=generator)]))
    excluded = draw(st.sampled_from([None, v // 2])) if v > 2 else None
    target[target == excluded] = 0
    x[weight == 0] = draw(st.sampled_from([1.0, float("nan"), float("inf")]))
    softcap = draw(st.sampled_from([None, 4.0]))
    return (x.to(dtype), w.to(dtype), bias, target, weight), (smoothing, softcap, excluded)


def check_head(case, options, road):
    x, w, bias, target, weight = case
    logits = torch.nn.functional.linear(*(None if t is None else t.double() for t in (x, w, bias)))
    with taking(road):
        check_rows(*run(*case, *options), logits, target, weight, *options)


@settings(max_examples=16, deadline=None, derandomize=True, phases=[Phase.generate])
@given(case=head_cases(), road=st.sampled_from(ROADS))
def test_loss_and_grad(case, road):
    check_head(*case, road)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, phases=[Phase.generate])
@given(case=head_cases((1, 3, 32), (2, 63, 507, 4096)), road=st.sampled_from(ROADS))
def test_loss_and_grad_many(case, road):
    check_head(*case, road)


def peaked(v=300):
    """Logits as a trained model has: 30 at the target, 30 at another class, 16 at the target, two
    equal peaks, all over noise. A head that is the identity makes them the input."""
    logits = normal(4, v)
    target = torch.tensor([7, v - 1, 70, 131])
    for row, column, value in ((0, 7, 30.0), (1, 9, 30.0), (2, 70, 16.0), (3, 131, 25), (3, 5, 25)):
        logits[row, column] = value
    return logits.half().float(), target


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_peaked_rows_are_exact(road, dtype):
    """The loss to a few roundings of fp32, though the gradient has 16 bits; the gradient to one or
    two roundings of each number, not of each logit, which would be 1 % at 30 in bf16."""
    logits, target = peaked()
    x, rest = logits.to(dtype), (target, torch.full((4,), 1024.0), 0.0, None, None)
    with taking(road):
        loss, grad = run(x, torch.eye(300, dtype=dtype), None, *rest)
    true_loss, true_grad = truth(logits.double(), *rest)
    others = true_grad.scatter(1, target[:, None], 0).sum(1, keepdim=True)
    true_grad.scatter_(1, target[:, None], -others)  # p - 1 would lose digits even in float64
    assert (loss - true_loss).abs().max() <= 2 * EPS * 30
    error = (grad - true_grad).abs() - (torch.finfo(dtype).eps + 8 * EPS) * true_grad.abs()
    assert error.max() <= (2.0**-24 if dtype == torch.float16 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_row_kernels_with_every_dtype(dtype):
    """As loss_and_grad, with the product and what its tiles leave made by torch."""
    logits, target = peaked(333)
    weight, tile = torch.tensor([1.0, 0.5, 0.0, 3.0]), 64
    wide = torch.full((4, 384), float("nan"))
    wide[:, :333] = logits
    rest = target, weight, torch.rand(4), None, 3
    grad = wide.view(dtype)[:, :384]
    loss = rows_triton.cross_entropy_rows(wide, None, grad, 333, *rest)
    check_rows(loss, grad[:, :333], logits.double(), target, weight, *rest[2:])
    assert not grad[:, 333:].any()

    others = torch.full((4, 384), float("-inf"))
    others[:, :333] = logits
    others[:, 3] = float("-inf")
    others.scatter_(1, target[:, None], float("-inf"))
    tiles = others.view(4, -1, tile)
    top = tiles.amax(-1).clamp_min(-3e38)
    e = (tiles - top[..., None]).exp()
    plain = torch.where(tiles.isinf(), 0, tiles).sum(-1)
    picked = logits.gather(1, target[:, None])
    parts = torch.cat([top, e.sum(-1), plain, picked], dim=1)
    scale = loss_triton.E_SCALES[dtype]
    grad = (e * scale).to(dtype).view(4, -1)
    merged = rows_triton.merge_rows(grad, parts, 333, tile, scale, *rest)
    check_rows(merged, grad[:, :333], logits.double(), target, weight, *rest[2:])
    assert not grad[:, 333:].any()


@pytest.mark.parametrize("road", ROADS)
def test_a_nan_row_has_a_nan_loss(road):
    x = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    with taking(road):
        case = None, torch.tensor([0, 0]), torch.ones(2), 0.0, None, None
        loss, _ = run(x, torch.eye(3), *case)
    assert loss.isnan().tolist() == [True, False]


def test_rows_past_2_31():
    far = cases.past_2_31()
    values, x = normal(5, 100).half(), normal(5, 100, seed=1).half()
    case = None, torch.tensor([4, 0, 1, 2, 3]), torch.ones(5), 0.0, None, None
    for road in ROADS:
        with taking(road):
            loss, grad = run(x, values, *case)
            for again in (run(x, far(values), *case), run(far(x), values, *case)):
                assert torch.equal(again[0], loss) and torch.equal(again[1], grad)
            g = grad.clone()
            assert torch.equal(grad_triton.grad_input(g, far(values)),
                               grad_triton.grad_input(g, values))
            right = grad_triton.grad_input(values, x.t())
            assert torch.equal(grad_triton.grad_input(far(values), x.t()), right)
    rest = torch.arange(5), torch.ones(5), None, None, None
    e, parts = values[:, :64].clone(), torch.ones(5, 4)
    loss = rows_triton.merge_rows(far(e), parts, 60, 64, 1.0, *rest)
    assert torch.equal(loss, rows_triton.merge_rows(e, parts, 60, 64, 1.0, *rest))


@st.composite
def product_cases(draw):
    n, v = draw(st.sampled_from([1, 2, 31, 33])), draw(st.sampled_from([2, 63, 64, 507, 1500]))
    d, seed = draw(st.sampled_from([1, 5, 64, 100])), draw(st.integers(0, 999))
    # What the row kernels leave: mostly small numbers and one large one in a row, then zeros.
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


@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    case=product_cases(), count=st.sampled_from([1, 4, 60]), road=st.sampled_from(ROADS),
    multiple=st.sampled_from([1, 5, 64]),
)
def test_grad_input(assert_no_worse, case, count, road, multiple):
    """By more or fewer splits, in rows padded to a multiple of the columns."""
    g, w = case
    padded = torch.zeros(len(g), -(-len(w) // multiple) * multiple, dtype=g.dtype)
    padded[:, : len(w)] = g
    with processors(count), taking(road):
        own, again = grad_triton.grad_input(padded, w), grad_triton.grad_input(padded, w)
    assert own.dtype == torch.float32
    truth = g.double() @ w.double()
    band = 4 * EPS * float((g.double().abs() @ w.double().abs()).max())
    assert_no_worse(own, wide_product(g, w), truth, band)
    assert torch.equal(own, again)


def test_splits_fill_the_chip():
    """Figures of an A100 and an H100 for N 512, D 4096: 640 of 648 and 128 of 132 programs."""
    for arch, count, splits in ((80, 108, 5), (90, 132, 2)):
        tile = _tuning.TABLE["grad_input", arch, 2][-1][1]
        tiles = -(-512 // tile.rows) * -(-4096 // tile.cols)
        with processors(count):
            assert _tuning.choose_splits(tile, tiles, 126464 // 64, torch.device("cpu")) == splits


@pytest.mark.parametrize(
    ("road", "dtype"), thinned([(r, d) for d in (torch.float32, torch.float16) for r in ROADS], 2)
)
def test_head_loss_is_the_loss_while_training_in_chunks_too(road, dtype, monkeypatch):
    chunks, by_road = [], loss_triton._RUNS[road]
    monkeypatch.setitem(
        loss_triton._RUNS, road, lambda x, *rest: chunks.append(len(x)) or by_road(x, *rest))
    for seed, (n, v, d) in enumerate([(1, 2, 1), (23, 129, 33)]):
        x, w, b = (normal(*s, seed=seed).to(dtype) for s in ((n, d), (v, d), (v,)))
        target = torch.arange(n) % v
        for options in ((0.0, None, None), (torch.rand(n), 3.0, v - 1 if v > 2 else None)):
            target[target == options[2]] = 0
            with taking(road):
                training, _ = run(x, w, b, target, torch.ones(n), *options)
                chunks.clear()
                chunk_bytes = 10 * loss_triton._row_bytes(v, dtype, x.device, road, False)
                own = loss_triton.head_loss(x, w, b, target, *options, chunk_bytes)
            assert chunks == ([1] if n == 1 else [8, 8, 7])
            size = 1 + float(torch.nn.functional.linear(x, w, b).abs().max())
            torch.testing.assert_close(own, training, rtol=0, atol=4 * EPS * size)


def test_no_rows_and_too_little_scratch():
    x, w, target = normal(3, 8), normal(100, 8), torch.tensor([0, 1, 2])
    none = run(x[:0], w, None, target[:0], torch.ones(0), 0.0, None, None)
    assert none[0].shape == (0,) and none[1].shape == (0, 100)
    with pytest.raises(ValueError, match=r"scratch must be \[3, 512\] or more, not \[3, 511\]"):
        loss_triton.loss_and_grad(x, w, None, target, torch.ones(3), 0.0, None, None,
                                  torch.empty(3, 511, dtype=torch.uint8))
