"""From a config to a running training: folder, model, data, objective, then the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from bwsft import config as c
from bwsft.checkpoints.contents import check_base, check_tokenizer, pinned, weights_content
from bwsft.checkpoints.folders import save_model, step_of, versions
from bwsft.checkpoints.optimizer_state import load_optimizer
from bwsft.checkpoints.resolve import ModelPlan, own_memory, plan_model, plan_tokenizer
from bwsft.checkpoints.state import read_state
from bwsft.data.chat_template import Template
from bwsft.data.tokenizer import load_tokenizer, merged_end_ids, tokenizer_content
from bwsft.models.backbone import Backbone, trainable
from bwsft.models.loading import load_backbone
from bwsft.models.lora import add_lora, load_adapter_weights
from bwsft.objectives.base import Objective
from bwsft.objectives.blockwise import Blockwise
from bwsft.objectives.classical import Classical
from bwsft.objectives.distill import Distill
from bwsft.objectives.mdlm import Mdlm
from bwsft.objectives.rdm import Rdm
from bwsft.objectives.soft_masked import SoftMasked
from bwsft.objectives.two_step import TwoStep
from bwsft.objectives.uniform import Uniform
from bwsft.presets import PRESETS, is_for_a_gpu
from bwsft.training import length
from bwsft.training.block_causal import block_size_at
from bwsft.training.context_modes import make_mode
from bwsft.training.distributed import PeerFailed, World, join, lost
from bwsft.training.guards import SpikeGuard, TrainingStopped, out_of_memory
from bwsft.training.metrics import column, plot_run, read_log
from bwsft.training.optim import make_optimizer
from bwsft.training.outcome import outcome
from bwsft.training.run_data import TrainingData, follow_data, held_out, plan_data
from bwsft.training.run_files import RunFiles, open_shared
from bwsft.training.signals import Signals, signals
from bwsft.training.trackers import Logs, check_installed
from bwsft.training.trainable import check_trainable
from bwsft.training.trainer import Run, loop
from bwsft.utils import config_check
from bwsft.utils.claims import lock_folder, new_folder
from bwsft.utils.devices import pick_device
from bwsft.utils.files import folder_atomic, sweep, write_atomic
from bwsft.utils.identity import Content, short
from bwsft.utils.lines import say
from bwsft.utils.terminal import lasting_output

OBJECTIVES: dict[str, type[Objective]] = {
    "blockwise": Blockwise,
    "classical": Classical,
    "mdlm": Mdlm,
    "rdm": Rdm,
    "soft_masked": SoftMasked,
    "two_step": TwoStep,
    "distill": Distill,
    "uniform": Uniform,
}


def train(config: c.Config, saves_on_signal: bool = True) -> int:
    """Run a whole training and return the exit status: 0 done or stopped by a signal, 1 failed.

    Without `saves_on_signal` SIGINT and SIGTERM take their usual course: Ctrl-C ends the caller.
    A terminal that goes away, or a reader of the output, ends nothing.
    """
    check_installed(config)
    if config.resume is None or not (c.run_folder(config) / "config.json").exists():
        check_start(config)
    try:
        with (
            lasting_output(),
            join(config.parallel, config.device) as world,
            contextlib.ExitStack() as stack,
        ):
            if not world.main:
                silence = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(silence))
            return train_in(world, config, stack, saves_on_signal)
    except PeerFailed:
        return 1
    except RuntimeError as error:
        if not lost(error):
            raise
        reason = str(error).strip().split("\n")[0]
        say(
            "bwsft train: another process of the run has ended or can't be reached; what it has "
            f"said tells why ({reason:.200})",
            file=sys.stderr,
        )
        return 1


def check_start(config: c.Config) -> None:
    """ValueError, before anything is downloaded, for a published model without data to train on,
    or one that a preset takes to a GPU where there is none."""
    wrong, ways = [], ["bwsft train", config.preset, "--data", str(config.data or "FILE")]
    if config.model is not None and config.data is None:
        wrong.append(f"{config.model} needs data to train on: a file, a folder or a Hub id")
    if is_for_a_gpu(config) and config.device == "auto" and not torch.cuda.is_available():
        here = f"preset {config.preset} is sized for one 80 GB card, and no CUDA device is here"
        if config.model == PRESETS[config.preset]().model:
            wrong.append(f"{here} (bwsft train debug needs none)")
            ways.append("--device cpu")
        else:
            say(f"{here}: training on the CPU")
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}; give {' '.join(ways)}")


def train_in(
    world: World, config: c.Config, stack: contextlib.ExitStack, saves_on_signal: bool
) -> int:
    """train, as one of the processes of `world`; `stack` keeps the run folder locked."""
    world.agree(settings(config))
    folder = c.run_folder(config)
    started = config.resume is not None and world.from_main((folder / "config.json").exists())

    def claim() -> None:
        """On rank 0: no other process writes in the folder from here on."""
        stack.enter_context(lock_folder(folder) if started else new_folder(folder))
        for place in (folder, folder / "checkpoints"):  # a finished run writes no checkpoint
            sweep(place, alone=True)

    if started:  # before a checkpoint is chosen, which another run may prune
        world.on_main(claim)
    _, checkpoint = open_shared(config, world)
    if not started:  # once it is known to be nobody's
        world.on_main(claim)
    run = setup(config, folder, checkpoint, world)
    world.on_main(run.files.note_data, run)
    try:
        noted = signals(world.size > 1) if saves_on_signal else contextlib.nullcontext(Signals())
        with noted as asked:
            done = loop(run, Logs(run), asked)
    except (TrainingStopped, RuntimeError) as error:
        message = why(run, error)
        if message is None:
            raise
        say(f"bwsft train: {message}", file=sys.stderr)
        return 1
    beside = run.files.beside
    if curve := world.on_main(beside, "the loss curve could not be drawn", plot_run, folder):
        say(f"loss curve: {curve}")
    for line in world.on_main(beside, "the outcome", outcome, folder, run.config, done) or ():
        say(line)
    for fault in run.files.faults:
        say(f"failed beside the run: {fault}", file=sys.stderr)
    return 0


def settings(config: c.Config) -> dict[str, Any]:
    """What all processes must have been started with. Places may have other names on another
    machine: what is there is compared once it is read."""
    places = ("model", "tokenizer", "data", "dataset.cache_dir")
    flat = config_check.flat(dataclasses.asdict(config))
    found = {f"--{name.replace('_', '-')}": v for name, v in flat.items() if name not in places}
    return found | versions()


def contents(
    data: TrainingData, identity: dict[str, Content], plan: ModelPlan, checkpoint: Path | None
) -> dict[str, Any]:
    """What all processes must have read, as digests."""
    found = {"tokenizer": short(identity["tokenizer"]), "data": data.examples.fingerprint}
    if "base" in identity:
        found["base"] = short(identity["base"])
    elif checkpoint is not None or not plan.is_random:
        found["weights"] = short(weights_content(checkpoint or plan.place))
    return found


def why(run: Run, error: Exception) -> str | None:
    """What to tell the user about an error that ended the loop; None if it is not understood."""
    if isinstance(error, TrainingStopped):
        return f"stopped: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(run, error)
    if lost(error):
        return f"another process of the run has ended; go on with --resume {run.folder}"
    return None


def setup(
    config: c.Config, folder: Path, checkpoint: Path | None, world: World | None = None
) -> Run:
    """Check everything and build it; only then write config.json, and print what will run."""
    world = world or World()
    state = None if checkpoint is None else read_state(checkpoint)
    named = config if state is None else pinned(config, state)
    tokenizer = load_tokenizer(plan_tokenizer(named))
    template = Template(tokenizer, config.dataset.template, config.dataset.template_args)
    plan = plan_model(named, tokenizer, folder)
    end_ids = merged_end_ids(template.end_ids, plan.family.end_ids)
    clean = config.clean_attention
    family = dataclasses.replace(plan.family, end_ids=end_ids, clean_attention=clean)
    check_trainable(family, config)
    with world.main_first():
        check_origin(config, plan, tokenizer, state, checkpoint)
        config = follow_data(config, tokenizer, family)
        data = plan_data(config, tokenizer, family)
    config = length.in_steps(config, data.epoch)
    first = 0 if checkpoint is None else step_of(checkpoint)
    if config.resume is not None:
        length.announce(config, c.stored(folder), first)
    if state is not None and state["data"] != data.examples.fingerprint:
        raise ValueError(
            f"--resume: {config.data or 'the generated data'} is not what {folder} was trained "
            "on; give the same records, tokenizer and limits"
        )
    device = world.device or pick_device(config.device)
    with world.main_first():
        backbone = build_backbone(config, plan, folder, checkpoint, device)
        identity = {"tokenizer": tokenizer_content(tokenizer)}
        if config.lora.rank:
            identity["base"] = weights_content(plan.place)
    if world.size > 1:
        world.agree(contents(data, identity, plan, checkpoint))
    backbone.family = family
    world.wrap(backbone)
    objective = OBJECTIVES[config.objective.name].of(config, family, data.responses())
    log = folder / "metrics.jsonl"
    done = [line for line in read_log(log) if line["step"] <= first]
    history = {name: column(log, done, name) for name in SpikeGuard.NAMES}
    run = Run(
        config=config, folder=folder, first=first, device=device, backbone=backbone,
        optimizer=make_optimizer(backbone, config.optim), data=data,
        mode=make_mode(config, family, backbone, objective, device),
        held_out=held_out(config, family),
        guard=SpikeGuard(config.watch, history, family.vocab_size, config.batch_size),
        files=RunFiles(folder, tokenizer, plan.base if config.lora.rank else None, identity),
        world=world,
    )  # fmt: skip
    if checkpoint is not None:
        load_optimizer(checkpoint, backbone, run.optimizer)
    banner(run)
    return run


def check_origin(
    config: c.Config, plan: ModelPlan, tokenizer: Any, state: dict | None, checkpoint: Path | None
) -> None:
    """ValueError, naming the file, if the tokenizer or an adapter's base is no longer what it was
    when the checkpoint was written; a note where that release did not say."""
    if state is None:
        return
    if "identity" not in state:
        say(
            f"{checkpoint} was written by an earlier release, without digests of tokenizer and "
            "base: they are taken to be the same"
        )
    folder = tokenizer.name_or_path
    check_tokenizer(state, tokenizer_content(tokenizer), folder, checkpoint)
    if config.lora.rank and not (plan.is_random and not Path(plan.base).is_dir()):
        check_base(state, plan.place, checkpoint)


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
    stored = c.stored(folder)
    if stored is None or (config.resume is not None and stored.steps != config.steps):
        kept = dataclasses.replace(stored or config, steps=config.steps)
        write_atomic(folder / "config.json", c.to_json(kept))
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
    say(
        f"{config.objective.name} SFT, {config.context} context, {what}: {trained:,} of {total:,} "
        f"parameters train; {run.device}, {kernels} kernels\n"
        f"canvas {config.gen_length} = {config.gen_length // config.block_size} blocks x "
        f"{config.block_size}; {batch}; "
        f"{config.steps} steps = {config.steps * config.batch_size / data.epoch:.2f} "
        f"epochs of {len(data.train_index):,} examples, {len(data.holdout_index)} held out"
    )
    if config.block_size_schedule:
        first, last = block_size_at(config, 0), math.ceil(config.block_size_schedule * config.steps)
        say(f"blocks shrink from {first} to {config.block_size} tokens in the first {last} steps")
