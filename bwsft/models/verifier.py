"""A causal LM of transformers that scores what another model drafts (Adaptive Parallel Decoding).

S sequences, W tokens of a span, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bwsft.models.backbone import Family
from bwsft.models.hf_decoder import DecoderBackbone, new_decoder
from bwsft.models.kv_cache import ContextCache, Span
from bwsft.models.loading import model_folder
from bwsft.models.weight_files import stored_shapes


@dataclass(frozen=True)
class Verifier:
    """An autoregressive model: position i predicts token i + 1."""

    decoder: DecoderBackbone
    name: str = ""
    """Folder or Hub id that it comes from."""

    @property
    def vocab_size(self) -> int:
        """Rows of its head."""
        return len(self.decoder.head()[0])

    def causal_states(self, ids: Tensor, span: Span, cache: ContextCache) -> Tensor:
        """Tokens of a span, ids [S, W], each after the cached positions before it -> [S * W, D].
        Their keys and values stay in the cache."""
        seen = replace(cache, visible=span.positions() + 1, even=None)
        return self.decoder.active_hidden_states(ids, span, seen)


def new_verifier(model: PreTrainedModel, name: str = "") -> Verifier:
    """ValueError for a model whose attention or head this cannot serve; see `new_decoder`."""
    config = model.config
    family = Family(
        mask_id=0,  # it never sees one
        eos_id=0,
        end_ids=(),
        vocab_size=min(config.vocab_size, model.get_input_embeddings().num_embeddings),
        max_positions=config.max_position_embeddings,
        logit_shift=1,
    )
    return Verifier(new_decoder(model.eval(), family), name)


def load_verifier(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Verifier:
    """The causal LM in a folder or of a Hub id, from safetensors, without remote code. ValueError
    or FileNotFoundError if it can't be loaded whole."""
    folder = model_folder(path)
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{path} holds an adapter: merge it, and name a model folder")
    stored_shapes(folder)  # of whole files, before any of them is read
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, attn_implementation="sdpa",
            trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # transformers raises many kinds for a damaged folder
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"can't load a causal LM from {path}: {reason}") from error
    if missing := sorted(found["missing_keys"]):  # transformers would draw them
        raise ValueError(f"{path} lacks {missing[0]}: take a complete checkpoint of a causal LM")
    return new_verifier(model.to(device), str(path))
