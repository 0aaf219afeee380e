"""Time and memory of the LM head and its loss: fused against full logits and what else there is.

python benchmarks/bench_loss.py [--quick] [--rows 32 128 512] [--vocab 32000 126464]
    [--head trainable] [--dtype bf16] [--variants fused naive] [--json FILE] [--plot FILE]

A batch of B x L tokens of which N bear loss, as block_mask leaves them. Each variant gets the same
tensors and returns the mean loss; forward and backward are timed apart, and with a frozen head the
gradient stops at the hidden states. "fused" makes its gradients in forward.
"""

import argparse
import functools
import itertools
from dataclasses import dataclass

import harness
import output
import torch
import torch.nn.functional as F
from bwsft_kernels import linear_cross_entropy, reference
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Problem:
    """x [T, D], head weight [V, D], target [T] with N kept rows."""

    x: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor


def make_problem(args, device, rows, vocabulary, tokens=None) -> Problem:
    tokens = tokens or args.batch * args.length
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


def naive(x, weight, target):
    """Full logits, as the paper's code."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


@functools.cache
def _compiled_naive():
    return torch.compile(naive)


def compiled(x, weight, target):
    return _compiled_naive()(x, weight, target)


def chunked_nll(x, weight, target, chunk=256):
    """Ignored rows dropped, then checkpointed chunks of 256 rows, as TRL's loss of this name."""
    kept = (target != -100).nonzero()[:, 0]
    x, target = x[kept], target[kept]
    total = 0
    for start in range(0, len(target), chunk):
        rows = slice(start, start + chunk)
        total = total + checkpoint(_chunk_sum, x[rows], weight, target[rows], use_reentrant=False)
    return total / len(target)


def _chunk_sum(x, weight, target):
    return F.cross_entropy(F.linear(x, weight).float(), target, reduction="sum")


def losses(device: torch.device) -> dict:
    """Name -> loss function, or the reason why it can't run here."""
    found = {"naive": naive, "compiled": compiled}
    if hasattr(F, "linear_cross_entropy"):
        chunked = torch.nn.LinearCrossEntropyOptions()
        found["torch_lce"] = F.linear_cross_entropy
        found["torch_lce_chunked"] = functools.partial(F.linear_cross_entropy, options=chunked)
    else:
        reason = f"torch {torch.__version__} has no linear_cross_entropy (2.13 has)"
        found["torch_lce"] = found["torch_lce_chunked"] = reason
    found["chunked_nll"] = chunked_nll
    found["liger"] = found["cce"] = "needs a CUDA device"
    if device.type == "cuda":
        found["liger"], found["cce"] = _liger(), _cce()
    found["fused"] = linear_cross_entropy
    return found


def quick_losses(device: torch.device) -> dict:
    """Without those that take most of two minutes on a CPU, unless asked for by name."""
    found = losses(device)
    if device.type == "cpu":
        found["torch_lce"] = "left out of --quick: the same full logits as naive"
        found["torch_lce_chunked"] = "left out of --quick: a minute a step on a CPU"
    return found


def _liger():
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        return "not installed (pip install liger-kernel)"
    return liger_fused_linear_cross_entropy


def _cce():
    try:
        from cut_cross_entropy import linear_cross_entropy as cce
    except ImportError:
        return "not installed (pip install cut-cross-entropy)"
    return cce


def step_of(loss_function, problem: Problem):
    """One forward and backward, as the harness wants it."""

    def step():
        loss = loss_function(problem.x, problem.weight, problem.target)
        yield "forward"
        loss.backward()
        yield "backward"
        problem.x.grad = problem.weight.grad = None

    return step


def check(loss_function, problem: Problem, truth) -> str:
    """The gate: "" if loss and gradients are right, else what is wrong.

    truth: float64 loss and gradients. The bounds are rounding of `dtype`: 8 units in the last
    place of the loss, 16 of the largest gradient.
    """
    leaves = [t for t in (problem.x, problem.weight) if t.requires_grad]
    loss = loss_function(problem.x, problem.weight, problem.target)
    grads = torch.autograd.grad(loss, leaves)
    eps = torch.finfo(problem.x.dtype).eps
    pairs = [(loss, truth[0], 8)] + [(g, t, 16) for g, t in zip(grads, truth[1], strict=True)]
    for name, (value, true, units) in zip(("loss", "dx", "dw"), pairs, strict=False):
        error = float((value.detach().double() - true).abs().max() / true.abs().max())
        if not error <= units * eps:
            return f"{name} is off by {error:.1e} of its largest value"
    return ""


def float64_truth(problem: Problem):
    """Loss and gradients by the law; ignored rows are left out only to save memory."""
    kept = (problem.target != -100).nonzero()[:, 0]
    x = problem.x.detach().double().requires_grad_()
    weight = problem.weight.detach().double().requires_grad_(problem.weight.requires_grad)
    loss = reference.linear_cross_entropy(x[kept], weight, problem.target[kept])
    return loss.detach(), torch.autograd.grad(loss, [t for t in (x, weight) if t.requires_grad])


def choose(args, device, problem: Problem):
    """(results by name, steps that run here and passed the gate)."""
    found = quick_losses(device) if args.quick and not args.variants else losses(device)
    unknown = set(args.variants or ()) - set(found)
    if unknown:
        raise SystemExit(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    results, steps, truth = {}, {}, float64_truth(problem)
    for name in args.variants or found:
        loss = found[name]
        results[name] = result = harness.Result(name, note=loss if isinstance(loss, str) else "")
        if not result.note:
            wrong = harness.attempt(result, functools.partial(check, loss, problem, truth))
            result.note = f"failed the check: {wrong}" if wrong else result.note
        if not result.note:
            steps[name] = step_of(loss, problem)
    for name in ("naive", "fused"):
        if name in results and results[name].note.startswith("failed"):
            raise SystemExit(f"{name} {results[name].note}; nothing was timed")
    return results, steps


def run_point(args, device, rows, vocabulary):
    """(settings, results) of one shape."""
    problem = make_problem(args, device, rows, vocabulary)
    tokens, kept = len(problem.target), int((problem.target != -100).sum())
    results, steps = choose(args, device, problem)
    harness.time_interleaved(steps, results, device, args.rounds)
    for name, step in steps.items():
        result = results[name]
        if result.median_s:
            result.tokens_per_s = tokens / result.median_s
            result.supervised_tokens_per_s = kept / result.median_s
        if name != "compiled":  # its operators are gone
            harness.attempt(result, functools.partial(harness.count_cost, step, result))
        if device.type == "cuda":
            harness.attempt(result, functools.partial(harness.measure_memory, step, device, result))
        else:
            shape = ["--rows", str(rows), "--vocab", str(vocabulary)]
            harness.memory_in_child(name, result, shape)
    settings = dict(tokens=tokens, rows=kept, hidden=args.hidden, vocab=vocabulary,
                    head=args.head, dtype=args.dtype_name)
    return settings, list(results.values())


def parse() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32 if gpu else 8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=4096 if gpu else 256)
    parser.add_argument("--rows", type=int, nargs="+", default=[512 if gpu else 128])
    parser.add_argument("--vocab", type=int, nargs="+", default=[126_464])
    parser.add_argument("--head", choices=["frozen", "trainable"], default="frozen")
    parser.add_argument("--dtype", dest="dtype_name", choices=DTYPES,
                        default="bf16" if gpu else "fp32")
    parser.add_argument("--variants", nargs="+", help="default: all")
    harness.add_arguments(parser)
    args = parser.parse_args()
    args.dtype = DTYPES[args.dtype_name]
    args.rounds = args.rounds or (3 if args.quick else 7)
    return args


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.measure_memory:
        problem = make_problem(args, device, args.rows[0], args.vocab[0])
        step = step_of(losses(device)[args.measure_memory], problem)
        harness.print_memory(args.measure_memory, step, device)
        return
    head, peak, points = output.header(device), harness.peak_flops(device), []
    for rows, vocabulary in itertools.product(args.rows, args.vocab):
        settings, results = run_point(args, device, rows, vocabulary)
        points.append((settings, results))
        title = "loss head: " + ", ".join(f"{key} {value}" for key, value in settings.items())
        output.print_table(title, head, results, peak)
    output.finish(args, "loss", head, points)


if __name__ == "__main__":
    main()
