"""What `linear_cross_entropy` checks, and what its loop over chunks of rows needs to know.

Letters: T rows of the input, N supervised rows, D hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._dispatch import check_float, check_impl
from ._matmul import autocast_dtype

# Logits at a time where the caller doesn't say; on a CPU few enough that pages are touched once and
# used again, but those of half of the rows or of so many that arithmetic and not reading the head
# takes the time (64 rows x 126k at a time: 6 to 17 % more time than 128, a sixth less memory).
GPU_BYTES, CPU_LOGITS, CPU_ROWS = 512 << 20, 8 << 20, 256


@dataclass(frozen=True)
class LossOptions:
    """What the loop over the chunks needs to know beside tensors."""

    by_row: bool = False  # reduction "none"
    smooth: float = 0.0  # label smoothing of all rows; where a tensor has it, any number but 0
    softcap: float | None = None
    excluded_id: int | None = None
    chunk_bytes: int | None = None
    impl: str = "auto"
    dtype: torch.dtype = torch.float32  # of the matmuls
    confidence: float = 0.0  # of the entropy of rows whose target leads

    @property
    def wide(self) -> torch.dtype:
        """Of loss and accumulators: fp32, or fp64 for fp64 input."""
        return torch.promote_types(self.dtype, torch.float32)

    def budget(self, device: torch.device, rows: int, head: torch.Size) -> int:
        """Most bytes of logits at a time, of so many rows in all under a head [V, D]."""
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        if device.type != "cpu":
            return GPU_BYTES
        logits = max(CPU_LOGITS, min(CPU_ROWS, -(-rows // 2)) * head[0])
        # Several chunks of 16 bits need a sum of the head's gradient in fp32 besides.
        summed = 0 if self.dtype == self.wide else head.numel() * self.wide.itemsize
        return max(logits * self.dtype.itemsize, summed)


def check_head(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """ValueError for shapes, dtypes and kinds of tensors that a linear head can't take."""
    for name, value in (("input", input), ("linear_weight", weight), ("linear_bias", bias)):
        if not isinstance(value, Tensor | None):
            raise ValueError(f"{name} must be a tensor, not {type(value).__name__}{_advice(value)}")
    check_float(input=input, linear_weight=weight, linear_bias=bias)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"linear_weight must be [V, D] and not empty, not {list(weight.shape)}; "
                         "a head sharded by FSDP or ZeRO-3 must be gathered first")
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(f"input {list(input.shape)} must end in the {weight.shape[1]} columns of "
                         "linear_weight")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_bias must be [{len(weight)}], not {list(bias.shape)}")


def _advice(value: object) -> str:
    """What to pass in place of a layer such as nn.Linear, or of what a model returns."""
    if hasattr(value, "last_hidden_state"):
        return ": pass its last_hidden_state"
    if not isinstance(value, torch.nn.Module):
        return ""
    bias = getattr(value, "bias", None)
    also = "" if bias is None else ", and linear_bias=head.bias"
    return f": pass head.weight{also}"


def check_target(target: Tensor, input: Tensor) -> None:
    if not isinstance(target, Tensor):
        raise ValueError(f"target must be a tensor, not {type(target).__name__}")
    if target.device != input.device:
        raise ValueError(f"target is on {target.device}, but input on {input.device}: move it")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError("target must hold class numbers; probability targets are unsupported")
    if target.shape != input.shape[:-1]:
        raise ValueError(f"target must be {list(input.shape[:-1])}, not {list(target.shape)}")


def check_options(
    reduction: str, softcap: float | None, excluded_id: int | None, chunk_bytes: int | None,
    label_smoothing: float | Tensor, num_rows: int | None, confidence: float, impl: str, rows: int,
    vocabulary: int,
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", not {reduction!r}')
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap must be positive and finite, not {softcap}; None is none")
    if excluded_id is not None and not (0 <= excluded_id < vocabulary and vocabulary > 1):
        raise ValueError(f"excluded_id must lie in [0, {vocabulary}), not {excluded_id}")
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
    if not isinstance(label_smoothing, Tensor | float | int):
        raise ValueError(f"label_smoothing must be a number or a tensor, not "
                         f"{type(label_smoothing).__name__}")
    if not isinstance(label_smoothing, Tensor) and not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], not {label_smoothing}")
    if num_rows is not None and not 0 <= num_rows <= rows:
        raise ValueError(f"num_rows must lie in [0, {rows}], not {num_rows}")
    if not 0 <= confidence < float("inf"):
        raise ValueError(f"confidence must be 0 or positive, not {confidence}")
    check_impl(impl)


def matmul_dtype(input: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype in which torch.nn.functional.linear would multiply, here and in autocast."""
    dtypes = {tensor.dtype for tensor in (input, weight, bias) if tensor is not None}
    autocast = autocast_dtype(input.device)
    if autocast is not None and torch.float64 not in dtypes:
        return autocast
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(f"input, linear_weight and linear_bias mix {names}; cast or use autocast")
    return input.dtype


def per_row(
    value: Tensor | None, name: str,  # [...] or a 0-dim tensor, which may be on any device
    target: Tensor, dtype: torch.dtype,  # [...]
) -> Tensor | None:  # [T]
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(value).__name__}")
    if not value.dim():
        value = value.to(target.device)
    if value.device != target.device:
        raise ValueError(f"{name} is on {value.device}, but target on {target.device}: move it")
    if value.requires_grad:
        raise ValueError(f"{name} gets no gradient; detach it")
    if value.shape not in (target.shape, ()):
        raise ValueError(f"{name} must be shaped like target, {list(target.shape)}")
    return value.expand(target.shape).reshape(-1).to(dtype)
