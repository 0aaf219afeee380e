"""LLaDA (Nie et al. 2025, arXiv:2502.09992) for transformers 5, written from its published layout.

A pre-norm transformer without a causal mask and without a logit shift: position i predicts token i.
Everything runs on packed tokens [T, D]; padded input is the same with a key mask. Tensor names are
those of the official checkpoints, so no conversion happens on the way in or out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

from bwsft.models.attention import Layout, padded_layout, varlen_kernel
from bwsft.models.backbone import Backbone, active_module, check_ids, check_positions
from bwsft.models.kv_cache import CacheShape
from bwsft.models.llada_config import LladaConfig
from bwsft.models.llada_layers import LladaModel, LladaRMSNorm


class LladaForMaskedDiffusion(PreTrainedModel):
    """LLaDA with its head, as a transformers model; what ``AutoModel`` and
    ``AutoModelForCausalLM`` build for model type ``llada`` once bwsft is imported."""

    config_class = LladaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LladaBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: LladaConfig):
        super().__init__(config)
        config.check()  # again: from_pretrained(**overrides) sets fields after the config is built
        self.model = LladaModel(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.transformer["wte"]

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head_module

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.transformer["wte"] = value

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.transformer["wte" if self.config.weight_tying else "ff_out"] = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any):
        if new_num_tokens in (None, self.config.embedding_rows):
            return self.get_input_embeddings()
        raise ValueError("LLaDA's vocabulary is fixed: use one of its reserved ids instead")

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint,
        every_n_layers: int = 1,
    ) -> None:  # fmt: skip
        """As transformers', which counts layers of its own class alone."""
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
        self.model.checkpoint_every = every_n_layers

    @classmethod
    def can_generate(cls) -> bool:
        return False

    def prepare_inputs_for_generation(self, *args: Any, **options: Any) -> dict[str, Any]:
        """peft wants a model of task type CAUSAL_LM to have this method."""
        raise ValueError("LLaDA has no next token: decode with bwsft.decoding or bwsft generate")

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **options: Any,
    ) -> MaskedLMOutput:  # fmt: skip
        """Padded input [S, L] (or embeddings [S, L, D]) -> ``logits`` [S, L, V].

        ``attention_mask``: [S, L] with zeros at padding, or boolean [S, 1, L, L] with True where
        query may see key. ``position_ids`` [S, L] or [L] default to 0 .. L - 1, as upstream.
        Options of transformers that nothing here honours raise ``ValueError``.
        """
        _refuse_options(options)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if inputs_embeds is None:
            check_ids(input_ids, self.config.vocab_size)
            inputs_embeds = self.model.transformer["wte"](input_ids)
        shape = inputs_embeds.shape[:2]
        check_positions(shape[1], position_ids, self.config.max_sequence_length)
        if position_ids is None:
            position_ids = torch.arange(shape[1], device=inputs_embeds.device)
        layout = padded_layout(*shape, attention_mask)
        positions = position_ids.expand(shape).flatten()
        hidden = self.model(inputs_embeds.flatten(0, 1), positions, layout)
        return MaskedLMOutput(logits=self.model.logits(hidden).unflatten(0, shape))

    def _init_weights(self, module: nn.Module) -> None:
        """``normal``: N(0, init_std). ``mitchell`` (OLMo's default, which LLaDA trained from):
        std 1/sqrt(fan in), cut at 3 std, the two output projections of layer n smaller by
        sqrt(2 (n + 1))."""
        if isinstance(module, LladaRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            if self.config.init_fn == "normal":
                init.normal_(module.weight, std=self.config.init_std)
            else:
                std = 1 / math.sqrt(module.weight.size(1)) / getattr(module, "init_shrink", 1.0)
                init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)


def _refuse_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if not (value is None or value is (name == "return_dict")):
            raise ValueError(f"LLaDA's forward does not support {name}={value!r}")


class LladaBackbone(Backbone):
    """The trainer's and sampler's view of a :class:`LladaForMaskedDiffusion`."""

    def run_layers(
        self, ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None = None
    ) -> Tensor:
        model = self.base_model.model
        return model(model.transformer["wte"](ids), position_ids, layout, wanted)

    def cache_shape(self) -> CacheShape:
        config = self.base_model.config
        return CacheShape(config.n_layers, config.num_kv_heads, config.head_dim)

    def head(self) -> tuple[Tensor, None]:
        module = active_module(self.base_model.model.head_module)
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise ValueError(
                "the LM head (model.transformer.ff_out, or the tied embedding) must stay as it is, "
                f"but {type(module).__name__} is on it: anchor target_modules on blocks.N., as "
                "bwsft.models.lora does, and leave it out of trainable_token_indices "
                "(modules_to_save may have it)"
            )
        return module.weight, None

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        model = self.base_model.model
        model.gradient_checkpointing, model.checkpoint_every = enabled, 1

    def set_fused_ops(self, choice: str) -> None:
        self.base_model.model.set_fused_ops(choice)

    def check_graphs(self) -> None:
        weight, width = self.head()[0], self.base_model.config.head_dim
        if not (weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)):
            super().check_graphs()
        if varlen_kernel(weight.device, weight.dtype, width) is None:
            raise ValueError(f"graphs needs heads that flash attention takes, not {width} wide")


AutoModel.register(LladaConfig, LladaForMaskedDiffusion, exist_ok=True)
AutoModelForCausalLM.register(LladaConfig, LladaForMaskedDiffusion, exist_ok=True)
