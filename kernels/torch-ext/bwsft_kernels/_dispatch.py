"""What the public functions share: choice of the implementation, checks that never stall a GPU."""

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor


def tracked(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed from the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def check_float(**tensors: Tensor | None) -> None:
    """ValueError for a tensor that is distributed, no floating-point one, or on another device
    than the first: a kernel would read its address on the wrong GPU. None passes."""
    first = device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) is not Tensor and _is_distributed(tensor):
            raise ValueError(f"{name} is a DTensor; gather it first, e.g. with full_tensor()")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, not {tensor.dtype}")
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but {first} on {device}: move it")


def _is_distributed(tensor: Tensor) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


@functools.cache
def import_triton(name: str) -> tuple[ModuleType | None, str | None]:
    """(module, None), or (None, why it can't be imported)."""
    try:
        return importlib.import_module(f".{name}", __package__), None
    except ImportError as error:
        return None, str(error)


@functools.cache
def _warn_slow(reason: str) -> None:
    warnings.warn(f"bwsft_kernels uses torch on CUDA tensors: {reason}", stacklevel=4)


def flag(name: str) -> bool:
    """Whether an environment variable is 1."""
    return os.environ.get(name, "0") == "1"


@functools.cache  # Triton too reads it once
def _interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter, which takes CPU tensors."""
    return flag("TRITON_INTERPRET")


def obstacle(tensor: Tensor) -> str | None:
    """Why no Triton kernel can take the tensor; None if one can."""
    if tensor.dtype == torch.float64:
        return "Triton has no float64 kernels"
    if tensor.dtype == torch.bfloat16 and _interpreting():
        return "Triton's interpreter multiplies bf16 wrongly; unset TRITON_INTERPRET"
    if not (tensor.is_cuda or _interpreting()):
        return f"the tensors are on {tensor.device.type} and TRITON_INTERPRET is not set"
    return None


def check_impl(impl: str) -> None:
    if impl not in ("auto", "triton", "torch"):
        raise ValueError(f'impl must be "auto", "triton" or "torch", not {impl!r}')


def plain_torch(impl: str, tensor: Tensor) -> bool:
    """Whether a public function of `tensor` runs as torch's own operators, which every transform
    knows, and not as one of the package's."""
    check_impl(impl)
    if impl == "auto":
        return not tensor.is_cuda or tensor.dtype == torch.float64
    return impl == "torch"


def triton_implementation(impl: str, tensor: Tensor, name: str) -> ModuleType | None:
    """The module `name` of Triton kernels to use for `tensor`, or None for torch.

    Triton has no float64 path: "auto" takes torch for it, "triton" raises ValueError.
    """
    if plain_torch(impl, tensor):
        return None
    if (reason := obstacle(tensor)) is None:
        module, reason = import_triton(name)
        if module is not None:
            return module
        if impl == "auto":
            _warn_slow(reason)
    if impl == "triton":
        raise ValueError(f'impl="triton" can\'t be used: {reason}; use impl="auto" or "torch"')
    return None


def checking(tensor: Tensor) -> bool:
    """Whether to look at values: a dozen small launches on a GPU, so there only if asked to."""
    return not tensor.is_cuda or flag("BWSFT_DEBUG")


def require(condition: Tensor, message: Callable[[], str]) -> None:
    """Raise ValueError(message()) unless the 0-dim bool tensor `condition` holds.

    On a GPU, reading it would stall the stream, so there it is a device-side assertion;
    BWSFT_DEBUG=1 reads it at once and gives the full message.
    """
    if condition.device.type == "cpu" or flag("BWSFT_DEBUG"):
        if not bool(condition):
            raise ValueError(message())
    elif condition.is_cuda:
        torch._assert_async(condition, "bwsft_kernels: bad input, rerun with BWSFT_DEBUG=1")
