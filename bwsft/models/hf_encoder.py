"""Masked-LM encoders of transformers (BERT, ModernBERT) as Backbones, with packed attention.

The layers run as transformers wrote them, on the packed tokens as one sequence of T: all they do
but attention is token by token. Attention goes through transformers' own registry of attention
functions to :mod:`bwsft.models.attention`, which keeps sequences apart, and which records and
reuses keys (after RoPE) and values. ModernBERT's local layers see what is within half their
window in either direction, counted in positions, so that noisy copies and cached blocks fit too.

T packed tokens, S sequences, L the longest, W tokens of a span, D hidden size, E head width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, BertForMaskedLM, ModernBertForMaskedLM
from transformers.modeling_utils import PreTrainedModel

from bwsft.models.attention import ActiveLayout, Layout, packed_layout
from bwsft.models.backbone import Backbone, Family, packed
from bwsft.models.hf_decoder import DecoderBackbone, checkpointed_layers, without_dropout
from bwsft.models.kv_cache import Context

_PACKED = "bwsft_packed"
_FULL, _LOCAL = "full_attention", "sliding_attention"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    layouts: list[Layout] | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers: q, k, v [1, H, T, E] -> [1, T, H, E]. ``layouts``,
    one for each layer, say what a token sees; dropout is off here, and the scale is 1/sqrt(E)."""
    if layouts is None:
        raise ValueError(
            "this model runs packed tokens: call its Backbone, or give it back its own attention "
            'with model.set_attn_implementation("sdpa")'
        )
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    return layouts[module.layer_idx].attend(module.layer_idx, *rows)[None], None


AttentionInterface.register(_PACKED, _attend)


class EncoderBackbone(DecoderBackbone):
    """The trainer's and sampler's view of a masked LM; :func:`new_encoder` builds it.

    Hidden states include the MLM head's transform, which runs for the wanted tokens alone; all
    layers run for the whole batch. The head is the decoder matrix with its bias.
    """

    varlen_kernel = Backbone.varlen_kernel

    def run_layers(
        self, ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None = None
    ) -> Tensor:
        encoder, local = self.decoder, layout
        kinds = _layer_types(encoder.config)
        if _LOCAL in kinds:
            local = _windowed(layout, position_ids, encoder.config.local_attention // 2)
        layouts = [local if kind == _LOCAL else layout for kind in kinds]
        packed = {"input_ids": ids[None], "position_ids": position_ids[None], "layouts": layouts}
        hidden = encoder(**packed).last_hidden_state[0]
        if wanted is not None:
            hidden = hidden.index_select(0, wanted.flatten())
        return _transform(self.base_model)(hidden)

    def _rows_of(self, batch: Any, rows: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
        """As in Backbone; without a span the transform runs for the supervised tokens alone too."""
        if context is not None:
            return super()._rows_of(batch, rows, context)
        hidden = self.hidden_states(**packed(batch), wanted=rows, mask=getattr(batch, "mask", None))
        return hidden, torch.arange(len(rows), device=rows.device)


def _windowed(layout: Layout, position_ids: Tensor, window: int) -> Layout:
    """A layout with a mask, of it the keys within ``window`` positions of the query alone."""
    if isinstance(layout, ActiveLayout):
        keys = torch.arange(layout.cache.reach, device=position_ids.device)
        if layout.slot_positions is not None:
            keys = layout.slot_positions[:, None, :]
    else:
        if layout.kernel is not None:  # which takes no mask
            padded = packed_layout(layout.cu_seqlens, layout.max_length)
            layout = replace(padded, cache=layout.cache, cache_slots=layout.cache_slots)
        # A padded query is at position 0: it sees the sequence's start, so it has keys.
        keys = layout.grid(position_ids)[:, None, :]
    distance = (layout.grid(position_ids)[:, :, None] - keys).abs()  # [S, queries, keys]
    near = (distance <= window)[:, None]
    return replace(layout, mask=near if layout.mask is None else near & layout.mask)


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
    model.set_attn_implementation(_PACKED)
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
