"""Bugs that users reported of other fused losses, replayed in torch: what happened, and what is
right. `repository#number` names the public report; fused_loss_bugs.py has those that Triton's tests
replay too.
"""

import contextlib
import itertools

import fused_loss_bugs
import pytest
import torch
import torch.nn.functional as F
from bwsft_kernels import _linear_cross_entropy_sweep
from bwsft_kernels import linear_cross_entropy as loss_of
from fused_loss_bugs import full, problem

D, V = 5, 131  # 131 is no multiple of any tile


def grads(loss, *tensors, upstream=None, **options):
    upstream = torch.ones_like(loss) if upstream is None else upstream
    return torch.autograd.grad(loss, tensors, upstream, **options)


def assert_close(actual, expected):
    """fp32 sums of at most V terms of size 1."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("report", fused_loss_bugs.REPORTS)
def test_reported_bug(report):
    fused_loss_bugs.assert_right(report, loss_of)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_freed_graph_says_so(reduction):
    x, weight, target = problem()
    loss = loss_of(x, weight, target, reduction=reduction)
    grads(loss, x, weight)
    with pytest.raises(RuntimeError, match="second time"):
        grads(loss, x, weight)


@pytest.mark.parametrize("chunk_bytes", [None, 4 * V * 4])
def test_a_kept_graph_gives_its_gradients_again(chunk_bytes):
    """Ours: the last backward may make its gradients where the forward pass kept them."""
    x, weight, target = problem()
    loss = loss_of(x, weight, target, chunk_bytes=chunk_bytes)
    expected = grads(3 * full(x, weight, target), x, weight)
    for retain in (True, True, False):
        assert_close(grads(3 * loss, x, weight, retain_graph=retain), expected)


def test_double_backward_raises():
    x, weight, target = problem()
    for reduction in ("sum", "none"):
        loss = loss_of(x, weight, target, reduction=reduction).sum()
        first = grads(loss, x, weight, create_graph=True)
        assert_close(first, grads(full(x, weight, target, reduction="sum"), x, weight))
        for grad in first:
            with pytest.raises(RuntimeError, match="second derivative"):
                grad.sum().backward(retain_graph=True)


TRAINED = ["x", "weight", "bias", "x weight", "x bias", "x weight bias", ""]


@pytest.mark.parametrize("train", TRAINED)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_what_needs_a_gradient_gets_one(train, reduction):
    """VeOmni#1017: a copied tensor lost requires_grad. Liger-Kernel#507: frozen input, loss 0."""
    x, weight, target = problem()
    bias = torch.randn(V, generator=torch.manual_seed(3), requires_grad=True)
    tensors = dict(x=x, weight=weight, bias=bias)
    trained = [tensors[name] for name in train.split()]
    for tensor in tensors.values():
        tensor.requires_grad_(any(tensor is one for one in trained))
    loss = loss_of(x, weight, target, linear_bias=bias, reduction=reduction)
    expected = F.cross_entropy(F.linear(x, weight, bias), target, reduction=reduction)
    assert_close([loss], [expected])
    assert loss.requires_grad == bool(trained)
    if trained:
        assert_close(grads(loss.sum(), *trained), grads(expected.sum(), *trained))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_made_where_none_is_wanted(context, monkeypatch):
    products, product = [], _linear_cross_entropy_sweep.product
    monkeypatch.setattr(
        _linear_cross_entropy_sweep, "product", lambda *a: products.append(a) or product(*a)
    )
    x, weight, target = problem()
    with context():
        loss = loss_of(x, weight, target)
    assert not products and not loss.requires_grad
    assert_close([loss], [full(x, weight, target)])
    loss_of(x, weight, target)
    assert len(products) == 1


@pytest.mark.parametrize("wrong", [V, V + 5, -1, 2**40])
def test_targets_outside_the_vocabulary_raise(wrong):
    """Liger reads a neighbor's logit and returns a finite wrong loss."""
    x, weight, target = problem()
    target[4] = wrong
    with pytest.raises(ValueError, match=rf"target {wrong} of row 4 .*\[0, 131\)"):
        loss_of(x, weight, target)
    assert torch.isfinite(loss_of(x, weight, target, row_weight=(target != wrong).float()))


def test_excluded_target_raises():
    x, weight, target = problem()
    with pytest.raises(ValueError, match=f"target {int(target[4])} of row 4 is the excluded_id"):
        loss_of(x, weight, target, excluded_id=int(target[4]))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
def test_every_pair_of_dtypes_in_and_out_of_autocast(x_dtype, w_dtype, autocast):
    """Liger-Kernel#305, #501, axolotl#2847: fp32 hidden states against a bf16 head."""
    x, weight, target = problem()
    x, weight = (t.detach().to(d).requires_grad_() for t, d in ((x, x_dtype), (weight, w_dtype)))
    context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    with context:
        try:
            logits = F.linear(x, weight)
        except RuntimeError:
            with pytest.raises(ValueError, match="autocast"):
                loss_of(x, weight, target)
            return
        loss = loss_of(x, weight, target)
        expected = F.cross_entropy(logits if x_dtype == torch.float64 else logits.float(), target)
    assert loss.dtype == expected.dtype
    own, theirs = grads(loss, x, weight), grads(expected, x, weight)
    assert [g.dtype for g in own] == [x_dtype, w_dtype]
    # Inputs and gradients are rounded to the same 8 or 11 bits, at other places.
    eps = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(loss, expected, rtol=0, atol=4 * eps)
    for one, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=4 * eps, atol=2 * eps)


def test_backward_inside_and_outside_autocast_agree():
    x, weight, target = problem()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(x, weight, target, reduction="none").sum()
        inside = grads(loss, x, weight, retain_graph=True)
    outside = grads(loss, x, weight)
    assert all(torch.equal(one, two) for one, two in zip(inside, outside, strict=True))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_fp16_keeps_small_gradients_and_takes_a_loss_scale(reduction):
    """Liger-Kernel#512: fp16 diverged. V 256k: w * p is below 6e-8; a scale of 65536 overflows."""
    generator = torch.manual_seed(0)
    x = torch.randn(4, 8, generator=generator).half().requires_grad_()
    weight = (0.1 * torch.randn(2**18, 8, generator=generator)).half()
    target = torch.tensor([0, 7, 2**17, 2**18 - 1])
    row_weight = torch.tensor([1e-4, 2e-4, 1e-4, 1e-4])

    def gradient(scale):
        loss = (loss_of(x, weight, target, row_weight=row_weight, reduction=reduction)).sum()
        return grads(loss * scale, x)[0].double() / scale

    wide = x.detach().double().requires_grad_()
    truth = grads((full64(wide, weight.double(), target) * row_weight).sum(), wide)[0]
    for scale in (1.0, 65536.0):
        assert (gradient(scale) - truth).abs().max() < 4 * 2**-11 * truth.abs().max()


def test_gradients_of_sure_rows_keep_their_digits():
    """1 - p is 2.5e-6 here; as fp32 difference it would be off by percents."""
    weight = torch.tensor([[14.0], [0.0], [0.0], [0.5]])
    x, target = torch.ones(2, 1), torch.tensor([0, 0])

    def gradient(dtype):
        leaf = x.to(dtype).requires_grad_()
        return grads(loss_of(leaf, weight.to(dtype), target, reduction="sum"), leaf)[0].double()

    torch.testing.assert_close(gradient(torch.float32), gradient(torch.float64), rtol=1e-5, atol=0)


def full64(x, weight, target):
    return F.cross_entropy(F.linear(x, weight), target, reduction="none")


def test_fp16_weight_gradient_of_many_equal_rows_stays_finite():
    """Ours: row weights are scaled up for fp16, and 33 equal rows of size 60 then summed past the
    largest fp16 number before the scale was taken back."""
    generator = torch.Generator().manual_seed(999)
    x = (torch.randn(1, 33, generator=generator) * 30).half().expand(33, 33)
    weight = torch.randn(63, 33, generator=generator).half().requires_grad_()
    target = torch.zeros(33, dtype=torch.long)
    loss = loss_of(x, weight, target, label_smoothing=0.9)
    (grad,) = torch.autograd.grad(loss, [weight])
    wide = weight.detach().double().requires_grad_()
    truth = F.cross_entropy(x.double() @ wide.T, target, label_smoothing=0.9)
    (expected,) = torch.autograd.grad(truth, [wide])
    assert grad.isfinite().all()
    torch.testing.assert_close(grad.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_and_huge_logits_give_the_loss_of_torch(dtype):
    """A diverged model must not look like one whose loss is 0."""
    x = torch.ones(1, 1, dtype=dtype)
    for values in itertools.product([0.0, 1e30, -1e30, torch.inf, torch.nan], repeat=3):
        weight = torch.tensor(values, dtype=dtype)[:, None]
        for target in (torch.tensor([0]), torch.tensor([2])):
            expected = F.cross_entropy(F.linear(x, weight).float(), target)
            torch.testing.assert_close(loss_of(x, weight, target), expected, equal_nan=True)
