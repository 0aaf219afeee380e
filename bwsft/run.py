"""From a config to everything a training step needs: folder, model, data, objective."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from bwsft_kernels.block_mask import MaskSpec

from bwsft import config as c
from bwsft import data as d
from bwsft import wordproblems
from bwsft.backbones.base import Backbone, Family
from bwsft.backbones.load import load_backbone
from bwsft.backbones.lora import add_lora
from bwsft.checkpoint import (
    load_adapter_weights,
    load_optimizer,
    newest_complete,
    read_state,
    save_model,
    versions,
)
from bwsft.files import folder_atomic, write_atomic
from bwsft.models import ModelPlan, own_memory, pick_device, plan_model, plan_tokenizer
from bwsft.modes import Mode
from bwsft.objectives import blockwise, classical
from bwsft.optim import make_optimizer, trainable

# A resumed run may differ from its config in these. Another device or micro-batch changes rounding
# and dropout, the others change no later loss at all.
FREE_ON_RESUME = {
    "out",
    "resume",
    "data",  # moved; the records must be the same
    "save_every",
    "keep_last",
    "grad_checkpointing",
    "micro_batch_size",
    "device",
    "eval.every",
    "eval.draws",
    "dataset.cache_dir",
}

GENERATED = 20_000  # word problems of a run without --data
# Generated problems, held-out examples and their masks don't follow --seed: what differs between
# two seeds is then the training alone.
FIXED_SEED = 0


@dataclass
class Run:
    """A training in progress."""

    config: c.Config
    folder: Path
    first: int
    """Updates already done when this process took over."""
    device: torch.device
    backbone: Backbone
    tokenizer: object
    optimizer: torch.optim.Optimizer
    data: TrainingData
    objective: ModuleType
    mode: Mode
    spec: MaskSpec
    eval_spec: MaskSpec
    base: str | None
    """Model that an adapter belongs to; None for full fine-tuning."""

    def corrupt(self, batch: d.Batch, draw: int):
        """(noisy batch, MaskedBatch) of one of the visit's draws."""
        order, draws = self.config.objective.blocks, self.config.draws_per_context
        return self.objective.corrupt(batch, self.spec, order, draw, draws)

    def autocast(self) -> contextlib.AbstractContextManager:
        """bf16 matmuls on CUDA; on the CPU everything is fp32."""
        cuda = self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=cuda)


@dataclass(frozen=True)
class TrainingData:
    """A tokenised set, its held-out part, and how a batch is laid out."""

    examples: d.TokenizedSet
    train_index: np.ndarray
    holdout_index: np.ndarray
    layout: d.CanvasLayout

    @property
    def fingerprint(self) -> str:
        return self.examples.fingerprint

    def slots(self, step: int, batch_size: int, seed: int) -> list[tuple[int, int]]:
        """(example index, earlier visits) of every sequence of optimiser update `step`."""
        slots = d.slots(step, batch_size, len(self.train_index), seed)
        return [(int(self.train_index[i]), visit) for i, visit in slots]

    def pack(self, slots: list[tuple[int, int]]) -> d.Batch:
        return d.pack([self.examples.example(i, visit) for i, visit in slots], self.layout)

    def sample_ids(self, slots: list[tuple[int, int]]) -> list[int]:
        return [int(self.examples.sample_ids[i]) for i, _ in slots]

    def holdout_batches(self, size: int) -> Iterator[d.Batch]:
        for start in range(0, len(self.holdout_index), size):
            yield self.pack([(int(i), 0) for i in self.holdout_index[start : start + size]])


def open_run(config: c.Config) -> tuple[Path, Path | None]:
    """(run folder, checkpoint to go on from or None). Refuses folders it must not touch."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("several processes would write one run folder: start a single process")
    folder = c.run_folder(config)
    if config.resume is None:
        if folder.exists():
            raise ValueError(
                f"{folder} exists; choose another --out, or go on with it by --resume {folder}"
            )
        return folder, None
    stored = folder / "config.json"
    if stored.exists():
        refuse_changes(stored.read_text(encoding="utf-8"), config, stored)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--resume {folder}: this is not a run folder, it has no config.json")
    checkpoint, skipped = newest_complete(folder)
    for fault in skipped:
        print(f"skipping a checkpoint that is not whole: {fault}")
    if checkpoint is None:
        print(f"{folder} has no complete checkpoint: starting at step 0")
    else:
        state = read_state(checkpoint)
        refuse_changes(json.dumps(state["config"]), config, checkpoint)
        print(f"resuming from {checkpoint}")
        if (writer := state.get("versions", {}).get("torch")) != versions()["torch"]:
            print(f"  torch is no longer {writer}: losses may differ in their last bits")
    return folder, checkpoint


def refuse_changes(stored: str, now: c.Config, where: Path) -> None:
    """Raise ValueError unless `now` differs from the config stored `where` in free fields only."""
    changed = [
        line
        for line in c.differences(c.from_json(stored), now)
        if line.split(":")[0] not in FREE_ON_RESUME
    ]
    if changed:
        raise ValueError(
            f"--resume: {where} was started otherwise: {'; '.join(changed)}; leave these options "
            "out, or start a new run"
        )


def setup(config: c.Config, folder: Path, checkpoint: Path | None) -> Run:
    """Check everything and build it; only then write config.json, and print what will run."""
    tokenizer = d.load_tokenizer(plan_tokenizer(config))
    end_ids = d.Template(tokenizer, config.dataset.template).end_ids
    plan = plan_model(config, tokenizer, folder)
    family = dataclasses.replace(
        plan.family, end_ids=tuple(dict.fromkeys((*end_ids, *plan.family.end_ids)))
    )
    if config.context == "block_causal" and family.logit_shift:
        raise ValueError(
            "--context block_causal: this model predicts a token from the row before it, which "
            "another block's noisy copy would fill; use exact or cached"
        )
    data = plan_data(config, tokenizer, family)
    if checkpoint is not None and read_state(checkpoint)["data"] != data.fingerprint:
        raise ValueError(
            f"--resume: {config.data or 'the generated data'} is not what {folder} was trained "
            "on; give the same records, tokenizer and limits"
        )
    device = pick_device(config.device)
    backbone = build_backbone(config, plan, folder, checkpoint, device)
    backbone.family = family
    objective = {"blockwise": blockwise, "classical": classical}[config.objective.name]
    run = Run(
        config=config,
        folder=folder,
        first=0 if checkpoint is None else read_state(checkpoint)["step"],
        device=device,
        backbone=backbone,
        tokenizer=tokenizer,
        optimizer=make_optimizer(backbone, config.optim),
        data=data,
        objective=objective,
        mode=Mode(
            name=config.context,
            draws=config.draws_per_context,
            context_grad=config.objective.context_grad,
            even=config.dataset.canvas == "fixed" and family.block_origin == "response",
            prune=config.objective.name == "blockwise",
        ),
        spec=objective.mask_spec(config, family),
        eval_spec=dataclasses.replace(blockwise.mask_spec(config, family), seed=FIXED_SEED),
        base=plan.base if config.lora.rank else None,
    )
    if checkpoint is not None:
        load_optimizer(checkpoint, backbone, run.optimizer)
    banner(run)
    return run


def build_backbone(
    config: c.Config, plan: ModelPlan, folder: Path, checkpoint: Path | None, device: torch.device
) -> Backbone:
    """The model to train, with its adapters, in the state of `checkpoint` if there is one.

    Writes config.json, and a random base under an adapter, once the base is known to load.
    """
    adapted = config.lora.rank > 0
    if checkpoint is not None and not adapted:
        backbone = load_backbone(checkpoint, dtype=torch.float32, device=device)
    else:
        backbone = plan.build(device)
    own_memory(backbone)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        write_atomic(folder / "config.json", c.to_json(config))
    if adapted:
        if plan.is_random and not Path(plan.base).is_dir():
            with folder_atomic(Path(plan.base)) as part:
                save_model(backbone.model, part)
        add_lora(backbone, config.lora, config.seed)
        if checkpoint is not None:
            load_adapter_weights(checkpoint, backbone)
    backbone.set_gradient_checkpointing(config.grad_checkpointing)
    backbone.train()
    return backbone


def plan_data(config: c.Config, tokenizer, family: Family) -> TrainingData:
    """Tokenise, report what was dropped, check lengths against the model, hold some out."""
    options = d.DataOptions(
        template=config.dataset.template,
        max_length=config.max_length,
        gen_length=config.gen_length,
        on_bad=config.dataset.on_bad,
        exclude_type=config.dataset.exclude_type,
        mask_id=family.mask_id,
        vocab_size=family.vocab_size,
    )
    source = config.data or wordproblems.generate(GENERATED, FIXED_SEED)
    examples = d.load_set(source, tokenizer, options, config.dataset.cache_dir)
    print(examples.summary())
    if config.dataset.limit is not None:
        examples = examples.select(np.arange(min(config.dataset.limit, len(examples))))
        print(f"  using the first {len(examples):,} (--dataset.limit)")
    layout = d.CanvasLayout(
        canvas=config.dataset.canvas,
        block_size=config.block_size,
        gen_length=config.gen_length,
        max_length=config.max_length,
        mask_id=family.mask_id,
        eos_id=family.eos_id,
        block_origin=family.block_origin,
    )
    if (longest := examples.longest_row(layout)) > family.max_positions:
        raise ValueError(
            f"prompt + gen_length needs {longest} positions, the model has {family.max_positions}: "
            "lower --gen-length or --max-length"
        )
    if config.dataset.holdout >= len(examples):
        raise ValueError(
            f"--dataset.holdout {config.dataset.holdout} leaves nothing of {len(examples)} "
            "examples to train on"
        )
    split = d.split_holdout(len(examples), config.dataset.holdout, FIXED_SEED)
    return TrainingData(examples, *split, layout)


def banner(run: Run) -> None:
    """Say what will run, derived numbers as equations."""
    config, data = run.config, run.data
    trained = sum(p.numel() for p in trainable(run.backbone).values())
    total = sum(p.numel() for p in run.backbone.parameters())
    triton = run.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    kernels = "Triton" if triton else "torch"
    what = f"LoRA r {config.lora.rank}" if config.lora.rank else "full fine-tuning"
    micro = config.micro_batch_size
    print(
        f"{config.objective.name} SFT, {config.context} context, {what}: {trained:,} of {total:,} "
        f"parameters train; {run.device}, {kernels} kernels\n"
        f"canvas {config.gen_length} = {config.gen_length // config.block_size} blocks x "
        f"{config.block_size}; batch {config.batch_size} = {config.batch_size // micro} x {micro}; "
        f"{config.steps} steps = {config.steps * config.batch_size / len(data.train_index):.2f} "
        f"epochs of {len(data.train_index):,} examples, {len(data.holdout_index)} held out"
    )
