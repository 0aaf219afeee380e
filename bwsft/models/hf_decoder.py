"""Any Hugging Face decoder (Qwen2, Llama, ...) made bidirectional, as a Backbone.

The layers run as transformers wrote them, on the packed tokens as one sequence of T: all they do
but attention is token by token. Attention goes through transformers' own registry of attention
functions to :mod:`bwsft.models.attention`, which keeps sequences apart, knows what a token may see,
and records and reuses keys (after RoPE) and values.

S sequences, T packed tokens, D hidden size, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

from bwsft.models.attention import Layout
from bwsft.models.backbone import Backbone, Family, active_module
from bwsft.models.kv_cache import CacheShape

ATTENTION = "bwsft_range"
# Factors on the logits that a head given as weight and bias cannot carry.
_LOGIT_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
# What some models ask of an attention function, and this one does not do.
_FOREIGN = ("softcap", "s_aux", "head_mask", "position_bias")


class _Pass:
    """What the attention of one forward needs: a layout for each layer. Not a dataclass: FSDP
    copies those, and the calls would be counted in the copy."""

    def __init__(self, layouts: list[Layout]) -> None:
        self.layouts, self.calls = layouts, 0


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, bwsft_pass: _Pass | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers: q [1, H, T, E], k and v [1, K, T, E] ->
    [1, T, H, E]. The layouts say what a token sees; dropout is off here."""
    if bwsft_pass is None:
        raise ValueError(
            "this model runs packed tokens: call its Backbone, or give it back its own attention "
            'with model.set_attn_implementation("sdpa")'
        )
    if foreign := [name for name in _FOREIGN if options.get(name) is not None]:
        raise ValueError(f"attention with {foreign[0]} is not supported")
    bwsft_pass.calls += 1
    width = query.shape[-1]
    if scaling not in (None, width**-0.5):  # a layout's own is 1 / sqrt(E)
        query = query * (scaling * width**0.5)
    # Under autocast RoPE widens queries and keys.
    rows = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    layer = module.layer_idx
    return bwsft_pass.layouts[layer].attend(layer, *rows)[None], None


AttentionInterface.register(ATTENTION, _attend)


class DecoderBackbone(Backbone):
    """The trainer's and sampler's view of a Hugging Face causal LM; :func:`new_decoder` builds it.

    ``wanted`` only picks tokens here: all layers run for the whole batch. Gradient checkpointing
    is a flag of each layer, which transformers' own methods switch too.
    """

    @property
    def decoder(self) -> PreTrainedModel:
        """Embedding, layers and final norm."""
        return self.base_model.base_model

    def run_layers(
        self, ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None = None
    ) -> Tensor:
        layouts = self.layouts(layout, position_ids)
        around = _Pass(layouts)
        packed = {"input_ids": ids[None], "position_ids": position_ids[None]}
        if hasattr(self.decoder.config, "use_cache"):
            packed["use_cache"] = False
        hidden = self.decoder(**packed, bwsft_pass=around).last_hidden_state[0]
        if around.calls != len(layouts):
            raise ValueError(
                f"{type(self.decoder).__name__} leaves the attention of {around.calls} of its "
                f"{len(layouts)} layers to attn_implementation: its model code is not supported"
            )
        return hidden if wanted is None else hidden.index_select(0, wanted.flatten())

    def layouts(self, layout: Layout, position_ids: Tensor) -> list[Layout]:
        """That of each layer."""
        return [layout] * self.decoder.config.num_hidden_layers

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
        checkpoint_layers(self.decoder, enabled)


def checkpoint_layers(decoder: nn.Module, enabled: bool) -> None:
    """Set the flag of every layer that has one; ``ValueError`` if none has."""
    layers = checkpointed_layers(decoder)
    if enabled and not layers:
        raise ValueError(f"{type(decoder).__name__} has no gradient checkpointing")
    for layer in layers:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = enabled


def checkpointed_layers(decoder: nn.Module) -> list[nn.Module]:
    return [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]


def new_decoder(model: PreTrainedModel, family: Family) -> DecoderBackbone:
    """Make a causal LM of transformers bidirectional, in place: its attention function changes, and
    its own dropout goes.

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
    model.set_attn_implementation(ATTENTION)
    return DecoderBackbone(model, family)


def without_dropout(model: PreTrainedModel) -> None:
    """Turn off a model's own dropout, not that of an adapter on it: a frozen context and the draws
    against it must come from one network."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "lora_dropout" not in name:
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
