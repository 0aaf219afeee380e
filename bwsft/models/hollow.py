"""Models whose weights have shapes and no values: a step of a large one can be counted on any
machine."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.configuration_utils import PreTrainedConfig

from bwsft.config import LoraConfig
from bwsft.models.backbone import Backbone
from bwsft.models.families import family_of, model_class, wrap
from bwsft.models.lora import add_lora
from bwsft.models.support import MIXTURES


def meta_backbone(config: PreTrainedConfig, dtype: torch.dtype) -> Backbone:
    """The model of a complete config (families.read_config) on the meta device."""
    with torch.device("meta"):
        model = model_class(config)(config).to(dtype)
        return wrap(model, family_of(config))


def hollow_backbone(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, lora: LoraConfig | None = None
) -> Backbone:
    """The model in training mode, with adapters if asked for. A pass of 8 billion parameters takes
    a second, and every operation in it can be watched. Ids, masks and row lists stay real.
    ``ValueError`` for a mixture of experts, whose operations depend on values."""
    if config.model_type in MIXTURES:
        raise ValueError(
            "a mixture of experts cannot be counted without its weights: which expert a token "
            "takes depends on them; leave --dry-run out"
        )
    backbone = meta_backbone(config, dtype)
    if lora is not None and lora.rank:
        add_lora(backbone, lora, seed=0)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made = {  # one for each, however many modules share it
        id(p): nn.Parameter(like(p, fake), p.requires_grad) for p in backbone.parameters()
    }
    for module in backbone.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = like(buffer, fake)
    return backbone.train()


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """What distinguishes each layer of the model, "" where all are alike."""
    return list(getattr(config, "layer_types", None) or [""] * config.num_hidden_layers)


def with_layers(config: PreTrainedConfig, kinds: list[str]) -> PreTrainedConfig:
    """The config of a model with layers of these kinds."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = len(kinds)
    if getattr(config, "layer_types", None):
        config.layer_types = kinds
    return config


def like(x: Tensor, fake: FakeTensorMode) -> Tensor:
    """A tensor of this shape and dtype on the CPU, without values."""
    with fake:
        return torch.empty(x.shape, dtype=x.dtype)
