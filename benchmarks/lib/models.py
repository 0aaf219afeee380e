"""Random LLaDA models of a given shape: real ones on a device, and hollow ones to count with."""

import functools

import torch
from lib.shapes import config_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bwsft.config import LoraConfig
from bwsft.models.backbone import Backbone
from bwsft.models.families import family_of
from bwsft.models.llada import LladaBackbone, LladaForMaskedDiffusion
from bwsft.models.lora import add_lora


def random_backbone(
    size: str, dtype: torch.dtype, device: torch.device, layers: int | None = None
) -> Backbone:
    """N(0, 0.02) weights drawn on the device, which for 8B takes seconds; norms are 1."""
    backbone = _without_weights(size, dtype, layers)
    backbone.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.02, generator=generator)
    return backbone.eval()


@functools.cache
def hollow_backbone(size: str, layers: int | None = None, rank: int = 0) -> Backbone:
    """A model whose weights have shapes and no values, with adapters if `rank`: a pass of the 8B
    model takes a second on any machine, and every matmul in it can be counted. Ids, masks and row
    lists stay real."""
    backbone = _without_weights(size, torch.float32, layers)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    if rank:
        adapt(backbone, rank)
    for module in backbone.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                with fake:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
    return backbone


def adapt(backbone: Backbone, rank: int) -> None:
    """LoRA on all block matrices, as the trainer's presets have it."""
    add_lora(backbone, LoraConfig(rank=rank, alpha=2.0 * rank, dropout=0.0), seed=0)
    backbone.train()


def _without_weights(size: str, dtype: torch.dtype, layers: int | None = None) -> Backbone:
    config = config_of(size)
    config.n_layers = layers or config.n_layers
    with torch.device("meta"):
        model = LladaForMaskedDiffusion(config).to(dtype)
    return LladaBackbone(model, family_of(config))
