"""Counts launches, those of the small fused operations of bwsft_kernels as on a GPU.

On a CPU they would run, and be counted, in torch. Inside `fused_launches` the Triton launchers run
on the CPU's tensors with each launch counted and left out; torch supplies the numbers of forward,
and gradients are zeros. An operator counter outside sees one operator for every launch, and nothing
else of it.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from bwsft_kernels import torch_ops
from lib.harness import CountOperators
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

try:
    from bwsft_kernels import _rms_norm_triton, _rotary_triton, _swiglu_triton
    from triton.runtime.jit import JITFunction
except ImportError:
    raise SystemExit("this counts what Triton's launchers launch: install triton (Linux)") from None


class Launches(CountOperators):
    """Operators that launch something: no views, no allocations, no questions about dtypes."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        before = self.count
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if "empty" in func.name() or not isinstance(out, (torch.Tensor, tuple, list)):
            self.count = before
        return out


def _counted(launcher: Callable, numbers: Callable | None) -> Callable:
    """A stand-in for `launcher` that returns what `numbers` computes, or else zeros."""

    def call(*args: object) -> object:
        with _disable_current_modes():
            with Launches() as operators, _left_out() as kernels:
                out = launcher(*args)
            if numbers:
                out = numbers(*args)
            else:
                tree_map_only(torch.Tensor, torch.Tensor.zero_, out)
            one = torch.ones(())
        for _ in range(operators.count + len(kernels)):
            one.neg()
        return out

    return call


@contextlib.contextmanager
def _left_out() -> Iterator[list[str]]:
    """Inside, Triton launches append their name and do nothing."""
    names = []

    def run(self: JITFunction, *args: object, **options: object) -> None:
        names.append(self.__name__)

    with mock.patch.object(JITFunction, "run", run):
        yield names


def _norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, ...]:
    out = torch_ops.rms_norm(x, weight, eps, residual)
    normed, *total = (out,) if residual is None else out
    return normed, *total, torch_ops.unit_rows(total[0] if total else x, eps)[1]


def _rotated(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, inverse: bool
) -> tuple[Tensor | None, ...]:
    cos, sin = cos[:, None], (-sin if inverse else sin)[:, None]
    return tuple(None if t is None else torch_ops.rotary(t, None, cos, sin)[0] for t in (q, k))


# Module -> its launchers and what gives their numbers.
COUNTED = {
    _rms_norm_triton: {"rms_norm_fwd": _norm, "rms_norm_bwd": None},
    _rotary_triton: {"rotate": _rotated},
    _swiglu_triton: {"swiglu_fwd": torch_ops.swiglu, "swiglu_bwd": None},
}


@contextlib.contextmanager
def fused_launches() -> Iterator[None]:
    """Inside, rms_norm, rotary and swiglu count as on a GPU, whatever impl says."""
    with contextlib.ExitStack() as stack:
        for module, launchers in COUNTED.items():
            public = sys.modules[module.__name__.removesuffix("_triton")]
            always = {"triton_implementation": lambda *_, module=module: module}
            stack.enter_context(mock.patch.multiple(public, **always))
            for name, numbers in launchers.items():
                stand_in = _counted(getattr(module, name), numbers)
                stack.enter_context(mock.patch.object(module, name, stand_in))
        yield
