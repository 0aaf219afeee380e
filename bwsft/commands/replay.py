"""`bwsft replay`: run the sequences that a run kept when something was wrong with them once more,
and say where the first number that is not finite comes from."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bwsft import config as c
from bwsft.checkpoints.folders import newest_complete
from bwsft.commands.options import ReplayOptions
from bwsft.data.packing import Batch
from bwsft.models.backbone import trainable
from bwsft.models.loading import load_backbone
from bwsft.models.lora import ADAPTER, load_adapter_weights
from bwsft.training.run_files import BATCH, FACTS
from bwsft.training.setup import setup
from bwsft.training.trainer import Run, seed_dropout
from bwsft.utils import config_check, strict_json
from bwsft.utils.lines import say

SHOWN = 5  # parameters in the table


@dataclass(frozen=True)
class Facts:
    """A repro.json (bwsft/training/run_files.py writes it)."""

    what: str
    step: int
    first: int
    sequences: int
    sample_ids: tuple[int, ...]
    max_length: int
    config: c.Config


def run_replay(options: ReplayOptions) -> int:
    """Print the losses and the gradient of the kept sequences; returns the exit status, 0."""
    folder = options.folder
    facts = config_check.build(Facts, strict_json.read_object(folder / FACTS), str(folder / FACTS))
    batch = read_batch(folder / BATCH, facts)
    config = dataclasses.replace(facts.config, resume=None, device=options.device)
    kept = any((folder / name).exists() for name in (ADAPTER, "config.json"))
    weights = folder if kept else newest_complete(folder.parent.parent)[0]
    run = setup(config, folder.parent.parent, None)
    if weights is not None:
        put_weights(run, weights)
    note = "" if kept else ", since those of the update were not kept"
    say(f"step {facts.step + 1}: {facts.what}")
    say(f"weights of {weights or 'the start of the run'}{note}")
    size = config.micro_batch_size
    for start in range(0, batch.num_sequences, size):
        part = batch.select(range(start, min(start + size, batch.num_sequences)))
        with first_not_finite(run.backbone) as names:
            replay(run, part, facts, facts.first + start)
        if names:
            say(f"  first output that is not finite: {names[0]}")
    report(run)
    return 0


def put_weights(run: Run, folder: Path) -> None:
    """Give the run the adapter or the model that is in `folder`."""
    if run.config.lora.rank:
        load_adapter_weights(folder, run.backbone)
        return
    family = run.backbone.family
    run.backbone = load_backbone(folder, dtype=torch.float32, device=run.device)
    run.backbone.family = family
    run.backbone.train()
    run.mode = dataclasses.replace(run.mode, backbone=run.backbone)


def read_batch(path: Path, facts: Facts) -> Batch:
    """The packed batch that a run kept."""
    try:
        return Batch(**load_file(path), max_length=facts.max_length)
    except (OSError, SafetensorError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def replay(run: Run, part: Batch, facts: Facts, first: int) -> None:
    """Forward and backward of a micro-batch as in the run, dropout included."""
    ids = part.sample_ids.tolist()
    seed_dropout(run.config.seed, facts.step, ids[0])
    samples = run.data.samples(facts.step, run.config.batch_size, run.config.seed)
    place = run.place(facts.step, samples)._replace(first=first)
    for loss in run.mode.losses(part, place):
        (loss.total / facts.sequences).backward()
        mean = loss.total.item() / part.num_sequences
        names = ", ".join(map(str, ids))
        say(f"samples {names}: loss {mean:.6g}, {int(loss.rows)} supervised tokens")


@contextlib.contextmanager
def first_not_finite(model: torch.nn.Module) -> Iterator[list[str]]:
    """Names of the modules whose output is not finite, in the order of their forwards."""
    found: list[str] = []

    def look(name: str):
        def hook(module: torch.nn.Module, arguments: tuple, output: object) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            if not all(tensor.isfinite().all() for tensor in tensors):
                found.append(name)

        return hook

    handles = [m.register_forward_hook(look(n or "loss")) for n, m in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def report(run: Run) -> None:
    """Gradient norms, those that are not finite first, then the largest."""
    grads = {name: p.grad for name, p in trainable(run.backbone).items() if p.grad is not None}
    norms = {name: grad.norm().item() for name, grad in grads.items()}
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    say(f"gradient norm {total:.6g}; largest parts:")
    size = {n: norm if math.isfinite(norm) else math.inf for n, norm in norms.items()}
    for name in sorted(norms, key=size.__getitem__, reverse=True)[:SHOWN]:
        say(f"  {norms[name]:.4g}  {name}")
