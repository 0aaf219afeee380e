"""Counts launches, those of bwsft_kernels' small operators as on a GPU.

On a CPU they would run, and be counted, in torch. Inside `fused_launches` they are operators, whose
numbers torch supplies, and a `Launches` counter runs each of them once more on its Triton launchers
with every launch counted and left out.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import torch
from lib.harness import CountOperators
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

try:
    from bwsft_kernels import _philox_triton, _rms_norm_triton, _rotary_triton, _swiglu_triton
    from triton.runtime.jit import JITFunction
except ImportError:
    raise SystemExit("this counts what Triton's launchers launch: install triton (Linux)") from None

# Operator -> its file in bwsft_kernels, its body there, and the file of its launchers.
COUNTED = {
    "rms_norm": ("_rms_norm", "_fwd", _rms_norm_triton),
    "rms_norm_bwd": ("_rms_norm", "_bwd", _rms_norm_triton),
    "rotary": ("_rotary", "_fwd", _rotary_triton),
    "rotary_bwd": ("_rotary", "_bwd", _rotary_triton),
    "swiglu": ("_swiglu", "_fwd", _swiglu_triton),
    "swiglu_bwd": ("_swiglu", "_bwd", _swiglu_triton),
    "philox_uniform": ("philox", "_philox_body", _philox_triton),
}


class Launches(CountOperators):
    """Operators that launch something: no views, no allocations, no questions about dtypes."""

    def __enter__(self) -> "Launches":
        self._whole = contextlib.ExitStack()
        for name, (file, *_) in COUNTED.items():
            # A counter sees what the body of an operator does; these are to be seen whole.
            op = getattr(torch.ops.bwsft_kernels, name).default
            caller = "_philox" if file == "philox" else f"_{name}"
            public = sys.modules[f"bwsft_kernels.{file}"]
            self._whole.enter_context(mock.patch.object(public, caller, op))
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._whole.close()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        before = self.count
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if "empty" in func.name() or not isinstance(out, (torch.Tensor, tuple, list)):
            self.count = before
        namespace, _, name = func.name().partition("::")
        if namespace == "bwsft_kernels" and name in COUNTED:
            self.count = before + _launches(args, *COUNTED[name])
        return out


def _launches(args: tuple, file: str, body: str, kernels: ModuleType) -> int:
    """What an operator launches on a GPU."""
    public = sys.modules[f"bwsft_kernels.{file}"]
    as_on_gpu = {"triton_implementation": lambda *_: kernels}
    if file == "philox":
        as_on_gpu["checking"] = lambda tensor: False
    with mock.patch.multiple(public, **as_on_gpu), _disable_current_modes():
        with Launches() as operators, left_out() as names:
            getattr(public, body)(*args)
    return operators.count + len(names)


@contextlib.contextmanager
def left_out() -> Iterator[list[str]]:
    """Inside, Triton launches append their name and do nothing."""
    names = []

    def run(self: JITFunction, *args: object, **options: object) -> None:
        names.append(self.__name__)

    with mock.patch.object(JITFunction, "run", run):
        yield names


@contextlib.contextmanager
def fused_launches() -> Iterator[None]:
    """Inside, rms_norm, rotary and swiglu are operators of their own on a CPU too."""
    with contextlib.ExitStack() as stack:
        for name in ("_rms_norm", "_rotary", "_swiglu"):
            public = sys.modules[f"bwsft_kernels.{name}"]
            never = mock.patch.object(public, "plain_torch", lambda impl, tensor: False)
            stack.enter_context(never)
        yield
