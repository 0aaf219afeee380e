"""Peak memory of a variant, above what its inputs take: resident bytes, or those of tensors."""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lib.harness import Result, Step, attempt, synchronize
from torch.profiler import ProfilerActivity, profile

# glibc maps every block of this many bytes and gives it back when it is freed. Left alone it keeps
# freed ones for later: the peak of a training step is then 1.6 to 2.0 GB where tensors need 0.94.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_MMAP_MAX_": str(1 << 20)}


def measure(step: Step, result: Result, args: argparse.Namespace, *shape: object) -> None:
    """Fill in the memory of a variant: on a CPU from a fresh process, because what the allocator
    of this one holds would hide a need. shape: arguments that pick one point of a sweep."""
    if args.no_memory or result.note:
        return
    if args.device.type == "cuda":
        attempt(result, measure_here, step, args.device, result)
        return
    command = [sys.executable, *args.command, *map(str, shape), "--measure-memory", result.name]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | MAPPED)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        result.note = f"memory run failed: {lines[-1] if lines else done.returncode}"
        return
    result.peak_bytes, result.baseline_bytes = json.loads(done.stdout.splitlines()[-1])


def print_memory(step: Step, args: argparse.Namespace) -> None:
    """What the child process does."""
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
    gc.collect()
    if on_gpu := device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else _resident(reset=True)
    yield
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else _resident(peak=True)
    result.peak_bytes, result.baseline_bytes = peak - before, before


def _resident(peak: bool = False, reset: bool = False) -> int:
    """Resident bytes of this process, or their high-water mark since the last reset (Linux)."""
    if reset:
        # Freed blocks that glibc keeps would hide what the next run needs.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    wanted = "VmHWM:" if peak else "VmRSS:"
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
