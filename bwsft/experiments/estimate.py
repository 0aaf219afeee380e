"""What an experiment will cost, before it runs: updates, tokens, FLOPs and hours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bwsft import config as c
from bwsft.experiments.arms import Arm, Plan
from bwsft.experiments.pilots import SEEDS
from bwsft.experiments.scales import Scale
from bwsft.utils.flops import Cost, TrainingCost

PAPER_TOKENS_PER_S = 5100  # one A100, the paper's figure for LLaDA-8B with LoRA
A100_FLOPS, UTILIZATION = 312e12, 0.4  # dense bf16
H100_FLOPS = 989e12
# Of one EPYC core with the embedded model, as the first cells took: Classical 34 GFLOP/s, draws
# that share a context 11 to 16, noisy copies 14 to 20. And what a cell spends on loading and
# measuring.
CPU_FLOPS, CELL_SECONDS = 18e9, 13


@dataclass(frozen=True)
class Estimate:
    """One cell."""

    updates: int
    tokens: float
    flops: float


def shape_of(config: c.Config) -> Cost:
    """Layer sizes of the run's model: its config.json where it is a folder, the embedded base's, or
    LLaDA-8B's for a Hub id, which is not looked up."""
    from bwsft.checkpoints.resolve import TINY
    from bwsft.models.llada_config import LladaConfig

    folder = Path(config.model) if config.model else TINY
    path = folder / "config.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = LladaConfig(**known)
    return Cost(found.d_model, found.n_layers, found.mlp_hidden_size, found.vocab_size)


def sequence_tokens(config: c.Config) -> tuple[float, float]:
    """(prompt, canvas after it) in tokens of a nominal sequence: half of max_length is prompt."""
    prompt = config.max_length / 2
    if config.dataset.canvas == "fixed":
        return prompt, config.gen_length
    return prompt, config.max_length - prompt


def update_flops(config: c.Config, shape: Cost, prompt: float, canvas: float) -> float:
    """FLOPs of one update on sequences of `prompt` + `canvas` tokens, forward and backward."""
    length, frozen = prompt + canvas, config.lora.rank > 0
    cost = TrainingCost(shape, 2 if frozen else 3, adapters(config, shape), dense=True)
    objective, block = config.objective, min(config.block_size, canvas)
    if objective.name == "blockwise":
        draws = config.draws_per_context
        sequence = cost.blockwise(
            config.context, prompt, canvas, block, draws, objective.context_grad,
            objective.suffix_weight > 0, config.shared_context, config.active_blocks,
        )
    else:
        copies = 2 if objective.name == "rdm" and objective.rdm.coupled else 1
        sequence = copies * cost.full(length, canvas / 2)
    if objective.name == "two_step":
        sequence += shape.whole(length) + shape.head(canvas / 2)
    return config.batch_size * sequence


def adapters(config: c.Config, shape: Cost) -> float:
    """Forward FLOPs of the adapters per token."""
    # The released list hits q, k, v and up; all are q, k, v, out and gate, up, down.
    square, mlp = {"released": (3, 1), "attention": (4, 0)}.get(config.lora.targets, (4, 3))
    return shape.adapters(config.lora.rank, square, mlp)


def estimate(
    arm: Arm, plan: Plan, lengths: tuple[float, float] | None = None
) -> Estimate | None:
    """One cell of an arm, of sequences of `lengths` or nominal ones; None for the untouched base,
    and for an arm whose updates are as many as fit into a time. Traversals are reckoned from the
    examples that --dataset.limit leaves, in full canvases."""
    if not arm.trained or arm.cpu_seconds is not None:
        return None
    config, shape = arm.config, shape_of(arm.config)
    prompt, canvas = lengths or sequence_tokens(config)
    per_update = update_flops(config, shape, prompt, canvas)
    updates = config.steps
    if arm.equal_flops_of is not None:
        other = next(a.config for a in plan.arms if a.name == arm.equal_flops_of)
        updates = round(other.steps * update_flops(other, shape, prompt, canvas) / per_update)
    if arm.traversals is not None:
        examples = config.dataset.limit or config.steps * config.batch_size
        examples -= config.dataset.holdout if config.dataset.limit else 0
        each = canvas // config.block_size if config.objective.blocks == "each" else 1
        updates = round(examples * each * arm.traversals / config.batch_size)
    tokens = updates * config.batch_size * (prompt + canvas)
    return Estimate(updates, tokens, updates * per_update)


def print_budget(console: Console, plan: Plan, scale: Scale, seeds: int) -> None:
    """Hours of the whole plan, its pilots included: of one core, or of an H100 at two lengths."""
    runs = {arm.name: seeds + len(SEEDS) * len(arm.rates) for arm in plan.arms if arm.trained}
    big = scale.base.model is not None
    for lengths in ((128.0, 128.0), (128.0, 512.0)) if big else (sequence_tokens(scale.base),):
        flops = sum(
            runs[arm.name] * found.flops
            for arm in plan.arms
            if (found := estimate(arm, plan, lengths)) is not None
        )
        hours = flops / (H100_FLOPS * UTILIZATION) / 3600
        text = f"{hours:,.0f} hours of training on one H100 at 40 % of its peak"
        if not big:
            hours = (flops / CPU_FLOPS + CELL_SECONDS * sum(runs.values())) / 3600
            text = f"about {hours:.1f} hours on one core, measures included"
        prompt, canvas = lengths
        console.print(
            f"{sum(runs.values())} cells with pilots, rows of {prompt:.0f} + {canvas:.0f} tokens: "
            f"{text}", highlight=False,
        )  # fmt: skip


def print_plan(plan: Plan, scale: Scale, seeds: list[int]) -> None:
    """The plan as a table, then its claims."""
    prompt, canvas = sequence_tokens(scale.base)
    table = Table(title=f"{plan.title} ({scale.name}), {len(seeds)} seeds")
    for head in ("arm", "updates", "tokens", "TFLOP", "h at 5.1k tok/s", "h at 40 % A100"):
        table.add_column(head, justify="left" if head == "arm" else "right")
    hours = 0.0
    measured: dict[tuple, list[str]] = {}
    for arm in plan.arms:
        found = estimate(arm, plan)
        measured.setdefault(arm.measures, []).append(arm.name)
        if found is None:
            table.add_row(arm.name, *["-"] * 5)
            continue
        flop_hours = found.flops / (A100_FLOPS * UTILIZATION) / 3600
        hours += flop_hours * len(seeds)
        table.add_row(
            arm.name, f"{found.updates:,}", f"{found.tokens:,.0f}", f"{found.flops / 1e12:,.2f}",
            f"{found.tokens / PAPER_TOKENS_PER_S / 3600:.2g}", f"{flop_hours:.2g}",
        )  # fmt: skip
    console = Console()
    console.print(plan.question, highlight=False)
    console.print(table)
    console.print(
        f"per cell; nominal rows of {prompt:.0f} + {canvas:.0f} tokens; all cells together "
        f"{hours:.2g} A100 hours of training at 40 % of the peak, decoding not counted",
        highlight=False,
    )
    for measures, names in measured.items():
        console.print(f"measured on {'; '.join(names)}: {' '.join(measures)}", highlight=False)
    if plan.primary:
        print_budget(console, plan, scale, len(seeds))
    for claim in (*plan.claims, *plan.primary):
        console.print(f"claim: {claim.text}", highlight=False)
