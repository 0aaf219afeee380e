"""Blockwise SFT under the Hugging Face Trainer, for those who already have one.

    config = presets.llada_8b_lora()             # block size, canvas, context mode, masks, seed
    train, held_out = load_examples(config, tokenizer, model)
    trainer = BlockwiseTrainer(
        model, TrainingArguments("out", max_steps=200, per_device_train_batch_size=4,
                                 gradient_accumulation_steps=8),
        config=config, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer,
    )
    trainer.train()

`model` is a LLaDA from `AutoModelForCausalLM` or another model of docs/model_families.md, plain or
wrapped by peft, or a bwsft Backbone. The loss is that of `bwsft train` on the same examples: masks
are functions of (config.seed, sample id, visit), and a visit is an epoch of the Trainer. What the
Trainer has its own settings for (updates, batches, optimizer, schedule, precision, saving) is taken
from the TrainingArguments alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from bwsft import config as c
from bwsft.checkpoints.generation_config import DecodingContract, write_generation_config
from bwsft.data.packing import Batch, CanvasLayout, Example, order, pack
from bwsft.models.backbone import check_context
from bwsft.models.loading import as_backbone
from bwsft.objectives.base import Place
from bwsft.objectives.blockwise import Blockwise
from bwsft.objectives.classical import Classical
from bwsft.training.context_modes import make_mode
from bwsft.training.hf_arguments import check_arguments
from bwsft.training.run_data import held_out, layout_of, plan_data

__all__ = ["BlockwiseCollator", "BlockwiseTrainer", "load_examples"]

OBJECTIVES = {"blockwise": Blockwise, "classical": Classical}
COLUMNS = ["prompt", "response", "sample_id", "visit"]
# Of the Trainer's own options: a loss, metrics and logits of other kinds than the objective's.
FOREIGN = ("model_init", "compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")


def load_examples(
    config: c.Config, tokenizer: PreTrainedTokenizerBase, model: nn.Module
) -> tuple[list[dict], list[dict]]:
    """(training examples, held-out examples) of the run `config`, as `bwsft train` has them:
    config.data, template, lengths, holdout."""
    data = plan_data(config, tokenizer, as_backbone(model).family)
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
        return {"sample_ids": batch.sample_ids} | vars(batch)

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

    config: a bwsft Config; of it count block_size, gen_length, max_length, context (exact or
    cached), draws_per_context, seed, dataset.canvas and objective. options: the Trainer's own.
    The training set must have a length; its order, like the masks, follows config.seed.
    `evaluate` reports the held-out blockwise NELBO (nats per response token, config.eval.draws) as
    eval_loss. ValueError, which names it, for what this Trainer cannot do: hf_arguments says so of
    every field of TrainingArguments.
    """

    def __init__(
        self, model: nn.Module, args: TrainingArguments | None = None, *, config: c.Config,
        **options: Any,
    ):  # fmt: skip
        self.backbone = as_backbone(model)
        self.backbone.head()  # ValueError if an adapter wraps it
        check(config, options)
        if args is not None:
            check_arguments(args)
        check_context(self.backbone.family, config.context)
        self.config, family = config, self.backbone.family
        self.layout = layout_of(config, family)
        options.setdefault("data_collator", BlockwiseCollator(self.layout))
        super().__init__(self.backbone.model, args, **options)
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
        batch = Batch(**inputs)
        batch = dataclasses.replace(batch, visits=batch.visits + self.visit)
        sequences = batch.num_sequences if num_items_in_batch is None else num_items_in_batch
        everywhere = self.args.average_tokens_across_devices
        scale = (self.accelerator.num_processes if everywhere else 1) / sequences
        mode, total = dataclasses.replace(self.mode, backbone=model), 0.0
        place = Place(self.state.global_step, 0, batch.num_sequences, 0)  # which no block needs
        for number, loss in enumerate(mode.losses(batch, place), 1):
            part = loss.total * scale
            if number < self.config.draws_per_context:  # the last backward is the Trainer's
                self.accelerator.backward(part)
                part = part.detach()
            total = total + part
        return total

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """As the Trainer's; the folder also says how to decode the model."""
        super()._save(output_dir, state_dict)
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
        batch = Batch(**self._prepare_inputs(inputs))
        value = held_out(self.config, self.backbone.family).nelbo(self.mode.score, [batch])
        return torch.tensor(value, device=self.args.device), None, None


class VisitOrder(Sampler):
    """The order in which `bwsft train` visits examples in the epoch that `visit` names."""

    def __init__(self, count: int, seed: int, visit: Callable[[], int]):
        self.count, self.seed, self.visit = count, seed, visit

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(order(self.count, self.visit(), self.seed).tolist())


class LengthOrder(VisitOrder):
    """Examples of like length in the `together` of an update, in an order that the visit names."""

    def __init__(self, lengths: list[int], together: int, seed: int, visit: Callable[[], int]):
        super().__init__(len(lengths), seed, visit)
        self.lengths, self.together = lengths, together

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed << 20) + self.visit())
        return iter(get_length_grouped_indices(self.lengths, self.together, generator=generator))


def check(config: c.Config, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a config or an option that BlockwiseTrainer cannot follow."""
    c.validate(config)
    if config.objective.name not in OBJECTIVES:
        raise ValueError(
            f"BlockwiseTrainer trains {' and '.join(OBJECTIVES)} SFT; use bwsft train for "
            f"objective {config.objective.name}"
        )
    if config.context not in ("exact", "cached"):
        raise ValueError(
            f"BlockwiseTrainer has context exact and cached; use bwsft train for {config.context}"
        )
    if config.objective.blocks in ("each", "all"):
        raise ValueError(
            f"BlockwiseTrainer cannot follow objective.blocks {config.objective.blocks!r}, whose "
            "epochs or forwards are others than the Trainer's; use bwsft train"
        )
    if refused := [name for name in FOREIGN if options.get(name) is not None]:
        raise ValueError(f"BlockwiseTrainer takes no {refused[0]}: its loss is the objective's")
