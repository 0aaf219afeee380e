"""`bwsft train --dry-run`: tokens, FLOPs and memory of a run, counted on a model without values."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bwsft import config as c
from bwsft.checkpoints.resolve import TINY
from bwsft.data.packing import Example, pack
from bwsft.models.backbone import Backbone, trainable
from bwsft.models.families import Facts, read_config
from bwsft.models.hollow import hollow_backbone, layer_kinds, with_layers
from bwsft.models.llada_config import LladaConfig
from bwsft.models.weight_files import read_json
from bwsft.objectives.base import Place
from bwsft.objectives.blockwise import Blockwise
from bwsft.objectives.classical import Classical
from bwsft.presets import is_for_a_gpu
from bwsft.training.context_modes import make_mode
from bwsft.training.run_data import layout_of
from bwsft.utils.flops import flop_counter
from bwsft.utils.lines import say

OBJECTIVES = {"blockwise": Blockwise, "classical": Classical}


@dataclass(frozen=True)
class Counted:
    """What a step on one sequence takes, and the model."""

    tokens: int
    """Tokens that run through the layers, a context pass included."""
    flops: int
    kept: int
    """Most bytes that a forward keeps for its backward, weights aside."""
    weights: int
    """Bytes of weights, and of the gradients and two moments of the trained ones, which are
    float32."""


class Kept:
    """Adds up what autograd saves, each storage once."""

    def __init__(self, backbone: Backbone):
        self.weights = {p.untyped_storage()._cdata for p in backbone.parameters()}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def save(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self.weights:
            self.storages[storage._cdata] = storage
        return x

    def take(self) -> int:
        """The bytes since the last call."""
        kept = sum(storage.nbytes() for storage in self.storages.values())
        self.storages.clear()
        return kept


def print_cost(config: c.Config) -> None:
    """Print what the run `config` costs on nominal sequences, half of max_length prompt. ValueError
    for an objective or a model that this cannot count."""
    config, shape = countable(config), shape_of(config)
    counted = count(config, shape)
    batch, steps, (prompt, canvas) = config.batch_size, config.steps, nominal(config)
    supervised, kept = batch * masked(config), config.micro_batch_size * counted.kept
    lines = {
        "sequences": f"{batch:,} an update, {config.micro_batch_size:,} at a time, of nominally "
        f"{prompt:,} + {canvas:,} tokens; {steps:,} updates",
        "tokens through the layers": f"{batch * counted.tokens:,} an update, "
        f"{steps * batch * counted.tokens:,} in all",
        "supervised tokens": f"{supervised:,.0f} an update, {steps * supervised:,.0f} in all",
        "FLOPs": f"{batch * counted.flops / 1e12:,.3g} T an update, "
        f"{steps * batch * counted.flops / 1e15:,.3g} P in all, "
        f"{batch * counted.flops / supervised / 1e9:,.3g} G per supervised token",
        "memory": f"{counted.weights / 1e9:,.3g} GB of weights, gradients and moments, and "
        f"{kept / 1e9:,.3g} GB kept for backward",
    }
    for name, text in lines.items():
        say(f"{name}: {text}")


def countable(config: c.Config) -> c.Config:
    """The config with nominal lengths where the data would decide. ValueError for an objective that
    is not counted."""
    if config.objective.name not in OBJECTIVES or config.objective.blocks in ("each", "all"):
        raise ValueError(
            f"--dry-run counts {' and '.join(OBJECTIVES)} SFT on one block, or all, at a visit: "
            "see bwsft experiment table --dry-run for the others"
        )
    plain, size = c.Config(), config.block_size
    gen = config.gen_length or -(-plain.gen_length // size) * size
    return dataclasses.replace(
        config, gen_length=gen, max_length=config.max_length or 2 * gen,
        dataset=dataclasses.replace(config.dataset, canvas="fixed"),
    )  # fmt: skip


def shape_of(config: c.Config) -> Any:
    """The model's config: a folder's, the embedded base's, or LLaDA-8B's for a LLaDA of the Hub,
    which is not looked up. Where config.json lacks [MASK] or an end token, their ids change no
    count. ValueError for another name than a folder's."""
    folder = Path(config.model) if config.model else TINY
    if not folder.is_dir():
        if "llada" in folder.name.lower():
            return LladaConfig()
        raise ValueError(
            f"--dry-run asks no Hub: hf download {config.model} config.json --local-dir DIR, then "
            "--model DIR"
        )
    last = read_json(folder / "config.json").get("vocab_size", 1) - 1
    return read_config(folder, Facts(last, config.logit_shift, last))


def nominal(config: c.Config) -> tuple[int, int]:
    """(prompt, response) of a nominal sequence."""
    return max(config.max_length - config.gen_length, 1), config.gen_length


def masked(config: c.Config) -> float:
    """Supervised tokens of a sequence in every draw: half of what can be masked, and all of a
    hidden suffix that is supervised, which makes it half of the response."""
    objective = config.objective
    whole = objective.name == "classical" or objective.suffix_weight
    whole = whole or config.context == "block_causal"
    return config.draws_per_context * (config.gen_length if whole else config.block_size) / 2


def dtype_of(config: c.Config) -> torch.dtype:
    """Of the weights as training on the device that the preset is for would have them."""
    return torch.bfloat16 if is_for_a_gpu(config) and config.lora.rank else torch.float32


def count(config: c.Config, shape: Any) -> Counted:
    """All of it, for a model's config: told from its first two layers, and from what a third one of
    each kind adds."""
    first, rest = (kinds := layer_kinds(shape))[:2], Counter(kinds[2:])
    total = two = np.array(counted(config, shape, first))
    for kind, number in rest.items():
        total = total + number * (np.array(counted(config, shape, [*first, kind])) - two)
    return Counted(*total.tolist())


def counted(config: c.Config, shape: Any, kinds: list[str]) -> tuple[int, ...]:
    """The fields of Counted, of one sequence through layers of these kinds."""
    backbone = hollow_backbone(with_layers(shape, kinds), dtype_of(config), config.lora)
    backbone.set_gradient_checkpointing(config.grad_checkpointing)
    return dataclasses.astuple(step_of(config, backbone))


def step_of(config: c.Config, backbone: Backbone) -> Counted:
    """What a step on one nominal sequence takes."""
    objective = OBJECTIVES[config.objective.name].of(config, backbone.family)
    mode = make_mode(config, backbone.family, backbone, objective, torch.device("cpu"))
    if is_for_a_gpu(config):
        half = functools.partial(torch.autocast, "cpu", torch.bfloat16)
        mode = dataclasses.replace(mode, autocast=half)
    rows = [np.zeros(length, dtype=np.int64) for length in nominal(config)]
    batch = pack([Example(*rows, 0)], layout_of(config, backbone.family))
    kept, most, tokens, run = Kept(backbone), 0, [], backbone.run_layers
    backbone.run_layers = lambda ids, *rest: tokens.append(len(ids)) or run(ids, *rest)
    with flop_counter() as flops:
        with torch.autograd.graph.saved_tensors_hooks(kept.save, lambda x: x):
            for loss in mode.losses(batch, Place(0, 0, 1, batch.ids.numel())):
                most = max(most, kept.take())
                loss.total.backward()
    held = sum(p.nbytes for p in backbone.parameters())
    held += sum(3 * p.nbytes for p in trainable(backbone).values())
    return Counted(sum(tokens), flops.get_total_flops(), most, held)
