"""AdamW over the trainable parameters, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from bwsft.config import OptimConfig


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


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in a fixed order: the key of the saved moments."""
    return {n: p for n, p in sorted(model.named_parameters()) if p.requires_grad}


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    parameters = list(trainable(model).values())
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=parameters[0].is_cuda,
    )


def clip(model: nn.Module, limit: float) -> float:
    """Scale the gradients down to a norm of at most `limit` (0: leave them) and return their norm
    before that. Sharded gradients count as a whole."""
    norm = torch.nn.utils.clip_grad_norm_(trainable(model).values(), limit or float("inf"))
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer state as flat tensors, `name.exp_avg` and so on: safetensors can hold it."""
    return {
        f"{name}.{key}": value
        for name, p in trainable(model).items()
        for key, value in optimizer.state[p].items()
    }


def restore_moments(model: nn.Module, optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Undo `moments`. Raises ValueError if the parameters are not those that were saved."""
    parameters = trainable(model)
    grouped: dict[str, dict[str, torch.Tensor]] = {}
    for full, value in tensors.items():
        name, key = full.rsplit(".", 1)
        grouped.setdefault(name, {})[key] = value
    if odd := sorted(set(grouped) ^ set(parameters)):
        raise ValueError(
            f"the checkpoint's optimizer state is of another model: {odd[0]} does not match"
        )
    for name, state in grouped.items():
        p = parameters[name]
        if state["exp_avg"].shape != p.shape:
            raise ValueError(
                f"the checkpoint's optimizer state for {name} has shape "
                f"{tuple(state['exp_avg'].shape)}, the model has {tuple(p.shape)}"
            )
        optimizer.state[p] = {k: _placed(v, p) for k, v in state.items()}


def _placed(value: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
    """A whole saved tensor on p's device, and of this rank its shard if p is sharded.

    Copied: what safetensors reads is a view of the file, which would stay on the disk. (The step
    counter belongs on the parameter's device too, as fused AdamW on CUDA has it.)
    """
    value = value.to(p.device, copy=True)
    if value.dim() == 0 or not hasattr(p, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # a second to import

    # Without a source rank nothing is sent: every rank has read the file.
    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
