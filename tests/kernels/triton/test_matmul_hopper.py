"""The products with TMA in Triton's interpreter, through the launchers that choose them.

fp16, which the interpreter multiplies rightly; truth is float64 from the same numbers. One program
takes several tiles (the interpreter has 4 slots), and every shape leaves a rest: of rows, of
columns within a quarter and of whole quarters, of the summed axis.
"""

import contextlib
import itertools

import pytest
import tile_search
import torch
from bwsft_kernels import _linear_cross_entropy_bwd_triton as bwd
from bwsft_kernels import _linear_cross_entropy_fwd_triton as fwd
from bwsft_kernels import _matmul_hopper_triton as hopper
from bwsft_kernels import _tuning, reference
from kernel_cases import head_problem, normal
from thinning import thinned

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # soft-cap: 1 - 2 / exp(inf) is meant
PLAIN = _tuning.Tile(32, 64, 32, 4, 3)
# (rows, vocabulary, hidden size), smoothing, softcap, excluded_id
CASES = [((33, 170, 40), 0.1, None, 5), ((33, 170, 40), 0.0, 5.0, 5),
         ((20, 300, 72), 0.0, None, None)]  # fmt: skip


@contextlib.contextmanager
def only(tile):
    with pytest.MonkeyPatch.context() as patch:
        for kernel in ("logits", "capped", "loss", "grad_input"):
            entries = ((_tuning.ANY_ROWS, tile), (_tuning.ANY_ROWS, PLAIN))
            patch.setitem(_tuning.TABLE, (kernel, _tuning.SAFE, 2), entries)
        yield


def launched(monkeypatch, name):
    """How often the Hopper launcher of this name is called, as a list that grows."""
    calls, launcher = [], getattr(fwd if name == "logits_parts" else bwd, name)

    def counted(*arguments):
        calls.append(name)
        return launcher(*arguments)

    monkeypatch.setattr(fwd if name == "logits_parts" else bwd, name, counted)
    return calls


@pytest.mark.parametrize("shape, smoothing, softcap, excluded", thinned(CASES, 2))
def test_loss_and_logits_gradient(
    shape, smoothing, softcap, excluded, monkeypatch, assert_no_worse
):
    n, v, d = shape
    x, weight, bias, target = head_problem(n, v, d, 0, "fp16", 1 / 4)
    target[target == excluded] = 0
    row_weight = torch.rand(n, generator=torch.Generator().manual_seed(1))
    calls, found = launched(monkeypatch, "logits_parts"), {}
    options = dict(softcap=softcap, excluded_id=excluded)
    wide, narrow = _tuning.Tile(16, 256, 64, 4, 4, True), _tuning.Tile(32, 64, 32, 4, 3, True)
    for tile in (PLAIN, wide, narrow):
        (tensors, smooth), width = fwd._prepare(x, weight, bias, smoothing), -(-v // 64) * 64
        scratch = torch.empty(n, 2 * width + fwd._part_bytes(v, 16), dtype=torch.uint8)
        with only(tile):
            loss, grad = fwd.by_triton(
                *tensors, target, row_weight, smooth, *options.values(), scratch)
            found[tile] = loss, grad.clone()
            alone, nothing = fwd.by_triton(
                *tensors, target, None, smooth, *options.values(), scratch)
        assert torch.equal(alone, loss) and nothing is None
        assert not found[tile][1][:, v:].any()  # the rest of a padded row
    assert len(calls) == 4
    logits = torch.nn.functional.linear(*(t.double() for t in (x, weight, bias)))
    logits.requires_grad_()
    eye = torch.eye(v, dtype=torch.float64)
    truth = reference.linear_cross_entropy(
        logits, eye, target, reduction="none", label_smoothing=smoothing, **options)
    (true_grad,) = torch.autograd.grad(truth, logits, row_weight.double())
    (loss, grad), *others = found.values()
    for other_loss, other_grad in others:
        # The other kernel's error, three times, and a few fp32 roundings of numbers of this size.
        assert_no_worse(other_loss, loss, truth.detach(), 1e-5)
        assert_no_worse(other_grad[:, :v], grad[:, :v], true_grad, 1e-6)


@pytest.mark.parametrize("n, v, d", [(33, 170, 40), (70, 300, 72)])
def test_the_inputs_gradient(n, v, d, monkeypatch, assert_no_worse):
    weight = normal(v, d, dtype=torch.float16)
    g = torch.full((n, -(-v // 64) * 64), float("nan"), dtype=torch.float16)
    g[:, :v] = normal(n, v, seed=1, dtype=torch.float16)
    calls = launched(monkeypatch, "grad_input_parts")
    truth = g[:, :v].double() @ weight.double()
    expected = g[:, :v].float() @ weight.float()
    for tile in (_tuning.Tile(32, 64, 32, 4, 3, True), _tuning.Tile(64, 32, 64, 4, 4, True)):
        with only(tile):
            found = bwd.split_product(g, weight)  # TMA clips the columns past V
        assert_no_worse(found, expected, truth, v * 2**-24 * float(truth.abs().max()))
    assert len(calls) == 2


@pytest.mark.parametrize("kernel", ["grad_input", "logits", "loss", "stats", "noise"])
def test_the_search_runs_what_it_times(kernel, monkeypatch):
    """benchmarks/gates/tile_search.py, with a small head: both roads, and a tile with TMA."""
    monkeypatch.setattr(tile_search, "VOCAB", 256)
    monkeypatch.setattr(tile_search, "HIDDEN", 64)
    torch.manual_seed(0)
    runs = tile_search.launchers(kernel, 5, "cpu", torch.float16)
    truth = tile_search.copy(runs["triton"]())
    if "cublas" in runs:
        tile_search.check(tile_search.copy(runs["cublas"]()), truth)
        with only(_tuning.Tile(16, 64, 32, 4, 3, True)):
            tile_search.check(tile_search.copy(runs["triton"]()), truth)
        with pytest.raises(AssertionError):
            tile_search.check([t * 1.01 for t in truth], truth)
    assert ("cublas" in runs) == (kernel in ("grad_input", "logits", "loss"))


def test_what_tma_cannot_read_takes_the_other_kernel(monkeypatch):
    calls, tile = launched(monkeypatch, "grad_input_parts"), _tuning.Tile(32, 64, 32, 4, 3, True)
    g, weight = normal(5, 128, dtype=torch.float16), normal(128, 41, dtype=torch.float16)
    with only(tile):
        rows = bwd.split_product(g, weight[:, :40])  # 82 bytes apart
        assert not calls
        torch.testing.assert_close(rows, bwd.split_product(g, weight[:, :40].contiguous()))
    assert len(calls) == 1


def test_fits_tma():
    half = torch.empty(8, 16, dtype=torch.float16)
    assert hopper.fits_tma(half, half[:, :5], half[1:], half[:, 8:])
    odd = torch.empty(8, 17, dtype=torch.float16)
    wrong = [half.float(), half.t(), odd, half[:, 1:], half[:0]]
    assert not any(itertools.starmap(hopper.fits_tma, ((half, w) for w in wrong)))
