"""Attention of one-pass training: range_attention, a dense mask, and FlexAttention on a GPU.

python benchmarks/bench_attention.py [--quick] [--prompt 128] [--response 512] [--copies 2]
    [--sequences 1] [--count-only] [--json FILE] [--plot FILE]

One layer, forward and backward. naive: torch's scaled_dot_product_attention with the dense boolean
mask [S, 1, L, L] and repeated key heads; range: bwsft_kernels.range_attention; flex: torch's
FlexAttention with a block mask, compiled (its compilation is in the untimed round). Masks and plan
are made once, as for all layers of a step. The gate compares numbers with float64. Memory is above
the inputs, and holds output and gradients.
"""

from argparse import Namespace
from collections.abc import Iterator

import torch
from attention_roofline import Layout, allowed_pairs, flex_pairs, issued_pairs
from bwsft_kernels import RangePlan, _tuning, range_attention, range_plan
from lib import harness, memory, output
from lib.dense import Attend, dense, visible
from torch import Tensor


def make_inputs(plan: RangePlan, args: Namespace) -> list[Tensor]:
    """q, k, v and the upstream gradient."""
    torch.manual_seed(0)
    rows = plan.query_ranges.size(1)
    heads = (args.heads, args.key_heads, args.key_heads, args.heads)
    tensors = [torch.randn(rows, number, args.width, dtype=args.dtype, device=args.device)
               for number in heads]
    return [x.requires_grad_(index < 3) for index, x in enumerate(tensors)]


def flex(plan: RangePlan) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = plan.query_ranges.size(1)
    mask = create_block_mask(
        lambda batch, head, query, key: visible(plan, query, key), None, None, rows, rows,
        device=plan.query_ranges.device)
    compiled = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = compiled(q, k, v, block_mask=mask, enable_gqa=q.size(1) != k.size(1))
        return out[0].transpose(0, 1)

    return attend


def make_plan(args: Namespace) -> RangePlan:
    lengths = (torch.full((args.sequences,), n) for n in (args.prompt, args.response))
    return range_plan(*lengths, args.block, copies=args.copies)[0].to(args.device)


def variants(plan: RangePlan, args: Namespace) -> dict[str, Attend | str]:
    """Variant -> function, or why it can't run here."""
    gpu = args.device.type == "cuda"
    return {
        "naive": dense(plan, args.sequences),
        "range": lambda q, k, v: range_attention(q, k, v, plan),
        "flex": flex(plan) if gpu else "needs a CUDA device",
    }


def step_of(attend: Attend, inputs: list[Tensor]) -> harness.Step:
    *leaves, upstream = inputs

    def step():
        out = attend(*leaves)
        yield "forward"
        torch.autograd.grad(out, leaves, upstream)
        yield "backward"

    return step


def check(plan: RangePlan, args: Namespace) -> str:
    """The gate: output and gradients are at most twice as far from float64 as those of torch."""
    inputs = make_inputs(plan, args)
    *leaves, upstream = inputs
    found = {}
    for name, attend in variants(plan, args).items():
        if callable(attend):
            out = attend(*leaves)
            found[name] = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = dense(plan, args.sequences)(*wide)
    truth = [out.detach(), *torch.autograd.grad(out, wide, upstream.double())]
    errors = {name: [float((x - true).norm() / true.norm())
                     for x, true in zip(tensors, truth, strict=True)]
              for name, tensors in found.items()}
    for own, plain in zip(errors["range"], errors["naive"], strict=True):
        if not own <= 2 * plain:
            return f"range_attention is off by {own:.2g}, torch's attention by {plain:.2g}"
    return ""


def measured(args: Namespace) -> Iterator[output.Point]:
    plan = make_plan(args)
    arch = _tuning.architecture(args.device)
    results = {name: harness.Result(name) for name in ("naive", "range", "flex")}
    shape = Layout((args.prompt,) * args.sequences, (args.response,) * args.sequences, args.copies,
                   args.block)
    pairs = {"naive": shape.dense, "flex": flex_pairs(plan.to("cpu")), "range": (
        issued_pairs(plan.to("cpu"), "fwd", arch) if args.device.type == "cuda"
        else allowed_pairs(plan))}
    if not args.count_only:
        found = variants(plan, args)
        for name, attend in found.items():
            results[name].note = "" if callable(attend) else attend
        inputs = make_inputs(plan, args)
        steps = {name: step_of(attend, inputs) for name, attend in found.items()
                 if callable(attend)}
        harness.time_interleaved(steps, results, args.device, args.rounds, gaps=False)
        own = sum(x.nbytes for x in inputs)  # the output is as large as its gradient
        for name, step in steps.items():
            memory.measure(step, results[name], args)
            if (peak := results[name].peak_bytes) is not None:
                results[name].extra["MiB beyond output and gradients"] = (peak - own) / 2**20
    for name, result in results.items():
        result.flops = 14 * args.heads * args.width * pairs[name]  # 2 products forward, 5 backward
        result.extra = {**result.extra, "pairs over allowed": pairs[name] / allowed_pairs(plan)}
        if result.median_s:
            result.tokens_per_s = plan.query_ranges.size(1) / result.median_s
    settings = {name: getattr(args, name) for name in
                ("sequences", "prompt", "response", "copies", "block", "heads", "width")}
    yield {**settings, "dtype": str(args.dtype)[6:]}, list(results.values())


def parse(argv: list[str] | None) -> Namespace:
    parser = harness.arguments(__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--sequences", type=int, default=8 if gpu else 1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32 if gpu else 8)
    parser.add_argument("--key-heads", type=int, default=32 if gpu else 8)
    parser.add_argument("--width", type=int, default=128 if gpu else 64, help="of a head")
    parser.add_argument("--count-only", action="store_true", help="time nothing")
    args = harness.parse(parser, argv, __file__)
    args.rounds = args.rounds or (3 if args.quick else 10)
    args.dtype = torch.bfloat16 if gpu else torch.float32
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    plan = make_plan(args)
    if args.measure_memory:
        attend = variants(plan, args)[args.measure_memory]
        return memory.print_memory(step_of(attend, make_inputs(plan, args)), args)
    if not args.count_only and (wrong := check(plan, args)):
        raise SystemExit(f"the check failed: {wrong}; nothing was timed")
    output.run(args, "attention", "", measured(args))


if __name__ == "__main__":
    main()
