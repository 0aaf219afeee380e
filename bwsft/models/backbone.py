"""The interface of a model: what every family offers the trainer and the sampler.

T packed tokens, S sequences, N supervised tokens, D hidden size, V vocabulary (rows of the head).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from bwsft_kernels import RangePlan, linear_argmax, linear_cross_entropy
from torch import Tensor, nn

from bwsft.models.attention import (
    ActiveLayout,
    Layout,
    RangeLayout,
    compute_dtype,
    packed_layout,
    varlen_kernel,
)
from bwsft.models.kv_cache import CacheShape, Context, ContextCache, Span


@dataclass(frozen=True)
class Family:
    """What the rest of bwsft must know about a family. Replace a field with
    ``dataclasses.replace`` (the tokenizer may know more end ids than the config)."""

    mask_id: int
    eos_id: int
    end_ids: tuple[int, ...]  # decoding ends at any of these
    vocab_size: int  # token ids are below it; the head may have more rows
    max_positions: int
    logit_shift: int = 0  # position i predicts token i + logit_shift
    block_origin: str = "response"  # where the block grid starts: "response" | "absolute"
    attention: str = "full"  # "full" | "block_causal"
    # Under context block_causal a token of the prompt or of a finished block sees its "block" whole
    # or, "causal", nothing after itself.
    clean_attention: str = "block"
    softcap: float | None = None
    # What stands where a token is not decided yet: [MASK], or "uniform", any token of the
    # vocabulary; mask_id then fills what no row sees.
    noise: str = "mask"


class Backbone(nn.Module):
    """A Hugging Face model, possibly wrapped by peft, as training and decoding call it.

    Head and loss live inside :meth:`forward`, so that the hooks of DDP and FSDP see the whole
    step. A family implements the methods that raise ``NotImplementedError`` here.
    """

    def __init__(self, model: nn.Module, family: Family):
        super().__init__()
        self.model = model
        self.family = family
        self.train(model.training)

    @property
    def base_model(self) -> nn.Module:
        """The family's own module, also where ``model`` is a ``PeftModel`` around it."""
        unwrap = getattr(self.model, "get_base_model", None)
        return self.model if unwrap is None else unwrap()

    def hidden_states(
        self, ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor,
        context: ContextCache | None = None, *, max_length: int | None = None,
        wanted: Tensor | None = None, plan: RangePlan | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Packed ids [T] -> [T, D] after the final norm.

        ``cu_seqlens`` [S + 1] holds the sequences' boundaries, ``position_ids`` [T] each token's
        position. ``context`` takes the keys and values of every layer. ``max_length``, the longest
        sequence where the caller knows it, saves a host read on CUDA. ``wanted`` [S, W]: only
        these tokens come out, [S * W, D], and the last layer runs for them alone. ``plan`` says
        which ranges of the T tokens each one sees (wanted ones then rise); without it each sees its
        sequence. ``slots`` [T] are flat ones of the context (default: by sequence and position).
        ``ValueError`` for a sequence beyond ``family.max_positions``, and on a CPU for an id or
        position out of range (on CUDA the embedding asserts on the device).
        """
        check_ids(ids, self.family.vocab_size)
        if plan is None:
            layout = packed_layout(cu_seqlens, max_length, self.varlen_kernel())
            longest = layout.max_length
        else:  # a sequence may hold copies at the same positions: those alone count
            layout, longest = RangeLayout(plan, cu_seqlens), 0
        check_positions(longest, position_ids, self.family.max_positions)
        if context is not None:
            if slots is None:
                slots = context.packed_slots(cu_seqlens, position_ids)
            layout = replace(layout, cache=context, cache_slots=slots)
        return self.run_layers(ids, position_ids, layout, wanted)

    def active_hidden_states(
        self, ids: Tensor, span: Span, cache: ContextCache, wanted: Tensor | None = None
    ) -> Tensor:
        """Tokens of a span, ids [S, W], against the cached context -> [S * W, D] after the final
        norm. Without gradients their keys and values stay in the cache. ``wanted`` [S, W']:
        indices into the S * W tokens, as in :meth:`hidden_states`."""
        check_ids(ids, self.family.vocab_size)
        positions = span.positions()
        layout = ActiveLayout(
            cache, cache.slots(positions, span.repeats()), cache.plan(span.width)
        )
        return self.run_layers(ids.flatten(), positions.flatten(), layout, wanted)

    def run_layers(
        self, ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None = None
    ) -> Tensor:
        """Embedding, layers and final norm: ids and positions [T] of a layout -> [T, D], or of the
        tokens with indices ``wanted`` [S, W] alone, [S * W, D]."""
        raise NotImplementedError

    def varlen_kernel(self) -> Callable | None:
        """The attention function for packed tokens here, None for padding inside attention."""
        model, width = self.base_model, self.cache_shape().head_dim
        weight = model.get_input_embeddings().weight
        chosen = model.config._attn_implementation
        return varlen_kernel(weight.device, compute_dtype(weight), width, chosen)

    def new_cache(self, num_sequences: int, length: int) -> ContextCache:
        """An empty context cache for sequences of at most ``length`` positions."""
        weight = self.base_model.get_input_embeddings().weight
        like = torch.empty((), dtype=compute_dtype(weight), device=weight.device)
        return ContextCache.allocate(self.cache_shape(), num_sequences, length, like)

    def cache_shape(self) -> CacheShape:
        """Layers, key/value heads and their width."""
        raise NotImplementedError

    def head(self) -> tuple[Tensor, Tensor | None]:
        """LM head: weight [V, D] and bias [V] or None."""
        raise NotImplementedError

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each layer in backward instead of keeping its activations."""
        raise NotImplementedError

    def set_fused_ops(self, choice: str) -> None:
        """Norms, rotary embedding and SwiGLU in one kernel each: "on", "off" or "auto". A family
        without such a path raises ``ValueError`` for "on"."""
        if choice == "on":
            raise ValueError("fused_ops: transformers wrote this model; leave the option at auto")

    def check_graphs(self) -> None:
        """``ValueError`` if CUDA graphs cannot record a forward, which then reads from the
        device."""
        needs = "a LLaDA in bfloat16 or float16 on a CUDA device"
        raise ValueError(f"graphs needs {needs}: leave it out here")

    def predicting_rows(self, rows: Tensor) -> Tensor:
        """Indices of the hidden states that predict the tokens at flat indices ``rows`` [N].

        With a logit shift a prompt must be at least as long as the shift. The clamp serves the
        tail of a list, whose indices and weights are 0.
        """
        shift = self.family.logit_shift
        return rows if shift == 0 else (rows - shift).clamp_min(0)

    def forward(
        self, batch: Any, rows: Tensor | None, target: Tensor | None, row_weight: Tensor | None,
        context: Context | None = None, smoothing: Tensor | float = 0.0,
        excluded_id: int | None = None, confidence: float = 0.0,
        num_rows: Callable[[], int] | None = None,
    ) -> Any:  # fmt: skip
        """Weighted sum of cross-entropies over the supervised tokens, a float32 scalar.

        ``batch`` has ``ids`` [T] (already masked), ``position_ids`` [T] and ``cu_seqlens``
        [S + 1]; ``rows`` [N] are flat indices into ``ids``, ``target`` [N] the clean tokens (-100
        on the tail) and ``row_weight`` [N] the weights (0 on the tail). They are gathered before
        the head, so its cost follows N and not T.

        ``context`` names the span that holds those tokens: the last layer then runs for it alone,
        and with a cache all layers do, unless it is live: that is filled by this forward. ``rows``
        None is the context pass, which fills that cache.
        ``target`` None predicts: ``linear_argmax`` of the rows, [MASK] left out.

        ``smoothing``, a number or [N], ``excluded_id`` and ``confidence`` are those of
        ``linear_cross_entropy``; ``num_rows``, called once the layers are on their way, gives its
        ``num_rows``.
        """
        if rows is None:
            planned = getattr(batch, "plan", None) is not None
            # What comes out is not used. (Of a canvas all does: with less, an adapter's dropout
            # would draw other numbers than in runs that were begun before.)
            self.fill(batch, context.cache, batch.ids.new_zeros(1, 1) if planned else None)
            return torch.zeros((), device=batch.ids.device)
        hidden, index = self._rows_of(batch, self.predicting_rows(rows), context)
        hidden = hidden.index_select(0, index)
        weight, bias = self.head()
        head = {"linear_bias": bias, "softcap": self.family.softcap}
        if target is None:
            return linear_argmax(hidden, weight, mask_id=self.family.mask_id, **head)
        head |= {"row_weight": row_weight, "label_smoothing": smoothing, "excluded_id": excluded_id}
        head["confidence"] = confidence
        head["num_rows"] = None if num_rows is None else num_rows()
        return linear_cross_entropy(hidden, weight, target, reduction="sum", **head)

    def _rows_of(self, batch: Any, rows: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
        """(hidden states, the indices [N] of the predicting ones in them)."""
        if context is None:
            return self.hidden_states(**packed(batch)), rows
        span, cache = context.span, context.cache
        if isinstance(span, Span):
            span = span.shifted(self.family.logit_shift)
        index, flat = span.index_of(rows, batch.cu_seqlens), span.flat(batch.cu_seqlens)
        if cache is None or context.live:
            if cache is not None:
                show_all(batch, cache)
            return self.hidden_states(**packed(batch), context=cache, wanted=flat), index
        if isinstance(span, Span):
            return self.active_hidden_states(batch.ids[flat], span, cache), index
        check_ids(batch.ids, self.family.vocab_size)
        layout = ActiveLayout(cache, span.rows, batch.plan.part(queries=span.rows), batch)
        return self.run_layers(batch.ids[span.rows], batch.position_ids[span.rows], layout), index

    @torch.no_grad()
    def fill(
        self, batch: Any, cache: ContextCache, wanted: Tensor | None = None,
        plan: RangePlan | None = None,
    ) -> Tensor:  # fmt: skip
        """Context pass: store every token's keys and values, and show them all. Returns hidden
        states as :meth:`hidden_states`; ``plan`` replaces the batch's own."""
        show_all(batch, cache)
        tokens = packed(batch)
        tokens["plan"] = tokens["plan"] if plan is None else plan
        return self.hidden_states(**tokens, context=cache, wanted=wanted)


def show_all(batch: Any, cache: ContextCache) -> None:
    """Let active tokens see every token of a packed batch, which is about to fill the cache."""
    lengths = batch.cu_seqlens.diff()
    longest = getattr(batch, "max_length", None)
    even = longest is not None and longest * len(lengths) == batch.ids.numel()
    cache.show(longest if even else lengths.long())


def active_module(module: nn.Module) -> nn.Module:
    """The module that runs under a name: peft's copy, where modules_to_save wraps it."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return module
    off = module.disable_adapters or not module.active_adapters
    return module.original_module if off else copies[module.active_adapters[0]]


def packed(batch: Any) -> dict[str, Any]:
    """A packed batch as arguments of :meth:`Backbone.hidden_states`."""
    found = {name: getattr(batch, name) for name in ("ids", "position_ids", "cu_seqlens")}
    more = ("max_length", "plan", "slots")
    return found | {name: getattr(batch, name, None) for name in more}


def check_context(family: Family, context: str) -> None:
    """``ValueError`` for a context mode that the family's attention cannot have."""
    if family.attention == "block_causal" and context != "block_causal":
        raise ValueError(
            f"this model attends from block to block and has no context {context}: its only one is "
            "block_causal"
        )


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """``ValueError`` if a token id on the CPU is out of range. A CUDA tensor is left alone: its
    check would wait for the device, and the embedding asserts there; so is one that is compiled."""
    if torch.compiler.is_compiling() or ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = (int(i) for i in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token id {low if low < 0 else high} is outside the vocabulary [0, {vocab_size}): "
            "the tokenizer does not belong to this model"
        )


def check_positions(longest: int, position_ids: Tensor | None, max_positions: int) -> None:
    """``ValueError`` if a sequence, or a position on the CPU, is beyond the model's maximum."""
    readable = not torch.compiler.is_compiling() and position_ids is not None
    if readable and position_ids.device.type == "cpu" and position_ids.numel():
        low, high = (int(i) for i in position_ids.aminmax())
        if low < 0:
            raise ValueError(f"position id {low} is negative")
        longest = max(longest, high + 1)
    if longest > max_positions:
        raise ValueError(
            f"a sequence needs {longest} positions, the model has {max_positions}: shorten the "
            "prompt, or lower max_length or gen_length"
        )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in a fixed order: the key of the saved moments."""
    return {n: p for n, p in sorted(model.named_parameters()) if p.requires_grad}
