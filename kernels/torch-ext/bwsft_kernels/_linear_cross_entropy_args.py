"""What `linear_cross_entropy` checks, and the choice of the rows that it multiplies."""

from dataclasses import dataclass

import torch

from ._dispatch import check_floating, require
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


@dataclass(frozen=True)
class LossRows:
    """Rows to multiply, each field [N]: index into the T rows of the input, target, weight."""

    index: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor
    smoothing: torch.Tensor | float


def check_head(input, weight, bias) -> None:
    """ValueError for shapes, dtypes and kinds of tensors that a linear head can't take."""
    named = {"input": input, "linear_weight": weight, "linear_bias": bias}
    check_floating(**{name: t for name, t in named.items() if t is not None})
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"linear_weight must be [V, D] and not empty, not {list(weight.shape)}; "
            "a head sharded by FSDP or ZeRO-3 must be gathered first"
        )
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input {list(input.shape)} must end in the {weight.shape[1]} columns of linear_weight"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_bias must be [{len(weight)}], not {list(bias.shape)}")


def check_target(target, input) -> None:
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError("target must hold class numbers; probability targets are unsupported")
    if target.shape != input.shape[:-1]:
        raise ValueError(f"target must be {list(input.shape[:-1])}, not {list(target.shape)}")


def check_options(reduction, softcap, excluded_id, chunk_bytes, vocabulary) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", not {reduction!r}')
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, not {softcap}")
    if excluded_id is not None and not (0 <= excluded_id < vocabulary and vocabulary > 1):
        raise ValueError(f"excluded_id must lie in [0, {vocabulary}), not {excluded_id}")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")


def check_smoothing(value) -> None:
    if isinstance(value, torch.Tensor):
        fits = ((value >= 0) & (value <= 1)).all()
        require(fits, lambda: "label_smoothing must lie in [0, 1]")
    elif not 0 <= value <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], not {value}")


def matmul_dtype(input, weight, bias) -> torch.dtype:
    """The dtype in which torch.nn.functional.linear would multiply, here and in autocast."""
    dtypes = {tensor.dtype for tensor in (input, weight, bias) if tensor is not None}
    autocast = autocast_dtype(input.device)
    if autocast is not None and torch.float64 not in dtypes:
        return autocast
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(f"input, linear_weight and linear_bias mix {names}; cast or use autocast")
    return input.dtype


def per_row(value, name, target, dtype):
    """None -> 1.0; a number stays one; a tensor shaped like target -> [T] in `dtype`."""
    if value is None:
        return 1.0
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.requires_grad:
        raise ValueError(f"{name} gets no gradient; detach it")
    if value.shape not in (target.shape, ()):
        raise ValueError(f"{name} must be shaped like target, {list(target.shape)}")
    return value.expand(target.shape).reshape(-1).to(dtype)


def select_rows(target, row_weight, smoothing, ignore_index, num_rows, job, vocabulary) -> LossRows:
    """The rows to multiply; row_weight and smoothing are [T] or a float."""
    target = target.reshape(-1).long()
    counts = target != ignore_index
    if isinstance(row_weight, torch.Tensor):
        counts &= row_weight != 0
    else:
        row_weight = torch.full(target.shape, row_weight, dtype=job.wide, device=target.device)
    if num_rows is None:
        index = counts.nonzero()[:, 0]  # on a GPU the one synchronisation
        target, row_weight = target[index], row_weight[index]
    else:
        if not 0 <= num_rows <= len(target):
            raise ValueError(f"num_rows must lie in [0, {len(target)}], not {num_rows}")
        size = min(len(target), -(-num_rows // 8) * 8)  # tensor cores like multiples of 8
        require(~counts[size:].any(), lambda: f"rows behind num_rows={num_rows} bear loss")
        index, counts = torch.arange(size, device=target.device), counts[:size]
        target = torch.where(counts, target[:size], 1 if job.excluded_id == 0 else 0)
        row_weight = torch.where(counts, row_weight[:size], 0)
    valid = (target >= 0) & (target < vocabulary)
    require(valid.all(), lambda: _complain(target, valid, index, f"outside [0, {vocabulary})"))
    if job.excluded_id is not None:
        valid = target != job.excluded_id
        require(valid.all(), lambda: _complain(target, valid, index, "the excluded_id"))
    if isinstance(smoothing, torch.Tensor):
        smoothing = smoothing[index]
    if job.reduction == "mean":
        total = row_weight.sum()
        row_weight = row_weight / torch.where(total == 0, 1, total)
    return LossRows(index, target, row_weight, smoothing)


def _complain(target, valid, index, what) -> str:
    bad = int((~valid).nonzero()[0, 0])
    return f"target {int(target[bad])} of row {int(index[bad])} is {what}"
