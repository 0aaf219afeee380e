"""LLaDA models whose weights have shapes and no values: a step of a large one can be counted on any
machine."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bwsft.config import LoraConfig
from bwsft.models.backbone import Backbone
from bwsft.models.families import family_of
from bwsft.models.llada import LladaBackbone, LladaForMaskedDiffusion
from bwsft.models.llada_config import LladaConfig
from bwsft.models.lora import add_lora


def meta_backbone(config: LladaConfig, dtype: torch.dtype) -> Backbone:
    """The model on the meta device."""
    with torch.device("meta"):
        model = LladaForMaskedDiffusion(config).to(dtype)
    return LladaBackbone(model, family_of(config))


def hollow_backbone(
    config: LladaConfig, dtype: torch.dtype = torch.float32, lora: LoraConfig | None = None
) -> Backbone:
    """The model in training mode, with adapters if asked for. A pass of 8 billion parameters takes
    a second, and every operation in it can be watched. Ids, masks and row lists stay real."""
    backbone = meta_backbone(config, dtype)
    if lora is not None and lora.rank:
        add_lora(backbone, lora, seed=0)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    for module in backbone.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                with fake:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
    return backbone.train()
