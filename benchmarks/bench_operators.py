"""Launched operators of a layer, a training step and a denoising step, without and with fused ops.

python benchmarks/bench_operators.py [--quick] [--size 8b] [--rows 8192] [--layers 32]
    [--count-only] [--json FILE] [--plot FILE]

naive: RMSNorm, rotary embedding, SwiGLU and residual adds as torch operators, as LLaDA's code has
them; fused: one launch each (bwsft_kernels); graphs: fused, and each forward of a denoising step
one CUDA graph (bwsft/decoding/cuda_graphs.py), counted as one. On a narrow bf16 model, since the
width launches nothing; a fused call counts as what its launcher launches, views and allocations as
nothing (launches.py). A layer of --size and the operations alone are timed too; on a CPU, where
fused runs in torch and is off by default, that shows what its own backward costs. The gate compares
a layer's numbers with float64. Host time: what a call of a fused operation costs the host that
launches it, measured with the launches left out. The last table is why LoRA's products are left to
peft: autograd keeps X A and dY B' already, so the FLOPs are the least.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

import bwsft_kernels
import torch
from bwsft_kernels import torch_ops
from lib import harness, memory, output, shapes
from lib.host_cost import host_cost
from lib.launches import Launches, fused_launches
from lib.small_counts import counted_points, lora_linear
from torch._subclasses.fake_tensor import FakeTensorMode

from bwsft.models.attention import AttentionLayout, rope_tables
from bwsft.models.llada_layers import LladaBlock

REMARKS = (
    "Operators, and what a layer with frozen weights keeps for backward in bf16 (32 layers keep 32 "
    "times that), are those of a GPU. Times on a CPU are those of fused's torch path, which is off "
    "there by default.",
    "Training step: one micro-batch of 4 sequences, forward and backward with LoRA on all "
    "matrices, bf16 under autocast, without the optimizer. Denoising step: batch 1, a later step "
    "of a block, and its first, which fills caches and records graphs. Heads, masks and loss run "
    "in torch here and are the same in all.",
    "LoRA linear: peft's FLOPs are the base matrix's plus the six rank-r products that any "
    "implementation needs, so X A and dY B' are computed once already. An autograd function "
    "written by hand did the same FLOPs in 3 forward and 8 backward operators instead of 5 and 8 "
    "(with dropout 4 and 10 instead of 9 and 9, 7 where dropout is one operator), and would "
    "replace the forward of peft's layer with its merging, disabling and mixed batches: left to "
    "peft.",
)


def set_fused(module: torch.nn.Module, fused: bool) -> None:
    for part in module.modules():
        if hasattr(part, "fused_ops"):
            part.fused_ops = "on" if fused else "off"


def make_layer(
    size: str, rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[LladaBlock, tuple]:
    """(block, arguments) of a frozen layer on rows of sequences of 256; x and delta have
    gradients, as in LoRA training."""
    config = shapes.config_of(size)
    with device:
        block = LladaBlock(config, 0)
        torch.manual_seed(0)
        for module in block.modules():
            for name, old in module._parameters.items():
                if old is not None:  # not .to(dtype), which fake tensors can't do
                    new = torch.ones(old.shape, dtype=dtype)
                    new = new if new.dim() == 1 else new.normal_(std=0.02)
                    module._parameters[name] = torch.nn.Parameter(new, requires_grad=False)
        x, delta = (torch.randn(rows, config.d_model, dtype=dtype) for _ in range(2))
        positions = torch.arange(rows) % 256
        rope = rope_tables(positions, config.head_dim, config.rope_theta, dtype)
    layout = AttentionLayout(-(-rows // 256), min(256, rows))
    return block, (x.requires_grad_(), rope, layout, None, delta.requires_grad_())


def layer_step(block: LladaBlock, arguments: tuple, fused: bool) -> harness.Step:
    inputs = arguments[0], arguments[-1]
    upstream = [torch.ones_like(t) for t in inputs]

    def step():
        set_fused(block, fused)
        out = block(*arguments)
        yield "forward"
        torch.autograd.backward(out, upstream)
        yield "backward"
        for tensor in inputs:
            tensor.grad = None

    return step


def kept_bytes(size: str, rows: int, fused: bool) -> int:
    """What a bf16 layer keeps for backward beside its weights and the rotary tables, which all
    layers share."""
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # held, so that no other one gets its address
        return tensor

    # Tensors without values that say they are on a CPU, whose attention keeps what flash attention
    # does; that of the meta device keeps the square of scores.
    with FakeTensorMode(allow_non_fake_inputs=True), fused_launches():
        block, arguments = make_layer(size, rows, torch.bfloat16, torch.device("cpu"))
        set_fused(block, fused)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(*arguments)
    for tensor in (*block.parameters(), *arguments[1]):
        kept.pop(tensor.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


def check(size: str, rows: int, dtype: torch.dtype, device: torch.device) -> str:
    """The gate: a layer's output with fused ops is as near to float64 as without."""
    block, arguments = make_layer(size, rows, dtype, device)
    outs = []
    for fused in (False, True):
        set_fused(block, fused)
        outs.append(sum(block(*arguments)).detach().double())
    set_fused(block.double(), False)
    x, rope, layout, wanted, delta = arguments
    rope = [t.double() for t in rope]
    truth = sum(block(x.double(), rope, layout, wanted, delta.double())).detach()
    naive, fused = ((out - truth).norm() / truth.norm() for out in outs)
    if not fused <= 1.5 * naive + 4 * torch.finfo(torch.float32).eps:
        return f"a fused layer is off by {float(fused):.2g}, a plain one by {float(naive):.2g}"
    return ""


def timed_layer(args: Namespace) -> output.Point:
    """One layer, timed at --size and counted."""
    block, arguments = make_layer(args.size, args.rows, args.dtype, args.device)
    steps = {"naive": layer_step(block, arguments, False),
             "fused": layer_step(block, arguments, True)}
    results = {name: harness.Result(name) for name in steps}
    if not args.count_only:
        harness.time_interleaved(steps, results, args.device, args.rounds)
    hollow = make_layer(args.size, args.rows, args.dtype, torch.device("meta"))
    flops = harness.count_flops(layer_step(*hollow, False))
    narrow, inputs = make_layer("tiny", 64, torch.bfloat16, torch.device("cpu"))
    for name, result in results.items():
        counts, count, run = [], Launches(), layer_step(narrow, inputs, name == "fused")
        with fused_launches(), count:
            for _ in run():
                counts.append(count.count)
        result.operators, result.flops = counts[-1], flops
        result.extra = {
            "forward operators": counts[0], "backward operators": counts[1] - counts[0],
            "MiB kept in bf16": kept_bytes(args.size, args.rows, name == "fused") / 2**20,
        }
        if not args.count_only:
            result.tokens_per_s = args.rows / result.median_s
            memory.measure(steps[name], result, args)
    settings = {"part": "one layer, forward and backward", "size": args.size, "rows": args.rows,
                "dtype": str(args.dtype)[6:]}
    return settings, list(results.values())


def small_steps(args: Namespace) -> tuple[dict, dict]:
    """(steps, bytes that each must move) of the three operations alone."""
    config, rows = shapes.config_of(args.size), args.rows
    with args.device:
        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(rows, *shape, dtype=args.dtype).requires_grad_()

        x, residual = tensor(config.d_model), tensor(config.d_model)
        gate, up = tensor(config.mlp_width), tensor(config.mlp_width)
        q, k = (tensor(n, config.head_dim) for n in (config.n_heads, config.num_kv_heads))
        weight = torch.ones(config.d_model, dtype=args.dtype)
        tables = rope_tables(torch.arange(rows), config.head_dim, config.rope_theta, args.dtype)
    calls = {
        "rms_norm": ((x, weight, 1e-5, residual), (x, residual)),
        "rotary": ((q, k, *tables), (q, k)),
        "swiglu": ((gate, up), (gate, up)),
    }

    def step(function: Callable, inputs: tuple, trained: tuple) -> Iterator[str]:
        out = function(*inputs)
        yield "forward"
        out = out if isinstance(out, tuple) else (out,)
        torch.autograd.grad(out, trained, [t.detach() for t in out])
        yield "backward"

    steps = {
        f"{name}_{kind}": partial(step, getattr(package, name), *calls[name])
        for name in calls for kind, package in (("naive", torch_ops), ("fused", bwsft_kernels))
    }
    traffic = {"rms_norm": 8 * x.nbytes, "rotary": 4 * (q.nbytes + k.nbytes + tables[0].nbytes),
               "swiglu": 8 * gate.nbytes}
    return steps, traffic


def timed_operations(args: Namespace) -> output.Point:
    """The operations alone, forward and backward."""
    steps, traffic = small_steps(args)
    results = {name: harness.Result(name) for name in steps}
    harness.time_interleaved(steps, results, args.device, args.rounds)
    for name, result in results.items():
        result.traffic_bytes = traffic[name.rpartition("_")[0]]
    settings = {"part": "the operations alone, forward and backward", "size": args.size,
                "rows": args.rows, "dtype": str(args.dtype)[6:]}
    return settings, list(results.values())


def parse(argv: list[str] | None = None) -> Namespace:
    gpu, parser = torch.cuda.is_available(), harness.arguments(__doc__)
    parser.add_argument("--size", choices=shapes.SIZES, default="8b" if gpu else "cpu")
    parser.add_argument("--rows", type=int, default=8192 if gpu else 256)
    parser.add_argument("--layers", type=int, default=32, help="of the model that is counted")
    parser.add_argument("--count-only", action="store_true", help="time nothing")
    args = harness.parse(parser, argv, __file__)
    args.rounds = args.rounds or (5 if args.quick else 20)
    args.dtype = torch.bfloat16 if gpu or args.size in ("1b", "8b") else torch.float32
    return args


def measured(args: Namespace) -> Iterator[output.Point]:
    yield timed_layer(args)
    if not args.count_only:
        yield timed_operations(args)
        yield host_cost(10 * args.rounds)
    yield from counted_points(args.layers)
    yield lora_linear()


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.measure_memory:
        layer = make_layer(args.size, args.rows, args.dtype, args.device)
        return memory.print_memory(layer_step(*layer, args.measure_memory == "fused"), args)
    size, rows = ("tiny", 64) if args.count_only else (args.size, min(args.rows, 1024))
    if wrong := check(size, rows, args.dtype, args.device):
        raise SystemExit(f"the check failed: {wrong}; nothing was measured")
    output.run(args, "operators", "", measured(args), REMARKS)


if __name__ == "__main__":
    main()
