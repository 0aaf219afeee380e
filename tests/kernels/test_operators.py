"""The operators in torch on a CPU: opcheck, one graph under torch.compile, export, fake tensors,
func.grad, clear refusals.

The small functions are plain torch where nobody asks for Triton, so that every transform knows
them; range_attention, linear_argmax and philox_uniform are operators everywhere.
"""

import subprocess
import sys

import operator_cases as cases
import pytest
import torch
from bwsft_kernels import GumbelKey, linear_argmax, philox_uniform, rms_norm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

OPAQUE = [name for name, call in cases.CALLS.items() if not call[3] or call[0] is cases.attend]
PLAIN = [name for name in cases.CALLS if name not in OPAQUE]


@pytest.mark.parametrize("op, arguments", cases.operators("torch"))
def test_opcheck(op, arguments):
    torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("name", cases.CALLS)
def test_one_graph_under_compile(name):
    cases.check_compiled(name, "aot_eager")


@pytest.mark.parametrize("name", cases.CALLS)
def test_export_and_fake_tensors(name):
    called = cases.check_exported(name)
    function = cases.CALLS[name][0]
    own = f"bwsft_kernels.{function.__name__}.default"
    assert (own in called) == (name in OPAQUE)
    cases.check_fake(name)


def test_func_grad_of_an_operator():
    cases.check_func_grad("range_attention")


@pytest.mark.parametrize("name", PLAIN)
def test_func_grad_and_vmap_of_plain_torch(name):
    cases.check_func_grad(name)
    function, arguments, own, _ = cases.CALLS[name]
    twice = torch.func.vmap(lambda x: cases.outputs(function, (x, *arguments[1:]), own))
    found = twice(torch.stack([arguments[0]] * 2))
    for one, other in zip(found, cases.outputs(function, arguments, own), strict=True):
        torch.testing.assert_close(one, torch.stack([other] * 2))


@pytest.mark.parametrize("name", OPAQUE)
def test_refusals(name):
    cases.check_refusals(name, "does not run under torch.vmap.* whole batch")


def test_the_operators_gradients_are_those_of_plain_torch():
    """What a GPU without Triton runs when it is compiled."""
    for name in PLAIN:
        function, arguments, _, trained = cases.CALLS[name]
        leaves = [t.clone().requires_grad_() if i in trained else t
                  for i, t in enumerate(arguments)]
        if function is rms_norm:  # the operator has the tensors first
            x, weight, eps, *residual = leaves
            given = (x, weight, *(residual or [None]), eps)
        else:
            given = leaves
        out = getattr(cases.OPS, function.__name__)(*given, "torch")
        out = [t for t in (out if isinstance(out, tuple) else (out,)) if t.numel()]
        expected = cases.outputs(function, leaves, {})
        torch.testing.assert_close(tuple(out), expected, rtol=0, atol=0)
        trained = [leaves[i] for i in trained]
        grads, plain = (
            torch.autograd.grad([t.sin().sum() for t in found], trained)
            for found in (out, expected)
        )
        torch.testing.assert_close(grads, plain, rtol=1e-5, atol=1e-6)


def test_no_gradient_flows_and_none_is_asked_for():
    x, weight, _, _ = cases.cases.head_problem(4, 9, 6, 0)
    found = linear_argmax(x.requires_grad_(), weight)
    assert not found.confidence.requires_grad

    def scaled(scale):
        position = torch.arange(3)
        return (scale * philox_uniform(position, 0, 1, seed=2, stream=3)).sum()

    expected = philox_uniform(torch.arange(3), 0, 1, seed=2, stream=3).sum()
    torch.testing.assert_close(torch.func.grad(scaled)(torch.tensor(1.0)), expected)


@pytest.mark.parametrize("name", cases.CALLS)
def test_tensors_of_a_gpu_are_traced_as_operators(name):
    """On a machine without one: what torch.compile sees there."""
    function, arguments, options, _ = cases.CALLS[name]
    seen = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.name())
            return func(*args, **(kwargs or {}))

    def on_gpu(value):
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="cuda")

    with FakeTensorMode(), Names():
        fakes = [on_gpu(value) for value in arguments]
        if key := options.get("gumbel"):
            noise = {name: on_gpu(value) for name, value in vars(key).items()}
            options = options | {"gumbel": GumbelKey(**noise)}
        found = cases.outputs(function, fakes, options)
    assert f"bwsft_kernels::{function.__name__}" in seen
    assert {t.device.type for t in found} == {"cuda"}


def test_the_import_is_light():
    """torch._dynamo takes a second, and triton is optional."""
    code = "import bwsft_kernels, sys; print({'torch._dynamo', 'triton'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr
