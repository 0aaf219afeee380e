"""`bwsft train --dry-run`: tokens, FLOPs and memory of a run, counted on a model without values."""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bwsft import config as c
from bwsft.commands.card_memory import (
    alternatives,
    fits,
    flags_of,
    in_words,
    peak_of,
    settings_that_fit,
    sized,
)
from bwsft.commands.hollow_run import (
    by_layers,
    countable,
    cuts,
    is_on_a_card,
    mode_of,
    nominal,
    nominal_batch,
    shape_of,
)
from bwsft.models.backbone import Backbone
from bwsft.objectives.base import Place
from bwsft.utils.devices import pick_device
from bwsft.utils.flops import active_groups, flop_counter
from bwsft.utils.lines import say

WAYS = 3  # settings that fit, of which a dry run tells


@dataclass(frozen=True)
class Counted:
    """What a step on one sequence takes."""

    tokens: int
    """Tokens that run through the layers, a context pass included."""
    flops: int


def print_cost(config: c.Config, memory: str | None = None) -> None:
    """Print what the run `config` costs on nominal sequences, half of max_length prompt, and which
    settings fit `memory` (as 24GiB; None: the device's own) if it does not. ValueError for an
    objective or a model that this cannot count."""
    config = countable(config)
    shape, room = shape_of(config), room_of(config, memory)
    counted, peak = count(config, shape), peak_of(config, shape)
    batch, steps, (prompt, canvas) = config.batch_size, config.steps, nominal(config)
    supervised = batch * masked(config)
    lines = {
        "sequences": f"{batch:,} an update, {config.micro_batch_size:,} at a time, of nominally "
        f"{prompt:,} + {canvas:,} tokens; {steps:,} updates",
        "tokens through the layers": f"{batch * counted.tokens:,} an update, "
        f"{steps * batch * counted.tokens:,} in all",
        "supervised tokens": f"{supervised:,.0f} an update, {steps * supervised:,.0f} in all",
        "FLOPs": f"{batch * counted.flops / 1e12:,.3g} T an update, "
        f"{steps * batch * counted.flops / 1e15:,.3g} P in all, "
        f"{batch * counted.flops / supervised / 1e9:,.3g} G per supervised token",
        "memory": in_words(peak),
    }
    for name, text in lines.items():
        say(f"{name}: {text}")
    if room is None:
        return
    if fits(peak, room):
        say(f"card: it fits {sized(room)}, with a tenth to spare")
        return
    say(f"card: {sized(room)}, of which a tenth is to stay free, are too few; what fits:")
    for way, less in some_that_fit(config, shape, room, WAYS):
        say(f"  {flags_of(way, config)}: {in_words(less)}")


def fitted(config: c.Config, memory: str | None) -> c.Config:
    """The run with the settings that change least of those that fit `memory`, as print_cost has
    it, which it says. ValueError where none do."""
    room, plain = room_of(config, memory), countable(config)
    if room is None:
        raise ValueError("--fit: no CUDA device is here; say what is to be fitted, as in "
                         "--memory 24GiB")
    shape, (prompt, canvas) = shape_of(plain), nominal(plain)
    sizes = f"{sized(room)}, for sequences of {prompt:,} + {canvas:,} tokens"
    if fits(peak_of(plain, shape), room):
        say(f"--fit: the settings fit {sizes}, as they are")
        return config
    ((way, _),) = some_that_fit(plain, shape, room, 1)
    say(f"--fit takes {flags_of(way, plain)}, which fits {sizes}")
    names = ("micro_batch_size", "grad_checkpointing", "lora")
    return dataclasses.replace(config, **{name: getattr(way, name) for name in names})


def some_that_fit(
    config: c.Config, shape: Any, room: int, number: int
) -> list[tuple[c.Config, dict[str, int]]]:
    """Up to so many of settings_that_fit, one at least: else ValueError with what is needed."""
    found = list(itertools.islice(settings_that_fit(config, shape, room), number))
    if not found:
        *_, last = (way for ways in alternatives(config, shape) for way in ways)
        least = peak_of(dataclasses.replace(last, micro_batch_size=1), shape)
        raise ValueError(
            f"no settings fit {sized(room)}, of which a tenth is to stay free: with "
            f"{flags_of(last, config)} one sequence at a time takes {in_words(least)}. Take a "
            "smaller --model, or shorter --max-length and --gen-length"
        )
    return found


def room_of(config: c.Config, memory: str | None) -> int | None:
    """Bytes of a memory as it is said, else of the CUDA device here, if the run is for one."""
    if memory is not None:
        return parse_bytes(memory)
    if not (is_on_a_card(config) and torch.cuda.is_available()):
        return None
    return torch.cuda.get_device_properties(pick_device(config.device)).total_memory


def parse_bytes(text: str) -> int:
    """24GiB, 80GB or 512MiB as bytes. ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([GM])(i?)B", text)
    if found is None:
        raise ValueError(f"--memory {text:.80}: say it as 24GiB, 80GB or 512MiB")
    number, letter, binary = found.groups()
    return round(float(number) * (1024 if binary else 1000) ** "MG".index(letter) *
                 (2**20 if binary else 10**6))


def masked(config: c.Config) -> float:
    """Supervised tokens of a sequence in every draw: half of what can be masked, and all of a
    hidden suffix that is supervised, which makes it half of the response. Of noise that is random
    tokens, all."""
    objective = config.objective
    if objective.name == "uniform":
        region = config.block_size if objective.uniform.one_block else config.gen_length
        return region * (config.draws_per_context + (config.ar_weight > 0))
    if objective.name == "classical" or objective.suffix_weight:
        return config.draws_per_context * config.gen_length / 2
    blocks, tiled = config.gen_length / config.block_size, config.context == "block_causal"
    groups = active_groups(blocks, config.active_blocks, tiled)
    return config.draws_per_context * groups.masked * config.block_size


def count(config: c.Config, shape: Any) -> Counted:
    """What a step on one nominal sequence takes, for a model's config."""
    return Counted(*(round(number) for number in by_layers(config, shape, step_of)))


def step_of(config: c.Config, backbone: Backbone) -> np.ndarray:
    """The fields of Counted, of one nominal sequence; with several active blocks the mean over the
    ways to cut it in groups."""
    tokens, run = [], backbone.run_layers
    backbone.run_layers = lambda ids, *rest: tokens.append(len(ids)) or run(ids, *rest)
    with flop_counter() as flops:
        for offset in range(cuts(config)):
            batch = nominal_batch(config, backbone, 1, offset)
            for loss in mode_of(config, backbone).losses(batch, Place(0, 0, 1, batch.ids.numel())):
                loss.total.backward()
    return np.array([sum(tokens), flops.get_total_flops()]) / cuts(config)
