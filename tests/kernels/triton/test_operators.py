"""The operators on Triton's kernels in the interpreter, as test_operators.py beside this folder has
them in torch."""

import operator_cases as cases
import pytest
import torch
from bwsft_kernels import _operator
from thinning import thinned
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # 1 / (1 + exp(200)) is meant
DIFFERENTIABLE = [name for name, call in cases.CALLS.items() if call[3]]


@pytest.mark.parametrize("op, arguments", thinned(cases.operators("triton")))
def test_opcheck(op, arguments):
    torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("name", cases.CALLS)
def test_one_graph_under_compile_and_export(name):
    cases.check_compiled(name, "aot_eager", impl="triton")
    own = f"bwsft_kernels.{cases.CALLS[name][0].__name__}.default"
    assert own in cases.check_exported(name, impl="triton")
    cases.check_fake(name, impl="triton")


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_func_grad(name):
    cases.check_func_grad(name, impl="triton")


@pytest.mark.parametrize("name", cases.CALLS)
def test_refusals(name):
    cases.check_refusals(name, "does not run under torch.vmap.* whole batch", impl="triton")


def test_tracers_see_an_operator_and_counters_its_body(monkeypatch):
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    for name in cases.CALLS:
        names, (function, arguments, own, _) = [], cases.CALLS[name]
        expected = cases.outputs(function, arguments, own | {"impl": "triton"})
        for recorded in (True, False):
            monkeypatch.setattr(_operator, "recorded", lambda recorded=recorded: recorded)
            names.clear()
            with Names():
                found = cases.outputs(function, arguments, own | {"impl": "triton"})
            assert (f"bwsft_kernels::{function.__name__}" in names) == recorded
            assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
