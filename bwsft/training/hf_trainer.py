"""Blockwise SFT under the Hugging Face Trainer, shaped like TRL's SFTTrainer.

    trainer = BlockwiseTrainer(
        model="GSAI-ML/LLaDA-8B-Instruct",
        args=BlockwiseConfig("out", context="cached", draws_per_context=4, max_steps=200, bf16=True,
                             per_device_train_batch_size=4, gradient_accumulation_steps=8),
        train_dataset=load_dataset("trl-lib/Capybara", split="train"),
        peft_config=LoraConfig(r=64),
    )
    trainer.train()

The loss is that of `bwsft train` on the same examples: masks are functions of (seed, sample id,
visit), and a visit is an epoch of the Trainer. What the Trainer has its own settings for (updates,
batches, optimizer, schedule, precision, saving) is taken from its arguments alone.

For a Trainer that is there already, settings may stand beside its TrainingArguments as a bwsft
Config, and examples may be token ids: `load_examples` makes those of a Config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments

from bwsft import config as c
from bwsft.checkpoints.generation_config import (
    DecodingContract,
    read_contract,
    write_generation_config,
)
from bwsft.data.packing import Batch, CanvasLayout, Example, pack
from bwsft.models.backbone import Family
from bwsft.models.loading import as_backbone
from bwsft.objectives.base import Place
from bwsft.objectives.blockwise import Blockwise
from bwsft.objectives.classical import Classical
from bwsft.training.block_causal import block_size_at
from bwsft.training.context_modes import ContextMode, make_mode
from bwsft.training.hf_arguments import check_arguments
from bwsft.training.hf_config import OWN, BlockwiseConfig, own_config
from bwsft.training.hf_order import LengthOrder, VisitOrder
from bwsft.training.hf_samples import Samples
from bwsft.training.hf_setup import is_raw, open_model, tokenizer_of, with_lengths
from bwsft.training.run_data import held_out, layout_of, plan_data
from bwsft.training.trainable import check_trainable

__all__ = ["BlockwiseCollator", "BlockwiseTrainer", "load_examples"]

OBJECTIVES = {"blockwise": Blockwise, "classical": Classical}
COLUMNS = ["prompt", "response", "sample_id", "visit"]
# Of the Trainer's own options: a loss, metrics and logits of other kinds than the objective's.
FOREIGN = ("model_init", "compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")


def load_examples(
    config: c.Config, tokenizer: PreTrainedTokenizerBase, model: nn.Module | Family,
    records: Any = None, holdout: float | None = None,
) -> tuple[list[dict], list[dict]]:  # fmt: skip
    """(training examples, held-out examples) of the run `config`, as `bwsft train` has them:
    config.data, template, lengths, holdout. In place of the config's, `records` is a data set, and
    `holdout` a number of examples, or below 1 a share."""
    family = model if isinstance(model, Family) else as_backbone(model).family
    data = plan_data(config, tokenizer, family, records, holdout)
    examples = (data.examples.example(int(i)) for i in (*data.train_index, *data.holdout_index))
    rows = [dict(zip(COLUMNS, example, strict=True)) for example in examples]
    return rows[: len(data.train_index)], rows[len(data.train_index) :]


class BlockwiseCollator:
    """Features to a packed batch: a dict of the fields of `bwsft.data.packing.Batch`.

    A feature has `prompt` and `response` (token ids; the response with its end token), `sample_id`
    (its row number in the data: the masks follow it), and may have `visit`, visits before this
    training. ValueError for features that lack one of them or contain [MASK].
    """

    def __init__(self, layout: CanvasLayout):
        self.layout = layout

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = pack([self.example(feature) for feature in features], self.layout)
        # The Trainer takes the first tensor's length for the batch size.
        fields = {name: value for name, value in vars(batch).items() if value is not None}
        return {"sample_ids": batch.sample_ids} | fields

    def example(self, feature: Mapping[str, Any]) -> Example:
        if missing := [name for name in COLUMNS[:3] if name not in feature]:
            raise ValueError(
                f"a training example has no {missing[0]}: BlockwiseTrainer needs prompt, response "
                "(token ids) and sample_id (the row's number); load_examples makes them"
            )
        prompt, response = np.asarray(feature["prompt"]), np.asarray(feature["response"])
        number = int(feature["sample_id"])
        if not len(response):
            raise ValueError(f"example {number} has an empty response")
        if self.layout.mask_id in prompt or self.layout.mask_id in response:
            raise ValueError(f"example {number} contains [MASK], id {self.layout.mask_id}")
        return Example(prompt, response, number, int(feature.get("visit", 0)))


class BlockwiseTrainer(Trainer):
    """`transformers.Trainer` with the loss of Blockwise (or classical) SFT.

    model: a folder or Hub id (None: the tiny LLaDA that ships here); or a loaded model of
    docs/model_families.md, plain or wrapped by peft; or a bwsft Backbone.
    args: a BlockwiseConfig; or other TrainingArguments and `config`, a bwsft Config.
    train_dataset, eval_dataset: records (messages, prompt and completion, ...: all that
    docs/train_your_data.md lists) in a Dataset, list, DataFrame, file or Hub id; or token ids as
    load_examples makes them. They need a length; the order, like the masks, follows the seed.
    processing_class: the tokenizer; default the model's own. peft_config: an adapter to train;
    LoRA without target_modules goes on all matrices of every block. options: the Trainer's own.

    `evaluate` reports the held-out blockwise NELBO (nats per response token) as eval_loss.
    `samples` holds the answers to args.sample_prompts. ValueError, which names it, for what this
    Trainer cannot do: hf_arguments says so of every field of TrainingArguments.
    """

    def __init__(
        self, model: nn.Module | str | Path | None = None, args: TrainingArguments | None = None, *,
        config: c.Config | None = None, train_dataset: Any = None, eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None, peft_config: Any = None,
        **options: Any,
    ):  # fmt: skip
        if args is None:
            args = BlockwiseConfig() if config is None else TrainingArguments()
        config = own_config(args, config)
        check(config, options)
        check_arguments(args, OWN if isinstance(args, BlockwiseConfig) else ())
        self.backbone, words = open_model(model, args, config, processing_class, peft_config)
        self.backbone.head()  # ValueError if an adapter wraps it
        check_trainable(self.backbone.family, config)
        clean = {"clean_attention": config.clean_attention}
        self.backbone.family = dataclasses.replace(self.backbone.family, **clean)
        prompts = args.sample_prompts if isinstance(args, BlockwiseConfig) else None
        if is_raw(train_dataset) or is_raw(eval_dataset) or prompts:
            words = tokenizer_of(self.backbone, words)
        family = self.backbone.family
        self.config = config = with_lengths(config, words, family, train_dataset)
        sets = self.tokenized(args, words, train_dataset, eval_dataset)
        self.layout = layout_of(config, family)
        options.setdefault("data_collator", BlockwiseCollator(self.layout))
        super().__init__(self.backbone.model, args, processing_class=words, **sets, **options)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or self.args.n_gpu > 1:
            raise ValueError(
                "BlockwiseTrainer runs on one device or, started by torchrun, as DDP: for FSDP use "
                "bwsft train --parallel fsdp; set CUDA_VISIBLE_DEVICES where several GPUs are seen"
            )
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the update's sequences
        self._signature_columns = [*COLUMNS, self.args.length_column_name]
        objective = OBJECTIVES[config.objective.name].of(config, family)
        mode = make_mode(config, family, self.backbone, objective, self.args.device)
        self.mode = dataclasses.replace(mode, autocast=self.accelerator.autocast)
        self.samples = Samples(self, config, self.backbone) if prompts else None
        if prompts:
            self.add_callback(self.samples)

    def tokenized(
        self, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase | None,
        train_dataset: Any, eval_dataset: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Both data sets as token ids; without an eval_dataset it is what is held out. A report
        says what was dropped."""
        own = isinstance(args, BlockwiseConfig)
        holdout = args.holdout if own else self.config.dataset.holdout
        if own and holdout and (eval_dataset is not None or not is_raw(train_dataset)):
            raise ValueError(
                "holdout is for a train_dataset of records without an eval_dataset: leave it at 0"
            )
        whole = dataclasses.replace(self.config.dataset, limit=None)
        others = dataclasses.replace(self.config, dataset=whole)

        def read(source: Any, config: c.Config = others, held: float = 0) -> tuple[Any, Any]:
            if isinstance(source, dict) and source is eval_dataset:  # one that the Trainer takes
                return {name: read(part)[0] for name, part in source.items()}, None
            if not is_raw(source):
                return source, None
            return load_examples(config, tokenizer, self.backbone, source, held)

        with args.main_process_first(local=False), quiet(args.process_index > 0):
            held = 0 if eval_dataset is not None else holdout
            train, held_out = read(train_dataset, self.config, held)
            return {"train_dataset": train, "eval_dataset": held_out or read(eval_dataset)[0]}

    @property
    def visit(self) -> int:
        """Earlier visits of every example in this training."""
        return int(self.state.epoch)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if not hasattr(dataset, "__len__"):
            raise ValueError("BlockwiseTrainer needs a train_dataset with a length")
        strategy, seed = self.args.train_sampling_strategy, self.config.seed
        if strategy == "sequential":
            return super()._get_train_sampler(train_dataset)
        if strategy == "group_by_length":
            together = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return LengthOrder(self.lengths(dataset), together, seed, lambda: self.visit)
        return VisitOrder(len(dataset), seed, lambda: self.visit)

    def lengths(self, dataset: Sequence[Mapping[str, Any]]) -> list[int]:
        """Of every example its column args.length_column_name, else its tokens in a batch."""
        column, of = self.args.length_column_name, self.layout.lengths
        return [
            row[column] if column in row else of(len(row["prompt"]), len(row["response"]))[1]
            for row in dataset
        ]

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """Head and loss are inside the backbone's forward: it is what DDP must wrap."""
        if not training or model is not self.model:
            return model
        return self.accelerator.prepare(self.backbone)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict], num_batches: int, device: torch.device
    ) -> tuple[list[dict], Tensor]:
        """As the Trainer's, which counts labels, but with the number of sequences of the update,
        over accumulation and (args.average_tokens_across_devices) processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count = torch.tensor(sum(len(batch["sample_ids"]) for batch in batches), device=device)
        everywhere = self.args.average_tokens_across_devices
        return batches, self.accelerator.gather(count).sum() if everywhere else count

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The micro-batch's part of the update's loss: the Trainer sums the parts, and DDP
        averages over processes."""
        if return_outputs:
            raise ValueError("BlockwiseTrainer has no outputs to return: it keeps no logits")
        batch = self.batch_of(inputs)
        batch = dataclasses.replace(batch, visits=batch.visits + self.visit)
        sequences = batch.num_sequences if num_items_in_batch is None else num_items_in_batch
        everywhere = self.args.average_tokens_across_devices
        scale = (self.accelerator.num_processes if everywhere else 1) / sequences
        mode, total = self.mode_around(model), 0.0
        place = Place(self.state.global_step, 0, batch.num_sequences, 0)  # which no block needs
        backwards = mode.backwards(self.config.draws_per_context)
        for number, loss in enumerate(mode.losses(batch, place), 1):
            part = loss.total * scale
            if number < backwards:  # the last one is the Trainer's
                self.accelerator.backward(part)
                part = part.detach()
            total = total + part
        return total

    def mode_around(self, model: nn.Module) -> ContextMode:
        """The context mode with the model as the Trainer wraps it; blocks shrink over its updates,
        whose number it knows once it trains."""
        mode = dataclasses.replace(self.mode, backbone=model)
        if not self.config.block_size_schedule:
            return mode
        config = dataclasses.replace(self.config, steps=self.state.max_steps)
        return dataclasses.replace(mode, size_at=functools.partial(block_size_at, config))

    def batch_of(self, inputs: Mapping[str, Any]) -> Batch:
        """The collator's batch where the context mode wants it: the Trainer moves it to the device,
        and block_causal lays its rows out on the host."""
        if self.config.context == "block_causal":
            inputs = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        return Batch(**inputs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """As the Trainer's. ValueError for a checkpoint of other blocks or another canvas, as other
        records may ask for."""
        then, now = read_contract(Path(resume_from_checkpoint)), self.config
        own = {"context": now.context, "block_size": now.block_size, "gen_length": now.gen_length}
        for name, value in own.items():
            if then is not None and getattr(then, name) != value:
                raise ValueError(
                    f"{resume_from_checkpoint} was trained with {name} {getattr(then, name)}, and "
                    f"this is {value}: say so in the config, or start anew"
                )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """As the Trainer's; the folder also says how to decode the model."""
        super()._save(output_dir, state_dict)
        if not self.args.should_save:  # newer releases call this in every process
            return
        family = self.backbone.family
        try:
            contract = DecodingContract.of(self.config, family, self.processing_class)
        except ValueError:  # the user's own examples, which this template cannot make
            contract = DecodingContract.of(self.config, family)
        write_generation_config(output_dir or self.args.output_dir, self.backbone, contract)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """For args.include_num_input_tokens_seen; a packed batch has no padding."""
        ids = inputs["ids"]
        super()._track_num_input_tokens({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:  # fmt: skip
        """(held-out blockwise NELBO of the batch, None, None)."""
        batch = self.batch_of(self._prepare_inputs(inputs))
        value = held_out(self.config, self.backbone.family).nelbo(self.mode.score, [batch])
        return torch.tensor(value, device=self.args.device), None, None


@contextlib.contextmanager
def quiet(silent: bool) -> Iterator[None]:
    """Keep the report of a process other than the first one to itself."""
    with contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext():
        yield


def check(config: c.Config, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a config or an option that BlockwiseTrainer cannot follow."""
    c.validate(config)
    if config.objective.name not in OBJECTIVES:
        raise ValueError(
            f"BlockwiseTrainer trains {' and '.join(OBJECTIVES)} SFT; use bwsft train for "
            f"objective {config.objective.name}"
        )
    if config.objective.blocks in ("each", "all"):
        raise ValueError(
            f"BlockwiseTrainer cannot follow objective.blocks {config.objective.blocks!r}, whose "
            "epochs or forwards are others than the Trainer's; use bwsft train"
        )
    if config.objective.suffix_decay:
        raise ValueError(
            "BlockwiseTrainer cannot follow objective.suffix_decay, whose weight falls over a "
            "number of updates that it does not know beforehand; use bwsft train"
        )
    if refused := [name for name in FOREIGN if options.get(name) is not None]:
        raise ValueError(f"BlockwiseTrainer takes no {refused[0]}: its loss is the objective's")
