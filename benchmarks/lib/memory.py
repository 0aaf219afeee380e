"""Peak memory of a variant, above what its inputs take: resident bytes, or those of tensors."""

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lib.harness import Result, Step, attempt, synchronize
from torch.profiler import ProfilerActivity, profile

from bwsft.utils.freed_memory import give_back

# glibc's M_MMAP_THRESHOLD, M_MMAP_MAX and M_TRIM_THRESHOLD. MAPPED: a block of 64 KiB or more is
# mapped, and given back when it is freed. Left alone glibc keeps freed ones for later: the peak of
# a training step is then 1.6 to 2.0 GB where tensors need 0.94. USUAL: as after large blocks.
MAPPED = {-3: 1 << 16, -4: 1 << 20}
USUAL = {-3: 32 << 20, -4: 1 << 16, -1: 64 << 20}


def measure(step: Step, result: Result, args: argparse.Namespace, *shape: object) -> None:
    """Fill in the memory of a variant: on a CPU from a fresh process, because what the allocator
    of this one holds would hide a need. shape: arguments that pick one point of a sweep."""
    if args.no_memory or result.note:
        return
    if args.device.type == "cuda":
        attempt(result, measure_here, step, args.device, result)
        return
    command = [sys.executable, *args.command, *map(str, shape), "--measure-memory", result.name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        result.note = f"memory run failed: {lines[-1] if lines else done.returncode}"
        return
    result.peak_bytes, result.baseline_bytes = json.loads(done.stdout.splitlines()[-1])


def print_memory(step: Step, args: argparse.Namespace) -> None:
    """What the child process does."""
    _tell_glibc(MAPPED)  # what the first run leaves, the second one frees
    result = Result(args.measure_memory)
    measure_here(step, args.device, result)
    print(json.dumps([result.peak_bytes, result.baseline_bytes]))


def measure_here(step: Step, device: torch.device, result: Result) -> None:
    """Peak of a run above the bytes held just before it; a run before loads the libraries."""
    for _ in step():
        pass
    with watched(device, result):
        for _ in step():
            pass


@contextmanager
def watched(device: torch.device, result: Result) -> Iterator[None]:
    """Fill in the peak of what is done inside."""
    give_back()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        _tell_glibc(MAPPED)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark
        before = _resident("VmRSS:")
        yield
        peak = _resident("VmHWM:")
        _tell_glibc(USUAL)
    result.peak_bytes, result.baseline_bytes = peak - before, before


def _tell_glibc(values: dict[int, int]) -> None:
    for parameter, value in values.items():
        ctypes.CDLL(None).mallopt(parameter, value)


def _resident(wanted: str) -> int:
    """Resident bytes of this process now, or their high-water mark (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(wanted):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {wanted}")


def tensor_bytes(run: Callable[[], object]) -> int:
    """Most bytes that tensors on the CPU take in a run beyond what was there before, as torch's
    profiler sees its allocator: those inside of operators too, and nothing of the process beside
    them. What was there before and goes meanwhile is not seen."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
