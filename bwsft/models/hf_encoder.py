"""Masked-LM encoders of transformers (BERT, ModernBERT) as Backbones, with packed attention.

They run as decoders do (:mod:`bwsft.models.hf_decoder`). ModernBERT's local layers see what is
within half their window in either direction, counted in positions, so that noisy copies and cached
blocks fit too. The queries that see a key are then more than two ranges of noisy copies: these
layers take a dense mask.

T packed tokens, S sequences, L the longest, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from bwsft_kernels import RangePlan
from torch import Tensor, nn
from transformers import BertForMaskedLM, ModernBertForMaskedLM
from transformers.modeling_utils import PreTrainedModel

from bwsft.models.attention import ActiveLayout, AttentionLayout, Layout, RangeLayout, packed_layout
from bwsft.models.backbone import Family, packed
from bwsft.models.hf_decoder import (
    ATTENTION,
    DecoderBackbone,
    checkpointed_layers,
    without_dropout,
)
from bwsft.models.kv_cache import Context

_FULL, _LOCAL = "full_attention", "sliding_attention"


class EncoderBackbone(DecoderBackbone):
    """The trainer's and sampler's view of a masked LM; :func:`new_encoder` builds it.

    Hidden states include the MLM head's transform, which runs for the wanted tokens alone; all
    layers run for the whole batch. The head is the decoder matrix with its bias.
    """

    def run_layers(
        self, ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None = None
    ) -> Tensor:
        return _transform(self.base_model)(super().run_layers(ids, position_ids, layout, wanted))

    def layouts(self, layout: Layout, position_ids: Tensor) -> list[Layout]:
        config, local = self.decoder.config, layout
        kinds = _layer_types(config)
        if _LOCAL in kinds:
            local = _windowed(layout, position_ids, config.local_attention // 2)
        return [local if kind == _LOCAL else layout for kind in kinds]

    def _rows_of(self, batch: Any, rows: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
        """As in Backbone; without a span the transform runs for the supervised tokens alone too."""
        if context is not None:
            return super()._rows_of(batch, rows, context)
        hidden = self.hidden_states(**packed(batch), wanted=rows)
        return hidden, torch.arange(len(rows), device=rows.device)


@dataclass(frozen=True)
class _Window:
    """Attention of queries [T', H, E] to keys [T, K, E], in the grids that they fill, under a mask
    [S, 1, queries, keys]."""

    queries: AttentionLayout
    keys: AttentionLayout
    mask: Tensor

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            layout.grid(x).transpose(1, 2)
            for layout, x in ((self.queries, q), (self.keys, k), (self.keys, v))
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        out = out.transpose(1, 2).flatten(0, 1)
        slots = self.queries.slots
        return out if slots is None else out.index_select(0, slots)


@dataclass(frozen=True)
class _LocalRanges(RangeLayout):
    window: _Window = None

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.window(q, k, v)


@dataclass(frozen=True)
class _LocalActive(ActiveLayout):
    window: _Window = None

    def against(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.window(q, *(self.cache.seen(x).flatten(0, 1) for x in (keys, values)))


def _windowed(layout: Layout, position_ids: Tensor, window: int) -> Layout:
    """A layout in which a query sees of what it saw the keys within ``window`` positions alone."""
    if isinstance(layout, AttentionLayout):
        if layout.kernel is not None:  # which takes no mask
            padded = packed_layout(layout.cu_seqlens, layout.max_length)
            layout = replace(padded, cache=layout.cache, cache_slots=layout.cache_slots)
        # A padded query is at position 0: it sees the sequence's start, so it has keys.
        near = _near(layout.grid(position_ids), layout.grid(position_ids), window)
        return replace(layout, mask=near if layout.mask is None else near & layout.mask)
    if isinstance(layout, RangeLayout):
        keys, edges = position_ids, layout.cu_seqlens
    elif layout.batch is not None:
        keys, edges = layout.batch.position_ids, layout.batch.cu_seqlens
    else:
        count, slots = layout.cache.seen(layout.cache.keys[0]).shape[:2]
        keys = torch.arange(slots, device=position_ids.device).repeat(count)
        edges = torch.arange(count + 1, device=keys.device) * slots
    made = _window(layout.plan, position_ids, keys, edges, window)
    kind = _LocalRanges if isinstance(layout, RangeLayout) else _LocalActive
    return kind(**vars(layout), window=made)


def _window(
    plan: RangePlan | None, queries: Tensor, keys: Tensor, edges: Tensor, window: int
) -> _Window:
    """Of queries and keys at these positions, [T'] and [T], the keys with boundaries ``edges``
    [S + 1]; without a plan the queries are a rectangle."""
    count, key_grid = len(edges) - 1, packed_layout(edges)
    if plan is None:
        rows = torch.arange(count + 1, device=edges.device) * (len(queries) // count)
    else:
        owner = torch.searchsorted(edges[1:].int(), plan.query_ranges[0], right=True)
        rows = torch.searchsorted(owner, torch.arange(count + 1, device=owner.device))
    query_grid = packed_layout(rows)
    mask = _near(query_grid.grid(queries), key_grid.grid(keys), window)
    if plan is not None:
        place = torch.arange(key_grid.max_length, device=edges.device)
        start, stop, own_start, own_stop = (
            query_grid.grid(x.long())[..., None] for x in plan.query_ranges - edges[owner].int()
        )
        # A padded query, at position 0, sees the sequence's first key: without any it may be NaN.
        stop = stop + 1 - query_grid.grid(torch.ones_like(owner))[..., None]
        seen = (place >= start) & (place < stop) | (place >= own_start) & (place < own_stop)
        mask &= seen[:, None]
    return _Window(query_grid, key_grid, mask)


def _near(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Boolean [S, 1, queries, keys] of positions [S, queries] and [S, keys]."""
    return ((queries[:, :, None] - keys[:, None, :]).abs() <= window)[:, None]


def _layer_types(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or [_FULL] * config.num_hidden_layers


def _transform(model: PreTrainedModel) -> nn.Module:
    """Dense, activation and norm between the last layer and the decoder matrix."""
    modern = isinstance(model, ModernBertForMaskedLM)
    return model.head if modern else model.cls.predictions.transform


def new_encoder(model: PreTrainedModel, family: Family) -> EncoderBackbone:
    """Put a masked LM (``BertForMaskedLM``, ``ModernBertForMaskedLM``) into a Backbone, in
    place: its attention function changes, and its own dropouts (0.1 in BERT's configs) are off.

    All context modes and block masks are supported. ``ValueError`` for a model that this cannot
    serve.
    """
    _check(model)
    without_dropout(model)
    model.set_attn_implementation(ATTENTION)
    # transformers names the embeddings too; sharded on their own they would part from a tied head.
    model._no_split_modules = sorted({type(layer).__name__ for layer in checkpointed_layers(model)})
    return EncoderBackbone(model, family)


def _check(model: PreTrainedModel) -> None:
    config = model.config
    if not isinstance(model, (BertForMaskedLM, ModernBertForMaskedLM)):
        raise ValueError(
            f"{type(model).__name__} is no masked LM that is known here: load BertForMaskedLM or "
            "ModernBertForMaskedLM"
        )
    if getattr(config, "is_decoder", False):
        raise ValueError("the config says is_decoder: a masked LM must see both sides")
    if getattr(config, "chunk_size_feed_forward", 0):
        raise ValueError("chunk_size_feed_forward is not supported: set it to 0 in the config")
    if foreign := set(_layer_types(config)) - {_FULL, _LOCAL}:
        raise ValueError(f"layers of type {', '.join(sorted(foreign))} are not supported")
