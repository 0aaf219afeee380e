"""Time and memory of the LM head and its loss: fused against full logits and what else there is.

python benchmarks/bench_loss.py [--quick | --sweep] [--rows 32 128 512] [--vocab 32000 126464]
    [--head trainable] [--phase forward] [--dtype bf16] [--variants fused naive] [--json FILE]

A batch of B x L tokens of which N are supervised, as block_mask leaves them. Each variant gets the
same tensors and returns the mean loss; forward and backward are timed apart, and with a frozen head
the gradient stops at the hidden states. "fused" makes its gradients in forward. --phase forward is
the loss without a gradient, as in evaluation.
"""

import functools
import importlib.util
import itertools
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from bwsft_kernels import linear_cross_entropy, reference
from lib import harness, output
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [T, D], weight [V, D], target [T] -> mean
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# --sweep: each setting alone, the other as in the first.
SWEEP = {"rows": (64, 256, 512, 1024), "vocab": (16_384, 32_768, 65_536)}
PEERS = {"liger": "liger-kernel", "cce": "cut-cross-entropy"}


@dataclass
class Problem:
    """x [T, D], head weight [V, D], target [T] with N kept rows."""

    x: Tensor
    weight: Tensor
    target: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.weight) if t.requires_grad]


def make_problem(args: Namespace, rows: int, vocabulary: int) -> Problem:
    tokens, device = args.batch * args.length, args.device
    generator = torch.Generator(device).manual_seed(0)
    options = dict(generator=generator, device=device)
    x = torch.randn(tokens, args.hidden, **options).to(args.dtype)
    weight = torch.empty(vocabulary, args.hidden, dtype=args.dtype, device=device)
    for part in weight.split(16_384):  # no fp32 copy of the whole head
        part.copy_(torch.randn(part.shape, **options) * 0.02)
    target = torch.full((tokens,), -100, device=device)
    kept = torch.randperm(tokens, **options)[:rows]
    target[kept] = torch.randint(vocabulary, (len(kept),), **options)
    weight.requires_grad_(args.head == "trainable")
    return Problem(x.requires_grad_(), weight, target)


def naive(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Full logits, as the paper's code."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


@functools.cache
def _compiled_naive() -> Loss:
    return torch.compile(naive)


def compiled(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _compiled_naive()(x, weight, target)


def chunked_nll(x: Tensor, weight: Tensor, target: Tensor, chunk: int = 256) -> Tensor:
    """Ignored rows dropped, then checkpointed chunks of 256 rows, as TRL's loss of this name."""
    kept = (target != -100).nonzero()[:, 0]
    x, target = x[kept], target[kept]
    total = 0
    for start in range(0, len(target), chunk):
        rows = slice(start, start + chunk)
        total = total + checkpoint(_chunk_sum, x[rows], weight, target[rows], use_reentrant=False)
    return total / len(target)


def _chunk_sum(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target, reduction="sum")


def losses(device: torch.device, quick: bool = False) -> dict[str, Loss | str]:
    """Name -> loss function, or the reason why it isn't run here."""
    found = {"naive": naive, "compiled": compiled}
    if not hasattr(F, "linear_cross_entropy"):
        reason = f"torch {torch.__version__} has no linear_cross_entropy (2.13 has)"
        found["torch_lce"] = found["torch_lce_chunked"] = reason
    elif quick and device.type == "cpu":
        found["torch_lce"] = "left out of --quick: the same full logits as naive"
        found["torch_lce_chunked"] = "left out of --quick: a minute a step on a CPU"
    else:
        chunked = torch.nn.LinearCrossEntropyOptions()
        found["torch_lce"] = F.linear_cross_entropy
        found["torch_lce_chunked"] = functools.partial(F.linear_cross_entropy, options=chunked)
    found["chunked_nll"] = chunked_nll
    found["liger"], found["cce"] = peer("liger", device), peer("cce", device)
    found["fused"] = linear_cross_entropy
    return found


def peer(name: str, device: torch.device) -> Loss | str:
    """The loss of an installed package, or why it can't run here."""
    package = PEERS[name]
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        gpu = "" if device.type == "cuda" else "; its Triton kernels need a CUDA device"
        return f"not installed (pip install {package}){gpu}"
    if device.type != "cuda":
        return f"{package} is installed, but its Triton kernels need a CUDA device"
    try:
        if name == "liger":
            from liger_kernel.transformers import functional
            loss = functional.liger_fused_linear_cross_entropy
        else:
            from cut_cross_entropy import linear_cross_entropy as loss
    except Exception as error:  # e.g. it doesn't know this torch: the others are timed
        return f"{package} can't be imported: {type(error).__name__}: {error}"
    return loss


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
    found = [loss, *torch.autograd.grad(loss, problem.leaves)]
    return [
        float((value.detach().double() - true).abs().max() / true.abs().max())
        for value, true in zip(found, values, strict=True)
    ]


def check(loss_function: Loss, problem: Problem, truth: Truth) -> str:
    """The gate: "" if loss and gradients are right, else what is wrong."""
    found = errors(loss_function, problem, truth.values)
    for name, error, bound in zip(("loss", "dx", "dw"), found, truth.bounds, strict=False):
        if not error <= bound:
            return f"{name} is off by {error:.1e} of its largest value, which may be {bound:.1e}"
    return ""


def find_truth(problem: Problem) -> Truth:
    """By the reference implementation; ignored rows are left out only to save memory."""
    kept = (problem.target != -100).nonzero()[:, 0]
    both = (problem.x, problem.weight)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in both]
    loss = reference.linear_cross_entropy(wide[0][kept], wide[1], problem.target[kept])
    grads = torch.autograd.grad(loss, [t for t in wide if t.requires_grad])
    values = [loss.detach(), *grads]
    torch_errors = errors(lambda x, w, t: naive(x[kept], w, t[kept]), problem, values)
    eps = torch.finfo(problem.x.dtype).eps
    # A softmax is exp(z - lse), and lse, about ln V, is rounded at its own size.
    most = 4 * math.log(len(problem.weight)) * eps
    assert max(torch_errors) <= most, f"plain torch is off by {torch_errors}, more than {most}"
    return Truth(values, [3 * error + 2 * eps for error in torch_errors])


def choose(args: Namespace, problem: Problem) -> tuple[dict[str, harness.Result], dict[str, Loss]]:
    """(results by name, loss functions that run here and passed the gate)."""
    found = losses(args.device, args.quick and not args.variants)
    unknown = set(args.variants or ()) - set(found)
    if unknown:
        raise SystemExit(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    results, right, truth = {}, {}, find_truth(problem)
    for name in args.variants or found:
        loss = found[name]
        results[name] = result = harness.Result(name, note=loss if isinstance(loss, str) else "")
        if not result.note:
            wrong = harness.attempt(result, check, loss, problem, truth)
            result.note = f"failed the check: {wrong}" if wrong else result.note
        if not result.note:
            right[name] = loss
    for name in ("naive", "fused"):
        if name in results and results[name].note.startswith("failed"):
            raise SystemExit(f"{name} {results[name].note}; nothing was timed")
    return results, right


def run_point(args: Namespace, rows: int, vocabulary: int) -> output.Point:
    problem = make_problem(args, rows, vocabulary)
    tokens, kept = len(problem.target), int((problem.target != -100).sum())
    results, right = choose(args, problem)
    steps = {name: step_of(loss, problem, args.phase) for name, loss in right.items()}
    timed = harness.time_interleaved(steps, results, args.device, args.rounds, gaps=False)
    passes = 1 if args.phase == "forward" else 2 + (args.head == "trainable")
    for result, step in timed:
        result.tokens_per_s = tokens / result.median_s
        result.supervised_tokens_per_s = kept / result.median_s
        if result.name == "fused":  # on a GPU a part of its products is in Triton
            loss = functools.partial(linear_cross_entropy, impl="torch")
            harness.count_cost(step_of(loss, problem, args.phase), result)
        elif result.name not in ("compiled", "cce"):  # their products are out of sight
            harness.attempt(result, harness.count_cost, step, result)
        result.flops = result.flops or None  # 0: all of them out of the counter's sight
        if result.flops:
            result.traffic_bytes = passes * problem.weight.nbytes
        harness.memory(step, result, args, "--rows", rows, "--vocab", vocabulary)
    settings = dict(tokens=tokens, rows=kept, hidden=args.hidden, vocab=vocabulary,
                    head=args.head, dtype=args.dtype_name, phase=args.phase)
    return settings, list(results.values())


def parse(argv: list[str] | None = None) -> Namespace:
    gpu, parser = torch.cuda.is_available(), harness.arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32 if gpu else 8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=4096 if gpu else 256)
    parser.add_argument("--rows", type=int, nargs="+", default=[512 if gpu else 128])
    parser.add_argument("--vocab", type=int, nargs="+", default=[126_464])
    parser.add_argument("--sweep", action="store_true", help="more rows and vocabularies")
    parser.add_argument("--head", choices=["frozen", "trainable"], default="frozen")
    parser.add_argument("--phase", choices=["both", "forward"], default="both")
    parser.add_argument("--dtype", dest="dtype_name", choices=DTYPES,
                        default="bf16" if gpu else "fp32")
    parser.add_argument("--variants", nargs="+", help="default: all")
    args = harness.parse(parser, argv, __file__)
    args.dtype = DTYPES[args.dtype_name]
    args.rounds = args.rounds or (3 if args.quick else 7)
    return args


def shapes_of(args: Namespace) -> list[tuple[int, int]]:
    """(rows, vocabulary) of every point, the first one first."""
    if not args.sweep:
        return list(itertools.product(args.rows, args.vocab))
    rows, vocabulary = args.rows[0], args.vocab[0]
    line = [(r, vocabulary) for r in SWEEP["rows"]] + [(rows, v) for v in SWEEP["vocab"]]
    return [(rows, vocabulary)] + [point for point in line if point != (rows, vocabulary)]


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.measure_memory:
        problem = make_problem(args, args.rows[0], args.vocab[0])
        loss = losses(args.device)[args.measure_memory]
        return harness.print_memory(step_of(loss, problem, args.phase), args)
    points = (run_point(args, *shape) for shape in shapes_of(args))
    output.run(args, "loss", "loss head: ", points)


if __name__ == "__main__":
    main()
