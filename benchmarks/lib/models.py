"""Random LLaDA models of a given shape: real ones on a device, and hollow ones to count with."""

import functools

import torch
from lib.shapes import config_of

from bwsft.config import LoraConfig
from bwsft.models import hollow
from bwsft.models.backbone import Backbone
from bwsft.models.llada_config import LladaConfig
from bwsft.models.lora import add_lora


def random_backbone(
    size: str, dtype: torch.dtype, device: torch.device, layers: int | None = None
) -> Backbone:
    """N(0, 0.02) weights drawn on the device, which for 8B takes seconds; norms are 1."""
    backbone = hollow.meta_backbone(shape(size, layers), dtype)
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
    """A model without weights, to count with, with adapters if `rank`."""
    return hollow.hollow_backbone(shape(size, layers), lora=adapters(rank) if rank else None)


def adapt(backbone: Backbone, rank: int) -> None:
    """LoRA on all block matrices, as the trainer's presets have it."""
    add_lora(backbone, adapters(rank), seed=0)
    backbone.train()


def adapters(rank: int) -> LoraConfig:
    return LoraConfig(rank=rank, alpha=2.0 * rank, dropout=0.0)


def shape(size: str, layers: int | None = None) -> LladaConfig:
    config = config_of(size)
    config.n_layers = layers or config.n_layers
    return config
