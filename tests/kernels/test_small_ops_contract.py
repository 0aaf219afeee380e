"""rms_norm, rotary and swiglu: what is refused, and how they live with torch."""

import pytest
import torch
from bwsft_kernels import rms_norm, rotary, swiglu

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


@pytest.mark.parametrize("function", GOOD)
def test_double_backward_is_refused(function):
    case = {n: t.clone() if n != "eps" else t for n, t in GOOD[function].items()}
    first = next(iter(case.values())).requires_grad_()
    out = function(**case)
    out = out[0] if isinstance(out, tuple) else out
    (grad,) = torch.autograd.grad(out.sin().sum(), first, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{function.__name__} has no second derivative"):
        grad.square().sum().backward()


@pytest.mark.parametrize("function", GOOD)
def test_two_backwards_give_the_same(function):
    case = {n: t.clone() if n != "eps" else t for n, t in GOOD[function].items()}
    first = next(iter(case.values())).requires_grad_()
    out = function(**case)
    out = out[0] if isinstance(out, tuple) else out
    one, two = (torch.autograd.grad(out.sum(), first, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, two) and one.any()


@pytest.mark.parametrize("function", GOOD)
def test_compiles_around_one_graph_break(function):
    def step(first, *case):
        out = function(first * 2, *case)
        return (out[0] if isinstance(out, tuple) else out) * 3

    case = tuple(GOOD[function].values())
    assert torch.equal(torch.compile(step, backend="eager")(*case), step(*case))
    assert torch._dynamo.explain(step)(*case).graph_break_count == 1


def test_a_distributed_tensor_is_refused():
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = DTensor.from_local(X, init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ValueError, match="x is a DTensor"):
            rms_norm(sharded, WEIGHT, 1e-5)
    finally:
        dist.destroy_process_group()
