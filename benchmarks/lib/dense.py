"""A dense mask in the place of ranges: the peer that `range_attention` is measured against."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from bwsft_kernels import RangePlan
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bwsft.models import attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def visible(plan: RangePlan, query: Tensor, key: Tensor) -> Tensor:
    """Whether a row of the plan sees another, for numbers of rows that broadcast."""
    start, stop, own_start, own_stop = plan.query_ranges[:, query]
    return ((key >= start) & (key < stop)) | ((key >= own_start) & (key < own_stop))


def dense(plan: RangePlan, sequences: int) -> Attend:
    """torch's attention under a mask [S, 1, queries, keys] with repeated key heads. All sequences
    have one length: the packed rows are [S, L]."""
    queries, keys = (
        torch.arange(x.size(1), device=x.device).view(sequences, -1)
        for x in (plan.query_ranges, plan.key_ranges)
    )
    mask = visible(plan, queries[:, :, None], keys[:, None, :])[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        q, k, v = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(0, 1)

    return attend


@contextlib.contextmanager
def dense_masks(sequences: int) -> Iterator[None]:
    """Inside, models attend by dense masks, each made once for all layers."""
    made = WeakTensorKeyDictionary()

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: RangePlan) -> Tensor:
        if plan.query_ranges not in made:
            made[plan.query_ranges] = dense(plan, sequences)
        return made[plan.query_ranges](q, k, v)

    with mock.patch.object(attention, "range_attention", attend):
        yield
