"""A run on a model without values: what `bwsft train --dry-run` counts on.

The batch, the context mode and the objective are those of a run; the sequences are nominal. Layers
of one kind take the same, so that two and a third one of each tell what all take.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bwsft import config as c
from bwsft.checkpoints.resolve import TINY
from bwsft.data.packing import Batch, Example, pack
from bwsft.models.backbone import Backbone
from bwsft.models.families import Facts, read_config
from bwsft.models.hollow import as_on_a_card, hollow_backbone, layer_kinds, with_layers
from bwsft.models.llada_config import LladaConfig
from bwsft.models.weight_files import read_json
from bwsft.objectives.active_blocks import groups_of
from bwsft.objectives.blockwise import Blockwise, mask_spec
from bwsft.objectives.classical import Classical
from bwsft.objectives.uniform import Uniform
from bwsft.presets import is_for_a_gpu
from bwsft.training.context_modes import ContextMode, make_mode
from bwsft.training.run_data import layout_of

OBJECTIVES = {"blockwise": Blockwise, "classical": Classical, "uniform": Uniform}


def countable(config: c.Config) -> c.Config:
    """The config with nominal lengths where the data would decide. ValueError for an objective that
    is not counted."""
    if config.objective.name not in OBJECTIVES or config.objective.blocks in ("each", "all"):
        raise ValueError(
            f"--dry-run counts {', '.join(OBJECTIVES)} SFT on one block, or all, at a visit: "
            "see bwsft experiment table --dry-run for the others"
        )
    plain, size = c.Config(), config.block_size
    gen = config.gen_length or -(-plain.gen_length // size) * size
    return dataclasses.replace(
        config, gen_length=gen, max_length=config.max_length or 2 * gen,
        dataset=dataclasses.replace(config.dataset, canvas="fixed"),
    )  # fmt: skip


def shape_of(config: c.Config) -> Any:
    """The model's config: a folder's, the embedded base's, or LLaDA-8B's for LLaDA-8B and 1.5 of
    the Hub, which is not looked up. Where config.json lacks [MASK] or an end token, their ids
    change no count. ValueError for another name than a folder's."""
    folder = Path(config.model) if config.model else TINY
    if not folder.is_dir():
        if re.match(r"llada-(8b|1\.5)", folder.name, re.IGNORECASE):
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


def is_on_a_card(config: c.Config) -> bool:
    """Whether the run is one for a CUDA device."""
    return config.device.startswith("cuda") or config.device == "auto" and is_for_a_gpu(config)


def nominal_batch(config: c.Config, backbone: Backbone, size: int, offset: int = 0) -> Batch:
    """So many nominal sequences, packed; with several active blocks at visits at which their groups
    have this offset."""
    rows = [np.zeros(length, dtype=np.int64) for length in nominal(config)]
    examples = [Example(*rows, number) for number in range(size)]
    batch = pack(examples, layout_of(config, backbone.family))
    if cuts(config) > 1:
        batch = dataclasses.replace(batch, visits=visits_of(batch, config, offset))
    return batch


def cuts(config: c.Config) -> int:
    """Ways to cut a response in groups of active blocks that cost differently: in exact mode, whose
    pass is of one group, none do."""
    return config.active_blocks if config.context == "block_causal" else 1


def visits_of(batch: Batch, config: c.Config, offset: int) -> Tensor:
    """Visits [S] of the sequences at which their groups of active blocks have this offset."""
    visits = torch.arange(64 * config.active_blocks)  # all miss it once in 10^27 runs
    every = dataclasses.replace(
        batch, sample_ids=batch.sample_ids.repeat_interleave(len(visits)),
        visits=visits.repeat(batch.num_sequences),
    )  # fmt: skip
    found = groups_of(every, config.seed, config.active_blocks).offset == offset
    return found.view(-1, len(visits)).long().argmax(1)


def worst_offset(config: c.Config, backbone: Backbone) -> int:
    """The offset of groups of active blocks whose last group is one block: the clean row, which
    ends before that, is longest."""
    shape = (torch.tensor([length]) for length in nominal(config))
    blocks = int(mask_spec(config, backbone.family).grid.num_blocks(*shape))
    return (1 - blocks) % cuts(config)


def mode_of(config: c.Config, backbone: Backbone) -> ContextMode:
    """The run's context mode, in bf16 where it is on a card."""
    objective = OBJECTIVES[config.objective.name].of(config, backbone.family)
    mode = make_mode(config, backbone.family, backbone, objective, torch.device("cpu"))
    if not is_on_a_card(config):
        return mode
    half = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    return dataclasses.replace(mode, autocast=half)


def model_of(config: c.Config, shape: Any, kinds: list[str]) -> Backbone:
    """The hollow model of the run, with layers of these kinds."""
    card = is_on_a_card(config)
    dtype = torch.bfloat16 if card and config.lora.rank else torch.float32
    backbone = hollow_backbone(with_layers(shape, kinds), dtype, config.lora)
    if card:
        as_on_a_card(backbone, config.fused_ops != "off", config.lora.quantize is not None)
    backbone.set_gradient_checkpointing(config.grad_checkpointing)
    return backbone


def by_layers(
    config: c.Config, shape: Any, numbers: Callable[[c.Config, Backbone], np.ndarray]
) -> np.ndarray:
    """The numbers of a run on the whole model of a config: told from its first two layers, and from
    what a third one of each kind adds."""
    first, rest = (kinds := layer_kinds(shape))[:2], Counter(kinds[2:])
    total = two = numbers(config, model_of(config, shape, first))
    for kind, number in rest.items():
        three = numbers(config, model_of(config, shape, [*first, kind]))
        total = total + number * (three - two)
    return total
