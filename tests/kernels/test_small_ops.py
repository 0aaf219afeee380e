"""rms_norm, rotary and swiglu on a CPU: plain torch, its values, layouts, and what is refused.

tests/kernels/triton/test_small_ops.py checks the Triton kernels in the interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from bwsft_kernels import rms_norm, rotary, swiglu, torch_ops
from kernel_cases import (
    DTYPES,
    LAYOUTS,
    SMALL,
    TRAINED,
    in_torch,
    norm_case,
    normal,
    outputs_and_grads,
    rotary_case,
    swiglu_case,
)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("function", SMALL)
def test_torch_is_plain_autograd(function, dtype):
    case, trained = SMALL[function](dtype), TRAINED[function]
    own, expected = (outputs_and_grads(f, case, trained) for f in (function, in_torch(function)))
    assert all(torch.equal(one, other) for one, other in zip(own, expected, strict=True))
    assert all(t.dtype == dtype for t in own)


@pytest.mark.parametrize("function", SMALL)
def test_gradcheck(function):
    case = SMALL[function](torch.float64)
    trained = TRAINED[function]
    leaves = [case[i].clone().requires_grad_() for i in trained]

    def run(*inputs):
        full = list(case)
        for i, value in zip(trained, inputs, strict=True):
            full[i] = value
        return function(*full)

    if function is swiglu:
        leaves[0].data.clamp_(-20, 20)  # finite differences need a slope
    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_norm_without_residual(dtype):
    x, weight, eps, residual = norm_case(dtype)
    normed = rms_norm(x, weight, eps)
    assert torch.equal(normed, rms_norm(x, weight, eps, torch.zeros_like(x))[0])
    assert torch.equal(normed, torch_ops.rms_norm(x, weight, eps))
    # Rows of zeros: 1 / rms is 1 / sqrt(eps), and nothing is NaN.
    assert not rms_norm(torch.zeros_like(x), weight, eps).any()
    if dtype == torch.float64:
        total = x + residual
        expected = F.rms_norm(total, weight.shape, weight, eps), total
        torch.testing.assert_close(rms_norm(x, weight, eps, residual), expected)


def test_the_sum_is_rounded_before_it_is_normalized():
    """In bf16, 256 + 1 is 256: the 1 must not reach the norm."""
    x, one = torch.full((1, 8), 256.0).bfloat16(), torch.ones(1, 8).bfloat16()
    normed, total = rms_norm(one, torch.ones(8).bfloat16(), 0.0, residual=x)
    assert torch.equal(total, x) and torch.equal(normed, rms_norm(x, torch.ones(8).bfloat16(), 0.0))


def test_mixed_dtypes_of_autocast():
    """fp32 rows and weights, a bf16 branch: what a layer sees under autocast."""
    x, weight, eps, residual = norm_case(torch.float32)
    branch = x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        normed, total = rms_norm(branch, weight, eps, residual)
        q, _ = rotary(*rotary_case(torch.bfloat16))
        gated = swiglu(*swiglu_case(torch.bfloat16))
    assert normed.dtype == total.dtype == torch.float32
    assert q.dtype == gated.dtype == torch.bfloat16
    assert torch.equal(normed, rms_norm(branch.float(), weight, eps, residual)[0])
    own = outputs_and_grads(rms_norm, (branch, weight, eps, residual), (0, 1, 3))
    assert own[2].dtype == torch.bfloat16 and own[4].dtype == torch.float32
    low = rms_norm(branch, weight, eps)  # a bf16 row times an fp32 weight, as torch promotes
    assert torch.equal(low, torch_ops.rms_norm(branch, weight, eps)) and low.dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", SMALL)
def test_layouts(function, layout):
    case, trained = SMALL[function](torch.float64), TRAINED[function]
    moved = [LAYOUTS[layout](t) if isinstance(t, torch.Tensor) and t.dim() > 1 else t for t in case]
    own, straight = (outputs_and_grads(function, c, trained) for c in (moved, case))
    # Not the same bits: vectorized and scalar exp differ.
    torch.testing.assert_close(own, straight, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("function", SMALL)
def test_any_leading_shape_and_none(function):
    options = {rms_norm: dict(shape=(0, 40)), rotary: dict(rows=(0,)), swiglu: dict(shape=(0, 7))}
    make = {rms_norm: norm_case, rotary: rotary_case,
            swiglu: lambda dtype, shape: (normal(*shape), normal(*shape))}[function]
    for one in outputs_and_grads(function, make(torch.float64, **options[function]),
                                 TRAINED[function]):
        assert not one.any() and one.dim()
    shape = {rms_norm: dict(shape=(40,)), rotary: dict(rows=()), swiglu: dict(shape=(40,))}
    own = outputs_and_grads(function, SMALL[function](torch.float64, **shape[function]),
                            TRAINED[function])
    assert own[0].shape in ((40,), (4, 6)) and own[0].any()


def test_rotary_of_one_tensor():
    q, k, cos, sin = rotary_case(torch.float32)
    both = rotary(q, k, cos, sin)
    alone, nothing = rotary(k, None, cos, sin)
    assert nothing is None and torch.equal(alone, both[1])


def test_rotary_keeps_lengths_and_rotates_back():
    q, k, cos, sin = rotary_case(torch.float64)
    rotated = rotary(q, k, cos, sin)
    for one, other in zip(rotated, (q, k), strict=True):
        torch.testing.assert_close(one.norm(dim=-1), other.norm(dim=-1), rtol=1e-12, atol=0)
        assert not torch.allclose(one, other)
    back = rotary(*rotated, cos, -sin)
    torch.testing.assert_close(back, (q, k), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", SMALL)
def test_shapes_alone(function):
    """On the meta device any read of a value raises."""
    case = [t.to("meta") if isinstance(t, torch.Tensor) else t
            for t in SMALL[function](torch.bfloat16)]
    leaves = [t.requires_grad_() if i in TRAINED[function] else t for i, t in enumerate(case)]
    out = function(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()
    assert leaves[0].grad.shape == leaves[0].shape


X, WEIGHT, RESIDUAL = torch.randn(3, 5, 40), torch.randn(40), torch.randn(3, 5, 40)
Q, K = torch.randn(3, 5, 4, 6), torch.randn(3, 5, 2, 6)
COS, SIN = torch.randn(3, 5, 1, 3), torch.randn(3, 5, 1, 3)
GATE, UP = torch.randn(3, 41), torch.randn(3, 41)
GOOD = {
    rms_norm: dict(x=X, weight=WEIGHT, eps=1e-5, residual=RESIDUAL),
    rotary: dict(q=Q, k=K, cos=COS, sin=SIN),
    swiglu: dict(gate=GATE, up=UP),
}
BAD_CALLS = [
    (rms_norm, "x must be floating point", dict(x=X.long())),
    (rms_norm, "must end in the 40 entries of weight", dict(x=X[..., :39])),
    (rms_norm, "must end in the 40 entries", dict(x=torch.tensor(1.0), residual=None)),
    (rms_norm, r"weight must be \[D\] and not empty", dict(weight=WEIGHT[None])),
    (rms_norm, r"weight must be \[D\] and not empty", dict(weight=WEIGHT[:0])),
    (rms_norm, "residual must be .* as x", dict(residual=RESIDUAL[:1])),
    (rms_norm, "float64 all or none", dict(residual=RESIDUAL.double())),
    (rms_norm, "eps must be 0 or more", dict(eps=-1e-5)),
    (rms_norm, "weight is on meta, but x on cpu: move it", dict(weight=WEIGHT.to("meta"))),
    (rms_norm, "impl must be", dict(impl="cuda")),
    (rotary, "k must be floating point", dict(k=K.long())),
    (rotary, "with heads and an even E", dict(q=Q[..., :5])),
    (rotary, "with heads and an even E", dict(q=Q[..., :0, :])),
    (rotary, "k must be torch.float32", dict(k=K.half())),
    (rotary, "k must be .* rows and width of q", dict(k=K[:1])),
    (rotary, "k must be .* rows and width of q", dict(k=K[..., :4])),
    (rotary, "cos must be torch.float32", dict(cos=COS.half())),
    (rotary, r"sin must be torch.float32 \[3, 5, 1, 3\]", dict(sin=SIN[:, :4])),
    (rotary, "sin is on meta, but q on cpu", dict(sin=SIN.to("meta"))),
    (rotary, "sin gets no gradient", dict(sin=SIN.clone().requires_grad_())),
    (rotary, "impl must be", dict(impl="cuda")),
    (swiglu, "up must be floating point", dict(up=UP.long())),
    (swiglu, "one shape and dtype", dict(up=UP[..., :40])),
    (swiglu, "one shape and dtype", dict(up=UP.half())),
    (swiglu, "one shape and dtype", dict(gate=torch.tensor(1.0), up=torch.tensor(1.0))),
    (swiglu, "impl must be", dict(impl="cuda")),
]


@pytest.mark.parametrize("function, message, change", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(function, message, change):
    with pytest.raises(ValueError, match=message):
        function(**{**GOOD[function], **change})


@pytest.mark.parametrize("function", GOOD)
def test_triton_on_cpu_tensors_says_why_not(function, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match='impl="triton" can\'t be used: the tensors are on cpu'):
        function(**GOOD[function], impl="triton")
    wide = {n: t.double() if n != "eps" else t for n, t in GOOD[function].items()}
    with pytest.raises(ValueError, match="float64"):
        function(**wide, impl="triton")


def test_a_distributed_tensor_is_refused(sharded):
    with pytest.raises(ValueError, match="x is a DTensor"):
        rms_norm(sharded(X), WEIGHT, 1e-5)
