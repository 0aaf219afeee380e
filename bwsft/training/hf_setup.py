"""What BlockwiseTrainer makes of its arguments: a name becomes a model, records become examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from bwsft import config as c
from bwsft.checkpoints.resolve import own_memory, plan_model, plan_tokenizer
from bwsft.data.tokenizer import load_tokenizer
from bwsft.models.backbone import Backbone, Family
from bwsft.models.loading import as_backbone
from bwsft.models.lora import add_adapter
from bwsft.training.run_data import follow_data


class Opened(NamedTuple):
    """A model ready to train, and its tokenizer as far as one is known."""

    backbone: Backbone
    tokenizer: PreTrainedTokenizerBase | None


def open_model(
    model: nn.Module | str | Path | None, args: TrainingArguments, config: c.Config,
    tokenizer: PreTrainedTokenizerBase | None, peft_config: Any,
) -> Opened:  # fmt: skip
    """The model that a trainer was given, or that of a folder or Hub id (None: of config.model),
    with the adapter of `peft_config`.

    A model that is loaded here has fp32 weights, which small updates need; bf16 under an adapter if
    args.bf16 says so.
    """
    if isinstance(model, nn.Module):
        if getattr(args, "mask_token", None) is not None:
            raise ValueError(
                "mask_token is for a model that is loaded by its name: for this one call "
                "bwsft.models.loading.set_mask first"
            )
        backbone = as_backbone(model)
    else:
        config = config if model is None else dataclasses.replace(config, model=str(model))
        tokenizer = tokenizer or load_tokenizer(plan_tokenizer(config))
        backbone = load(config, args, tokenizer, adapted=peft_config is not None)
    if peft_config is not None:
        add_adapter(backbone, peft_config, args.seed)
    return Opened(backbone, tokenizer)


def load(
    config: c.Config, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase, adapted: bool
) -> Backbone:
    """The model that config.model names, as `bwsft train` loads it (None: the embedded one).
    ValueError for an adapter."""
    alone = dataclasses.replace(config, tokenizer=None, lora=c.LoraConfig(rank=0))
    plan = plan_model(alone, tokenizer, Path(args.output_dir))
    backbone = plan.build(args.device)
    own_memory(backbone)
    if adapted and args.bf16:
        backbone.to(torch.bfloat16)
    if config.model is not None:
        # What an adapter's folder names as its base: a Hub id, not the place of its download.
        backbone.model.name_or_path = plan.base
    return backbone


def tokenizer_of(backbone: Backbone, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """The tokenizer, else that of the folder or Hub id that the model came from."""
    name = getattr(backbone.base_model, "name_or_path", "")
    if tokenizer is None and not name:
        raise ValueError("pass processing_class=tokenizer: the model does not say where its own is")
    return tokenizer or load_tokenizer(name)


def with_lengths(
    config: c.Config, tokenizer: PreTrainedTokenizerBase | None, family: Family, dataset: Any
) -> c.Config:
    """The config with the lengths that it leaves open as the records to train on need them.
    ValueError where these are token ids already."""
    if None not in (config.gen_length, config.max_length):
        return config
    if hasattr(dataset, "__len__") and not len(dataset):
        raise ValueError("train_dataset has no records")
    if not is_raw(dataset):
        raise ValueError(
            "give the config gen_length and max_length: they can follow a train_dataset of records "
            "alone (bwsft data FILE suggests them)"
        )
    return follow_data(config, tokenizer, family, dataset)


def is_raw(dataset: Any) -> bool:
    """Whether a data set holds records to tokenize: a name, or rows that are not yet token ids."""
    if isinstance(dataset, str | Path | Mapping) or hasattr(dataset, "iloc"):
        return True
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset)):
        return False
    row = dataset[0]
    made = isinstance(row, Mapping) and {"response", "sample_id"} <= row.keys()
    return not (made and np.asarray(row["response"]).dtype.kind in "iuf")
