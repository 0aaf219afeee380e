"""From a config to everything a training step needs: folder, model, data, objective."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from bwsft_kernels import MaskSpec

from bwsft import config as c
from bwsft.checkpoints.folders import (
    load_adapter_weights,
    load_optimizer,
    newest_complete,
    read_state,
    save_model,
    step_of,
    versions,
)
from bwsft.checkpoints.resolve import ModelPlan, own_memory, pick_device, plan_model, plan_tokenizer
from bwsft.data import dataset as d
from bwsft.models.backbone import Backbone, Family
from bwsft.models.loading import load_backbone
from bwsft.models.lora import add_lora
from bwsft.objectives import blockwise, classical, mdlm, rdm, soft_masked, two_step
from bwsft.objectives.base import Place
from bwsft.training import context_modes as modes
from bwsft.training.context_modes import Losses, Mode, whole_response
from bwsft.training.distributed import World
from bwsft.training.guards import SpikeGuard
from bwsft.training.metrics import column, read_log
from bwsft.training.optim import make_optimizer, trainable
from bwsft.training.run_data import TrainingData, held_out_spec, plan_data
from bwsft.utils.files import folder_atomic, write_atomic
from bwsft.utils.strict_json import read_text

# A resumed run may differ from its config in these. Another device, micro-batch or kind of
# parallelism changes rounding and dropout, the others change no later loss at all (unless a spike's
# update is left out).
FREE_ON_RESUME = {
    "out",
    "resume",
    "data",  # moved; the records must be the same
    "save_every",
    "keep_last",
    "grad_checkpointing",
    "fused_ops",
    "micro_batch_size",
    "device",
    "parallel",
    "profile",
    "trackers",
    "watch.spike_factor",
    "watch.spike_norm_factor",
    "watch.spike_action",
    "watch.spike_window",
    "eval.every",
    "eval.draws",
    "dataset.cache_dir",
}


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
    options: Any
    """What a whole-response objective prepared; None for blocks and classical SFT."""
    mode: Mode
    spec: MaskSpec
    eval_spec: MaskSpec
    base: str | None
    """Model that an adapter belongs to; None for full fine-tuning."""
    guard: SpikeGuard
    world: World = field(default_factory=World)

    def corrupt(self, batch: d.Batch, draw: int, block: int | None = None):
        """(noisy batch, MaskedBatch) of one of the visit's draws, of this block if one is given."""
        return modes.corrupt(self, batch, draw, block)

    def losses(self, batch: d.Batch, step: int, slots: list, first: int) -> Losses:
        """The losses of a micro-batch that begins at the `first` of the update's `slots`."""
        if self.options is None:
            return self.mode.losses(self, batch)
        place = Place(step, first, len(slots), self.data.response_tokens(slots))
        return whole_response(self, batch, place)

    def autocast(self) -> contextlib.AbstractContextManager:
        """bf16 matmuls on CUDA; on the CPU everything is fp32."""
        cuda = self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=cuda)

    def idle(self) -> torch.Tensor:
        """A forward whose loss is 0, for a rank that must keep step with others."""
        batch = self.data.pack([(int(self.data.train_index[0]), 0)]).to(self.device)
        row = batch.ids.new_zeros(1)
        with self.autocast():
            return self.backbone(batch, row, batch.ids[row], torch.zeros_like(row).float())

    def weights(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of a sharded model, whole, for rank 0; {} where the model has
        whole tensors itself. Every rank must call it."""
        if not self.world.sharded:
            return {}
        model = self.backbone.model
        adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        return self.world.gather(adapters if self.config.lora.rank else model.state_dict())


def open_shared(config: c.Config, world: World) -> tuple[Path, Path | None]:
    """open_run by rank 0, for all ranks."""
    folder, checkpoint = world.on_main(open_run, config) or (c.run_folder(config), None)
    step = int(world.from_main(-1 if checkpoint is None else step_of(checkpoint)))
    return folder, None if step < 0 else folder / "checkpoints" / f"step-{step}"


def open_run(config: c.Config) -> tuple[Path, Path | None]:
    """(run folder, checkpoint to go on from or None). Refuses folders it must not touch."""
    folder = c.run_folder(config)
    if config.resume is None:
        if folder.exists():
            raise ValueError(
                f"{folder} exists; choose another --out, or go on with it by --resume {folder}"
            )
        return folder, None
    stored = folder / "config.json"
    if stored.exists():
        refuse_changes(read_text(stored), config, stored)
    elif folder.exists() and (
        # A writer that was killed at once leaves hidden files at most.
        not folder.is_dir() or any(not p.name.startswith(".") for p in folder.iterdir())
    ):
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
        for line in c.differences(c.from_json(stored, str(where)), now)
        if line.split(":")[0] not in FREE_ON_RESUME
    ]
    if changed:
        raise ValueError(
            f"--resume: {where} was started otherwise: {'; '.join(changed)}; leave these options "
            "out, or start a new run"
        )


def setup(
    config: c.Config, folder: Path, checkpoint: Path | None, world: World | None = None
) -> Run:
    """Check everything and build it; only then write config.json, and print what will run."""
    world = world or World()
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
    with world.main_first():
        data = plan_data(config, tokenizer, family)
    if checkpoint is not None and read_state(checkpoint)["data"] != data.fingerprint:
        raise ValueError(
            f"--resume: {config.data or 'the generated data'} is not what {folder} was trained "
            "on; give the same records, tokenizer and limits"
        )
    device = world.device or pick_device(config.device)
    with world.main_first():
        backbone = build_backbone(config, plan, folder, checkpoint, device)
    backbone.family = family
    world.wrap(backbone)
    objective, options = pick_objective(config, family, data)
    first = 0 if checkpoint is None else step_of(checkpoint)
    log = folder / "metrics.jsonl"
    done = [line for line in read_log(log) if line["step"] <= first]
    history = {name: column(log, done, name) for name in SpikeGuard.NAMES}
    run = Run(
        config=config,
        folder=folder,
        first=first,
        device=device,
        backbone=backbone,
        tokenizer=tokenizer,
        optimizer=make_optimizer(backbone, config.optim),
        data=data,
        objective=objective,
        options=options,
        mode=modes.mode_of(config, family),
        spec=(objective if options is None else classical).mask_spec(config, family),
        eval_spec=held_out_spec(config, family),
        base=plan.base if config.lora.rank else None,
        guard=SpikeGuard(config.watch, history),
        world=world,
    )
    if checkpoint is not None:
        load_optimizer(checkpoint, backbone, run.optimizer)
    banner(run)
    return run


def pick_objective(config: c.Config, family: Family, data: TrainingData) -> tuple[ModuleType, Any]:
    """(module, its options; None for those that go through the context modes)."""
    if config.objective.name in ("blockwise", "classical"):
        return {"blockwise": blockwise, "classical": classical}[config.objective.name], None
    objective = {"mdlm": mdlm, "rdm": rdm, "soft_masked": soft_masked, "two_step": two_step}[
        config.objective.name
    ]
    return objective, objective.prepare(config, family, data.responses())


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
    backbone.set_fused_ops(config.fused_ops)
    backbone.train()
    return backbone


def banner(run: Run) -> None:
    """Say what will run, derived numbers as equations."""
    config, data = run.config, run.data
    trained = sum(p.numel() for p in trainable(run.backbone).values())
    total = sum(p.numel() for p in run.backbone.parameters())
    triton = run.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    kernels = "Triton" if triton else "torch"
    what = f"LoRA r {config.lora.rank}" if config.lora.rank else "full fine-tuning"
    micro, ranks = config.micro_batch_size, run.world.size
    batch = f"batch {config.batch_size} = {config.batch_size // micro} x {micro}"
    if ranks > 1:
        idle = max(ranks - config.batch_size, 0)
        batch = (
            f"batch {config.batch_size} shared by {ranks} processes ({config.parallel}"
            f"{f', {idle} of them idle: raise --batch-size' if idle else ''}), {micro} at a time"
        )
    print(
        f"{config.objective.name} SFT, {config.context} context, {what}: {trained:,} of {total:,} "
        f"parameters train; {run.device}, {kernels} kernels\n"
        f"canvas {config.gen_length} = {config.gen_length // config.block_size} blocks x "
        f"{config.block_size}; {batch}; "
        f"{config.steps} steps = {config.steps * config.batch_size / data.epoch:.2f} "
        f"epochs of {len(data.train_index):,} examples, {len(data.holdout_index)} held out"
    )
