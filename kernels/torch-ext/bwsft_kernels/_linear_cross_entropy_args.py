"""What `linear_cross_entropy` checks, and the choice of the rows that it multiplies.

Letters: T rows of the input, N supervised rows, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import check_float, require
from ._matmul import autocast_dtype


@dataclass(frozen=True)
class LossOptions:
    """What the autograd function needs to know beside tensors."""

    reduction: str
    softcap: float | None
    excluded_id: int | None
    chunk_bytes: int
    impl: str
    dtype: torch.dtype  # of the matmuls

    @property
    def wide(self) -> torch.dtype:
        """Of loss and accumulators: fp32, or fp64 for fp64 input."""
        return torch.promote_types(self.dtype, torch.float32)


class SelectedRows(NamedTuple):
    """The supervised rows of an input [T, D]: what of `target` and its companions is kept."""

    index: Tensor  # [N] into the T rows
    target: Tensor  # [N]
    weight: Tensor  # [N]
    smoothing: Tensor | float  # [N]


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
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError("target must hold class numbers; probability targets are unsupported")
    if target.shape != input.shape[:-1]:
        raise ValueError(f"target must be {list(input.shape[:-1])}, not {list(target.shape)}")


def check_options(
    reduction: str, softcap: float | None, excluded_id: int | None, chunk_bytes: int,
    label_smoothing: float | Tensor, vocabulary: int,
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", not {reduction!r}')
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, not {softcap}")
    if excluded_id is not None and not (0 <= excluded_id < vocabulary and vocabulary > 1):
        raise ValueError(f"excluded_id must lie in [0, {vocabulary}), not {excluded_id}")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
    if isinstance(label_smoothing, Tensor):
        fits = ((label_smoothing >= 0) & (label_smoothing <= 1)).all()
        require(fits, lambda: "label_smoothing must lie in [0, 1]")
    elif not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], not {label_smoothing}")


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
    value: Tensor | float | None, name: str,  # [...]
    target: Tensor, dtype: torch.dtype,  # [...]
) -> Tensor | float:  # [T], 1.0 for None; a number stays one
    if value is None:
        return 1.0
    if not isinstance(value, Tensor):
        return float(value)
    if value.requires_grad:
        raise ValueError(f"{name} gets no gradient; detach it")
    if value.shape not in (target.shape, ()):
        raise ValueError(f"{name} must be shaped like target, {list(target.shape)}")
    return value.expand(target.shape).reshape(-1).to(dtype)


def select_rows(
    target: Tensor, row_weight: Tensor | float, smoothing: Tensor | float,  # [...], [T], [T]
    ignore_index: int, num_rows: int | None, options: LossOptions, vocabulary: int,
) -> SelectedRows:
    """The rows to multiply: those with a target and a weight, or a list's first num_rows."""
    target = target.reshape(-1).long()
    counts = target != ignore_index
    if isinstance(row_weight, Tensor):
        counts &= row_weight != 0
    else:
        row_weight = torch.full(target.shape, row_weight, dtype=options.wide, device=target.device)
    if num_rows is None:
        index = counts.nonzero()[:, 0]  # on a GPU the one synchronization
        target, row_weight = target[index], row_weight[index]
    else:
        if not 0 <= num_rows <= len(target):
            raise ValueError(f"num_rows must lie in [0, {len(target)}], not {num_rows}")
        size = min(len(target), -(-num_rows // 8) * 8)  # tensor cores like multiples of 8
        require(~counts[size:].any(), lambda: f"rows after num_rows={num_rows} are supervised")
        index, counts = torch.arange(size, device=target.device), counts[:size]
        target = torch.where(counts, target[:size], 1 if options.excluded_id == 0 else 0)
        row_weight = torch.where(counts, row_weight[:size], 0)
    valid = (target >= 0) & (target < vocabulary)
    require(valid.all(), lambda: _complain(target, valid, index, f"outside [0, {vocabulary})"))
    if options.excluded_id is not None:
        valid = target != options.excluded_id
        require(valid.all(), lambda: _complain(target, valid, index, "the excluded_id"))
    if isinstance(smoothing, Tensor):
        smoothing = smoothing[index]
    if options.reduction == "mean":
        total = row_weight.sum()
        row_weight = row_weight / torch.where(total == 0, 1, total)
    return SelectedRows(index, target, row_weight, smoothing)


def _complain(target: Tensor, valid: Tensor, index: Tensor, what: str) -> str:
    bad = int((~valid).nonzero()[0, 0])
    return f"target {int(target[bad])} of row {int(index[bad])} is {what}"
