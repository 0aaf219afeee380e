"""How many threads torch should take on a machine that other programs use too."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from bwsft.utils.lines import say

SECONDS = 0.25  # of looking how busy the cores are
STAT, QUOTA = Path("/proc/stat"), Path("/sys/fs/cgroup/cpu.max")


def leave_busy_cores() -> None:
    """Take no more threads than there are idle cores: where threads outnumber cores, each parallel
    region waits for the one that was put aside, and a step takes many times as long.

    OMP_NUM_THREADS decides where it is set; so does torch where Linux does not say who is busy.
    """
    most = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or most == 1 or (idle := idle_cores()) is None:
        return
    threads = max(1, min(most, round(idle)))
    if threads < most:
        torch.set_num_threads(threads)
        say(
            f"threads: {threads} of {most}, as {idle:.1f} cores are idle (OMP_NUM_THREADS={most} "
            "takes them all)", file=sys.stderr,
        )  # fmt: skip


def idle_cores() -> float | None:
    """Cores that this process may use and that nobody uses now; None where that is unknown."""
    before = core_times()
    if not before:
        return None
    time.sleep(SECONDS)
    idle = 0.0
    for (idle_then, then), (idle_now, now) in zip(before, core_times(), strict=True):
        idle += (idle_now - idle_then) / max(now - then, 1)
    return min(idle, quota())


def core_times() -> list[tuple[int, int]]:
    """(idle, all) clock ticks since the start of the machine, of each core that we may use."""
    try:
        allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in STAT.read_text().split("\n")]
    except (AttributeError, OSError):  # not Linux
        return []
    ticks = [[int(text) for text in row[1:9]] for row in rows if row and row[0] in allowed]
    return [(each[3] + each[4], sum(each)) for each in ticks]  # idle, and waiting for a disk


def quota() -> float:
    """Cores' worth of time that a container grants."""
    try:
        most, period = QUOTA.read_text().split()
        return float("inf") if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return float("inf")
