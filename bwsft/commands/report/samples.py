"""Held-out examples of a run, answered and scored by the model it started from and by its newest
checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwsft_kernels.block_grid import BlockGrid
from torch import Tensor

from bwsft import config as c
from bwsft.checkpoints.contents import pinned
from bwsft.checkpoints.generation_config import DecodingContract
from bwsft.checkpoints.resolve import (
    Trained,
    known_contract,
    load_trained,
    locate,
    plan_model,
    plan_tokenizer,
)
from bwsft.checkpoints.state import read_state
from bwsft.commands.options import SampleOptions
from bwsft.commands.report.slices import losses
from bwsft.data.chat_template import METAMATH, Template
from bwsft.data.tokenizer import load_tokenizer
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.result import Generation
from bwsft.models.backbone import Family
from bwsft.training.run_data import plan_data
from bwsft.utils.devices import pick_device


@dataclass(frozen=True)
class Answered:
    """What the models of a run make of its held-out examples."""

    samples: list[dict]
    """With question, reference and answers."""
    slices: list[dict]
    """Of each model its name and its loss by block and by mask rate: slices.losses."""
    notes: list[str]
    """What could not be had, and why."""


def ask_models(
    config: c.Config, run: Path, checkpoint: Path | None, options: SampleOptions
) -> Answered:
    """The base and the newest checkpoint of a run on its held-out examples."""
    if options.samples < 0:
        raise ValueError("--samples must be at least 0")
    shape = {"gen_length": config.gen_length, "block_size": config.block_size}
    settings = DecodeConfig(**shape, steps=options.steps, batch_size=max(options.samples, 1))
    why = None
    if not options.samples:
        why = "--samples 0."
    elif config.dataset.holdout == 0:
        why = "the run holds no examples out (--dataset.holdout 0)."
    else:
        try:
            return asked(config, run, checkpoint, settings, options)
        except (ValueError, OSError) as error:  # data or base are no longer there: the rest is
            why = str(error)
    return Answered([], [], [f"No samples, no loss by block and mask rate: {why}"])


def asked(
    config: c.Config,
    run: Path,
    checkpoint: Path | None,
    settings: DecodeConfig,
    options: SampleOptions,
) -> Answered:
    """ask_models, for a run that has held-out examples. No two models are held at a time."""
    named = config if checkpoint is None else pinned(config, read_state(checkpoint))
    tokenizer = load_tokenizer(plan_tokenizer(named))
    template = Template(tokenizer, config.dataset.template, config.dataset.template_args)
    plan = plan_model(named, tokenizer, run)
    data = plan_data(config, tokenizer, plan.family)
    chosen = [int(i) for i in data.holdout_index[: options.samples]]
    prompts = [data.examples.prompt(i).tolist() for i in chosen]

    def base() -> Trained:
        backbone = plan.build(pick_device(options.device)).eval()
        contract = DecodingContract.of(config, backbone.family, tokenizer)
        backbone.family = dataclasses.replace(backbone.family, end_ids=contract.end_ids)
        return Trained(backbone, tokenizer, None, plan.base, contract)

    models, notes = [("base", base, start_mode(config, plan.family))], []
    if checkpoint is None:
        notes.append("No checkpoint yet: the samples are the base's.")
    else:
        newest = functools.partial(load_trained, str(checkpoint), device=options.device)
        models.append((checkpoint.name, newest, config.context))
    columns, slices = [], []
    for name, load, context in models:
        trained = load()
        decode = dataclasses.replace(settings, context=context)
        columns.append(answers(name, Decoder(trained, template, decode), prompts))
        slices.append({"name": name, **losses(config, trained.backbone, data)})
        del trained
    samples = []
    for i, row in zip(chosen, zip(*columns, strict=True), strict=True):
        asked_for = question(tokenizer, data.examples.prompt(i))
        truth = plain(tokenizer, data.examples.response(i))
        samples.append({"question": asked_for, "reference": truth, "answers": list(row)})
    return Answered(samples, slices, notes)


def start_mode(config: c.Config, family: Family) -> str:
    """Context mode of the model that a run starts from: its own training's, else what its family
    has, else exact."""
    contract = known_contract(*locate(config.model)) if config.model else None
    if contract:
        return contract.context
    return "block_causal" if family.attention == "block_causal" else "exact"


def answers(name: str, decoder: Decoder, prompts: list[list[int]]) -> list[dict]:
    """What a model answers, in the page's form."""
    found = decoder.answers(prompts, trace=True)
    return [answer(name, decoder, p, g) for p, g in zip(prompts, found, strict=True)]


def answer(name: str, decoder: Decoder, prompt: list[int], generation: Generation) -> dict:
    family, config = decoder.trained.backbone.family, decoder.config
    record = decoder.trace_record(generation)
    record["commits"] = [[*commit[:3], round(commit[3], 4)] for commit in record["commits"]]
    grid = BlockGrid(config.block_size, family.block_origin)
    offset = len(prompt) - grid.start(len(prompt))  # of the response in its first block
    text, end_ids = decoder.text(generation.tokens), list(family.end_ids)
    return {
        **record, "name": name, "context": config.context, "text": text, "ended": generation.ended,
        "steps": generation.steps, "offset": offset, "end_ids": end_ids,
    }  # fmt: skip


def plain(tokenizer: Any, ids: Tensor) -> str:
    """The text of ids without special tokens."""
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True).strip()


def question(tokenizer: Any, ids: Tensor) -> str:
    """The prompt's text without the instruction that template metamath puts around it."""
    text = plain(tokenizer, ids)
    before, after = METAMATH.split("{query}")
    _, found, rest = text.partition(before)
    return rest.partition(after)[0] if found else text
