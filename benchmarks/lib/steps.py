"""One optimiser step of LLaDA with LoRA in every variant of bench_step.py, and its gate."""

import random
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from bwsft_kernels import MaskSpec
from lib import shapes

from bwsft.data.packing import CanvasLayout, Example, pack
from bwsft.models.backbone import trainable
from bwsft.objectives import blockwise
from bwsft.training.context_modes import Mode

MODES = {
    "exact": Mode("exact", even=True),
    "cached_k1": Mode("cached", draws=1, even=True),
    "cached_k4": Mode("cached", draws=4, even=True),
    "block_causal": Mode("block_causal", even=True),
}
MAX_LENGTH = 256  # of a padded row, as in the paper


@dataclass(frozen=True)
class Job:
    """The micro-batches of one optimiser step and how they are masked."""

    batches: list  # bwsft.data.packing.Batch
    spec: MaskSpec
    device: torch.device

    @property
    def tokens(self) -> int:
        """Prompt and response tokens; padding and canvas don't count."""
        return sum(int(b.prompt_lengths.sum() + b.response_lengths.sum()) for b in self.batches)

    def supervised(self, mode) -> float:
        """Expected loss rows of a step: half of the active block for each draw, so that the luck
        of few draws decides nothing."""
        total = 0.0
        for batch in self.batches:
            for response in batch.response_lengths.tolist():
                blocks = -(-response // self.spec.block_size)
                whole = mode is not None and mode.name == "block_causal"
                draws = 1 if mode is None else mode.draws
                total += draws * response / (2 if whole else 2 * blocks)
        return total

    def run(self, backbone, mode):
        """What bwsft.training.context_modes needs of a run."""

        def autocast():
            cuda = self.device.type == "cuda"
            return torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

        def corrupt(batch, draw):
            return blockwise.corrupt(batch, self.spec, "uniform", draw, mode.draws)

        return SimpleNamespace(backbone=backbone, mode=mode, spec=self.spec, device=self.device,
                               autocast=autocast, corrupt=corrupt)


def make_job(size: str, lengths, batch: int, block: int, device, **canvas) -> Job:
    """Synthetic examples of these (prompt, response) lengths, `batch` to a micro-batch. canvas:
    options of CanvasLayout."""
    config, rng = shapes.config_of(size), np.random.default_rng(0)
    most = config.eos_token_id - 1
    layout = CanvasLayout(
        mask_id=config.mask_token_id, eos_id=config.eos_token_id, block_size=block, **canvas
    )
    examples = [
        Example(rng.integers(0, most, prompt), rng.integers(0, most, response), i)
        for i, (prompt, response) in enumerate(lengths)
    ]
    batches = [pack(examples[i : i + batch], layout) for i in range(0, len(examples), batch)]
    return Job(batches, MaskSpec(block_size=block, mask_id=config.mask_token_id), device)


def mode_losses(backbone, mode, job: Job, batch):
    """The losses of one micro-batch, one for each draw."""
    for total, *_ in mode.losses(job.run(backbone, mode), batch):
        yield total


def naive_losses(backbone, _, job: Job, batch):
    """Padded rows, masks from a Python loop, logits of every position, per-row mean loss."""
    lengths, size, spec = batch.cu_seqlens.diff().tolist(), job.spec.block_size, job.spec
    ids = torch.full((len(lengths), max(lengths)), backbone.family.eos_id)
    labels = torch.full_like(ids, -100)
    for s, row in enumerate(batch.ids.split(lengths)):
        ids[s, : len(row)] = row
        start, response = int(batch.prompt_lengths[s]), int(batch.response_lengths[s])
        first = start + size * random.randrange(-(-response // size))
        last, rate = min(first + size, start + response), random.uniform(1e-3, 1)
        for i in range(first, last):
            if random.random() < rate:
                labels[s, i] = ids[s, i]
        ids[s][labels[s] != -100] = spec.mask_id
        ids[s, last : start + response] = spec.mask_id
    ids, labels = ids.to(job.device), labels.to(job.device)
    with job.run(backbone, MODES["exact"]).autocast():
        logits = backbone.model(input_ids=ids).logits
    each = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="none"
    ).view_as(labels)
    yield (each.sum(1) / (labels != -100).sum(1).clamp(min=1)).sum()


def step_of(backbone, mode, job: Job, optimizer=None):
    """One optimiser step; mode None is the naive path."""
    losses = naive_losses if mode is None else mode_losses

    def step():
        try:
            for batch in job.batches:
                for total in losses(backbone, mode, job, batch):
                    total.backward()
            yield "micro-batches"
            if optimizer:
                torch.nn.utils.clip_grad_norm_(trainable(backbone).values(), 1.0)
                optimizer.step()
            yield "optimiser"
        finally:
            backbone.zero_grad(set_to_none=True)

    return step


def check(backbone, job: Job) -> str:
    """The gate: the exact step's loss equals full logits + cross_entropy at the same masks; every
    other mode's loss is finite and of its size (random weights: near log V)."""
    losses, batch = {}, job.batches[0]
    with torch.no_grad():
        for name, mode in MODES.items():
            losses[name] = sum(float(t) for t in mode_losses(backbone, mode, job, batch))
        run = job.run(backbone, MODES["exact"])
        noisy, masked = run.corrupt(batch.to(job.device), 0)
        with run.autocast():
            hidden = backbone.hidden_states(noisy.ids, noisy.position_ids, noisy.cu_seqlens)
        n = int(masked.num_rows)
        weight = backbone.head()[0]
        logits = F.linear(hidden[masked.rows[:n]].to(weight.dtype), weight).float()
        each = F.cross_entropy(logits, masked.row_target[:n], reduction="none")
        truth = float((each * masked.row_weight[:n]).sum())
    bound = 1e-4 if job.device.type == "cpu" else 2e-2
    if not abs(losses["exact"] - truth) <= bound * truth:
        return f"exact loss {losses['exact']} is not the full-logits loss {truth}"
    for name, loss in losses.items():
        if not 0.5 * truth < loss < 2 * truth:
            return f"{name} loss {loss} is far from the exact {truth}"
    return ""
