"""Any Hugging Face decoder (Qwen2, Llama, ...) made bidirectional, as a Backbone.

The decoder runs as transformers wrote it, on padded sequences, under an explicit boolean 4-D mask:
transformers hands such a mask to SDPA as it is and then drops the causal flag. Keys and values pass
through its Cache API (after RoPE, as it stores them) into and out of our context cache.

S sequences, T packed tokens, L the longest sequence, W tokens of a span, D hidden size, K key/value
heads, E head width.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

from bwsft.models.attention import ActiveLayout, AttentionLayout, Layout
from bwsft.models.backbone import Backbone, Family, active_module
from bwsft.models.kv_cache import CacheShape, ContextCache

# Factors on the logits that a head given as weight and bias cannot carry.
_LOGIT_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier")


class _LayerCache(Cache):
    """Hands the keys and values of every layer to the context cache of a layout, under the name by
    which transformers' layers call a cache.

    A context pass only writes them. In an active pass attention gets all that the cache reaches,
    [S, K, reach, E].
    """

    def __init__(self, layout: Layout):
        super().__init__(layers=[])
        self.layout, self.updates = layout, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.updates += 1
        layout, context = self.layout, self.layout.cache
        k, v = (_rows(x, context) for x in (key_states, value_states))
        if isinstance(layout, AttentionLayout):
            if layout.slots is not None:
                k, v = k.index_select(0, layout.slots), v.index_select(0, layout.slots)
            context.write(layer_idx, layout.cache_slots, k, v)
            return key_states, value_states
        if torch.is_grad_enabled():
            # A copy of the layer's buffers, kept until backward: the context is a constant, the
            # active tokens carry gradient, and no later draw can write into what backward reads.
            buffers = (context.keys[layer_idx], context.values[layer_idx])
            k, v = (
                b.flatten(0, 1).index_copy(0, layout.cache_slots, x).view_as(b)
                for b, x in zip(buffers, (k, v), strict=True)
            )
        else:
            k, v = context.write(layer_idx, layout.cache_slots, k, v)
        return context.seen(k).transpose(1, 2), context.seen(v).transpose(1, 2)


def _rows(states: Tensor, context: ContextCache) -> Tensor:
    """[S, K, L, E] -> [S * L, K, E] in the buffers' dtype (under autocast RoPE widens keys)."""
    return states.transpose(1, 2).flatten(0, 1).to(context.keys[0].dtype)


class DecoderBackbone(Backbone):
    """The trainer's and sampler's view of a Hugging Face causal LM; :func:`new_decoder` builds it.

    ``wanted`` only picks tokens here: all layers run for the whole batch. Gradient checkpointing
    is a flag of each layer, which transformers' own methods switch too. It covers passes without a
    cache; an active pass is a few tokens and keeps its activations.
    """

    @property
    def decoder(self) -> PreTrainedModel:
        """Embedding, layers and final norm."""
        return self.base_model.base_model

    def varlen_kernel(self) -> None:
        return None

    def run_layers(
        self, ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None = None
    ) -> Tensor:
        ids, position_ids = layout.grid(ids), layout.grid(position_ids)  # [S, L]
        active, mask = isinstance(layout, ActiveLayout), layout.mask
        if mask is None:  # transformers takes that for a causal mask, so "all" is written out
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
        keys = layout.cache.reach if active else layout.max_length
        cache = None if layout.cache is None else _LayerCache(layout)
        with contextlib.nullcontext() if cache is None else _activations_kept(self.decoder):
            output = self.decoder(
                input_ids=ids,
                attention_mask=mask.expand(len(ids), 1, ids.shape[1], keys),
                position_ids=position_ids,
                use_cache=cache is not None,
                **{_cache_argument(self.decoder): cache},
            )
        count = self.decoder.config.num_hidden_layers
        if cache is not None and cache.updates != count:
            raise ValueError(
                f"{type(self.decoder).__name__} passed the keys and values of {cache.updates} of "
                f"its {count} layers to the cache: use context=exact"
            )
        hidden = output.last_hidden_state.flatten(0, 1)
        index = None if active else layout.slots
        if wanted is not None:
            index = wanted.flatten() if index is None else index[wanted.flatten()]
        return hidden if index is None else hidden.index_select(0, index)

    def cache_shape(self) -> CacheShape:
        config = self.decoder.config
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return CacheShape(config.num_hidden_layers, kv_heads, width)

    def head(self) -> tuple[Tensor, Tensor | None]:
        module = active_module(self.base_model.get_output_embeddings())
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"the LM head must be a plain nn.Linear, not {type(module).__name__}: load the "
                "model with its head, and leave the head, and an embedding tied to it, out of an "
                "adapter's target_modules and trainable_token_indices (modules_to_save may have it)"
            )
        return module.weight, module.bias

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        layers = checkpointed_layers(self.decoder)
        if enabled and not layers:
            raise ValueError(f"{type(self.decoder).__name__} has no gradient checkpointing")
        for layer in layers:
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            layer.gradient_checkpointing = enabled


def checkpointed_layers(decoder: nn.Module) -> list[nn.Module]:
    return [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]


@contextlib.contextmanager
def _activations_kept(decoder: nn.Module) -> Iterator[None]:
    """No gradient checkpointing inside: transformers drops the cache of a layer that it
    checkpoints, with a warning only."""
    layers = [m for m in checkpointed_layers(decoder) if m.gradient_checkpointing]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


def _cache_argument(decoder: nn.Module) -> str:
    """``past_key_values``, which transformers 5.24 renamed to ``cache`` in most models."""
    names = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def new_decoder(model: PreTrainedModel, family: Family) -> DecoderBackbone:
    """Make a causal LM of transformers bidirectional; its attention becomes SDPA, whose mask here
    replaces the causal one, and its own dropout goes.

    ``family.logit_shift`` is 1 for a model that keeps predicting the next token, 0 for one trained
    to predict in place. ``ValueError`` for a family or a model that this cannot serve.
    """
    config = model.config
    if family.logit_shift not in (0, 1):
        raise ValueError(f"logit_shift must be 0 or 1, not {family.logit_shift}")
    if foreign := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise ValueError(f"layers of type {', '.join(sorted(foreign))} can't be made bidirectional")
    for name in _LOGIT_FACTORS:
        if getattr(config, name, None) not in (None, 1):
            raise ValueError(f"config field {name}={getattr(config, name)} is not supported")
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        raise ValueError("rope_type longrope makes keys depend on the batch's longest sequence")
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap != family.softcap:
        raise ValueError(f"the config caps logits at {softcap}, the family at {family.softcap}")
    rows = len(model.get_input_embeddings().weight)
    for name in ("mask_id", "eos_id"):
        if not 0 <= getattr(family, name) < min(family.vocab_size, rows):
            raise ValueError(
                f"{name}={getattr(family, name)} has no embedding: the family counts "
                f"{family.vocab_size} token ids, the model {rows}"
            )
    without_dropout(model)
    model.set_attn_implementation("sdpa")
    return DecoderBackbone(model, family)


def without_dropout(model: PreTrainedModel) -> None:
    """Turn off a model's own dropout, not that of an adapter on it: a frozen context and the draws
    against it must come from one network."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "lora_dropout" not in name:
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
