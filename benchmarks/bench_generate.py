"""Time and cost of decoding: the published LLaDA decoder against context modes and rules.

python benchmarks/bench_generate.py [--quick | --sweep] [--size cpu|1b|8b|...] [--prompt 128]
    [--gen 128] [--batch 1] [--block 32] [--blocks 1] [--variants naive exact] [--count-only]

Random weights in the official shape. Of the canvas the first `--blocks` blocks are decoded, one
token a step, and the rest is given: a step costs what it costs in a whole decoding, without waiting
for all of them. Random weights are never sure of a token, so there `threshold` shows what the rule
costs, not what it saves: the last table decodes word problems with the embedded trained model. The
gate: `exact` commits the tokens of the published loop. Early exit is off.

`--variants` knows the related work's rules too (docs/decoders.md). They must first agree with a
simpler rule where they reduce to it. `apd` takes a random verifier that agrees to nothing: a step
costs what it costs, and saves nothing.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
from lib import harness, memory, models, output, shapes
from lib.decodes import (
    EVERY,
    VARIANTS,
    Problem,
    decode,
    decode_by,
    facts,
    hollow_flops,
    make_problem,
    planned,
    step_of,
    trained_problem,
)

from bwsft.models.backbone import Backbone
from bwsft.utils.flops import decode_flops

SWEEP = ((128, 1024), (128, 512), (1, 8))  # prompt, gen, batch


def measure(
    args: Namespace, problem: Problem, flops: Callable[[str], int] | None = None
) -> list[harness.Result]:
    """Decode once for the tokens and the cost, then on the clock. flops: variant -> FLOPs, where
    torch can't see them all: a GPU's attention and head kernels are out of its sight."""
    results, steps, found = {}, {}, {}
    for name in args.variants:
        results[name] = result = harness.Result(name)
        steps[name] = step_of(problem, name, found)
        harness.attempt(result, harness.count_cost, steps[name], result)
        if args.device.type == "cuda":
            result.flops = flops and flops(name)
    truth = found["naive"].tokens if "naive" in found else None
    for name, run in found.items():
        extra = results[name].extra
        extra["steps"], extra["passes"] = run.steps, run.passes
        if truth is not None and name != "naive":
            extra["agreement"] = float((run.tokens == truth.to(run.tokens.device)).float().mean())
    weights = sum(p.nbytes for p in problem.model.parameters())
    timed = harness.time_interleaved(steps, results, args.device, args.rounds, warm=True)
    for result, step in timed:
        run = found[result.name]
        result.tokens_per_s = len(problem.prompts) * problem.wanted / result.median_s
        result.extra["ms/step"] = 1e3 * result.median_s / run.steps
        result.traffic_bytes = weights * run.passes
        if args.device.type == "cuda":
            memory.measure(step, result, args)
    return list(results.values())


def gate(device: torch.device, variants: list[str] | tuple = ()) -> None:
    """SystemExit unless `exact` commits what the published loop does, and each of the related
    work's rules what a simpler rule does where it must; at a small size in fp32."""
    model = models.random_backbone("tiny", torch.float32, device)
    problem = make_problem(model, (16, 32, 2), 8, 2)
    truth, own = (decode(problem, name).tokens.cpu() for name in ("naive", "exact"))
    if not torch.equal(truth, own):
        share = float((truth == own).float().mean())
        raise SystemExit(f"the check failed: exact agrees with the published decoder on {share:.0%}"
                         " of the tokens; nothing was timed")
    for name in variants:
        if pair := facts(problem, name):
            own, simpler = (decode_by(problem, options).tokens for options in pair)
            if not torch.equal(own, simpler):
                raise SystemExit(f"the check failed: {name} with {pair[0]} commits other tokens "
                                 f"than with {pair[1]}; nothing was timed")


def run_point(args: Namespace, model: Backbone | None, shape: tuple[int, int, int]) -> output.Point:
    """One shape: prompt, gen, batch."""
    settings = {"size": args.size, "prompt": shape[0], "gen": shape[1], "batch": shape[2],
                "block": args.block, "blocks": args.blocks or shape[1] // args.block}
    grid = (args.block, settings["blocks"])

    def flops(name: str) -> int:
        return hollow_flops(args.size, shape, *grid, planned(name))

    if args.count_only:
        results = [harness.Result(name, flops=flops(name)) for name in args.variants]
        return settings, results
    return settings, measure(args, make_problem(model, shape, *grid), flops)


def parse(argv: list[str] | None = None) -> Namespace:
    gpu, parser = torch.cuda.is_available(), harness.arguments(__doc__)
    parser.add_argument("--size", choices=shapes.SIZES, default="8b" if gpu else "cpu")
    for name, default in zip(("prompt", "gen", "batch"), (128, 128, 1), strict=True):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sweep", action="store_true",
                        help="prompt 128, 1024 x gen 128, 512 x batch 1, 8")
    parser.add_argument("--block", type=int, help="default: 32, or 16 if quick on a CPU")
    parser.add_argument("--blocks", type=int, default=1, help="blocks to decode; 0: all")
    parser.add_argument("--variants", nargs="+", choices=EVERY, default=list(VARIANTS))
    parser.add_argument("--count-only", action="store_true", help="FLOPs alone, of hollow weights")
    args = harness.parse(parser, argv, __file__)
    args.block = args.block or (16 if args.quick and not gpu and args.size != "8b" else 32)
    args.rounds = args.rounds or (1 if args.quick or args.sweep else 3)
    return args


def measured(args: Namespace) -> Iterator[output.Point]:
    model = None
    if not args.count_only:
        dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
        model = models.random_backbone(args.size, dtype, args.device)
    one = ((args.prompt,), (args.gen,), (args.batch,))
    for shape in itertools.product(*(SWEEP if args.sweep else one)):
        yield run_point(args, model, shape)
    if not args.count_only:
        problem = trained_problem(args.device)
        settings = {"size": "the embedded trained model", "problems": len(problem.prompts),
                    "gen": problem.wanted, "block": problem.block}
        yield settings, measure(args, problem)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    gate(args.device, args.variants)
    cost = decode_flops(shapes.cost_of("8b"), args.prompt, args.gen, args.block)
    ratios = {name: round(cost["naive"] / value, 2) for name, value in cost.items()}
    remarks = [
        f"LLaDA-8B by formula, prompt {args.prompt}, gen {args.gen}, whole decoding: naive's FLOPs "
        f"over theirs: {ratios}",
    ]
    if "apd" in args.variants:
        remarks.append(
            "apd's verifier has random weights and agrees by chance alone: its rows show what a "
            "step costs, not the steps that a good verifier saves."
        )
    output.run(args, "generate", "decoding: ", measured(args), remarks)


if __name__ == "__main__":
    main()
