"""Answers to fixed prompts while a Trainer trains: greedy, as the model will be decoded."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bwsft import config as c
from bwsft.checkpoints.generation_config import DecodingContract
from bwsft.checkpoints.resolve import Trained
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.result import Decoded
from bwsft.models.backbone import Backbone
from bwsft.utils.lines import one_line, say


class Samples(TrainerCallback):
    """Decodes args.sample_prompts every args.sample_steps updates, else at every evaluation and
    checkpoint: printed, kept in `answers`, and told to TensorBoard and Weights & Biases where the
    Trainer reports to them. ValueError for a prompt that the model cannot take.
    """

    def __init__(self, trainer: Trainer, config: c.Config, backbone: Backbone):
        self.trainer, self.prompts = trainer, trainer.args.sample_prompts
        self.answers: dict[int, list[Decoded]] = {}  # by the number of updates before them
        self.last: int | None = None  # number of updates at which they were taken last
        tokenizer = trainer.processing_class
        contract = DecodingContract.of(config, backbone.family, tokenizer)
        backbone.family = dataclasses.replace(backbone.family, end_ids=contract.end_ids)
        folder = trainer.args.output_dir
        self.decoder = Decoder.around(Trained(backbone, tokenizer, None, folder, contract))
        self.decoder.encode(self.prompts)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if args.sample_steps and state.global_step % args.sample_steps == 0:
            self.take(state)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if args.sample_steps is None:
            self.take(state)

    on_save = on_evaluate

    def take(self, state: TrainerState) -> None:
        """Decode, print and log in the first process, unless that was done after this update."""
        step = state.global_step
        if step == self.last or not state.is_world_process_zero:
            return
        self.last = step
        backbone = self.decoder.backbone
        training = backbone.training
        backbone.eval()
        try:
            with self.trainer.accelerator.autocast():
                self.answers[step] = self.decoder.decode(self.prompts)
        except ValueError as error:  # NaN: the training's own guards say what they make of it
            say(f"step {step}: no samples: {error}")
            return
        finally:
            backbone.train(training)
        for prompt, answer in zip(self.prompts, self.answers[step], strict=True):
            end = "" if answer.ended else ", no end token"
            said = f"{one_line(answer.text)} [{answer.tokens} tokens{end}]"
            say(f"step {step}: {one_line(prompt)} -> {said}")
        self.report(step)

    def report(self, step: int) -> None:
        """Tell the trackers that take texts."""
        texts = [answer.text for answer in self.answers[step]]
        for callback in self.trainer.callback_handler.callbacks:
            if (writer := getattr(callback, "tb_writer", None)) is not None:
                for number, text in enumerate(texts):
                    writer.add_text(f"samples/{number}", text, step)
            wandb = getattr(callback, "_wandb", None)
            if wandb is not None and wandb.run is not None:
                rows = [list(row) for row in zip(self.prompts, texts, strict=True)]
                wandb.log({"samples": wandb.Table(columns=["prompt", "answer"], data=rows)})
