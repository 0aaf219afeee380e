"""What `linear_cross_entropy` checks, and the choice of the rows that it multiplies.

Letters: T rows of the input, N supervised rows, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import check_float, check_impl, require, triton_implementation
from ._matmul import autocast_dtype

# Logits at a time where the caller doesn't say. On a CPU few enough that pages are touched once and
# used again; a trained head wants fewer chunks, each of which is added to its gradient in fp32.
GPU_BYTES, CPU_LOGITS, CPU_LOGITS_TRAINED = 512 << 20, 32 << 20, 64 << 20


@dataclass(frozen=True)
class LossOptions:
    """What the loop over the chunks needs to know beside tensors."""

    reduction: str = "sum"
    smooth: float = 0.0  # label smoothing of all rows; where a tensor has it, any number but 0
    ignore_index: int = -100
    softcap: float | None = None
    excluded_id: int | None = None
    num_rows: int | None = None
    chunk_bytes: int | None = None
    impl: str = "auto"
    dtype: torch.dtype = torch.float32  # of the matmuls

    @property
    def wide(self) -> torch.dtype:
        """Of loss and accumulators: fp32, or fp64 for fp64 input."""
        return torch.promote_types(self.dtype, torch.float32)

    def budget(self, device: torch.device, trained: bool) -> int:
        """Most bytes of logits at a time; trained: the head gets a gradient."""
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        if device.type != "cpu":
            return GPU_BYTES
        return (CPU_LOGITS_TRAINED if trained else CPU_LOGITS) * self.dtype.itemsize


class SelectedRows(NamedTuple):
    """The supervised rows of an input [T, D]: what of `target` and its companions is kept."""

    index: Tensor | None  # [N] into the T rows; None: the first N rows
    target: Tensor  # [N]
    weight: Tensor  # [N]
    smoothing: Tensor | float  # [N]

    def of(self, x: Tensor, part: slice = slice(None)) -> Tensor:  # [T, D] -> [n, D]
        """The rows of an input, or a part of them."""
        if self.index is None:
            return x[: len(self.target)][part]
        return x.index_select(0, self.index[part])

    def smooth(self, part: slice) -> Tensor | float:
        return self.smoothing[part] if isinstance(self.smoothing, Tensor) else self.smoothing

    def spread(self, loss: Tensor, size: int) -> Tensor:  # [N] -> [T]
        """The losses at their rows, 0 elsewhere."""
        out = loss.new_zeros(size)
        if self.index is None:
            out[: len(loss)] = loss
            return out
        return out.index_copy_(0, self.index, loss)


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
    reduction: str, softcap: float | None, excluded_id: int | None, chunk_bytes: int | None,
    label_smoothing: float | Tensor, num_rows: int | None, impl: str, rows: int, vocabulary: int,
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", not {reduction!r}')
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, not {softcap}")
    if excluded_id is not None and not (0 <= excluded_id < vocabulary and vocabulary > 1):
        raise ValueError(f"excluded_id must lie in [0, {vocabulary}), not {excluded_id}")
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
    if not isinstance(label_smoothing, Tensor) and not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], not {label_smoothing}")
    if num_rows is not None and not 0 <= num_rows <= rows:
        raise ValueError(f"num_rows must lie in [0, {rows}], not {num_rows}")
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
    value: Tensor | float | None, name: str,  # [...]
    target: Tensor, dtype: torch.dtype,  # [...]
) -> Tensor | None:  # [T]; None for a number
    if not isinstance(value, Tensor):
        return None
    if value.requires_grad:
        raise ValueError(f"{name} gets no gradient; detach it")
    if value.shape not in (target.shape, ()):
        raise ValueError(f"{name} must be shaped like target, {list(target.shape)}")
    return value.expand(target.shape).reshape(-1).to(dtype)


def rows_to_multiply(target: Tensor, num_rows: int) -> int:  # [T]
    """How many rows of a list are taken: tensor cores like multiples of 8."""
    if not target.is_cuda:
        return num_rows
    return min(target.shape[0], -(-num_rows // 8) * 8)


def select_rows(
    target: Tensor, row_weight: Tensor | None, smoothing: Tensor | None,  # [T]
    options: LossOptions, vocabulary: int,
) -> SelectedRows:
    """The rows to multiply: those with a target and a weight, or a list's first num_rows."""
    if (kernels := options.wide == torch.float32 and triton_implementation(
            options.impl, target, "_select_rows_triton")):
        index, target, row_weight, _ = kernels.select_rows(
            target, row_weight, options.ignore_index, vocabulary, options.excluded_id,
            options.reduction == "mean", options.num_rows)
    else:
        index, target, row_weight = _select_rows_torch(target, row_weight, options, vocabulary)
    if smoothing is None:
        return SelectedRows(index, target, row_weight, options.smooth)
    fits = ((smoothing >= 0) & (smoothing <= 1)).all()
    require(fits, lambda: "label_smoothing must lie in [0, 1]")
    smoothing = smoothing[: len(target)] if index is None else smoothing[index]
    return SelectedRows(index, target, row_weight, smoothing)


def _select_rows_torch(
    target: Tensor, row_weight: Tensor | None,  # [T]
    options: LossOptions, vocabulary: int,
) -> tuple[Tensor | None, Tensor, Tensor]:  # [N]
    """(index, target, weight) of SelectedRows."""
    target, num_rows = target.long(), options.num_rows
    counts = target != options.ignore_index
    if row_weight is None:
        row_weight = torch.ones(target.shape, dtype=options.wide, device=target.device)
    else:
        counts &= row_weight != 0
    if num_rows is None:
        index = counts.nonzero()[:, 0]  # on a GPU the one synchronization
        target, row_weight = target[index], row_weight[index]
    else:
        size, index = rows_to_multiply(target, num_rows), None
        require(~counts[size:].any(), lambda: f"rows after num_rows={num_rows} are supervised")
        counts = counts[:size]
        target = torch.where(counts, target[:size], 1 if options.excluded_id == 0 else 0)
        row_weight = torch.where(counts, row_weight[:size], 0)
    valid = (target >= 0) & (target < vocabulary)
    require(valid.all(), lambda: _complain(target, valid, index, f"outside [0, {vocabulary})"))
    if options.excluded_id is not None:
        valid = target != options.excluded_id
        require(valid.all(), lambda: _complain(target, valid, index, "the excluded_id"))
    if options.reduction == "mean":
        total = row_weight.sum()
        row_weight = row_weight / torch.where(total == 0, 1, total)
    return index, target, row_weight


def _complain(target: Tensor, valid: Tensor, index: Tensor | None, what: str) -> str:
    bad = int((~valid).nonzero()[0, 0])
    row = bad if index is None else int(index[bad])
    return f"target {int(target[bad])} of row {row} is {what}"
