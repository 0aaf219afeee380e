"""Blockwise SFT as a plugin of axolotl, around BlockwiseTrainer.

    plugins: [bwsft.training.hf_axolotl.BlockwisePlugin]
    blockwise: {block_size: 32, context: cached, draws_per_context: 4}
    datasets: [{path: my.jsonl}]

`blockwise` has fields that BlockwiseConfig adds to TrainingArguments. Updates, batches, optimizer,
adapter, seed and saving are axolotl's, and so is val_set_size. Records are read and tokenized as
BlockwiseTrainer does it, from the path (with name and split) of one entry of `datasets`.
Imported by axolotl alone, which bwsft does not need.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from transformers import Trainer, TrainingArguments

from bwsft import config as c
from bwsft.checkpoints.resolve import plan_model, plan_tokenizer
from bwsft.data.tokenizer import load_tokenizer
from bwsft.training.hf_config import OWN, BlockwiseConfig
from bwsft.training.hf_setup import with_lengths
from bwsft.training.hf_trainer import BlockwiseTrainer, load_examples

# Fields of BlockwiseConfig that are said elsewhere in axolotl, and where.
ELSEWHERE = {
    "holdout": "val_set_size says it",
    "subset": "name of the entry of datasets says it",
    "split": "split of the entry of datasets says it",
    "mask_token": "put mask_token_id into the model's config.json",
    "logit_shift": "put logit_shift into the model's config.json",
    "sample_prompts": "axolotl samples itself",
    "sample_steps": "axolotl samples itself",
}
SETTINGS = OWN - {field.name for field in dataclasses.fields(TrainingArguments)} - set(ELSEWHERE)
REFUSED = (
    "sample_packing", "pretraining_dataset", "rl", "reward_model", "fsdp_config", "test_datasets",
    "train_on_inputs",
)  # fmt: skip


class BlockwiseArguments(BaseModel):
    """What the plugin adds to axolotl's config."""

    blockwise: dict[str, Any] | None = None


class BlockwisePlugin(BasePlugin):
    """Trains by BlockwiseTrainer what axolotl has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.run: c.Config | None = None

    def get_input_args(self) -> str:
        """Where axolotl finds the plugin's part of its config."""
        return f"{__name__}.{BlockwiseArguments.__name__}"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> Any:
        """Token ids of the records, in place of axolotl's own reading."""
        from axolotl.common.datasets import TrainDatasetMeta

        run = run_of(cfg)
        words = load_tokenizer(plan_tokenizer(run))
        family = plan_model(run, words, Path(cfg.output_dir)).family
        self.run = run = with_lengths(run, words, family, run.data)
        train, held_out = load_examples(run, words, family, run.data, cfg.val_set_size or 0)
        return TrainDatasetMeta(train, held_out or None, updates(cfg, len(train)))

    def get_trainer_cls(self, cfg: Any) -> type[Trainer]:
        """A BlockwiseTrainer of the run that load_datasets has read."""
        return type("AxolotlBlockwiseTrainer", (AxolotlBlockwiseTrainer,), {"run": self.run})


class AxolotlBlockwiseTrainer(BlockwiseTrainer):
    """BlockwiseTrainer as axolotl calls it: with collators of labels, which it has no use for."""

    run: c.Config

    def __init__(
        self, *args: Any, data_collator: Any = None, eval_data_collator: Any = None,
        bench_data_collator: Any = None, dataset_tags: Any = None, **options: Any,
    ):  # fmt: skip
        super().__init__(*args, config=self.run, **options)


def run_of(cfg: Mapping[str, Any] | Any) -> c.Config:
    """The settings of a config of axolotl as a bwsft Config. ValueError, which names it, for one
    that BlockwiseTrainer cannot follow."""
    given, sets = dict(cfg.blockwise or {}), cfg.datasets or []
    if refused := [name for name in REFUSED if cfg.get(name)]:
        raise ValueError(f"BlockwisePlugin takes no {refused[0]}: leave it out")
    for name in given:
        if name not in SETTINGS:
            reason = ELSEWHERE.get(name, f"known are {', '.join(sorted(SETTINGS))}")
            raise ValueError(f"BlockwisePlugin takes no blockwise.{name}: {reason}")
    if len(sets) != 1:
        raise ValueError("BlockwisePlugin reads one entry of datasets; its path may be a folder")
    seed = 42 if cfg.seed is None else cfg.seed
    args = BlockwiseConfig(cfg.output_dir, seed=seed, report_to=[], **given)
    source = {"subset": sets[0].get("name"), "split": sets[0].get("split")}
    plain = args.run_config()
    return dataclasses.replace(
        plain, model=cfg.base_model, tokenizer=cfg.tokenizer_config or None, data=sets[0]["path"],
        dataset=dataclasses.replace(plain.dataset, **source),
    )  # fmt: skip


def updates(cfg: Any, examples: int) -> int:
    """Updates of the training, as the Trainer counts them."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    batches = math.ceil(examples / (cfg.micro_batch_size * processes))
    whole = math.ceil(batches / cfg.gradient_accumulation_steps)
    return cfg.max_steps or math.ceil(whole * cfg.num_epochs)
