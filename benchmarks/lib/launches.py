"""Counts launches, those of the small fused operations of bwsft_kernels as on a GPU.

On a CPU they would run, and be counted, in torch. Inside `fused_launches` the Triton launchers run
on the CPU's tensors with each launch counted and left out; torch supplies the numbers. An operator
counter outside sees one operator for every launch, and nothing else of it.
"""

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import torch
from bwsft_kernels._rms_norm import _forward as norm_fwd
from bwsft_kernels._rms_norm import rms_norm_bwd
from bwsft_kernels._rotary import _turn
from bwsft_kernels._swiglu import _forward as swiglu_fwd
from bwsft_kernels._swiglu import swiglu_bwd
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


def _counted(launcher, law):
    """A stand-in for `launcher` that returns the numbers of `law`."""

    def call(*args):
        with _disable_current_modes():
            with Launches() as operators, _left_out() as kernels:
                launcher(*args)
            out = law(*args)
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


def _last(function, *more):
    return lambda *args: function(*args, *more)


TWINS = {
    "_rms_norm_triton": SimpleNamespace(
        MOST_D=_rms_norm_triton.MOST_D,
        rms_norm_fwd=_counted(_rms_norm_triton.rms_norm_fwd, _last(norm_fwd, None)),
        rms_norm_bwd=_counted(_rms_norm_triton.rms_norm_bwd, rms_norm_bwd),
    ),
    "_rotary_triton": SimpleNamespace(turn=_counted(_rotary_triton.turn, _last(_turn, None))),
    "_swiglu_triton": SimpleNamespace(
        swiglu_fwd=_counted(_swiglu_triton.swiglu_fwd, _last(swiglu_fwd, None)),
        swiglu_bwd=_counted(_swiglu_triton.swiglu_bwd, swiglu_bwd),
    ),
}


@contextlib.contextmanager
def fused_launches():
    """Inside, rms_norm, rotary and swiglu count as on a GPU, whatever impl says."""
    with contextlib.ExitStack() as stack:
        for name in ("rms_norm", "rotary", "swiglu"):
            module = sys.modules[f"bwsft_kernels._{name}"]
            stack.enter_context(
                mock.patch.object(module, "triton_twin", lambda impl, tensor, name: TWINS[name])
            )
        yield
