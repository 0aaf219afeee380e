"""Counts launches, those of the small fused operations of bwsft_kernels as on a GPU.

On a CPU they would run, and be counted, in torch. Inside `fused_launches` the Triton launchers run
on the CPU's tensors with each launch counted and left out; torch supplies the numbers. An operator
counter outside sees one operator for every launch, and nothing else of it.
"""

import contextlib
import sys
from unittest import mock

import torch
from bwsft_kernels import torch_ops
from lib.harness import CountOperators
from torch.utils._python_dispatch import _disable_current_modes

try:
    from bwsft_kernels import _rms_norm_triton, _rotary_triton, _swiglu_triton
    from triton.runtime.jit import JITFunction
except ImportError:
    raise SystemExit("this counts what Triton's launchers launch: install triton (Linux)") from None


class Launches(CountOperators):
    """Operators that launch something: no views, no allocations, no questions about dtypes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.count
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if "empty" in func.name() or not isinstance(out, (torch.Tensor, tuple, list)):
            self.count = before
        return out


def _counted(launcher, numbers):
    """A stand-in for `launcher` that returns what `numbers` computes in torch."""

    def call(*args):
        with _disable_current_modes():
            with Launches() as operators, _left_out() as kernels:
                launcher(*args)
            out = numbers(*args)
            one = torch.ones(())
        for _ in range(operators.count + len(kernels)):
            one.neg()
        return out

    return call


@contextlib.contextmanager
def _left_out():
    """Inside, Triton launches append their name and do nothing."""
    names = []

    def run(self, *args, **options):
        names.append(self.__name__)

    with mock.patch.object(JITFunction, "run", run):
        yield names


def _gradients(function, inputs, upstream):
    """Of the inputs of a function of torch, by autograd."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(function(*inputs), inputs, upstream)


def _norm_fwd(x, weight, eps, residual):
    total = x if residual is None else x + residual
    unit, scale = torch_ops.unit_rows(total, eps)
    return (weight * unit, scale) if residual is None else (weight * unit, total, scale)


def _norm_bwd(grad, total_grad, total, weight, scale, want_weight):
    eps = scale**-2 - total.to(scale.dtype).square().mean(-1, keepdim=True)
    out, weight_grad = _gradients(
        lambda x, weight: torch_ops.rms_norm(x, weight, eps), (total, weight), grad
    )
    return out if total_grad is None else out + total_grad, weight_grad if want_weight else None


def _rotate(q, k, cos, sin, inverse):
    cos, sin = cos[:, None], (-sin if inverse else sin)[:, None]
    return tuple(None if t is None else torch_ops.rotated(t, cos, sin) for t in (q, k))


def _swiglu_bwd(grad, gate, up):
    return _gradients(torch_ops.swiglu, (gate, up), grad)


MODULES = {"rms_norm": _rms_norm_triton, "rotary": _rotary_triton, "swiglu": _swiglu_triton}
NUMBERS = {
    "rms_norm": {"rms_norm_fwd": _norm_fwd, "rms_norm_bwd": _norm_bwd},
    "rotary": {"rotate": _rotate},
    "swiglu": {"swiglu_fwd": torch_ops.swiglu, "swiglu_bwd": _swiglu_bwd},
}


@contextlib.contextmanager
def fused_launches():
    """Inside, rms_norm, rotary and swiglu count as on a GPU, whatever impl says."""
    with contextlib.ExitStack() as stack:
        for name, triton_module in MODULES.items():
            public = sys.modules[f"bwsft_kernels._{name}"]
            stack.enter_context(mock.patch.object(
                public, "triton_implementation", lambda *_, kernels=triton_module: kernels
            ))
            counted = {
                launcher: _counted(getattr(triton_module, launcher), numbers)
                for launcher, numbers in NUMBERS[name].items()
            }
            stack.enter_context(mock.patch.multiple(triton_module, **counted))
        yield
