"""rms_norm, rotary and swiglu in torch: values and gradients against float64, layouts, memory.

tests/kernels/triton/test_small_ops.py asks the same of the Triton kernels in the interpreter.
"""

import pytest
import torch
from bwsft_kernels import rms_norm, rotary, swiglu
from bwsft_kernels import torch_ops as plain

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def normal(*shape, seed=0, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def norm_case(dtype, shape=(3, 5, 40), scale=1.0):
    x, residual = normal(*shape, dtype=dtype, scale=scale), normal(*shape, seed=1, dtype=dtype)
    return x, normal(shape[-1], seed=2, dtype=dtype), EPS, residual


def rotary_case(dtype, rows=(3, 5), heads=(4, 2), width=6):
    q, k = (normal(*rows, h, width, seed=h, dtype=dtype) for h in heads)
    angle = normal(*rows, 1, width // 2, seed=9, scale=50.0)
    wide = torch.promote_types(dtype, torch.float32)
    return q, k, angle.cos().to(wide), angle.sin().to(wide)


def swiglu_case(dtype, shape=(3, 5, 41), scale=3.0):
    gate = normal(*shape, dtype=dtype, scale=scale)
    gate.view(-1)[:2] = torch.tensor([-200.0, 200.0])  # exp(200) is inf in fp32
    return gate, normal(*shape, seed=1, dtype=dtype)


CASES = {rms_norm: norm_case, rotary: rotary_case, swiglu: swiglu_case}
TRAINED = {rms_norm: (0, 1, 3), rotary: (0, 1), swiglu: (0, 1)}  # arguments with a gradient


def outputs_and_grads(function, case, trained, **options):
    """Outputs, then gradients of an uneven sum of them."""
    case = [t.detach().requires_grad_() if i in trained else t for i, t in enumerate(case)]
    out = function(*case, **options)
    out = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    upstream = [normal(*t.shape, seed=20 + i).to(t.dtype) for i, t in enumerate(out)]
    paths = [pair for pair in zip(out, upstream, strict=True) if pair[0].requires_grad]
    ends, upstream = zip(*paths, strict=True)
    grads = torch.autograd.grad(ends, [case[i] for i in trained], upstream)
    return [t.detach() for t in (*out, *grads)]


def check_values(assert_no_worse, function, case, trained=None, **options):
    """Error at most 3x that of autograd through plain torch in the same dtype; returns outputs and
    gradients. A band of two roundings of the largest number, for values that torch gets exactly."""
    trained = TRAINED[function] if trained is None else trained
    law = getattr(plain, function.__name__)
    own = outputs_and_grads(function, case, trained, **options)
    same = outputs_and_grads(law, case, trained)
    wide = [t.double() if isinstance(t, torch.Tensor) else t for t in case]
    for one, two, truth in zip(own, same, outputs_and_grads(law, wide, trained), strict=True):
        assert one.dtype == two.dtype
        band = 2 * torch.finfo(one.dtype).eps * float(truth.abs().max() if truth.numel() else 0)
        assert_no_worse(one, two, truth, band)
    return own


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", CASES)
def test_values_and_gradients(assert_no_worse, function, dtype):
    check_values(assert_no_worse, function, CASES[function](dtype))


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("function", CASES)
def test_outputs_have_the_bits_of_torch(function, dtype):
    case, law = CASES[function](dtype), getattr(plain, function.__name__)
    for one, other in zip(function(*case), law(*case), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("function", CASES)
def test_gradcheck(function):
    case = CASES[function](torch.float64)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_without_residual(assert_no_worse, dtype):
    x, weight, eps, _ = norm_case(dtype)
    own = check_values(assert_no_worse, rms_norm, (x, weight, eps), (0, 1))
    assert torch.equal(own[0], rms_norm(x, weight, eps, torch.zeros_like(x))[0])
    # Rows of zeros: 1 / rms is 1 / sqrt(eps), and nothing is NaN.
    assert not rms_norm(torch.zeros_like(x), weight, eps).any()


def test_the_sum_is_rounded_before_it_is_normalised():
    """In bf16, 256 + 1 is 256: the 1 must not reach the norm."""
    x, one = torch.full((1, 8), 256.0).bfloat16(), torch.ones(1, 8).bfloat16()
    normed, total = rms_norm(one, torch.ones(8).bfloat16(), 0.0, residual=x)
    assert torch.equal(total, x) and torch.equal(normed, rms_norm(x, torch.ones(8).bfloat16(), 0.0))


@pytest.mark.parametrize("trained", [(0,), (3,), (1,), (0, 3), (1, 3)])
def test_only_wanted_gradients_of_the_norm(trained):
    case = norm_case(torch.float64)
    own, law = (outputs_and_grads(f, case, trained) for f in (rms_norm, plain.rms_norm))
    for one, other in zip(own, law, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_what_depends_on_nothing_trained_asks_for_no_gradient():
    x, weight, eps, residual = norm_case(torch.float64)
    normed, total = rms_norm(x, weight.requires_grad_(), eps, residual)
    assert normed.requires_grad and not total.requires_grad
    q, k, *tables = rotary_case(torch.float64)
    assert [t.requires_grad for t in rotary(q, k.requires_grad_(), *tables)] == [False, True]


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_used(used):
    """The gradient of the other one is None, not zeros."""
    for function, law in ((rms_norm, plain.rms_norm), (rotary, plain.rotary)):
        grads = []
        for f in (function, law):
            case, trained = CASES[function](torch.float64), TRAINED[function]
            leaves = [t.requires_grad_() if i in trained else t for i, t in enumerate(case)]
            grads.append(torch.autograd.grad(
                f(*leaves)[used].sin().sum(), [leaves[i] for i in trained], allow_unused=True
            ))
        for one, other in zip(*grads, strict=True):
            assert (one is None or not one.any()) if other is None else torch.allclose(one, other)


def test_mixed_dtypes_of_autocast(assert_no_worse):
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
    own = check_values(assert_no_worse, rms_norm, (branch, weight, eps, residual))
    assert own[2].dtype == torch.bfloat16 and own[4].dtype == torch.float32
    low = rms_norm(branch, weight, eps)  # a bf16 row times an fp32 weight, as torch promotes
    assert torch.equal(low, plain.rms_norm(branch, weight, eps)) and low.dtype == torch.float32


LAYOUTS = {
    "transposed": lambda x: x.detach().transpose(0, -1).contiguous().transpose(0, -1),
    "every second row": lambda x: torch.stack([x.detach()] * 2, dim=1)[:, 0],
    "half of a wider tensor": lambda x: torch.cat([x.detach()] * 2, dim=-1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", CASES)
def test_layouts(function, layout):
    case, trained = CASES[function](torch.float64), TRAINED[function]
    moved = [
        LAYOUTS[layout](t) if isinstance(t, torch.Tensor) and t.dim() > 1 else t for t in case
    ]
    own, plain_layout = (outputs_and_grads(function, c, trained) for c in (moved, case))
    # Not the same bits: vectorised and scalar exp differ.
    torch.testing.assert_close(own, plain_layout, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("function", CASES)
def test_any_leading_shape_and_none(function):
    options = {rms_norm: dict(shape=(0, 40)), rotary: dict(rows=(0,)), swiglu: dict(shape=(0, 7))}
    make = {rms_norm: norm_case, rotary: rotary_case,
            swiglu: lambda dtype, shape: (normal(*shape), normal(*shape))}[function]
    for one in outputs_and_grads(function, make(torch.float64, **options[function]),
                                 TRAINED[function]):
        assert not one.any() and one.dim()
    shape = {rms_norm: dict(shape=(40,)), rotary: dict(rows=()), swiglu: dict(shape=(40,))}
    own = outputs_and_grads(function, CASES[function](torch.float64, **shape[function]),
                            TRAINED[function])
    assert own[0].shape in ((40,), (4, 6)) and own[0].any()


def test_rotary_of_one_tensor():
    q, k, cos, sin = rotary_case(torch.float32)
    both = rotary(q, k, cos, sin)
    alone, nothing = rotary(k, None, cos, sin)
    assert nothing is None and torch.equal(alone, both[1])
    own = outputs_and_grads(rotary, (k, None, cos, sin), (0,))
    assert torch.equal(own[1], outputs_and_grads(plain.rotary, (k, None, cos, sin), (0,))[1])


def test_rotary_keeps_lengths_and_turns_back():
    q, k, cos, sin = rotary_case(torch.float64)
    turned = rotary(q, k, cos, sin)
    for one, other in zip(turned, (q, k), strict=True):
        torch.testing.assert_close(one.norm(dim=-1), other.norm(dim=-1), rtol=1e-12, atol=0)
        assert not torch.allclose(one, other)
    back = rotary(*turned, cos, -sin)
    torch.testing.assert_close(back, (q, k), rtol=1e-12, atol=1e-12)


def saved_bytes(run):
    """Bytes of the different tensors that autograd keeps of run()."""
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(kept.values())


def test_what_is_kept_for_backward():
    """swiglu: two tensors of three. rms_norm: the sum and 1 / rms of each row, where plain torch
    keeps an fp32 copy of 16-bit rows. rotary: the tables alone."""
    gate, up = (t.bfloat16().requires_grad_() for t in swiglu_case(torch.float32, (64, 128)))
    own, law = (saved_bytes(lambda f=f: f(gate, up)) for f in (swiglu, plain.swiglu))
    assert own == 2 * gate.nbytes and law == 3 * gate.nbytes
    x, weight, eps, residual = norm_case(torch.bfloat16, (64, 128))
    x.requires_grad_()
    own, law = (
        saved_bytes(lambda f=f: f(x, weight, eps, residual)) for f in (rms_norm, plain.rms_norm)
    )
    assert own == x.nbytes + weight.nbytes + 64 * 4 and law >= 2 * x.nbytes
    q, k, cos, sin = rotary_case(torch.bfloat16, (64,))
    q.requires_grad_()
    assert saved_bytes(lambda: rotary(q, k, cos, sin)) == cos.nbytes + sin.nbytes


@pytest.mark.parametrize("function", CASES)
def test_shapes_alone(function):
    """On the meta device any read of a value raises."""
    case = [t.to("meta") if isinstance(t, torch.Tensor) else t
            for t in CASES[function](torch.bfloat16)]
    leaves = [t.requires_grad_() if i in TRAINED[function] else t for i, t in enumerate(case)]
    out = function(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()
    assert leaves[0].grad.shape == leaves[0].shape
