"""Choosing and naming the device that a model is on."""

from __future__ import annotations

import torch


def pick_device(name: str) -> torch.device:
    """`auto` is a CUDA device where there is one. Raises ValueError for an unknown name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: no CUDA device is available; use --device cpu")
    return device


def device_name(device: torch.device) -> str:
    """What a checkpoint remembers: "cpu", or the card's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
