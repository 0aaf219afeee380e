"""What the benchmarks share: interleaved timing and counted cost (output.py prints them).

A variant is a function that returns a generator; it yields the name of each phase when the phase
is done, and code after the last yield isn't timed. A variant that can't run here is a note, which
says why. Every number belongs to one run on one device, named in the header.
"""

import argparse
import gc
import statistics
import sys
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from bwsft.utils.flops import flop_counter
from bwsft.utils.threads import leave_busy_cores

# Dense bf16 FLOP/s and bytes/s of the 80 GB cards (H200: 141 GB); a CPU's are measured.
PEAKS = {"A100": (312e12, 2.04e12), "H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}
SLOW_SECONDS = 60
HOLD_SECONDS = 0.1
Step = Callable[[], Iterator[str]]


@dataclass
class Result:
    """One variant: seconds (median and 20/80 quantiles), bytes above the baseline, counted cost.

    traffic_bytes: what its weights and inputs alone must move. extra: columns of one benchmark.
    """

    name: str
    note: str = ""
    rounds: int = 0
    median_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    phases: dict = field(default_factory=dict)
    tokens_per_s: float | None = None
    supervised_tokens_per_s: float | None = None
    peak_bytes: int | None = None
    baseline_bytes: int | None = None
    flops: int | None = None
    operators: int | None = None
    traffic_bytes: int | None = None
    extra: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Peak:
    """What a device reaches at best; None where it isn't known."""

    flops: float | None = None  # per second
    bytes: float | None = None

    def share(self, result: Result) -> float | None:
        """Share of the roofline: the time that arithmetic or traffic need at best, over what was
        measured."""
        shares = [
            cost / best for cost, best in
            ((result.flops, self.flops), (result.traffic_bytes, self.bytes)) if cost and best
        ]
        return max(shares) / result.median_s if shares and result.median_s else None


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser of what all benchmarks take; `description` is the file's docstring."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds, at most 2 minutes")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds (0: 7, fewer if quick)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw times and memory to FILE (matplotlib)")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory runs out")
    parser.add_argument("--measure-memory", metavar="VARIANT", help=argparse.SUPPRESS)
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None, file: str) -> argparse.Namespace:
    """Arguments with the device; their `command` runs the same benchmark again in a child."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    leave_busy_cores()
    args.command = [str(Path(file).resolve()), *argv]
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return args


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(device: torch.device) -> Callable[[], float]:
    """Wall time; on a CPU with one thread the process' CPU time, which is the same but for what
    other programs take."""
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if one_thread else time.perf_counter


def timed(step: Step, device: torch.device) -> dict[str, float]:
    """Seconds of each phase of one run, and their "total"."""
    phases, seconds = {}, clock(device)
    run = step()
    synchronize(device)
    start = before = seconds()
    for phase in run:
        synchronize(device)
        now = seconds()
        phases[phase] = phases.get(phase, 0) + now - before
        before = now
        phases["total"] = now - start
    return phases


def timed_queued(step: Step, result: Result) -> dict[str, float]:
    """As `timed`, in the GPU's own seconds: the host queues the step while the GPU is held busy,
    so gaps in which the GPU waits for the host don't count. Where they did (a step that
    synchronizes, or takes the host longer than HOLD_SECONDS), the result says so."""

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    run = step()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9 * HOLD_SECONDS))  # in cycles, of which a GPU has at most 2 GHz
    start = before = mark()
    marks = [(phase, mark()) for phase in run]
    result.extra["host gaps"] = "counted" if start.query() else ""  # reached: the GPU is waiting
    torch.cuda.synchronize()
    phases = defaultdict(float)
    for phase, event in marks:
        phases[phase] += before.elapsed_time(event) / 1e3
        before = event
    return {**phases, "total": start.elapsed_time(before) / 1e3}


def attempt(result: Result, function: Callable, *arguments: object) -> object:
    """function(*arguments). A failure becomes the variant's note: peers may fail in any way."""
    try:
        return function(*arguments)
    except Exception as error:
        memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate" in str(error)
        first = (str(error).splitlines() or [""])[0]
        result.note = "out of memory" if memory else f"{type(error).__name__}: {first[:160]}"
    gc.collect()  # what the failed run held
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def time_interleaved(
    steps: dict[str, Step], results: dict[str, Result], device: torch.device, rounds: int,
    warm: bool = False, gaps: bool = True,
) -> list[tuple[Result, Step]]:
    """Rounds over all variants, so that drift of clocks and neighbors hits all alike; those that
    could be timed.

    Unless they are warm, a first round isn't counted. A slow variant stops after SLOW_SECONDS.
    gaps: whether the time in which a GPU waits for the host counts, as it does for a whole step.
    """
    queued = device.type == "cuda" and not gaps
    samples = {name: defaultdict(list) for name in steps}
    runs = [(number, name) for number in range(warm, rounds + 1) for name in steps]
    gc.collect()
    gc.freeze()  # so that looking for garbage between runs takes no time
    for number, name in tqdm(runs, "timing", leave=False, disable=None):
        times = samples[name]
        if results[name].note or sum(times["total"]) > SLOW_SECONDS:
            continue
        gc.collect()
        how = (timed_queued, steps[name], results[name]) if queued else (timed, steps[name], device)
        phases = attempt(results[name], *how) or {}
        for phase, seconds in phases.items():
            if number:
                times[phase].append(seconds)
    gc.unfreeze()
    for name, times in samples.items():
        result, total = results[name], times["total"]
        if result.note:
            continue
        result.rounds, result.median_s = len(total), statistics.median(total)
        result.low_s, result.high_s = (float(q) for q in numpy.quantile(total, [0.2, 0.8]))
        result.phases = {phase: statistics.median(seconds) for phase, seconds in times.items()}
    return [(results[name], step) for name, step in steps.items() if not results[name].note]


class CountOperators(TorchDispatchMode):
    """Counts operators that do work; views only change metadata."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        aliases = [out.alias_info for out in func._schema.returns]
        self.count += not any(alias is not None and not alias.is_write for alias in aliases)
        return func(*args, **(kwargs or {}))


def count_cost(step: Step, result: Result) -> None:
    """FLOPs and launched operators of one run, the same numbers on every device. FLOPs inside
    Triton kernels are not seen."""
    with CountOperators() as operators:
        result.flops = count_flops(step)
    result.operators = operators.count


def count_flops(step: Step) -> int:
    """FLOPs of a run, whose weights may be hollow (models.py)."""
    with flop_counter() as flops:
        for _ in step():
            pass
    return flops.get_total_flops()


def of_layers(layers: int, count: Callable[[int], int]) -> int:
    """count(layers), told from two and three: all layers but the last cost the same."""
    two, three = count(2), count(3)
    return two + (layers - 2) * (three - two)


def peak_of(device: torch.device) -> Peak:
    """From a table for GPUs; on a CPU from a large fp32 matmul and a copy."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Peak(*next((peak for word, peak in PEAKS.items() if word in name), (None, None)))
    a, source = torch.randn(1536, 1536), torch.ones(32 << 20)
    target = torch.empty_like(source)
    product, copy = (
        min(timeit.repeat(run, timer=clock(device), repeat=5, number=1))
        for run in (lambda: a @ a, lambda: target.copy_(source))
    )
    return Peak(2 * len(a) ** 3 / product, 2 * source.nbytes / copy)
