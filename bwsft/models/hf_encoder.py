"""Masked-LM encoders of transformers (BERT, ModernBERT) behind the Backbone contract.

The layers run as transformers wrote them, on the packed rows as one row of T tokens: all they do
but attention is row by row. Attention goes through transformers' own registry of attention
functions to :mod:`bwsft.models.attention`, which keeps sequences apart, and which records and
reuses keys (after RoPE) and values. ModernBERT's local layers see what lies within half their
window in either direction, counted in positions, so that noisy copies and cached blocks fit too.

T packed tokens, S sequences, L the longest, W rows of a span, D hidden size, E head width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, BertForMaskedLM, ModernBertForMaskedLM
from transformers.modeling_utils import PreTrainedModel

from bwsft.models.attention import ActiveLayout, AttentionLayout, packed_layout, varlen_kernel
from bwsft.models.backbone import Family, check_ids, check_positions
from bwsft.models.hf_decoder import DecoderBackbone, _grid, _layers, without_dropout
from bwsft.models.kv_cache import Context, ContextCache, Span
from bwsft.models.llada import compute_dtype

_PACKED = "bwsft_packed"
_FULL, _LOCAL = "full_attention", "sliding_attention"

Layout = AttentionLayout | ActiveLayout


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    layouts: list[Layout] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: q, k, v [1, H, T, E] -> [1, T, H, E]. ``layouts``,
    one for each layer, say what a row sees; dropout is off here, and the scale is 1/sqrt(E)."""
    if layouts is None:
        raise ValueError(
            "this model runs packed rows: call its Backbone, or give it back its own attention "
            'with model.set_attn_implementation("sdpa")'
        )
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    return layouts[module.layer_idx].attend(module.layer_idx, *rows)[None], None


AttentionInterface.register(_PACKED, _attend)


class EncoderBackbone(DecoderBackbone):
    """The trainer's and sampler's view of a masked LM; :func:`new_encoder` builds it.

    Hidden states include the MLM head's transform, which runs for the wanted rows alone; all
    layers run for the whole batch. The head is the decoder matrix with its bias.
    """

    def hidden_states(
        self,
        ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        context: ContextCache | None = None,
        *,
        max_length: int | None = None,
        wanted: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        check_ids(ids, self.family.vocab_size)
        full = packed_layout(cu_seqlens, max_length, self._kernel() if mask is None else None)
        check_positions(full.max_length, position_ids, self.family.max_positions, mask)
        if mask is not None:
            full = replace(full, mask=mask)
        local = full
        if self._window is not None:
            local = full if full.kernel is None else packed_layout(cu_seqlens, max_length)
            local = replace(local, mask=_nearby(local, position_ids, self._window))
        if context is not None:
            slots = context.packed_slots(cu_seqlens, position_ids)
            record = {"record": context, "cache_slots": slots}
            full, local = replace(full, **record), replace(local, **record)
        return self._run(ids, position_ids, full, local, wanted)

    def active_hidden_states(
        self, ids: Tensor, span: Span, cache: ContextCache, wanted: Tensor | None = None
    ) -> Tensor:
        check_ids(ids, self.family.vocab_size)
        positions = span.positions()
        slots = cache.slots(positions, span.repeats())
        full = ActiveLayout(cache, slots, len(ids), cache.mask())
        local = full
        if self._window is not None:
            slot = torch.arange(cache.reach, device=ids.device)
            near = ((positions[:, :, None] - slot).abs() <= self._window)[:, None]
            local = replace(full, mask=near if full.mask is None else near & full.mask)
        return self._run(ids.flatten(), positions.flatten(), full, local, wanted)

    def _run(
        self,
        ids: Tensor,
        position_ids: Tensor,
        full: Layout,
        local: Layout,
        wanted: Tensor | None,
    ) -> Tensor:
        """Rows [T] -> hidden states of all or the wanted rows, [T or their number, D]."""
        encoder = self.decoder
        for layer in _layers(encoder):
            layer.gradient_checkpointing = self.checkpointing
        layouts = [local if kind == _LOCAL else full for kind in _layer_types(encoder.config)]
        packed = {"input_ids": ids[None], "position_ids": position_ids[None], "layouts": layouts}
        hidden = encoder(**packed).last_hidden_state[0]
        if wanted is not None:
            hidden = hidden.index_select(0, wanted.flatten())
        return _transform(self.base_model)(hidden)

    def _rows_of(self, batch: Any, rows: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
        """As in Backbone; without a span the transform runs for the loss rows alone too."""
        if context is not None:
            return super()._rows_of(batch, rows, context)
        hidden = self.hidden_states(
            batch.ids,
            batch.position_ids,
            batch.cu_seqlens,
            max_length=getattr(batch, "max_length", None),
            wanted=rows,
            mask=getattr(batch, "mask", None),
        )
        return hidden, torch.arange(len(rows), device=rows.device)

    @property
    def _window(self) -> int | None:
        """How many positions a local layer sees to either side; None without such layers."""
        config = self.decoder.config
        return config.local_attention // 2 if _LOCAL in _layer_types(config) else None

    def _kernel(self):
        weight, config = self.decoder.get_input_embeddings().weight, self.decoder.config
        width = config.hidden_size // config.num_attention_heads
        return varlen_kernel(weight.device, compute_dtype(weight), width)


def _nearby(layout: AttentionLayout, position_ids: Tensor, window: int) -> Tensor:
    """The mask of a padded layout, of it the keys within ``window`` positions: [S, 1, L, L]."""
    places = _grid(position_ids, layout)
    near = ((places[:, :, None] - places[:, None, :]).abs() <= window)[:, None]
    # A padded query stands at position 0: it sees the sequence's start, and no row is empty.
    return near if layout.mask is None else near & layout.mask


def _layer_types(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or [_FULL] * config.num_hidden_layers


def _transform(model: PreTrainedModel) -> nn.Module:
    """Dense, activation and norm between the last layer and the decoder matrix."""
    if isinstance(model, ModernBertForMaskedLM):
        return model.head
    return model.cls.predictions.transform


def new_encoder(model: PreTrainedModel, family: Family) -> EncoderBackbone:
    """Put a masked LM (``BertForMaskedLM``, ``ModernBertForMaskedLM``) behind the contract, in
    place: its attention function changes, and its own dropouts (0.1 in BERT's configs) are off.

    All context modes and block masks are supported. ``ValueError`` for a family or a model that
    this cannot serve.
    """
    _check(model, family)
    without_dropout(model)
    model.set_attn_implementation(_PACKED)
    # transformers names the embeddings too; sharded on their own they would part from a tied head.
    model._no_split_modules = sorted({type(layer).__name__ for layer in _layers(model)})
    return EncoderBackbone(model, family)


def _check(model: PreTrainedModel, family: Family) -> None:
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
    if family.logit_shift or family.softcap is not None:
        raise ValueError("a masked LM predicts in place: logit_shift must be 0, and softcap None")
    rows = model.get_input_embeddings().num_embeddings
    if not max(family.mask_id, family.eos_id) < family.vocab_size <= rows:
        raise ValueError(
            f"mask_id={family.mask_id} and eos_id={family.eos_id} must lie below vocab_size="
            f"{family.vocab_size}, and that within the model's {rows} embeddings"
        )
    if family.max_positions > config.max_position_embeddings:
        raise ValueError(
            f"the family has {family.max_positions} positions, the model "
            f"{config.max_position_embeddings}"
        )
