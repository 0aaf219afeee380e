"""The most memory that an update takes, told before a weight is there.

The update is the real one, of a real batch: the model, the context mode, the loss and the optimizer
of a run, on tensors that have shapes alone. utils/live_bytes.py adds up what lives.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from bwsft_kernels.implementations import GPU_BYTES
from torch import Tensor, nn

from bwsft import config as c
from bwsft.commands.hollow_run import (
    by_layers,
    is_on_a_card,
    mode_of,
    nominal_batch,
    worst_offset,
)
from bwsft.models.backbone import Backbone, trainable
from bwsft.models.hollow import layer_kinds
from bwsft.models.support import STACKED
from bwsft.objectives.base import Place
from bwsft.training.optim import make_optimizer
from bwsft.utils.config_check import flat
from bwsft.utils.live_bytes import LOGITS, OTHER, LiveBytes

PARTS = ("weights", "gradients", "moments", OTHER, LOGITS, "keys and values")
# Within each of these an update takes more and more with every layer, or less and less.
PHASES = ("forward", "backward of the top layer", "backward of the bottom layer", "update")

FILLED = 0.9  # of a memory: the rest is for CUDA itself, and for gaps between tensors
LEAST_RANK = 8


def peak_of(config: c.Config, shape: Any) -> dict[str, int]:
    """Bytes of the PARTS when an update of the model with this config takes most."""
    bytes_ = by_layers(config, shape, bytes_of).reshape(len(PHASES), len(PARTS))
    return dict(zip(PARTS, bytes_[bytes_.sum(1).argmax()].tolist(), strict=True))


def in_words(peak: dict[str, int]) -> str:
    """A peak and its parts."""
    parts = ", ".join(f"{name} {sized(size)}" for name, size in peak.items() if size)
    return f"{sized(sum(peak.values()))} at most: {parts}"


def sized(number: int) -> str:
    """Bytes as people read them."""
    small = number < 2**30
    return f"{number / 2**20:.1f} MiB" if small else f"{number / 2**30:.2f} GiB"


def fits(peak: dict[str, int], memory: int) -> bool:
    """Whether a peak leaves a tenth of so many bytes."""
    return sum(peak.values()) <= FILLED * memory


def settings_that_fit(
    config: c.Config, shape: Any, memory: int
) -> Iterator[tuple[c.Config, dict[str, int]]]:
    """The run, and its peak, with fewer sequences at a time, then recomputed activations, matrices
    in nf4 and a lower rank too, each with the largest micro-batch that fits: what changes least
    comes first."""
    for ways in alternatives(config, shape):
        for way in ways:
            if (found := largest_micro_batch(way, shape, memory)) is not None:
                yield found
                break


def alternatives(config: c.Config, shape: Any) -> Iterator[list[c.Config]]:
    """Lists of settings, of each of which the first that fits is wanted."""
    dense = getattr(shape, "model_type", None) not in STACKED
    lora, quantized = config.lora, [config.lora]
    if is_on_a_card(config) and lora.rank and config.model and config.parallel == "ddp" and dense:
        quantized.append(dataclasses.replace(lora, quantize="nf4"))
    for kind in dict.fromkeys(quantized):
        for again in dict.fromkeys((config.grad_checkpointing, True)):
            yield [dataclasses.replace(config, lora=kind, grad_checkpointing=again)]
    for kind in dict.fromkeys(quantized):
        ranks, rank = [], lora.rank // 2
        while rank >= LEAST_RANK:  # at the same scale alpha / r
            lower = dataclasses.replace(kind, rank=rank, alpha=lora.alpha * rank / lora.rank)
            ranks.append(dataclasses.replace(config, lora=lower, grad_checkpointing=True))
            rank //= 2
        yield ranks


def largest_micro_batch(
    config: c.Config, shape: Any, memory: int
) -> tuple[c.Config, dict[str, int]] | None:
    """The run with the most sequences at a time, up to its own, that fit, and its peak; None if one
    does not."""
    most, best = config.micro_batch_size, None
    sizes = [n for n in range(1, most + 1) if config.batch_size % n == 0]
    while sizes:  # the ends first, then halves
        at = 0 if best is None else len(sizes) // 2
        way = dataclasses.replace(config, micro_batch_size=sizes[at])
        if fits(peak := peak_of(way, shape), memory):
            best, sizes = (way, peak), sizes[at + 1 :]
        else:
            sizes = sizes[:at]
    return best


def flags_of(config: c.Config, before: c.Config) -> str:
    """The flags that make `config` of `before`."""
    old, new = (flat(dataclasses.asdict(x)) for x in (before, config))
    words = []
    for path, value in new.items():
        if value != old[path]:
            flag = f"--{path}".replace("_", "-")
            words.append(flag if value is True else f"{flag} {value:g}" if isinstance(value, float)
                         else f"{flag} {value}")
    return " ".join(words)


def bytes_of(config: c.Config, backbone: Backbone) -> np.ndarray:
    """[PHASES * PARTS]: what lives when each phase of an update after the first has most, in its
    last micro-batch."""
    card, size, mode = is_on_a_card(config), config.micro_batch_size, mode_of(config, backbone)
    batch = nominal_batch(config, backbone, size, worst_offset(config, backbone))
    optimizer, live = make_optimizer(backbone, config.optim), watched(backbone, card)
    begin(optimizer, live, accumulates=config.batch_size > size)
    with live:
        live.enter("forward")
        for loss in mode.losses(batch, Place(0, 0, 1, batch.ids.numel())):
            live.enter("backward of the top layer")
            loss.total.backward()
            live.enter("forward")
        live.enter("update")
        nn.utils.clip_grad_norm_(trainable(backbone).values(), 1.0)
        if not card:  # whose optimizer is one kernel
            optimizer.step()
    return np.array([live.most[phase][part] for phase in PHASES for part in PARTS])


def begin(optimizer: torch.optim.Optimizer, live: LiveBytes, accumulates: bool) -> None:
    """Let the optimizer make its moments, as the first update does; where several micro-batches
    add up, leave the gradients of those before."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with live, live.called("moments"):
        optimizer.step()
    if accumulates:
        live.call([parameter.grad for parameter in parameters], "gradients")
    else:
        optimizer.zero_grad(set_to_none=True)
    live.most.clear()


def watched(backbone: Backbone, card: bool) -> LiveBytes:
    """A counter that knows the model's weights, its caches and gradients, and the layers at its
    ends in a backward."""
    live = LiveBytes(GPU_BYTES if card else None)
    live.call([*backbone.parameters(), *backbone.buffers()], "weights")
    last = len(layer_kinds(backbone.base_model.config)) - 1
    phases = {0: "backward of the bottom layer", last: "backward of the top layer"}

    def gradient(parameter: Tensor, layer: int | None) -> None:
        if layer is not None:
            live.enter(phases.get(layer, "between"))
        live.call([parameter.grad], "gradients")

    for name, parameter in trainable(backbone).items():
        found = re.search(r"\.(\d+)\.", name)
        hook = functools.partial(gradient, layer=int(found[1]) if found else None)
        parameter.register_post_accumulate_grad_hook(hook)
    make = backbone.new_cache

    def new_cache(*sizes: int) -> Any:
        with live.called("keys and values"):
            return make(*sizes)

    backbone.new_cache = new_cache
    return live
