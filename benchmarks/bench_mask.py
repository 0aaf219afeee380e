"""Time of building a blockwise batch: a collator of Python loops against block_mask.

python benchmarks/bench_mask.py [--quick] [--sequences 8 64] [--lengths 256 1024] [--block 32]
    [--json FILE] [--plot FILE]

`naive` is what the paper's released collator does, written anew: for every row a loop over its
tokens draws the marks, hides the suffix and sets the labels. The others are one call of block_mask,
which also lists the supervised rows and their weights. The gate feeds the loop with block_mask's
own random numbers and asks for the same ids, labels and counts. On a GPU the batch ends on the
device.
"""

import functools
import itertools
import random
from argparse import Namespace
from dataclasses import dataclass

import torch
from bwsft_kernels import MaskSpec, block_mask
from bwsft_kernels.philox import Stream, philox_u24
from lib import harness, memory, output

MASK, VOCAB, IGNORE = 126_336, 126_000, -100
ONE24 = 1 << 24


@dataclass
class Problem:
    """Padded ids [S, L] on the host, lengths [S] as lists, and the block size."""

    ids: list[list[int]]
    prompts: list[int]
    responses: list[int]
    block: int

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        columns = self.ids, self.prompts, self.responses
        return [torch.tensor(column, device=device) for column in columns]


def make_problem(sequences: int, length: int, block: int) -> Problem:
    """Rows of up to `length` tokens: a prompt of a tenth to a half, then the response."""
    draw = random.Random(0)
    rows = [draw.randint(length * 3 // 4, length) for _ in range(sequences)]
    prompts = [draw.randint(length // 10, length // 2) for _ in range(sequences)]
    ids = [[draw.randrange(VOCAB) for _ in range(length)] for _ in range(sequences)]
    return Problem(ids, prompts, [n - p for n, p in zip(rows, prompts, strict=True)], block)


class PythonRandom:
    """What a collator draws from."""

    def block(self, row: int, count: int) -> int:
        return random.randrange(count)

    def rate(self, row: int) -> float:
        return random.uniform(1e-3, 1.0)

    def mark(self, row: int, position: int, rate: float) -> bool:
        return random.random() < rate


class SameBits:
    """The numbers of block_mask, so that the loop must give the same batch."""

    def __init__(self, sequences: int, length: int, spec: MaskSpec):
        rows = torch.arange(sequences)

        def words(
            stream: Stream, position: torch.Tensor | int = 0, sample: torch.Tensor = rows
        ) -> list:
            return philox_u24(position, 0, sample, seed=spec.seed, stream=stream).tolist()

        self.blocks, self.rates = words(Stream.BLOCK), words(Stream.RATE)
        self.marks = words(Stream.MARKS, torch.arange(length)[None], rows[:, None])
        self.low, self.high = round(spec.low * ONE24), round(spec.high * ONE24)

    def block(self, row: int, count: int) -> int:
        return self.blocks[row] * count >> 24

    def rate(self, row: int) -> int:
        return self.low + ((self.high - self.low) * self.rates[row] >> 24)

    def mark(self, row: int, position: int, rate: int) -> bool:
        return self.marks[row][position] < rate


def collate(problem: Problem, source: PythonRandom | SameBits) -> tuple[list, list]:
    """Noisy ids and labels [S, L] as lists, token by token."""
    noisy, labels = [], []
    columns = zip(problem.ids, problem.prompts, problem.responses, strict=True)
    for row, (ids, prompt, response) in enumerate(columns):
        end, size = prompt + response, problem.block
        count = (response + size - 1) // size
        start = prompt + size * source.block(row, count)
        stop = min(start + size, end)
        rate = source.rate(row)
        new, label = list(ids), [IGNORE] * len(ids)
        for position in range(start, stop):
            if source.mark(row, position, rate):
                label[position] = ids[position]
                new[position] = MASK
        if all(token == IGNORE for token in label):
            label[stop - 1], new[stop - 1] = ids[stop - 1], MASK
        for position in range(stop, end):
            new[position] = MASK
        noisy.append(new)
        labels.append(label)
    return noisy, labels


def naive(
    problem: Problem, device: torch.device, source: PythonRandom | SameBits | None = None
) -> list[torch.Tensor]:
    """Noisy ids and labels as tensors on the device."""
    source = source or PythonRandom()
    return [torch.tensor(column).to(device) for column in collate(problem, source)]


def steps_of(problem: Problem, device: torch.device, spec: MaskSpec) -> dict:
    """Variant -> step, or why it can't run here."""
    tensors = problem.tensors(device)
    calls = {"naive": functools.partial(naive, problem, device)}
    for impl in ("torch", "triton"):
        calls[f"block_mask_{impl}"] = functools.partial(block_mask, *tensors, spec, impl=impl)

    def step(name: str):
        calls[name]()
        yield "mask"

    steps = {name: functools.partial(step, name) for name in calls}
    return steps if device.type == "cuda" else steps | {"block_mask_triton": "needs a CUDA device"}


def check(problem: Problem, device: torch.device, spec: MaskSpec) -> str:
    """The gate: "" if block_mask and the loop agree at the same random numbers."""
    source = SameBits(len(problem.ids), len(problem.ids[0]), spec)
    ids, labels = naive(problem, device, source)
    for impl in ("torch", "triton") if device.type == "cuda" else ("torch",):
        own = block_mask(*problem.tensors(device), spec, impl=impl)
        for name, truth in (("noisy_ids", ids), ("labels", labels),
                            ("count", (labels != IGNORE).sum(1))):
            if not torch.equal(getattr(own, name), truth):
                return f"{name} of block_mask ({impl}) are not those of the loop"
    return ""


def spec_of(args: Namespace) -> MaskSpec:
    """As the paper fills empty draws, which a loop can imitate."""
    return MaskSpec(block_size=args.block, mask_id=MASK, empty="last")


def run_point(args: Namespace, sequences: int, length: int) -> output.Point:
    problem = make_problem(sequences, length, args.block)
    spec = spec_of(args)
    if wrong := check(problem, args.device, spec):
        raise SystemExit(f"the check failed: {wrong}; nothing was timed")
    found = steps_of(problem, args.device, spec)
    results = {
        name: harness.Result(name, note=step if isinstance(step, str) else "")
        for name, step in found.items()
    }
    steps = {name: step for name, step in found.items() if not results[name].note}
    tokens = sum(problem.prompts) + sum(problem.responses)
    for result, step in harness.time_interleaved(steps, results, args.device, args.rounds):
        result.tokens_per_s = tokens / result.median_s
        result.traffic_bytes = 3 * 8 * sequences * length  # ids in, noisy ids and labels out
        harness.count_cost(step, result)
        result.flops = None
        memory.measure(step, result, args, "--sequences", sequences, "--lengths", length)
    settings = {"sequences": sequences, "length": length, "block": args.block}
    return settings, list(results.values())


def parse(argv: list[str] | None = None) -> Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", help="default: 8 32 64; quick: 8 64")
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 256 512 1024; quick: 256")
    parser.add_argument("--block", type=int, default=32)
    args = harness.parse(parser, argv, __file__)
    args.sequences = args.sequences or ([8, 64] if args.quick else [8, 32, 64])
    args.lengths = args.lengths or ([256] if args.quick else [256, 512, 1024])
    args.rounds = args.rounds or (10 if args.quick else 30)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.measure_memory:
        problem = make_problem(args.sequences[0], args.lengths[0], args.block)
        steps = steps_of(problem, args.device, spec_of(args))
        return memory.print_memory(steps[args.measure_memory], args)
    shapes = itertools.product(args.sequences, args.lengths)
    output.run(args, "mask", "masks: ", (run_point(args, *shape) for shape in shapes))


if __name__ == "__main__":
    main()
