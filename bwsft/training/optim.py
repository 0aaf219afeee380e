"""AdamW over the trainable parameters, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from bwsft.config import OptimConfig
from bwsft.models.backbone import trainable


def lr_at(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of update `step` (0-based) of `steps`: warm-up, then cosine to the floor."""
    warm = round(config.warmup * steps)
    if step < warm:
        if config.warmup_shape == "log":
            return config.lr * math.log(step + 1) / math.log(max(warm, 2))
        return config.lr * (step + 1) / warm
    progress = (step - warm) / max(steps - warm, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.floor + (1 - config.floor) * cosine)


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    parameters = list(trainable(model).values())
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
        weight_decay=config.weight_decay, fused=parameters[0].is_cuda,
    )  # fmt: skip


def clip(model: nn.Module, limit: float) -> float:
    """Scale the gradients down to a norm of at most `limit` (0: leave them) and return their norm
    before that. Sharded gradients count as a whole."""
    norm = torch.nn.utils.clip_grad_norm_(trainable(model).values(), limit or float("inf"))
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
