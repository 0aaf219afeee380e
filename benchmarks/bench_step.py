"""Time, memory and cost of one training step of LLaDA with LoRA: naive path and context modes.

python benchmarks/bench_step.py [--quick] [--size cpu|1b|8b] [--prompt 128] [--gen 512] [--block 32]
    [--batch 1] [--variants naive exact cached_k4] [--json FILE] [--plot FILE]

All variants train the same sequences of one micro-batch with the same adapters: random weights in
the official shape, synthetic ids. `naive` is what the paper's released code does: padded batch,
masks made by a Python loop, full logits, no pruning. Supervised tokens are the rows that bear loss;
cached_k4 draws four masks per context, block_causal supervises every block at once.
"""

import argparse
import functools
import json
import random
from contextlib import nullcontext
from types import SimpleNamespace

import harness
import numpy as np
import output
import shapes
import torch
import torch.nn.functional as F
from bwsft_kernels.block_mask import MaskSpec

from bwsft.backbones.load import new_backbone
from bwsft.backbones.lora import add_lora
from bwsft.config import LoraConfig
from bwsft.data import CanvasLayout, Example, pack
from bwsft.modes import Mode
from bwsft.objectives import blockwise

# The paper's own figures for LLaDA-8B, LoRA r 256 on one A100 at batch 1 (appendix A.1).
PAPER = {"tokens_per_s": 5_100, "peak_gb": 23.5}
MODES = {
    "exact": Mode("exact", even=True),
    "cached_k1": Mode("cached", draws=1, even=True),
    "cached_k4": Mode("cached", draws=4, even=True),
    "block_causal": Mode("block_causal", even=True),
}


def build(args, device):
    """(backbone with adapters, host batch, MaskSpec)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backbone = new_backbone(shapes.config_of(args.size), dtype=dtype, device=device)
    add_lora(backbone, LoraConfig(rank=args.rank, alpha=2.0 * args.rank, dropout=0.0), seed=0)
    backbone.train()
    rng = np.random.default_rng(0)
    layout = CanvasLayout(
        mask_id=shapes.MASK, eos_id=shapes.EOS, block_size=args.block, gen_length=args.gen,
        max_length=args.prompt + args.gen,
    )  # fmt: skip
    examples = [
        Example(rng.integers(0, 126_000, args.prompt), rng.integers(0, 126_000, args.gen), i)
        for i in range(args.batch)
    ]
    return backbone, pack(examples, layout), MaskSpec(block_size=args.block, mask_id=shapes.MASK)


def run_of(backbone, mode, spec, device):
    """What bwsft.modes needs of a run."""

    def autocast():
        cuda = device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    run = SimpleNamespace(backbone=backbone, mode=mode, spec=spec, device=device, autocast=autocast)
    run.corrupt = lambda b, draw: blockwise.corrupt(b, spec, "uniform", draw, mode.draws)
    return run


def mode_step(backbone, batch, spec, mode, device, counts):
    """One forward and backward per draw of a context mode."""
    run = run_of(backbone, mode, spec, device)

    def step():
        rows = []
        for total, num_rows in mode.losses(run, batch):
            total.backward()
            rows.append(num_rows)
        counts.append(int(sum(rows)))
        yield "step"
        backbone.zero_grad(set_to_none=True)

    return step


def naive_step(backbone, batch, spec, device, counts):
    """Padded rows, masks from a Python loop, logits of every position, per-row mean loss."""
    run = run_of(backbone, MODES["exact"], spec, device)
    lengths = batch.cu_seqlens.diff().tolist()

    def step():
        ids = torch.full((len(lengths), max(lengths)), shapes.EOS)
        labels, supervised = torch.full_like(ids, -100), 0
        for s, row in enumerate(batch.ids.split(lengths)):
            ids[s, : len(row)] = row
            start, stop = int(batch.prompt_lengths[s]), len(row)
            first = start + spec.block_size * random.randrange((stop - start) // spec.block_size)
            rate = random.uniform(1e-3, 1)
            for i in range(first, first + spec.block_size):
                if random.random() < rate:
                    labels[s, i] = ids[s, i]
                    supervised += 1
            ids[s][labels[s] != -100] = shapes.MASK
            ids[s, first + spec.block_size : stop] = shapes.MASK
        ids, labels = ids.to(device), labels.to(device)
        with run.autocast():
            logits = backbone.model(input_ids=ids).logits
        each = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), reduction="none"
        ).view_as(labels)
        loss = each.sum(1) / (labels != -100).sum(1).clamp(min=1)
        loss.sum().backward()
        counts.append(supervised)
        yield "step"
        backbone.zero_grad(set_to_none=True)

    return step


def check(backbone, batch, spec, device) -> str:
    """The gate: the exact step's loss equals full logits + cross_entropy at the same masks; every
    other mode's loss is finite and of its size (random weights: near log V)."""
    losses = {}
    with torch.no_grad():
        for name, mode in MODES.items():
            run = run_of(backbone, mode, spec, device)
            losses[name] = sum(float(total) for total, _ in mode.losses(run, batch))
        noisy, masked = run_of(backbone, MODES["exact"], spec, device).corrupt(batch.to(device), 0)
        hidden = backbone.hidden_states(noisy.ids, noisy.position_ids, noisy.cu_seqlens)
        n = int(masked.num_rows)
        logits = F.linear(hidden[masked.rows[:n]], backbone.head()[0]).float()
        each = F.cross_entropy(logits, masked.row_target[:n], reduction="none")
        truth = float((each * masked.row_weight[:n]).sum())
    bound = 1e-4 if device.type == "cpu" else 2e-2
    if not abs(losses["exact"] - truth) <= bound * truth:
        return f"exact loss {losses['exact']} is not the full-logits loss {truth}"
    for name, loss in losses.items():
        if not 0.5 * truth < loss < 2 * truth:
            return f"{name} loss {loss} is far from the exact {truth}"
    return ""


def steps_of(args, device):
    """(steps by variant, supervised counts by variant)."""
    backbone, batch, spec = build(args, device)
    if wrong := check(backbone, batch, spec, device):
        raise SystemExit(f"the check failed: {wrong}; nothing was timed")
    counts = {name: [] for name in args.variants}
    steps = {}
    for name in args.variants:
        if name == "naive":
            steps[name] = naive_step(backbone, batch, spec, device, counts[name])
        else:
            steps[name] = mode_step(backbone, batch, spec, MODES[name], device, counts[name])
    return steps, counts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=shapes.SIZES, default="8b" if gpu else "cpu")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, default=512)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, help="LoRA rank; default 256, or 16 on a CPU")
    names = ["naive", *MODES]
    parser.add_argument("--variants", nargs="+", choices=names, default=names)
    harness.add_arguments(parser)
    args = parser.parse_args()
    args.rank = args.rank or (16 if args.size == "cpu" else 256)
    args.rounds = args.rounds or (3 if args.quick else 7)
    return args


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.measure_memory:
        args.variants = [args.measure_memory]
        steps, _ = steps_of(args, device)
        harness.print_memory(args.measure_memory, steps[args.measure_memory], device)
        return
    head, peak = output.header(device), harness.peak_flops(device)
    steps, counts = steps_of(args, device)
    results = {name: harness.Result(name) for name in steps}
    harness.time_interleaved(steps, results, device, args.rounds)
    for name, step in steps.items():
        result = results[name]
        if result.median_s:
            tokens = args.batch * (args.prompt + args.gen)
            result.tokens_per_s = tokens / result.median_s
            # naive draws its masks anew each time: the mean number is the fair one.
            result.supervised_tokens_per_s = float(np.mean(counts[name])) / result.median_s
        harness.attempt(result, functools.partial(harness.count_cost, step, result))
        if device.type == "cuda":
            harness.attempt(result, functools.partial(harness.measure_memory, step, device, result))
        else:
            harness.memory_in_child(name, result)
    settings = {k: getattr(args, k) for k in ("size", "prompt", "gen", "block", "batch", "rank")}
    title = "training step: " + ", ".join(f"{key} {value}" for key, value in settings.items())
    output.print_table(title, head, list(results.values()), peak)
    print("paper, 8B on one A100, batch 1: {tokens_per_s} tokens/s, {peak_gb} GB".format(**PAPER))
    cost = shapes.step_flops("8b", args.prompt, args.gen, args.block, 4)
    ratios = {name: round(cost["exact"] / value, 2) for name, value in cost.items()}
    print(f"exact FLOPs per supervised token over theirs, LLaDA-8B: {json.dumps(ratios)}")
    settings |= {"flop_ratio_8b": ratios}
    output.finish(args, "step", head, [(settings, list(results.values()))])


if __name__ == "__main__":
    main()
