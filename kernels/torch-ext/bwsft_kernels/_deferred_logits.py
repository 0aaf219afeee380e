"""Logits that a model's own loss code may handle, and that are never made.

Letters: D hidden size, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._linear_cross_entropy import linear_cross_entropy


class DeferredLogits:
    """scale * (hidden @ weight.T + bias), or cap * tanh of it, until cross_entropy asks for a loss.

    It knows what models do to logits before a loss: casts, reshaping to [-1, V], division or
    multiplication by a number, tanh. Everything else raises ValueError.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None,  # [..., D], [V, D], [V]
        scale: float = 1.0, cap: float | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.scale, self.cap = scale, cap
        self.device, self.dtype = hidden.device, hidden.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], len(self.weight)))

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> "DeferredLogits":
        """The loss is accumulated in fp32 whatever the logits' dtype is."""
        return self

    def to(self, target: object) -> "DeferredLogits":
        if target not in (torch.float32, self.dtype, self.device):
            raise _unknown(f"to({target})")
        return self

    def contiguous(self) -> "DeferredLogits":
        return self

    def view(self, *shape: int | tuple[int, ...]) -> "DeferredLogits":
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        if shape[-1] != len(self.weight):
            raise _unknown(f"view{shape} of {list(self.shape)}")
        hidden = self.hidden.reshape(*shape[:-1], self.hidden.shape[-1])
        return DeferredLogits(hidden, self.weight, self.bias, self.scale, self.cap)

    reshape = view

    def __mul__(self, factor: object) -> "DeferredLogits":
        if not isinstance(factor, int | float):
            raise _unknown(f"multiplication by {type(factor).__name__}")
        scale, cap = self.scale, self.cap
        scale, cap = (scale * factor, cap) if cap is None else (scale, cap * factor)
        return DeferredLogits(self.hidden, self.weight, self.bias, scale, cap)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> "DeferredLogits":
        if not isinstance(divisor, int | float):
            raise _unknown(f"division by {type(divisor).__name__}")
        return self * (1 / divisor)

    def _refuse(self, *args: object) -> None:
        raise _unknown("indexing, or arithmetic other than a product with a number")

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __rtruediv__ = __neg__ = _refuse

    def tanh(self) -> "DeferredLogits":
        if self.cap is not None:
            raise _unknown("a second tanh")
        return DeferredLogits(self.hidden, self.weight, self.bias, self.scale, 1.0)

    def cross_entropy(self, target: Tensor, **options: object) -> Tensor:
        """The fused loss, with the options of torch.nn.functional.cross_entropy."""
        hidden, bias = self.hidden, self.bias
        # cap * tanh(scale * z) = cap * tanh(z' / cap) with z' = (scale * cap) * z
        scale = self.scale if self.cap is None else self.scale * self.cap
        if not math.isclose(scale, 1.0):
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        return linear_cross_entropy(
            hidden, self.weight, target, linear_bias=bias, softcap=self.cap,
            **{name: value for name, value in options.items() if value is not None})

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None,
    ) -> object:
        if func is F.cross_entropy:
            logits, target = args
            return logits.cross_entropy(target, **kwargs)
        if func is torch.tanh:
            return args[0].tanh()
        raise _unknown(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> object:
        raise AttributeError(str(_unknown(name)))


def _unknown(operation: str) -> ValueError:
    return ValueError(
        f"this model's forward does to its logits what the fused loss doesn't know: {operation}; "
        "bwsft_kernels.unpatch(model) gives it its own loss back")
