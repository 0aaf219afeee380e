"""Time, memory and cost of one optimiser step of LLaDA with LoRA: naive path and context modes.

python benchmarks/bench_step.py [--quick] [--size cpu|1b|8b|...] [--prompt 128] [--gen 512]
    [--block 32] [--batch 1] [--accumulate 32] [--variants naive exact cached_k4] [--count-only]

All variants train the same sequences with the same adapters, in the same micro-batches (on a GPU
the largest that fits naive), accumulated to --accumulate sequences: random weights in the official
shape, synthetic ids. `naive` is what the paper's released code does: padded batch, masks made by a
Python loop, full logits, no pruning. Supervised tokens are the rows that bear loss; cached_k4 draws
four masks per context, block_causal supervises every block at once. A second table has responses
of GSM8K's lengths, padded to 256 and packed.
"""

import argparse
import dataclasses

import torch
from lib import harness, models, output, shapes
from lib.steps import MAX_LENGTH, MODES, Job, check, make_job, step_of

from bwsft.config import OptimConfig
from bwsft.training.context_modes import Mode
from bwsft.training.optim import make_optimizer
from bwsft.utils.flops import step_flops

# The paper, appendix A.1: LLaDA-8B, LoRA r 256, batch 1 on one A100.
PAPER = {"tokens_per_s": 5_100.0, "extra": {"GB in all": 23.5}}
# The second table: the mode, and what lies behind a response.
PADDING = {
    "naive": (None, "padded"),
    "exact_padded": (Mode("exact"), "padded"),
    "exact_fixed": (Mode("exact", even=True), "fixed"),
    "exact_packed": (Mode("exact"), "response"),
}


def measure(args, device, backbone, variants: dict, gen: int = 0) -> list[harness.Result]:
    """Time and cost of variants, name -> (mode, job), and with the first table's `gen` memory."""
    results = {name: harness.Result(name) for name in variants}
    steps = all_steps(backbone, variants)
    if not args.count_only:
        harness.time_interleaved(steps, results, device, args.rounds)
    for name, (mode, job) in variants.items():
        result, supervised = results[name], job.supervised(mode)
        if not (args.count_only or result.note):
            result.tokens_per_s = job.tokens / result.median_s
            result.supervised_tokens_per_s = supervised / result.median_s
            harness.count_cost(steps[name], result)
        if args.count_only or device.type == "cuda":  # its attention and kernels can't be counted
            result.flops = counted(args, mode, job)
        if result.flops:
            result.extra["GFLOP per supervised token"] = result.flops / supervised / 1e9
        if gen and not args.count_only:
            harness.memory(name, steps[name], device, result, args, ["--gen", str(gen)])
        if result.peak_bytes:
            result.extra["GB in all"] = (result.peak_bytes + result.baseline_bytes) / 1e9
    return list(results.values())


def all_steps(backbone, variants: dict) -> dict:
    """Name -> optimiser step, one optimiser for all."""
    optimizer = backbone and make_optimizer(backbone, OptimConfig())
    return {
        name: step_of(backbone, mode, job, optimizer) for name, (mode, job) in variants.items()
    }


def counted(args, mode, job: Job) -> int:
    """FLOPs of a step without its optimiser.

    Micro-batches of one length differ in their loss rows only, a percent: the first stands for
    all. All layers but the last cost the same, so two and three layers tell the cost of any number.
    """
    same = len({b.ids.numel() for b in job.batches}) == 1
    some = job.batches[:1] if same else job.batches
    part = dataclasses.replace(job, batches=some, device=torch.device("cpu"))
    two, three = (
        harness.count_flops(step_of(models.hollow_backbone(args.size, n, args.rank), mode, part))
        for n in (2, 3)
    )
    layers = shapes.SIZES[args.size]["n_layers"]
    return (two + (layers - 2) * (three - two)) * (len(job.batches) // len(some))


def dtype_of(device, args) -> torch.dtype:
    """bf16 weights where there is a GPU, or where only its work is counted."""
    gpu = device.type == "cuda" or args.size in ("8b", "1b")
    return torch.bfloat16 if gpu else torch.float32


def largest_batch(args, device, backbone) -> int:
    """The largest power of two of sequences that naive can train at once."""
    size, optimizer = 1, make_optimizer(backbone, OptimConfig())
    while size < args.accumulate:
        lengths = [(args.prompt, args.gen[0])] * 2 * size
        job = job_of(args, lengths, 2 * size, device, args.gen[0])
        result, step = harness.Result("naive"), step_of(backbone, None, job, optimizer)
        harness.attempt(result, lambda step=step: harness.timed(step, device))
        if result.note:
            break
        size *= 2
    optimizer.state.clear()
    return size


def job_of(args, lengths, batch, device, gen, canvas="fixed") -> Job:
    return make_job(args.size, lengths, batch, args.block, device, gen_length=gen,
                    max_length=MAX_LENGTH, canvas=canvas)


def modes_of(args, device, gen) -> dict:
    """The variants of the first table."""
    job = job_of(args, [(args.prompt, gen)] * args.accumulate, args.batch, device, gen)
    return {name: (MODES.get(name), job) for name in args.variants}


def run_modes(args, device, backbone, gen):
    """(settings, results) of the context modes at one response length."""
    results = measure(args, device, backbone, modes_of(args, device, gen), gen)
    settings = {k: getattr(args, k) for k in ("size", "prompt", "block", "batch", "accumulate")}
    settings |= {"gen": gen, "rank": args.rank}
    paper = harness.Result("paper", "the authors' LLaDA-8B at batch 1 on an A100, for reference",
                           **PAPER)
    return settings, [*results, paper]


def run_padding(args, device, backbone):
    """(settings, results) of padded and packed rows of the same examples."""
    lengths, source = shapes.gsm8k_lengths(args.examples)
    batch = max(1, args.batch * (args.prompt + args.gen[0]) // MAX_LENGTH)
    gen = -(-MAX_LENGTH // 2 // args.block) * args.block
    variants = {
        name: (mode, job_of(args, lengths, batch, device, gen, canvas))
        for name, (mode, canvas) in PADDING.items()
    }
    settings = {"size": args.size, "lengths": source, "examples": len(lengths), "batch": batch,
                "block": args.block, "gen": gen, "rank": args.rank}
    return settings, measure(args, device, backbone, variants)


def parse(argv=None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=shapes.SIZES, default="8b" if gpu else "cpu")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, nargs="+", help="default: 128, or 512 on a CPU")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch", type=int, help="default: what fits naive, or 1 on a CPU")
    parser.add_argument("--accumulate", type=int, help="sequences a step: 32 (CPU 4), quick 8 (1)")
    parser.add_argument("--examples", type=int, help="examples of the padding table, likewise")
    parser.add_argument("--rank", type=int, help="LoRA rank; default: 256, or 16 on a CPU")
    names = ["naive", *MODES]
    parser.add_argument("--variants", nargs="+", choices=names, default=names)
    parser.add_argument("--count-only", action="store_true", help="FLOPs alone, of hollow weights")
    harness.add_arguments(parser)
    args = harness.parse(parser, argv, __file__)
    large = gpu or args.count_only
    args.gen = args.gen or [128 if large or args.quick else 512]
    args.accumulate = args.accumulate or ((8 if args.quick else 32) if large else
                                          (1 if args.quick else 4))
    args.examples = args.examples or ((16 if args.quick else 32) if large else
                                      (2 if args.quick else 8))
    args.batch = args.batch or (0 if gpu else 1)
    args.rank = args.rank or (256 if args.size in ("1b", "8b") else 16)
    args.rounds = args.rounds or (2 if args.quick and not gpu else 3 if args.quick else 5)
    return args


def prepare(args, device):
    """The backbone with adapters that all variants train, past the gate; sets args.batch."""
    backbone = models.random_backbone(args.size, dtype_of(device, args), device)
    models.adapt(backbone, args.rank)
    args.batch = args.batch or largest_batch(args, device, backbone)
    if args.measure_memory:  # the parent has checked
        return backbone
    wrong = check(backbone, job_of(args, [(args.prompt, args.gen[0])], 1, device, args.gen[0]))
    if wrong:
        raise SystemExit(f"the check failed: {wrong}; nothing was timed")
    return backbone


def main(argv=None) -> None:
    args, device = parse(argv), harness.this_device()
    if args.measure_memory:
        args.variants = [args.measure_memory]
        step = all_steps(prepare(args, device), modes_of(args, device, args.gen[0]))
        harness.print_memory(args.measure_memory, step[args.measure_memory], device)
        return
    peak, backbone = harness.peak_of(device), None
    if not args.count_only:
        backbone = prepare(args, device)
    args.batch = args.batch or 1
    head, points = output.header(device, peak, args), []
    runs = [lambda gen=gen: run_modes(args, device, backbone, gen) for gen in args.gen]
    for run in [*runs, lambda: run_padding(args, device, backbone)]:
        settings, results = run()
        points.append((settings, results))
        output.print_table(f"training step: {output.settings_text(settings)}", head, results, peak)
    ratios = step_flops(shapes.cost_of("8b"), args.prompt, args.gen[0], args.block, 4)
    ratios = {name: round(ratios["exact"] / value, 2) for name, value in ratios.items()}
    output.finish(args, "step", head, points, [
        f"LLaDA-8B by formula, exact's FLOPs per supervised token over theirs: {ratios}",
        "In the last table the speed counts prompt and response tokens alone, not padding.",
    ])


if __name__ == "__main__":
    main()
