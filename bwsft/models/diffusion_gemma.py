"""DiffusionGemma of transformers as one-pass training and its own sampler call it.

One set of weights runs twice: a causal encoder, whose keys and values are the context, and a
decoder that denoises a canvas of tokens, all of which see each other and the context before them.
In training every canvas of every example of a batch goes through the decoder at once: the encoder
runs once over the clean rows, and a mask tells each canvas what inference would show it.

The sliding-window layers keep all keys here, and the mask cuts the window. A cache that drops
what the window has passed, as in decoding, would hold the end of the whole row, not what was
before each canvas.

T rows, the clean ones and the canvases; W rows of one of both; D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import PreTrainedModel

from bwsft.models.backbone import Backbone, Family, active_module, check_ids, check_positions
from bwsft.models.grouped_experts import GroupedExperts
from bwsft.models.hf_decoder import checkpoint_layers, without_dropout
from bwsft.models.kv_cache import CacheShape, Context

_SOFT_BYTES = 256 << 20  # of fp32 logits at a time, for the predictions that a canvas sees
_ATTENTIONS = ("eager", "sdpa")  # those that take any mask


class DiffusionGemmaBackbone(Backbone):
    """The trainer's view of a `DiffusionGemmaForBlockDiffusion`, possibly wrapped by peft.

    Encoder and decoder share weights, and so they share adapters: put these on
    ``model.decoder.layers`` alone. Images are not read: what reads them is frozen.
    ``ValueError`` for a model whose two halves are untied, and where it runs, for one with adapters
    on the encoder.
    """

    def __init__(self, model: nn.Module, family: Family) -> None:
        super().__init__(model, family)
        base = self.base_model
        _check(base)
        without_dropout(base)
        for part in (base.model.encoder.vision_tower, base.model.encoder.embed_vision):
            part.requires_grad_(False)
        for layer in (layer for pair in _pairs(base) for layer in pair):
            if not isinstance(layer.experts, GroupedExperts):
                layer.experts.__class__ = _grouped(type(layer.experts))

    def cache_shape(self) -> CacheShape:
        raise ValueError("DiffusionGemma's layers differ in their keys: it has no context cache")

    def head(self) -> tuple[Tensor, Tensor | None]:
        return active_module(self.base_model.get_output_embeddings()).weight, None

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute the decoder's layers in backward. The encoder keeps its activations, because
        its layers write the cache."""
        checkpoint_layers(self.base_model.model.decoder, enabled)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, the encoder's layers run the decoder's own modules, adapters included."""
        before = []
        try:
            for ours, theirs in _pairs(self.base_model):
                for part, its in ((ours, theirs), (ours.self_attn, theirs.self_attn)):
                    for name, module in part.named_children():
                        if name != "self_attn":
                            before.append((its, name, its.get_submodule(name)))
                            _check_plain(its.get_submodule(name), name)
                            its.register_module(name, module)
            yield
        finally:
            for its, name, module in before:
                its.register_module(name, module)

    def write_canvases(
        self, prompt: Sequence[int], seed: int, *, canvas: int, entropy_bound: float | None = None,
        **settings: Any,
    ) -> list[int]:  # fmt: skip
        """Token ids that transformers' own sampler writes after a prompt: whole canvases, the
        padding token after the first end token. ``canvas`` is the length of one, ``settings`` are
        those of its ``generate``; those left out are the model's. The caller's random state is left
        as it was."""
        ids, model = torch.tensor([list(prompt)], device=self.head()[0].device), self.base_model
        if entropy_bound is not None:
            from transformers import EntropyBoundSamplerConfig

            settings["sampler_config"] = EntropyBoundSamplerConfig(entropy_bound=entropy_bound)
        devices, own = [ids.device] if ids.is_cuda else [], model.config.canvas_length
        with torch.random.fork_rng(devices), self.shared():
            torch.manual_seed(seed)
            try:
                model.config.canvas_length = canvas
                found = model.generate(input_ids=ids, **settings)
            finally:
                model.config.canvas_length = own
        return found.sequences[0, ids.size(1) :].tolist()

    def _rows_of(self, batch: Any, rows: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
        """(hidden states [T, D], indices [N] of the predicting ones). A clean token is predicted by
        the row before it, a token of a canvas by its own."""
        clean, noisy = batch.clean_rows, batch.noisy_rows
        check_ids(batch.ids, self.family.vocab_size)
        check_positions(0, batch.position_ids, self.family.max_positions)
        encoded, cache = self.encode(batch)
        signal, seeing = None, getattr(batch, "conditioned", None)
        if seeing is not None and bool(seeing.any()):
            signal = self.own_predictions(batch, noisy, seeing[noisy], cache)
        decoded = self.decode(batch, noisy, cache, signal)
        place = torch.empty_like(batch.ids)
        place[torch.cat((clean, noisy))] = torch.arange(len(place), device=place.device)
        is_clean = torch.zeros_like(batch.ids).index_fill_(0, clean, 1)[rows]
        return torch.cat((encoded, decoded)), place[(rows - is_clean).clamp_min(0)]

    def encode(self, batch: Any) -> tuple[Tensor, DynamicCache]:
        """The clean rows through the encoder: hidden states [W, D] after the final norm, and their
        keys and values with gradients."""
        rows, cache = batch.clean_rows, DynamicCache()
        encoder, masks = self.base_model.model.encoder.language_model, self.masks(batch, rows, rows)

        def half(ids: Tensor, positions: Tensor) -> Any:
            given = {"input_ids": ids, "position_ids": positions}
            return encoder(**given, attention_mask=masks, cache=cache)

        with self.shared():
            return self.run_layers(batch.ids[rows], batch.position_ids[rows], half), cache

    def run_layers(
        self, ids: Tensor, position_ids: Tensor, layout: Callable[[Tensor, Tensor], Any],
        wanted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """One of the two halves, ``layout``, on tokens [W] -> [W, D] after the final norm."""
        return layout(ids[None], position_ids[None]).last_hidden_state[0]

    def decode(
        self, batch: Any, rows: Tensor, cache: DynamicCache, signal: Tensor | None = None
    ) -> Tensor:
        """Whole canvases, rows [W], through the decoder -> [W, D] after the final norm. ``signal``
        [W, D]: embeddings of what the model said of these tokens before, 0 for nothing."""
        decoder, keys = self.base_model.model.decoder, torch.cat((batch.clean_rows, rows))
        masks = self.masks(batch, rows, keys)

        def half(ids: Tensor, positions: Tensor) -> Any:
            given = {"decoder_input_ids": ids, "decoder_position_ids": positions}
            return decoder(**given, decoder_attention_mask=masks, cache=cache)

        with _signal(decoder.self_conditioning, signal):
            return self.run_layers(batch.ids[rows], batch.position_ids[rows], half)

    @torch.no_grad()
    def own_predictions(
        self, batch: Any, rows: Tensor, seeing: Tensor, cache: DynamicCache
    ) -> Tensor:
        """The signal [W, D] of canvases: for those with ``seeing`` [W] the expected embedding under
        the model's own prediction, as a constant; 0 for the others, which do not run."""
        which = seeing.nonzero()[:, 0]
        found = self.expected_embeddings(self.decode(batch, rows[which], cache))
        return found.new_zeros(len(rows), found.size(1)).index_copy(0, which, found)

    @torch.no_grad()
    def expected_embeddings(self, hidden: Tensor) -> Tensor:
        """softmax(logits) @ embedding of hidden states [N, D] -> [N, D], without more than 256 MiB
        of logits at a time."""
        weight, _ = self.head()
        embedding, cap = self.base_model.model.decoder.embed_tokens, self.family.softcap
        table, scale = embedding.weight, embedding.embed_scale.to(embedding.weight.dtype)
        parts = []
        for part in hidden.split(max(1, _SOFT_BYTES // (4 * len(table)))):
            logits = (part @ weight.t()).float().div_(cap).tanh_().mul_(cap)
            parts.append(logits.softmax(-1).to(table.dtype) @ table * scale)
        return torch.cat(parts) if parts else hidden.new_zeros(0, table.size(1))

    def masks(self, batch: Any, queries: Tensor, keys: Tensor) -> dict[str, Tensor]:
        """What rows [W] see of other rows [M], by type of layer: [1, 1, W, M], 0 or the lowest
        number.

        A full layer shows what the plan says. A sliding one shows of the clean rows those less than
        a window before the query, for a token of a canvas: before the canvas' first token.
        """
        first, stop, own, own_stop = batch.plan.query_ranges[:, queries].long()[..., None]
        inside = (keys >= own) & (keys < own_stop)
        seen = (keys >= first) & (keys < stop) | inside
        begins = torch.where(own_stop > own, own, queries[:, None])
        edge = batch.position_ids[begins] - self.base_model.config.text_config.sliding_window
        near = seen & (inside | (batch.position_ids[keys] > edge))
        dtype = self.base_model.get_input_embeddings().weight.dtype
        lowest = torch.finfo(dtype).min
        return {
            name: torch.zeros(shown.shape, dtype=dtype, device=shown.device)
            .masked_fill_(~shown, lowest)[None, None]
            for name, shown in (("full_attention", seen), ("sliding_attention", near))
        }


def _check(model: PreTrainedModel) -> None:
    """``ValueError`` for a model that the masks or the sharing here would not fit."""
    config = model.config
    chosen = config.text_config._attn_implementation
    if config.text_config.use_bidirectional_attention == "all":
        raise ValueError("use_bidirectional_attention='all' makes the encoder see later tokens")
    if chosen not in _ATTENTIONS:
        raise ValueError(
            f"attention {chosen!r} takes no mask of any shape: load the model with "
            'attn_implementation="sdpa"'
        )
    if any(a.mlp.up_proj.weight is not b.mlp.up_proj.weight for a, b in _pairs(model)):
        raise ValueError("encoder and decoder must be tied: load with tie_word_embeddings")


def _check_plain(module: nn.Module, name: str) -> None:
    """``ValueError`` for an adapter on the encoder."""
    if any(hasattr(part, "lora_A") for part in module.modules()):
        raise ValueError(
            f"an adapter on the encoder's {name}: encoder and decoder are one set of weights, put "
            "adapters on the decoder's layers alone "
            r"(target_modules=r'.*decoder\.layers\.\d+\.self_attn\.[qkvo]_proj')"
        )


@functools.cache
def _grouped(kind: type[nn.Module]) -> type[nn.Module]:
    """transformers' class of experts, run as those of other mixtures."""
    return type(kind.__name__, (GroupedExperts, kind), {})


def _pairs(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """(decoder layer, encoder layer) of every layer."""
    inner = model.model
    layers = inner.decoder.layers, inner.encoder.language_model.layers
    return list(zip(*layers, strict=True))


@contextmanager
def _signal(conditioning: nn.Module, signal: Tensor | None) -> Iterator[None]:
    """Inside, the decoder's self-conditioning adds ``signal`` [W, D] in place of the embeddings
    that it would make of logits [W, V]."""
    if signal is None:
        yield
        return
    hook = conditioning.register_forward_pre_hook(lambda _, given: (given[0], signal[None]))
    try:
        yield
    finally:
        hook.remove()
