"""rms_norm, rotary and swiglu in Triton's interpreter, alone and in a LLaDA.

There is no tl.dot in them, so the interpreter is right about bf16 too.
"""

import importlib
import sys

import kernel_cases as cases
import pytest
import tiny_llada
import torch
from bwsft_kernels import _rms_norm_triton, _tuning, rms_norm, rotary, swiglu, torch_ops
from bwsft_kernels._rms_norm import MOST_D
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from thinning import thinned

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow"),  # 1 / (1 + exp(200)) is meant
    pytest.mark.filterwarnings("ignore:invalid value"),  # inf / inf too
]
MAKE, FUNCTIONS = cases.SMALL, list(cases.SMALL)


@pytest.fixture
def used(monkeypatch):
    """Every call takes the Triton file, bf16 included; yields the names taken."""
    names = []

    def taken(impl, tensor, name):
        names.append(name)
        return importlib.import_module(f"bwsft_kernels.{name}")

    for name in ("rms_norm", "rotary", "swiglu"):
        public = sys.modules[f"bwsft_kernels._{name}"]
        monkeypatch.setattr(public, "triton_implementation", taken)
        monkeypatch.setattr(public, "plain_torch", lambda impl, tensor: False)
    return names


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_and_gradients(assert_no_worse, used, function, dtype):
    own = cases.check_values(assert_no_worse, function, MAKE[function](dtype))
    assert set(used) == {f"_{function.__name__}_triton"}
    again = cases.outputs_and_grads(function, MAKE[function](dtype), cases.TRAINED[function])
    assert all(torch.equal(one, two) for one, two in zip(own, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_points_are_those_of_torch(used, dtype):
    """fp32 sums and exponentials differ in their last bits, which seldom shows in 16: a rounding
    left out would change a tenth of the numbers. The norm's gradients are rounded once, not thrice.
    """
    case = cases.norm_case(dtype, (24, 100))
    pairs = list(zip(rms_norm(*case), torch_ops.rms_norm(*case), strict=True))
    assert torch.equal(*pairs[1])  # the sum
    case = cases.swiglu_case(dtype, (24, 100))
    results = (cases.outputs_and_grads(f, case, (0, 1)) for f in (swiglu, torch_ops.swiglu))
    for one, other in [*pairs, *zip(*results, strict=True)]:
        assert (one == other).double().mean() > 0.98


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rotary_has_the_bits_of_torch(used, dtype):
    case = cases.rotary_case(dtype, (7,), (6, 3), 12)
    results = (cases.outputs_and_grads(f, case, (0, 1)) for f in (rotary, torch_ops.rotary))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


NORMS = {"one": (1, 1), "wide": (2, 1025), "more rows than programs": (37, 600), "3-d": (2, 3, 64),
         "heads": (5, 119, 128)}


@pytest.mark.parametrize(
    ("shape", "trained"), thinned([(n, t) for n in NORMS for t in ((0, 1), (0,), (1,))], 2)
)
def test_norm_shapes(assert_no_worse, used, shape, trained):
    """37 rows on 4 processors: 19 programs of 2 rows, the last of 1. 595 heads: 25 programs of
    three times 8, the last of 19."""
    case = cases.norm_case(torch.float32, NORMS[shape], scale=30.0)
    cases.check_values(assert_no_worse, rms_norm, case[:3], trained)
    cases.check_values(assert_no_worse, rms_norm, case, (*trained, 3))


@pytest.mark.parametrize("count", [1, 3, 40])
def test_norm_gradient_of_weight_on_any_chip(assert_no_worse, used, count, monkeypatch):
    monkeypatch.setattr(_rms_norm_triton, "processors", lambda device: count)
    cases.check_values(assert_no_worse, rms_norm, cases.norm_case(torch.float16, (11, 48)))
    assert _tuning.processors(torch.device("cpu")) == 4


def test_norm_of_mixed_dtypes(assert_no_worse, used):
    """Under autocast: an fp32 residual and weight, a bf16 branch."""
    x, weight, eps, residual = cases.norm_case(torch.float32)
    own = cases.check_values(assert_no_worse, rms_norm, (x.bfloat16(), weight, eps, residual))
    assert [t.dtype for t in own[:3]] == [torch.float32, torch.float32, torch.bfloat16]
    cases.check_values(assert_no_worse, rms_norm, (x.bfloat16(), weight, eps), (0, 1))


def test_rows_that_are_not_finite_stay_alone(used):
    x, weight, eps, _ = cases.norm_case(torch.float32, (4, 40))
    x[1, 3], x[2] = float("nan"), 0.0
    normed = rms_norm(x, weight, eps)
    assert normed.isnan().any(1).tolist() == [False, True, False, False] and not normed[2].any()
    gate = torch.tensor([[float("inf"), -float("inf"), float("nan"), -200.0]])
    one, other = swiglu(gate, torch.ones(1, 4)), torch_ops.swiglu(gate, torch.ones(1, 4))
    assert torch.equal(one.isnan(), other.isnan()) and one[0, 0] == float("inf")


@pytest.mark.parametrize("heads, width", [((1, 1), 2), ((5, 3), 10), ((3, 3), 64)])
def test_rotary_shapes(assert_no_worse, used, heads, width, monkeypatch):
    monkeypatch.setattr(sys.modules["bwsft_kernels._rotary_triton"], "PAIRS", 64)  # several blocks
    case = cases.rotary_case(torch.float32, (3,), heads, width)
    cases.check_values(assert_no_worse, rotary, case)
    cases.check_values(assert_no_worse, rotary, (case[0], None, *case[2:]), (0,))


def test_swiglu_past_one_block(assert_no_worse, used):
    cases.check_values(assert_no_worse, swiglu, cases.swiglu_case(torch.float32, (2, 2049)))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_layouts(used, function, layout):
    case, trained = MAKE[function](torch.float32), cases.TRAINED[function]
    moved = [cases.LAYOUTS[layout](t) if getattr(t, "ndim", 0) > 1 else t for t in case]
    own, straight = (cases.outputs_and_grads(function, c, trained) for c in (moved, case))
    assert all(torch.equal(one, two) for one, two in zip(own, straight, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_rows_and_an_expanded_upstream_gradient(used, function):
    for part in (slice(0), slice(2)):
        leaves = [t[part].requires_grad_() if getattr(t, "ndim", 0) > 2 else t
                  for t in MAKE[function](torch.float32)]
        if function is rotary:
            leaves[2:] = [t.detach() for t in leaves[2:]]
        grads = []
        for f in (function, cases.in_torch(function)):
            out = f(*leaves)
            out = out if isinstance(out, tuple) else (out,)
            grads.append(torch.autograd.grad(sum(t.sum() for t in out), leaves[0])[0])
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_no_rows_give_the_weight_a_gradient_of_zeros(used):
    x, weight = torch.ones(0, 24), torch.ones(24, requires_grad=True)
    rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.grad.shape == (24,) and not weight.grad.any()


def test_one_output_used(used):
    for function in (rms_norm, rotary):
        for output in (0, 1):
            case, trained = MAKE[function](torch.float32), cases.TRAINED[function]
            leaves = [t.requires_grad_() if i in trained else t for i, t in enumerate(case)]
            grads = [
                torch.autograd.grad(f(*leaves)[output].sin().sum(), [leaves[i] for i in trained],
                                    allow_unused=True, materialize_grads=True)
                for f in (function, cases.in_torch(function))
            ]
            torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [(0,), (3,), (1,), (0, 3), (1, 3)])
def test_only_wanted_gradients_of_the_norm(assert_no_worse, used, trained):
    cases.check_values(assert_no_worse, rms_norm, cases.norm_case(torch.float32), trained)


def test_what_depends_on_nothing_trained_asks_for_no_gradient(used):
    x, weight, eps, residual = cases.norm_case(torch.float32)
    normed, total = rms_norm(x, weight.requires_grad_(), eps, residual)
    assert normed.requires_grad and not total.requires_grad
    q, k, *tables = cases.rotary_case(torch.float32)
    assert [t.requires_grad for t in rotary(q, k.requires_grad_(), *tables)] == [False, True]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_second_backward_is_the_first_and_a_second_derivative_is_refused(used, function):
    case = MAKE[function](torch.float32)
    out = function(case[0].requires_grad_(), *case[1:])
    out = out[0] if isinstance(out, tuple) else out
    one, two = (torch.autograd.grad(out.sum(), case[0], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, two) and one.any()
    (grad,) = torch.autograd.grad(out.sin().sum(), case[0], create_graph=True)
    with pytest.raises(RuntimeError, match=f"{function.__name__} has no second derivative"):
        grad.square().sum().backward()


def saved_bytes(run):
    """Bytes of the different tensors that autograd keeps of run()."""
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(kept.values())


def test_what_is_kept_for_backward(used):
    """swiglu: two tensors of three. rms_norm: the sum, where plain torch keeps an fp32 copy of
    16-bit rows too. rotary: the tables alone."""
    gate, up = (t.bfloat16().requires_grad_() for t in cases.swiglu_case(torch.float32, (64, 128)))
    own, plain = (saved_bytes(lambda f=f: f(gate, up)) for f in (swiglu, torch_ops.swiglu))
    assert own == 2 * gate.nbytes and plain == 3 * gate.nbytes
    x, weight, eps, residual = cases.norm_case(torch.bfloat16, (64, 128))
    x.requires_grad_()
    own, plain = (
        saved_bytes(lambda f=f: f(x, weight, eps, residual)) for f in (rms_norm, torch_ops.rms_norm)
    )
    assert own == x.nbytes + weight.nbytes and plain >= 2 * x.nbytes
    q, k, cos, sin = cases.rotary_case(torch.bfloat16, (64,))
    q.requires_grad_()
    assert saved_bytes(lambda: rotary(q, k, cos, sin)) == cos.nbytes + sin.nbytes


def test_rows_past_2_31():
    far = cases.past_2_31()
    one, other = (cases.normal(5, 96, seed=i, dtype=torch.float16) for i in (1, 2))
    weight = torch.ones(96).half()
    expected = rms_norm(one, weight, 1e-5, other, impl="triton")
    assert torch.equal(rms_norm(far(one), weight, 1e-5, other, impl="triton")[0], expected[0])
    assert torch.equal(rms_norm(one, weight, 1e-5, far(other), impl="triton")[0], expected[0])
    expected = swiglu(one, other, impl="triton")
    assert torch.equal(swiglu(far(one), other, impl="triton"), expected)
    assert torch.equal(swiglu(one, far(other), impl="triton"), expected)
    q, k, *tables = cases.rotary_case(torch.float16, (5,), (4, 2), 24)
    expected = rotary(q, k, *tables, impl="triton")
    assert torch.equal(rotary(far(q), k, *tables, impl="triton")[0], expected[0])
    assert torch.equal(rotary(q, far(k), *tables, impl="triton")[1], expected[1])
    # Heads first, as attention lays them out: head 4 is 2^31 elements after head 0.
    q, _, *tables = cases.rotary_case(torch.float16, (3,), (5, 1), 24)
    apart = far(q.transpose(0, 1).contiguous()).transpose(0, 1)
    rotated = rotary(apart, None, *tables, impl="triton")[0]
    assert torch.equal(rotated, rotary(q, None, *tables, impl="triton")[0])


def test_rows_too_long_for_registers(used, monkeypatch):
    """Torch takes them where nobody insists on Triton."""
    x = torch.randn(2, MOST_D + 1)
    weight = torch.ones(x.shape[1])
    assert torch.equal(rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5))
    assert not used
    with pytest.raises(ValueError, match="8193 columns, more than 8192"):
        rms_norm(x, weight, 1e-5, impl="triton")


@pytest.mark.slow
@settings(max_examples=200, deadline=None, phases=[Phase.generate],
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(data=st.data())
def test_many_shapes(assert_no_worse, used, data):
    draw = data.draw
    function, dtype = draw(st.sampled_from(FUNCTIONS)), draw(st.sampled_from(cases.DTYPES))
    rows, scale = draw(st.integers(1, 20)), draw(st.sampled_from([1e-2, 1.0, 50.0]))
    if function is rotary:
        heads, width = draw(st.tuples(*[st.integers(1, 9)] * 2)), 2 * draw(st.integers(1, 40))
        case, trained = cases.rotary_case(dtype, (rows,), heads, width), (0, 1)
    else:
        make = {rms_norm: cases.norm_case, swiglu: cases.swiglu_case}[function]
        case = make(dtype, (rows, draw(st.integers(2, 300))), scale=scale)
        sets = [(0, 1, 3), (0, 3), (1,), (3,)] if function is rms_norm else [(0, 1), (0,), (1,)]
        trained = draw(st.sampled_from(sets))
    cases.check_values(assert_no_worse, function, case, trained)


def llada(fused):
    fields = {"n_kv_heads": 2, "vocab_size": 90, "mask_token_id": 89}
    backbone = tiny_llada.backbone(torch.float32, **fields)
    backbone.set_fused_ops("on" if fused else "off")
    return backbone


@pytest.mark.parametrize("pruned", [False, True])
def test_a_model_with_fused_ops(assert_no_worse, used, pruned):
    """Hidden states and every gradient: no further from float64 than 3x plain torch, with a band of
    8 roundings of the largest entry."""
    ids = torch.randint(2, 89, (19,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(7), torch.arange(12)])
    boundaries = torch.tensor([0, 7, 19])
    wanted = torch.tensor([[1, 2, 6], [7, 17, 18]]) if pruned else None
    results, forward = [], None
    for backbone in (llada(True), llada(False), llada(False).double()):
        out = backbone.hidden_states(ids, positions, boundaries, wanted=wanted)
        forward = forward or list(used)
        out.sin().sum().backward()
        parameters = backbone.named_parameters()
        results.append([out.detach(), *(p.grad for n, p in parameters if p.grad is not None)])
    # Two norms a layer and one at the end; the pruned layer rotates queries and keys apart.
    counts = {name: forward.count(f"_{name}_triton") for name in ("rms_norm", "rotary", "swiglu")}
    assert counts == {"rms_norm": 5, "rotary": 3 if pruned else 2, "swiglu": 2}
    for one, two, truth in zip(*results, strict=True):
        band = 8 * torch.finfo(torch.float32).eps * float(truth.abs().max())
        assert_no_worse(one, two, truth, band)
