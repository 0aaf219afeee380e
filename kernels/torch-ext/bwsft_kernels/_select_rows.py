"""The supervised rows of `linear_cross_entropy`: their choice, checks and weights.

They are gathered before the loss, by an operation that autograd knows: so the gradient of all T
rows is made after the logits are gone. Letters: T rows of the target, N supervised rows,
V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dispatch import require, triton_implementation
from ._operator import operator


class SelectedRows(NamedTuple):
    """What of a target [T] and its companions is multiplied."""

    index: Tensor | None  # [N] into the T rows; None: the first N rows
    target: Tensor  # [N] int64
    weight: Tensor  # [N]; 0 for rows that aren't supervised

    def of(self, x: Tensor | None) -> Tensor | None:  # [T, ...] -> [N, ...]
        """The rows of a tensor; None stays None."""
        if x is None:
            return None
        if self.index is not None:
            return x.index_select(0, self.index)
        size = self.target.shape[0]
        return x if size == x.shape[0] else x[:size]

    def spread(self, loss: Tensor, size: int) -> Tensor:  # [N] -> [T]
        """The losses at their rows, 0 elsewhere."""
        if self.index is None:
            return F.pad(loss, (0, size - loss.shape[0]))
        return loss.new_zeros(size).index_copy(0, self.index, loss)


def select_rows(
    target: Tensor, row_weight: Tensor | None, smoothing: Tensor | None,  # [T]
    vocabulary: int, ignore_index: int, excluded_id: int | None, normalize: bool,
    num_rows: int | None, dtype: torch.dtype, impl: str,
) -> SelectedRows:
    """The rows to multiply: those with a target and a weight, or a list's first num_rows.

    dtype: of the weights, which `normalize` divides by their sum, unless it is 0. ValueError for a
    bad target, label smoothing or num_rows (on a GPU a device-side assertion).
    """
    index, *kept = _select_rows(
        target, row_weight, smoothing, vocabulary, ignore_index, excluded_id, normalize, num_rows,
        dtype, impl)
    if num_rows is not None or _are_all(index, target):
        index = None
    return SelectedRows(index, *kept)


def _are_all(index: Tensor, target: Tensor) -> bool:  # [N], [T]
    """Whether every row is kept, so that none need be copied; a traced graph, which serves any
    number of them, says no."""
    kept = index.shape[0]
    return not torch.compiler.is_compiling() and type(kept) is int and kept == target.shape[0]


def rows_to_multiply(target: Tensor, num_rows: int) -> int:  # [T]
    """How many rows of a list are taken: tensor cores like multiples of 8."""
    if not target.is_cuda:
        return num_rows
    return min(target.shape[0], -(-num_rows // 8) * 8)


def _body(
    target: Tensor, row_weight: Tensor | None, smoothing: Tensor | None,
    vocabulary: int, ignore_index: int, excluded_id: int | None, normalize: bool,
    num_rows: int | None, dtype: torch.dtype, impl: str,
) -> tuple[Tensor | None, Tensor, Tensor]:
    if smoothing is not None:
        fits = ((smoothing >= 0) & (smoothing <= 1)).all()
        require(fits, lambda: "label_smoothing must lie in [0, 1]")
    choice = ignore_index, vocabulary, excluded_id, normalize, num_rows
    if (kernels := dtype == torch.float32 and triton_implementation(
            impl, target, "_select_rows_triton")):
        return kernels.select_rows(target, row_weight, *choice)[:3]
    return _select_rows_torch(target, row_weight, *choice, dtype)


def _fake(
    target: Tensor, row_weight: object, smoothing: object, vocabulary: int, ignore_index: int,
    excluded_id: object, normalize: bool, num_rows: int | None, dtype: torch.dtype, impl: str,
) -> tuple[Tensor | None, Tensor, Tensor]:
    known = num_rows is not None
    size = (rows_to_multiply(target, num_rows) if known
            else torch.library.get_ctx().new_dynamic_size())
    kept = target.new_empty(size, dtype=torch.int64)
    return None if known else torch.empty_like(kept), kept, kept.new_empty(size, dtype=dtype)


_select_rows = operator(
    "linear_cross_entropy_rows",
    "(Tensor target, Tensor? row_weight, Tensor? smoothing, SymInt vocabulary, int ignore_index, "
    "int? excluded_id, bool normalize, SymInt? num_rows, ScalarType dtype, str impl) "
    "-> (Tensor, Tensor, Tensor)",
    _body, _fake,
)


def _select_rows_torch(
    target: Tensor, row_weight: Tensor | None,  # [T]
    ignore_index: int, vocabulary: int, excluded_id: int | None, normalize: bool,
    num_rows: int | None, dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor, Tensor]:  # [N]
    """The fields of SelectedRows."""
    target = target.long()
    counts = target != ignore_index
    if row_weight is None:
        row_weight = torch.ones((), dtype=dtype, device=target.device).expand(target.shape)
    else:
        counts &= row_weight != 0
    if num_rows is None:
        index = counts.nonzero()[:, 0]  # on a GPU the one synchronization
        target, row_weight = target[index], row_weight[index]
    else:
        size, index = rows_to_multiply(target, num_rows), None
        require(~counts[num_rows:].any(), lambda: f"rows after num_rows={num_rows} are supervised")
        counts = counts[:size]
        target = torch.where(counts, target[:size], 1 if excluded_id == 0 else 0)
        row_weight = torch.where(counts, row_weight[:size], 0)
    valid = (target >= 0) & (target < vocabulary)
    require(valid.all(), lambda: _complain(target, valid, index, f"outside [0, {vocabulary})"))
    if excluded_id is not None:
        valid = target != excluded_id
        require(valid.all(), lambda: _complain(target, valid, index, "the excluded_id"))
    if normalize:
        total = row_weight.sum()
        row_weight = row_weight / torch.where(total == 0, 1, total)
    return index, target, row_weight


def _complain(target: Tensor, valid: Tensor, index: Tensor | None, what: str) -> str:
    bad = int((~valid).nonzero()[0, 0])
    row = bad if index is None else int(index[bad])
    return f"target {int(target[bad])} of row {row} is {what}"
