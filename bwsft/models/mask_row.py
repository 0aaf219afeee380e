"""The row of [MASK] in embedding and head, where a base model has none that was trained."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from bwsft.models.backbone import active_module


@torch.no_grad()
def add_mask_row(model: PreTrainedModel, mask_id: int) -> None:
    """Give [MASK] a row in embedding and head: the mean of the others, so that whoever grows the
    same base gets the same model, adapters fit, and its logit is no outlier."""
    rows = len(model.get_input_embeddings().weight)
    if mask_id < rows:
        return
    with torch.random.fork_rng(devices=[]):  # transformers draws a row first
        model.resize_token_embeddings(mask_id + 1, mean_resizing=False)
    for values in (v for pair in token_rows(model) for v in pair if v is not None):
        values[rows:] = values[:rows].mean(0, dtype=torch.float32).to(values.dtype)


@torch.no_grad()
def fill_mask_row(model: PreTrainedModel, mask_id: int) -> None:
    """Where [MASK] has a row of a vocabulary padded beyond the tokenizer that nobody trained, give
    it the mean of the trained rows, in the embedding and, by the same test, in an untied head.

    Nothing of it is stored: whoever loads the same base finds the same row, in training under an
    adapter, on resuming, in decoding. A row once trained passes the test no more.
    """
    (embedding, _), *head = token_rows(model)
    if embedding.is_meta or not len(trained := trained_beside(embedding, mask_id)):
        return
    warnings.warn(
        f"the embedding of [MASK], id {mask_id}, is a spare row that was never trained: it is set "
        "to the mean of the trained rows",
        stacklevel=4,
    )
    _to_mean(embedding, mask_id, trained)
    for matrix, bias in head:
        if len(trained := trained_beside(matrix, mask_id)):
            _to_mean(matrix, mask_id, trained)
            _to_mean(bias, mask_id, trained)


def trained_beside(matrix: Tensor, row: int) -> Tensor:
    """Indices of the trained rows of an embedding [V, D] if `row` is untrained; none if it is
    trained, or if none are.

    Untrained is a row that is zero, or equal to another one, as the spare rows of a padded
    vocabulary are: training tells any two tokens apart. Both up to a hundredth of the median row's
    largest element, since weight decay and the head's gradient draw spare rows together without
    end. Spare rows that still have random numbers of their own cannot be told from trained ones.
    """
    largest = torch.linalg.vector_norm(matrix, ord=float("inf"), dim=1).float()
    rounding = 0.01 * largest.median()
    untrained = largest <= rounding
    if not untrained[row]:
        start = matrix[:, :8] - matrix[row, :8]  # leaves few, which are compared whole
        alike = (start.abs() <= rounding).all(1).nonzero().flatten()
        alike = alike[((matrix[alike] - matrix[row]).abs() <= rounding).all(1)]
        if len(alike) == 1:
            return alike[:0]
        untrained[alike] = True
    return (~untrained).nonzero().flatten()


def token_rows(model: PreTrainedModel) -> list[tuple[Tensor, Tensor | None]]:
    """(weight, bias) of the embedding and of an untied head."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    pairs = [(m.weight, getattr(m, "bias", None)) for m in map(active_module, modules)]
    return pairs[:1] if pairs[0][0] is pairs[1][0] and pairs[1][1] is None else pairs


def _to_mean(values: Tensor | None, row: int, others: Tensor) -> None:
    if values is not None:
        values[row] = values[others].mean(0, dtype=torch.float32).to(values.dtype)
