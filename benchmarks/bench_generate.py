"""Time and cost of a denoising step: the published LLaDA decoder against the context modes.

python benchmarks/bench_generate.py [--quick] [--size cpu|1b|8b] [--prompt 128] [--gen 128]
    [--block 32] [--batch 1] [--blocks 1] [--variants naive exact cached] [--json FILE]

Random weights in the official shape. Of the canvas the first `--blocks` blocks are decoded, one
token a step, and the rest is given: a step costs what it costs in a whole decoding, without waiting
for all of them. The gate: `exact` commits the tokens of the published loop. Early exit is off.
"""

import argparse
import functools
import json

import harness
import output
import shapes
import torch

from bwsft.backbones.load import new_backbone
from bwsft.decoding import DecodeConfig
from bwsft.generate import generate

VARIANTS = ["naive", "exact", "prefix", "cached", "block_causal"]


def build(args, device):
    """(backbone, prompts, canvases with the first blocks open)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backbone = new_backbone(shapes.config_of(args.size), dtype=dtype, device=device).eval()
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return torch.randint(0, 126_000, (args.batch, count), generator=generator).tolist()

    open_tokens = args.blocks * args.block
    given = [[None] * open_tokens + row for row in draw(args.gen - open_tokens)]
    return backbone, draw(args.prompt), given


@torch.no_grad()
def published(backbone, prompts, canvases, size: int) -> list[list[int]]:
    """LLaDA's decoder as published: full logits and softmax of every row, top-1 per step, block
    by block of `size`. [MASK] is banned as in ours."""
    mask = shapes.MASK
    filled = [[mask if token is None else token for token in row] for row in canvases]
    rows = [a + b for a, b in zip(prompts, filled, strict=True)]
    ids = torch.tensor(rows, device=backbone.head()[0].device)
    start = len(prompts[0])
    while (ids == mask).any():
        stop = start + size
        for _ in range(int((ids[0, start:stop] == mask).sum())):
            logits = backbone.model(input_ids=ids).logits
            logits[..., mask] = -torch.inf
            token = logits.argmax(-1)
            confidence = logits.softmax(-1).gather(-1, token[..., None])[..., 0]
            confidence = confidence.masked_fill(ids != mask, -torch.inf)
            confidence[:, stop:] = -torch.inf
            best = confidence.topk(1, dim=-1).indices
            ids.scatter_(1, best, token.gather(1, best))
        start = stop
    return ids[:, len(prompts[0]) :].tolist()


def decode(backbone, prompts, canvases, args, context):
    config = DecodeConfig(
        gen_length=args.gen, block_size=args.block, context=context, stop_at_end=False,
        batch_size=args.batch,
    )  # fmt: skip
    return generate(backbone, prompts, config, canvases=canvases, trace=True)


def steps_of(args, device):
    """Variant -> step; SystemExit if `exact` does not commit the published tokens."""
    backbone, prompts, canvases = build(args, device)
    steps = {}
    for name in args.variants:
        if name == "naive":
            run = functools.partial(published, backbone, prompts, canvases, args.block)
        else:
            run = functools.partial(decode, backbone, prompts, canvases, args, name)
        steps[name] = as_step(run)
    return steps, backbone, prompts, canvases


def as_step(run):
    def step():
        run()
        yield "decode"

    return step


def agreement(args, backbone, prompts, canvases) -> dict[str, float]:
    """Share of the open tokens that equal the published decoder's, by variant."""
    count = args.blocks * args.block
    truth = torch.tensor(published(backbone, prompts, canvases, args.block))
    truth = truth[:, :count]
    shares = {}
    for name in args.variants:
        if name == "naive":
            continue
        found = truth.new_full(truth.shape, -1)
        for row, result in enumerate(decode(backbone, prompts, canvases, args, name)):
            for commit in result.trace:
                if commit.position < count:
                    found[row, commit.position] = commit.token
        shares[name] = float((found == truth).float().mean())
    return shares


def parse() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=shapes.SIZES, default="8b" if gpu else "cpu")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=1, help="blocks of the canvas to decode")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    harness.add_arguments(parser)
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    return args


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.measure_memory:
        args.variants = [args.measure_memory]
        steps = steps_of(args, device)[0]
        harness.print_memory(args.measure_memory, steps[args.measure_memory], device)
        return
    head, peak = output.header(device), harness.peak_flops(device)
    steps, *model = steps_of(args, device)
    shares = agreement(args, *model)
    if device.type == "cpu" and shares.get("exact", 1.0) < 1.0:
        raise SystemExit(f"exact agrees with the published decoder on {shares['exact']:.0%} alone")
    results = {name: harness.Result(name) for name in steps}
    harness.time_interleaved(steps, results, device, args.rounds)
    count = args.batch * args.blocks * args.block
    for name, step in steps.items():
        result = results[name]
        result.tokens_per_s = count / result.median_s if result.median_s else None
        harness.attempt(result, functools.partial(harness.count_cost, step, result))
    settings = {k: getattr(args, k) for k in ("size", "prompt", "gen", "block", "batch", "blocks")}
    title = "decoding: " + ", ".join(f"{key} {value}" for key, value in settings.items())
    output.print_table(title, head, list(results.values()), peak)
    cost = shapes.decode_flops("8b", args.prompt, args.gen, args.block)
    ratios = {name: round(cost["naive"] / value, 2) for name, value in cost.items()}
    print(f"tokens equal to the published decoder's: {json.dumps(shares)}")
    print(f"FLOP ratio to naive at LLaDA-8B's shape, whole decoding: {json.dumps(ratios)}")
    settings |= {"agreement": shares, "flop_ratio_8b": ratios}
    output.finish(args, "generate", head, [(settings, list(results.values()))])


if __name__ == "__main__":
    main()
