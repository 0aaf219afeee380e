"""Time, memory and cost of one optimizer step of LLaDA with LoRA: naive path and context modes.

python benchmarks/bench_step.py [--quick] [--size cpu|1b|8b|...] [--prompt 128] [--gen 512]
    [--block 32] [--batch 1] [--accumulate 32] [--variants naive exact cached_k4] [--count-only]

All variants train the same sequences with the same adapters, in the same micro-batches (on a GPU
the largest that fits naive), accumulated to --accumulate sequences: random weights in the official
shape, synthetic ids. `naive` is what the paper's released code does: padded batch, masks made by a
Python loop, full logits, no pruning. exact_suffix supervises the hidden suffix too; exact_shared_k4
draws four masks, of which the first runs whole and its keys and values serve the others; cached_k4
draws four per frozen context; block_causal supervises every block at once, in one noisy copy, a
complementary pair of them or four (k4); its peer `dense` attends by a mask in place of ranges. A
second table has responses of GSM8K's lengths, padded to 256 and packed.
"""

import dataclasses
from argparse import Namespace
from collections.abc import Iterator

import torch
from lib import harness, memory, models, output, shapes
from lib.steps import MAX_LENGTH, MODES, PEERS, Job, Variant, check, make_job, step_of

from bwsft.config import OptimConfig
from bwsft.models.backbone import Backbone
from bwsft.training.optim import make_optimizer
from bwsft.utils.flops import step_flops

Variants = dict[str, tuple[Variant | None, Job]]  # None: the naive path
# The paper, appendix A.1: LLaDA-8B, LoRA r 256, batch 1 on one A100.
PAPER = {"tokens_per_s": 5_100.0, "extra": {"GB in all": 23.5}}
# The second table: the mode, and what comes after a response.
PADDING = {
    "naive": (None, "padded"),
    "exact_padded": (Variant(), "padded"),
    "exact_fixed": (Variant(), "fixed"),
    "exact_packed": (Variant(), "response"),
}


def measure(
    args: Namespace, backbone: Backbone | None, variants: Variants, gen: int = 0
) -> list[harness.Result]:
    """Time and cost of the variants, and with the first table's `gen` memory."""
    results = {name: harness.Result(name) for name in variants}
    steps = all_steps(backbone, variants)
    if not args.count_only:
        harness.time_interleaved(steps, results, args.device, args.rounds)
    for name, (mode, job) in variants.items():
        result, supervised = results[name], job.supervised(mode)
        if not (args.count_only or result.note):
            result.tokens_per_s = job.tokens / result.median_s
            result.supervised_tokens_per_s = supervised / result.median_s
            harness.count_cost(steps[name], result)
        # A GPU's attention and kernels are out of the counter's sight.
        if args.count_only or args.device.type == "cuda":
            result.flops = counted(args, mode, job)
        if result.flops:
            result.extra["GFLOP per supervised token"] = result.flops / supervised / 1e9
        if gen and not args.count_only:
            memory.measure(steps[name], result, args, "--gen", gen)
        if result.peak_bytes:
            result.extra["GB in all"] = (result.peak_bytes + result.baseline_bytes) / 1e9
    return list(results.values())


def all_steps(backbone: Backbone | None, variants: Variants) -> dict[str, harness.Step]:
    """Name -> optimizer step, one optimizer for all."""
    optimizer = backbone and make_optimizer(backbone, OptimConfig())
    return {name: step_of(backbone, mode, job, optimizer) for name, (mode, job) in variants.items()}


def counted(args: Namespace, mode: Variant | None, job: Job) -> int:
    """FLOPs of a step without its optimizer.

    Micro-batches of one length differ in their supervised rows only, a percent: the first stands
    for all.
    """
    same = len({b.ids.numel() for b in job.batches}) == 1
    some = job.batches[:1] if same else job.batches
    part = dataclasses.replace(job, batches=some, device=torch.device("cpu"))

    def count(layers: int) -> int:
        hollow = models.hollow_backbone(args.size, layers, args.rank)
        return harness.count_flops(step_of(hollow, mode, part))

    layers = shapes.SIZES[args.size]["n_layers"]
    return harness.of_layers(layers, count) * (len(job.batches) // len(some))


def largest_batch(args: Namespace, backbone: Backbone) -> int:
    """The largest power of two of sequences that naive can train at once."""
    size, optimizer = 1, make_optimizer(backbone, OptimConfig())
    while size < args.accumulate:
        lengths = [(args.prompt, args.gen[0])] * 2 * size
        job = job_of(args, lengths, 2 * size, args.gen[0])
        result, step = harness.Result("naive"), step_of(backbone, None, job, optimizer)
        harness.attempt(result, harness.timed, step, args.device)
        if result.note:
            break
        size *= 2
    optimizer.state.clear()
    return size


def job_of(
    args: Namespace, lengths: list[tuple[int, int]], batch: int, gen: int, canvas: str = "fixed"
) -> Job:
    return make_job(args.size, lengths, batch, args.block, args.device, gen_length=gen,
                    max_length=MAX_LENGTH, canvas=canvas)


def modes_of(args: Namespace, gen: int) -> Variants:
    """The variants of the first table."""
    job = job_of(args, [(args.prompt, gen)] * args.accumulate, args.batch, gen)
    return {name: ((MODES | PEERS).get(name), job) for name in args.variants}


def run_modes(args: Namespace, backbone: Backbone | None, gen: int) -> output.Point:
    """The context modes at one response length."""
    results = measure(args, backbone, modes_of(args, gen), gen)
    settings = {k: getattr(args, k) for k in ("size", "prompt", "block", "batch", "accumulate")}
    settings |= {"gen": gen, "rank": args.rank}
    paper = harness.Result("paper", "the authors' LLaDA-8B at batch 1 on an A100, for reference",
                           **PAPER)
    return settings, [*results, paper]


def run_padding(args: Namespace, backbone: Backbone | None) -> output.Point:
    """The same examples padded and packed."""
    lengths, source = shapes.gsm8k_lengths(args.examples)
    batch = max(1, args.batch * (args.prompt + args.gen[0]) // MAX_LENGTH)
    gen = -(-MAX_LENGTH // 2 // args.block) * args.block
    variants = {
        name: (mode, job_of(args, lengths, batch, gen, canvas))
        for name, (mode, canvas) in PADDING.items()
    }
    settings = {"size": args.size, "lengths": source, "examples": len(lengths), "batch": batch,
                "block": args.block, "gen": gen, "rank": args.rank}
    return settings, measure(args, backbone, variants)


def parse(argv: list[str] | None = None) -> Namespace:
    gpu, parser = torch.cuda.is_available(), harness.arguments(__doc__)
    parser.add_argument("--size", choices=shapes.SIZES, default="8b" if gpu else "cpu")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, nargs="+", help="default: 128, or 512 on a CPU")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch", type=int, help="default: what fits naive, or 1 on a CPU")
    parser.add_argument("--accumulate", type=int, help="sequences a step: 32 (CPU 4), quick 8 (1)")
    parser.add_argument("--examples", type=int, help="examples of the padding table, likewise")
    parser.add_argument("--rank", type=int, help="LoRA rank; default: 256, or 16 on a CPU")
    names = ["naive", *MODES, *PEERS]
    parser.add_argument("--variants", nargs="+", choices=names, default=names)
    parser.add_argument("--count-only", action="store_true", help="FLOPs alone, of hollow weights")
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


def prepare(args: Namespace) -> Backbone:
    """The backbone with adapters that all variants train, past the gate; sets args.batch."""
    gpu = args.device.type == "cuda" or args.size in ("8b", "1b")
    dtype = torch.bfloat16 if gpu else torch.float32
    backbone = models.random_backbone(args.size, dtype, args.device)
    models.adapt(backbone, args.rank)
    args.batch = args.batch or largest_batch(args, backbone)
    if args.measure_memory:  # the parent has checked
        return backbone
    wrong = check(backbone, job_of(args, [(args.prompt, args.gen[0])], 1, args.gen[0]))
    if wrong:
        raise SystemExit(f"the check failed: {wrong}; nothing was timed")
    return backbone


def measured(args: Namespace) -> Iterator[output.Point]:
    backbone = None if args.count_only else prepare(args)
    args.batch = args.batch or 1
    for gen in args.gen:
        yield run_modes(args, backbone, gen)
    yield run_padding(args, backbone)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.measure_memory:
        args.variants = [args.measure_memory]
        (step,) = all_steps(prepare(args), modes_of(args, args.gen[0])).values()
        return memory.print_memory(step, args)
    ratios = step_flops(shapes.cost_of("8b"), args.prompt, args.gen[0], args.block, 4)
    ratios = {name: round(ratios["exact"] / value, 2) for name, value in ratios.items()}
    output.run(args, "step", "training step: ", measured(args), [
        f"LLaDA-8B by formula, exact's FLOPs per supervised token over theirs: {ratios}",
        "In the last table the speed counts prompt and response tokens alone, not padding.",
    ])


if __name__ == "__main__":
    main()
