"""One optimizer step of LLaDA with LoRA in every variant of bench_step.py, and its gate."""

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from bwsft_kernels.block_grid import BlockGrid
from lib import harness, shapes
from lib.dense import dense_masks
from torch import Tensor

from bwsft import presets
from bwsft.config import Config
from bwsft.data.packing import Batch, CanvasLayout, Example, pack
from bwsft.models.backbone import Backbone, trainable
from bwsft.objectives.base import Place
from bwsft.objectives.blockwise import Blockwise
from bwsft.training.context_modes import ContextMode, make_mode

MAX_LENGTH = 256  # of a padded row, as in the paper


@dataclass(frozen=True)
class Variant:
    """A context mode with its draws per context, and whether they are complementary, or share the
    context of the first; and the weight of a supervised suffix."""

    context: str = "exact"
    draws: int = 1
    pairs: bool = False
    dense: bool = False  # a mask in place of ranges
    shared: bool = False
    suffix: float = 0.0


MODES = {
    "exact": Variant(),
    "exact_suffix": Variant(suffix=0.5),
    "exact_shared_k4": Variant(draws=4, shared=True),
    "cached_k1": Variant("cached"),
    "cached_k4": Variant("cached", 4),
    "block_causal": Variant("block_causal"),
    "block_causal_pair": Variant("block_causal", 2, pairs=True),
    "block_causal_k4": Variant("block_causal", 4),
}
PEERS = {"block_causal_pair_dense": Variant("block_causal", 2, pairs=True, dense=True)}


@dataclass(frozen=True)
class Job:
    """The micro-batches of one optimizer step and how they are masked."""

    batches: list[Batch]
    config: Config
    device: torch.device

    @property
    def tokens(self) -> int:
        """Prompt and response tokens; padding and canvas don't count."""
        return sum(int(b.prompt_lengths.sum() + b.response_lengths.sum()) for b in self.batches)

    def supervised(self, variant: Variant | None) -> float:
        """Expected supervised tokens of a step: half of the active block for each draw, and with a
        suffix half of the response, so that the luck of few draws decides nothing."""
        total, grid = 0.0, BlockGrid(self.config.block_size)
        for batch in self.batches:
            for response in batch.response_lengths.tolist():
                variant = variant or Variant()
                whole, draws = variant.context == "block_causal", variant.draws
                whole = whole or variant.suffix > 0
                blocks = 1 if whole else grid.num_blocks(0, response)
                total += draws * response / (2 * blocks)
        return total

    def mode(self, backbone: Backbone, variant: Variant) -> ContextMode:
        config = dataclasses.replace(
            self.config, context=variant.context, draws_per_context=variant.draws,
            shared_context=variant.shared,
            objective=dataclasses.replace(
                self.config.objective, pairs=variant.pairs, suffix_weight=variant.suffix
            ),
        )  # fmt: skip
        objective = Blockwise.of(config, backbone.family)
        return make_mode(config, backbone.family, backbone, objective, self.device)


def make_job(
    size: str,
    lengths: Sequence[tuple[int, int]],
    batch: int,
    block: int,
    device: torch.device,
    canvas: str = "fixed",
    **options: int,
) -> Job:
    """Synthetic examples of these (prompt, response) lengths, `batch` to a micro-batch. canvas and
    options: those of CanvasLayout."""
    model, rng = shapes.config_of(size), np.random.default_rng(0)
    most = model.eos_token_id - 1
    layout = CanvasLayout(
        mask_id=model.mask_token_id, eos_id=model.eos_token_id, block_size=block, canvas=canvas,
        **options,
    )  # fmt: skip
    examples = [
        Example(rng.integers(0, most, prompt), rng.integers(0, most, response), i)
        for i, (prompt, response) in enumerate(lengths)
    ]
    batches = [pack(examples[i : i + batch], layout) for i in range(0, len(examples), batch)]
    config = presets.debug()
    dataset = dataclasses.replace(config.dataset, canvas=canvas)
    config = dataclasses.replace(config, block_size=block, seed=0, dataset=dataset)
    return Job(batches, config, device)


def mode_losses(backbone: Backbone, variant: Variant, job: Job, batch: Batch) -> Iterator[Tensor]:
    """The losses of one micro-batch, one for each draw."""
    place = Place(0, 0, batch.num_sequences, 0)
    with dense_masks(batch.num_sequences) if variant.dense else contextlib.nullcontext():
        for loss in job.mode(backbone, variant).losses(batch, place):
            yield loss.total


def naive_losses(backbone: Backbone, _: None, job: Job, batch: Batch) -> Iterator[Tensor]:
    """Padded rows, masks from a Python loop, logits of every position, per-row mean loss."""
    lengths, size = batch.cu_seqlens.diff().tolist(), job.config.block_size
    mask_id, eos_id = backbone.family.mask_id, backbone.family.eos_id
    ids = torch.full((len(lengths), max(lengths)), eos_id)
    labels = torch.full_like(ids, -100)
    for s, row in enumerate(batch.ids.split(lengths)):
        ids[s, : len(row)] = row
        start, response = int(batch.prompt_lengths[s]), int(batch.response_lengths[s])
        first = start + size * random.randrange(-(-response // size))
        last, rate = min(first + size, start + response), random.uniform(1e-3, 1)
        for i in range(first, last):
            if random.random() < rate:
                labels[s, i] = ids[s, i]
        ids[s][labels[s] != -100] = mask_id
        ids[s, last : start + response] = mask_id
    ids, labels = ids.to(job.device), labels.to(job.device)
    with job.mode(backbone, MODES["exact"]).autocast():
        logits = backbone.model(input_ids=ids).logits
    each = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="none"
    ).view_as(labels)
    yield (each.sum(1) / (labels != -100).sum(1).clamp(min=1)).sum()


def step_of(
    backbone: Backbone,
    variant: Variant | None,
    job: Job,
    optimizer: torch.optim.Optimizer | None = None,
) -> harness.Step:
    """One optimizer step; variant None is the naive path."""
    losses = naive_losses if variant is None else mode_losses

    def step() -> Iterator[str]:
        try:
            for batch in job.batches:
                for total in losses(backbone, variant, job, batch):
                    total.backward()
            yield "micro-batches"
            if optimizer:
                torch.nn.utils.clip_grad_norm_(trainable(backbone).values(), 1.0)
                optimizer.step()
            yield "optimizer"
        finally:
            backbone.zero_grad(set_to_none=True)

    return step


def check(backbone: Backbone, job: Job) -> str:
    """The gate: the exact step's loss equals full logits + cross_entropy at the same masks; every
    other mode's loss is finite and of its size (random weights: near log V)."""
    losses, batch = {}, job.batches[0]
    with torch.no_grad():
        for name, variant in (MODES | PEERS).items():
            losses[name] = sum(float(t) for t in mode_losses(backbone, variant, job, batch))
        mode = job.mode(backbone, MODES["exact"])
        masked = mode.objective.mask(batch.to(job.device))
        with mode.autocast():
            rows = (x.to(job.device) for x in (batch.position_ids, batch.cu_seqlens))
            hidden = backbone.hidden_states(masked.noisy_ids, *rows)
        n = int(masked.num_rows)
        weight = backbone.head()[0]
        logits = F.linear(hidden[masked.rows[:n]].to(weight.dtype), weight).float()
        each = F.cross_entropy(logits, masked.row_target[:n], reduction="none")
        truth = float((each * masked.row_weight[:n]).sum())
    bound = 1e-4 if job.device.type == "cpu" else 2e-2
    if not abs(losses["exact"] - truth) <= bound * truth:
        return f"exact loss {losses['exact']} is not the full-logits loss {truth}"
    for name, loss in losses.items():
        same = losses[name.removesuffix("_dense")]
        if not abs(loss - same) <= bound * same:
            return f"{name} loss {loss} is not that of ranges, {same}"
        if not 0.5 * truth < loss < 2 * truth:
            return f"{name} loss {loss} is far from the exact {truth}"
    return ""
