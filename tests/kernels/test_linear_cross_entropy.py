"""linear_cross_entropy against full logits in float64, and the algebra that it must obey.

In float64 the tolerance is rounding of sums of V or D terms. In lower precision an error may be
three times that of torch's own linear + cross_entropy in the same dtype on the same numbers.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from bwsft_kernels import _cross_entropy_streamed, _matmul, linear_cross_entropy, reference
from bwsft_kernels._matmul import plan_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

EXACT = dict(rtol=1e-11, atol=1e-12)


def problem(n, d, v, *, seed=0, dtype=torch.float64, ignored=0.3, bias=False):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    target = torch.randint(v, (n,), generator=generator)
    target[torch.rand(n, generator=generator) < ignored] = -100
    x, weight = normal(n, d), normal(v, d)
    return x, weight, target, normal(v) if bias else None


def run(function, x, weight, target, bias=None, upstream=None, frozen=False, **options):
    """(loss, gradients of what requires grad: of all, or with a frozen head of x)."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    if frozen:
        leaves, weight, linear_bias = leaves[:1], weight.detach(), bias
    else:
        weight, linear_bias = leaves[1], leaves[2] if bias is not None else None
    loss = function(leaves[0], weight, target, linear_bias=linear_bias, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    return loss.detach(), torch.autograd.grad(loss, leaves, upstream)


def assert_reference(x, weight, target, bias=None, upstream=None, chunk_bytes=512 << 20, **options):
    expected, grads = run(reference.linear_cross_entropy, x, weight, target, bias, upstream,
                          **options)
    loss, own = run(linear_cross_entropy, x, weight, target, bias, upstream,
                    chunk_bytes=chunk_bytes, **options)
    frozen, own_x = run(linear_cross_entropy, x, weight, target, bias, upstream, frozen=True,
                        chunk_bytes=chunk_bytes, **options)
    for one, other in zip([loss, *own, frozen, *own_x], [expected, *grads, expected, grads[0]],
                          strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@st.composite
def cases(draw):
    n = draw(st.sampled_from([0, 1, 2, 7, 31, 32, 33]))
    v, d = draw(st.sampled_from([2, 3, 5, 17, 64, 127])), draw(st.sampled_from([1, 3, 16]))
    seed = draw(st.integers(0, 2**31))
    ignored = draw(st.sampled_from([0.0, 0.4, 1.0]))
    x, weight, target, bias = problem(n, d, v, seed=seed, ignored=ignored, bias=draw(st.booleans()))
    options = dict(reduction=draw(st.sampled_from(["mean", "sum", "none"])))
    generator = torch.Generator().manual_seed(seed)
    if draw(st.booleans()):
        options["row_weight"] = torch.rand(n, generator=generator) * (target % 3)
    options["label_smoothing"] = draw(
        st.sampled_from([0.0, 0.1, 1.0, torch.rand(n, generator=generator)])
    )
    options["softcap"] = draw(st.sampled_from([None, 2.5]))
    options["confidence"] = draw(st.sampled_from([0.0, 0.7]))
    if draw(st.booleans()):
        options["excluded_id"] = v - 1 if draw(st.booleans()) else 0
        target[target == options["excluded_id"]] = 1 if options["excluded_id"] == 0 else 0
    upstream = torch.randn(n if options["reduction"] == "none" else (), generator=generator)
    rows = draw(st.sampled_from([1, 5, 1000]))
    return (x, weight, target, bias, upstream, rows * v * 8), options


@settings(max_examples=200, deadline=None)
@given(cases())
def test_equals_the_reference(case):
    arguments, options = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cross_entropy_streamed, "NARROWEST", 4)  # tiles of the vocabulary
        assert_reference(*arguments, **options)


def test_tiles_with_ever_larger_logits():
    """A later tile's logits are above the reference by less than the slack, by more, and by more
    than fp32 can hold; the largest may be the target's, which is left out."""
    weight = torch.tensor([0.0, 1.0, 25.0, 26.0, 90.0, 400.0, 399.0, -1e4])[:, None]
    x, target = torch.tensor([[1.0], [1.0], [-1.0], [0.01]]), torch.tensor([5, 0, 7, 6])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cross_entropy_streamed, "NARROWEST", 1)
        loss, (grad,) = run(linear_cross_entropy, x, weight, target, frozen=True, chunk_bytes=16,
                            reduction="none")
    truth, (true_grad,) = run(reference.linear_cross_entropy, x.double(), weight.double(), target,
                              frozen=True, reduction="none")
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), true_grad, rtol=1e-6, atol=1e-6)


def test_confidence_is_the_entropy_of_rows_whose_target_leads():
    """By numerical differences, and by hand: of two equal logits the entropy is ln 2, and a row
    whose target is not the likeliest adds nothing; a sure row loses no digits."""
    x, weight, target, _ = problem(9, 4, 7, ignored=0)
    target[:6] = (x @ weight.T).argmax(1)[:6]
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    for options in ({}, dict(softcap=3.0), dict(reduction="none", label_smoothing=0.1)):
        run = functools.partial(linear_cross_entropy, target=target, confidence=0.8, **options)
        assert torch.autograd.gradcheck(run, leaves)
    one, head = torch.ones(3, 1).double(), torch.tensor([[0.0], [0.0], [-40.0]]).double()
    target = torch.tensor([0, 2, 1])
    loss = linear_cross_entropy(one, head, target, confidence=2.0, reduction="none")
    ln2 = torch.tensor(2.0).double().log()
    torch.testing.assert_close(loss[0], 3 * ln2, **EXACT)  # a tie leads too
    torch.testing.assert_close(loss[1], 40 + ln2, **EXACT)
    sure = linear_cross_entropy(one[:1], head[1:], torch.tensor([0]), confidence=1.0)
    torch.testing.assert_close(sure, torch.tensor(-40.0).double().exp() * 42, **EXACT)


def test_equals_torch_with_leading_shapes():
    x, weight, target, bias = problem(24, 8, 13, bias=True)
    for shape in ((24,), (4, 6), (2, 3, 4)):
        for reduction in ("mean", "sum", "none"):
            own = linear_cross_entropy(
                x.view(*shape, 8), weight, target.view(shape), linear_bias=bias,
                reduction=reduction, label_smoothing=0.2,
            )
            expected = F.cross_entropy(
                F.linear(x, weight, bias), target, reduction=reduction, label_smoothing=0.2
            )
            assert own.shape == (torch.Size(shape) if reduction == "none" else ())
            torch.testing.assert_close(own.flatten(), expected.flatten(), **EXACT)
    alone = linear_cross_entropy(x[0], weight, torch.tensor(3), reduction="none")
    torch.testing.assert_close(alone, F.cross_entropy(x[0] @ weight.T, torch.tensor(3)), **EXACT)


SAME_DTYPE = [  # N, D, V: odd sizes; one row; the vocabulary of LLaDA, where dX sums 126,464 terms
    (33, 17, 127), (1, 64, 50_257), (8, 16, 126_464),
]


@pytest.mark.parametrize("n, d, v", SAME_DTYPE)
@pytest.mark.parametrize("dtype, widened", [
    (torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)])
def test_error_is_that_of_torch_in_the_same_dtype(n, d, v, dtype, widened, monkeypatch):
    monkeypatch.setattr(_matmul, "_is_widened", lambda factor: widened)
    monkeypatch.setattr(_matmul, "WIDENED_BYTES", 1 << 14)  # several tiles
    x, weight, target, _ = problem(n, d, v, dtype=dtype, ignored=0)
    upstream = torch.rand(n) + 0.5

    def naive(x, weight, target, linear_bias=None, reduction="none"):
        logits = F.linear(x, weight, linear_bias)
        return F.cross_entropy(logits.float(), target, reduction=reduction)

    truth, true_grads = run(naive_in_float64, x.double(), weight.double(), target, None, upstream)
    theirs, their_grads = run(naive, x, weight, target, None, upstream)
    # The two paths: gradients made in backward ("none"), and in forward (row_weight).
    ours, our_grads = run(linear_cross_entropy, x, weight, target, None, upstream, reduction="none")
    total, sum_grads = run(
        linear_cross_entropy, x, weight, target, row_weight=upstream, reduction="sum"
    )
    # With a frozen head, where no logits are stored if products are in fp32.
    frozen, frozen_grads = run(linear_cross_entropy, x, weight, target, frozen=True,
                               row_weight=upstream, reduction="sum")
    assert ours.dtype == total.dtype == torch.float32
    most = 3 * error(theirs, truth) + 1e-6 * float(truth.abs().max())
    assert error(ours, truth) <= most
    torch.testing.assert_close(frozen, (ours * upstream).sum(), rtol=1e-6, atol=0)
    assert error(total, (truth * upstream).sum()) <= most * float(upstream.sum())
    if not widened:
        torch.testing.assert_close(total, (ours * upstream).sum(), rtol=1e-6, atol=0)
    for grads in (our_grads, sum_grads, frozen_grads):
        for own, other, true in zip(grads, their_grads, true_grads, strict=False):
            assert own.dtype == dtype
            band = torch.finfo(dtype).eps * float(true.abs().max())
            assert error(own, true) <= 3 * error(other, true) + band


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_target_has_an_unrounded_logit(dtype):
    """Rows sure of their target: their loss is small, and most of its error is the rounding of the
    target's logit, ten times the others'."""
    weight = torch.randn(300, 64, generator=torch.manual_seed(0)).to(dtype)
    target = torch.arange(0, 300, 3)
    x = (weight[target].double() * 0.2).to(dtype)  # target logits of about 13, others of about 1.6
    own = linear_cross_entropy(x, weight, target, reduction="none")
    truth = naive_in_float64(x.double(), weight.double(), target)
    logits = F.linear(x, weight).float()
    rounded = F.cross_entropy(logits, target, reduction="none")
    assert error(own / truth, 1) < 0.2 * error(rounded / truth, 1)


def naive_in_float64(x, weight, target, linear_bias=None):
    return F.cross_entropy(F.linear(x, weight, linear_bias), target, reduction="none")


def error(value, truth):
    return float((value.double() - truth).abs().max())


def test_gradients_accumulate_over_chunks_in_fp32():
    """512 equal rows: a bf16 accumulator stops growing after a few hundred additions."""
    x, weight, target, _ = problem(1, 4, 3, dtype=torch.bfloat16, ignored=0)
    x, target = x.expand(512, 4), target.expand(512)
    options = dict(reduction="sum")
    _, whole = run(linear_cross_entropy, x, weight, target, **options)
    _, parts = run(linear_cross_entropy, x, weight, target, chunk_bytes=6, **options)
    truth = run(naive_in_float64, x.double(), weight.double(), target)[1]
    assert error(parts[1], truth[1]) <= 3 * error(whole[1], truth[1]) + 2**-8 * float(
        truth[1].abs().max()
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunk_size_changes_nothing(reduction):
    x, weight, target, bias = problem(33, 6, 11, bias=True)
    weights = torch.rand(33)
    for rows in (1, 2, 8, 16, 32, 33, 34):
        assert_reference(x, weight, target, bias, chunk_bytes=rows * 11 * 8, reduction=reduction,
                   row_weight=weights)


def test_row_weights_are_linear_and_mean_divides_by_their_sum():
    x, weight, target, _ = problem(20, 6, 11)
    one, two = torch.rand(20).double(), torch.rand(20).double()

    def loss(weights, reduction="sum"):
        value, grads = run(linear_cross_entropy, x, weight, target, row_weight=weights,
                           reduction=reduction)
        return torch.cat([value[None], grads[0].flatten(), grads[1].flatten()])

    both = loss(2 * one - two)
    torch.testing.assert_close(both, 2 * loss(one) - loss(two), rtol=1e-6, atol=1e-6)
    mean = loss(one, "mean") * one[target != -100].sum()
    torch.testing.assert_close(mean, loss(one), **EXACT)
    torch.testing.assert_close(loss(3 * one, "mean"), loss(one, "mean"), **EXACT)


def test_identities():
    x, weight, target, _ = problem(16, 8, 23, ignored=0)
    logits = x @ weight.T
    plain = linear_cross_entropy(x, weight, target, reduction="none")
    # Smoothing 1 leaves the log-sum-exp minus the mean logit, whatever the target.
    smooth = linear_cross_entropy(x, weight, target, reduction="none", label_smoothing=1.0)
    torch.testing.assert_close(smooth, logits.logsumexp(-1) - logits.mean(-1), **EXACT)
    # SUBS: CE without the column M is CE + log(1 - p_M).
    target = target % 22
    subs = linear_cross_entropy(x, weight, target, reduction="none", excluded_id=22)
    raw = linear_cross_entropy(x, weight, target, reduction="none")
    gain = torch.log1p(-logits.softmax(-1)[:, 22])
    torch.testing.assert_close(subs, raw + gain, **EXACT)
    # Adding a constant to all logits changes nothing.
    shifted = linear_cross_entropy(x, weight, target, reduction="none",
                                   linear_bias=torch.full((23,), 50.0).double())
    torch.testing.assert_close(shifted, raw, **EXACT)
    assert (plain >= 0).all()


def test_equal_logits_give_log_v():
    x = torch.zeros(4, 2)
    loss = linear_cross_entropy(x, torch.ones(126_464, 2), torch.tensor([0, 1, 2, 126_463]))
    assert loss.item() == pytest.approx(math.log(126_464), rel=1e-6)  # 11.7477


def test_one_batch_is_k_micro_batches():
    x, weight, target, _ = problem(40, 6, 11, ignored=0.5)
    weights = torch.rand(40).double()
    whole = run(linear_cross_entropy, x, weight, target, row_weight=weights, reduction="sum")
    total, grad_weight, grad_x = 0, 0, []
    for part in torch.arange(40).split([1, 0, 16, 23]):
        loss, grads = run(linear_cross_entropy, x[part], weight, target[part],
                          row_weight=weights[part], reduction="sum")
        total, grad_weight = total + loss, grad_weight + grads[1]
        grad_x.append(grads[0])
    torch.testing.assert_close(total, whole[0], **EXACT)
    torch.testing.assert_close(torch.cat(grad_x), whole[1][0], **EXACT)
    torch.testing.assert_close(grad_weight, whole[1][1], **EXACT)


@pytest.mark.parametrize("size", [1, 31, 512, 2_122, 2_123, 20_000, 2**22])
def test_chunks_cover_the_rows_evenly_within_the_budget(size):
    """At V 126,464 in bf16 20,000 rows are 2.5e9 logits, past int32."""
    row_bytes, budget = 126_464 * 2, 512 << 20
    chunks = plan_chunks(size, row_bytes, budget)
    assert chunks[0][0] == 0 and chunks[-1][1] == size
    assert all(one[1] == two[0] for one, two in zip(chunks[:-1], chunks[1:], strict=True))
    lengths = [stop - start for start, stop in chunks]
    assert max(lengths) * row_bytes <= budget and len(set(lengths[:-1])) <= 1
    assert len(chunks) == -(-size // 2_122)  # as few as the budget allows
    assert max(lengths) - lengths[-1] < len(chunks)
    assert plan_chunks(3, row_bytes, 1) == [(0, 1), (1, 2), (2, 3)]  # never less than a row
