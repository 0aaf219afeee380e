"""Time and memory of the LM head and its loss: fused against full logits and what else there is.

python benchmarks/bench_loss.py [--quick | --sweep | --grid] [--rows 32 128 512]
    [--vocab 32000 126464] [--head frozen trainable] [--dtype fp32 bf16] [--data random model]
    [--phase forward] [--variants fused naive] [--json FILE]

A batch of B x L tokens of which N are supervised, as block_mask leaves them. Each variant gets the
same tensors and returns the mean loss; forward and backward are timed apart, and with a frozen head
the gradient stops at the hidden states. "fused" makes its gradients in forward. --phase forward is
the loss without a gradient, as in evaluation. --grid is N 128, 512 and all of 2,048 tokens, V
32,000 and 126,464, both heads and both dtypes. --data model takes the logits of a trained model.

With --rounds 1 a variant whose step takes longer than SLOW_STEP seconds runs that one step after
a forward pass: it is timed, weighed and checked in it, and its FLOPs aren't counted.

Below the tables each speed-up is split in two: what dropping the ignored rows gives anybody
(`compact`), and what the loss itself gives beyond that.
"""

import contextlib
import functools
import itertools
import math
from argparse import Namespace
from dataclasses import dataclass

import torch
from bwsft_kernels import linear_cross_entropy, reference
from lib import harness, memory, output
from lib.heads import Problem, make_problem
from lib.losses import COMPILED, Loss, losses, naive
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# --sweep: each setting alone, the other as in the first.
SLOW_STEP = 5  # seconds
SWEEP = {"rows": (64, 256, 512, 1024), "vocab": (16_384, 32_768, 65_536)}
GRID = {
    "batch": 8, "length": 256, "rows": [128, 512, 2048], "vocab": [32_000, 126_464],
    "head": ["frozen", "trainable"], "dtype_name": ["fp32", "bf16"],
}
Shape = tuple[int, int, str, str, str]  # rows, vocabulary, head, dtype, data


def step_of(loss_function: Loss, problem: Problem, phase: str = "both") -> harness.Step:
    """One forward, and unless the phase is "forward" one backward, as the harness wants it."""

    def step():
        with torch.set_grad_enabled(phase == "both"):
            loss = loss_function(problem.x, problem.weight, problem.target)
        yield "forward"
        if phase == "both":
            loss.backward()
            yield "backward"
        problem.x.grad = problem.weight.grad = None

    return step


@dataclass
class Truth:
    """Loss and gradients in float64, and the error that each may have, relative to its largest
    value: three times that of plain torch on the kept rows in the same dtype, and two units in
    the last place."""

    values: list[Tensor]
    bounds: list[float]


def errors(loss_function: Loss, problem: Problem, values: list[Tensor]) -> list[float]:
    """Largest error of the loss and of each gradient, relative to the largest true value."""
    loss = loss_function(problem.x, problem.weight, problem.target)
    return compare([loss, *torch.autograd.grad(loss, problem.leaves)], values)


def compare(found: list[Tensor], values: list[Tensor]) -> list[float]:
    return [
        float((value.detach().double() - true).abs().max() / true.abs().max())
        for value, true in zip(found, values, strict=True)
    ]


def check(loss_function: Loss, problem: Problem, truth: Truth) -> str:
    """The gate: "" if loss and gradients are right, else what is wrong."""
    return complaint(errors(loss_function, problem, truth.values), truth)


def complaint(found: list[float], truth: Truth) -> str:
    """Which of the errors is too large, or ""."""
    for name, error, bound in zip(("loss", "dx", "dw"), found, truth.bounds, strict=False):
        if not error <= bound:
            return f"{name} is off by {error:.1e} of its largest value, which may be {bound:.1e}"
    return ""


def find_truth(problem: Problem, brief: bool = False) -> Truth:
    """By the reference implementation; ignored rows are left out only to save memory. brief: plain
    torch isn't run, and its errors are taken to be a rounding and what fp32 sums may be off by."""
    kept = (problem.target != -100).nonzero()[:, 0]
    both = (problem.x, problem.weight)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in both]
    loss = reference.linear_cross_entropy(wide[0][kept], wide[1], problem.target[kept])
    grads = torch.autograd.grad(loss, [t for t in wide if t.requires_grad])
    values = [loss.detach(), *grads]
    eps = torch.finfo(problem.x.dtype).eps
    # A softmax is exp(z - lse), and lse, about ln V, is rounded at its own size.
    most = 4 * math.log(len(problem.weight)) * eps
    if brief:
        fp32 = torch.finfo(torch.float32).eps
        torch_errors = [eps + most / eps * fp32] * len(values)
    else:
        torch_errors = errors(lambda x, w, t: naive(x[kept], w, t[kept]), problem, values)
        assert max(torch_errors) <= most, f"plain torch is off by {torch_errors}, more than {most}"
    return Truth(values, [3 * error + 2 * eps for error in torch_errors])


def single(args: Namespace) -> bool:
    return args.rounds == 1 and args.phase == "both"


def measure_once(
    args: Namespace, result: harness.Result, loss_function: Loss, problem: Problem, truth: Truth
) -> str:
    """Time, memory and the gate of one step, after a forward pass that loads and compiles."""

    def step():
        loss = loss_function(problem.x, problem.weight, problem.target)
        yield "forward"
        loss.backward()
        yield "backward"
        found.extend([loss.detach(), *(leaf.grad for leaf in problem.leaves)])

    found: list[Tensor] = []
    loss_function(problem.x, problem.weight, problem.target)
    with memory.watched(args.device, result):
        phases = harness.timed(step, args.device)
    problem.x.grad = problem.weight.grad = None
    result.rounds, result.phases = 1, phases
    result.median_s = result.low_s = result.high_s = phases["total"]
    return complaint(compare(found, truth.values), truth)


def choose(
    args: Namespace, problem: Problem, truth: Truth
) -> tuple[dict[str, harness.Result], dict[str, Loss]]:
    """(results by name, loss functions that run here and passed the gate); with one round those
    that are slow were measured on the way, and are in the results only."""
    found = losses(args.device, brief=(args.quick or args.grid) and not args.variants)
    unknown = set(args.variants or ()) - set(found)
    if unknown:
        raise SystemExit(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    results, right = {}, {}
    for name in args.variants or found:
        loss = found[name]
        results[name] = result = harness.Result(name, note=loss if isinstance(loss, str) else "")
        if not result.note:
            gate = functools.partial(measure_once, args, result) if single(args) else check
            wrong = harness.attempt(result, gate, loss, problem, truth)
            result.note = f"failed the check: {wrong}" if wrong else result.note
        if not result.note and (result.median_s or 0) < SLOW_STEP:
            right[name] = loss
    for name in ("naive", "fused"):
        if name in results and results[name].note.startswith("failed"):
            raise SystemExit(f"{name} {results[name].note}; nothing was timed")
    return results, right


def count_cost(problem: Problem, phase: str, result: harness.Result, step: harness.Step) -> None:
    """FLOPs and operators, of compiled code as it runs uncompiled."""
    if result.name == "cce":  # all of its products are in Triton
        return
    if result.name == "fused":  # and on a GPU a part of these
        step = step_of(functools.partial(linear_cross_entropy, impl="torch"), problem, phase)
    eager = torch.compiler.set_stance("force_eager")
    with eager if result.name in COMPILED else contextlib.nullcontext():
        harness.attempt(result, harness.count_cost, step, result)
    result.flops = result.flops or None  # 0: all of them out of the counter's sight


def run_point(args: Namespace, shape: Shape, remarks: list[str]) -> output.Point:
    """Measure a shape, and add to the remarks where its speed-ups come from."""
    rows, vocabulary, head, dtype, data = shape
    args.dtype = DTYPES[dtype]
    problem = make_problem(args, rows, vocabulary, head, data)
    tokens, kept = len(problem.target), int((problem.target != -100).sum())
    results, right = choose(args, problem, find_truth(problem, brief=single(args)))
    steps = {name: step_of(loss, problem, args.phase) for name, loss in right.items()}
    timed = harness.time_interleaved(steps, results, args.device, args.rounds, gaps=False)
    passes = 1 if args.phase == "forward" else 2 + (head == "trainable")
    for result in results.values():
        if not result.note:
            result.tokens_per_s = tokens / result.median_s
            result.supervised_tokens_per_s = kept / result.median_s
    for result, step in timed:
        count_cost(problem, args.phase, result, step)
        if result.flops:
            result.traffic_bytes = passes * problem.weight.nbytes
        words = zip(("--rows", "--vocab", "--head", "--dtype", "--data"), shape, strict=True)
        memory.measure(step, result, args, *itertools.chain(*words))
    settings = dict(tokens=tokens, rows=kept, hidden=args.hidden, vocab=vocabulary, head=head,
                    dtype=dtype, data=data, phase=args.phase)
    if line := explain(results):
        remarks.append(f"{output.settings_text(settings)}: {line}")
    return settings, list(results.values())


def explain(results: dict[str, harness.Result]) -> str:
    """How much of fused's speed-up anybody gets by dropping rows, and how much is its own."""
    times = [results[n].median_s if n in results else None for n in ("naive", "compact", "fused")]
    if None in times:
        return ""
    full, dropped, fused = times
    return (f"fused {full / fused:.2f}x naive = {full / dropped:.2f}x by dropping ignored rows "
            f"(compact) x {dropped / fused:.2f}x by the loss itself")


def parse(argv: list[str] | None = None) -> Namespace:
    gpu, parser = torch.cuda.is_available(), harness.arguments(__doc__)
    usual = {
        "batch": 32 if gpu else 8, "length": 256, "rows": [512 if gpu else 128],
        "vocab": [126_464], "head": ["frozen"], "dtype_name": ["bf16" if gpu else "fp32"],
    }
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--hidden", type=int, default=4096 if gpu else 256)
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--vocab", type=int, nargs="+")
    parser.add_argument("--sweep", action="store_true", help="more rows and vocabularies")
    parser.add_argument("--grid", action="store_true", help="rows x vocabulary x head x dtype")
    parser.add_argument("--head", choices=["frozen", "trainable"], nargs="+")
    parser.add_argument("--phase", choices=["both", "forward"], default="both")
    parser.add_argument("--dtype", dest="dtype_name", choices=DTYPES, nargs="+")
    parser.add_argument("--data", choices=["random", "model"], nargs="+", default=["random"],
                        help="logits: near 0, or a trained model's")
    parser.add_argument("--variants", nargs="+", help="default: all")
    args = harness.parse(parser, argv, __file__)
    for name, value in (usual | (GRID if args.grid else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.rounds = args.rounds or (3 if args.quick else 7)
    return args


def shapes_of(args: Namespace) -> list[Shape]:
    """Every point, the first one first."""
    kinds = args.head, args.dtype_name, args.data
    if not args.sweep:
        return list(itertools.product(args.rows, args.vocab, *kinds))
    rows, vocabulary = args.rows[0], args.vocab[0]
    line = [(r, vocabulary) for r in SWEEP["rows"]] + [(rows, v) for v in SWEEP["vocab"]]
    pairs = dict.fromkeys([(rows, vocabulary), *line])
    return [(*pair, *kind) for kind in itertools.product(*kinds) for pair in pairs]


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.measure_memory:
        (rows, vocabulary, head, dtype, data), *_ = shapes_of(args)
        args.dtype = DTYPES[dtype]
        problem = make_problem(args, rows, vocabulary, head, data)
        loss = losses(args.device)[args.measure_memory]
        return memory.print_memory(step_of(loss, problem, args.phase), args)
    remarks = []
    points = (run_point(args, shape, remarks) for shape in shapes_of(args))
    output.run(args, "loss", "loss head: ", points, remarks)


if __name__ == "__main__":
    main()
