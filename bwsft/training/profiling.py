"""A torch profiler trace of a few steps of a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from bwsft.utils.files import folder_atomic

if TYPE_CHECKING:
    from bwsft.training.trainer import Run

WARM_UP = 3  # steps before a profile: the first ones allocate and compile


@contextlib.contextmanager
def profiler(run: Run) -> Iterator[torch.profiler.profile | None]:
    """Rank 0's torch profiler: RUN/profile/steps-A-B/trace.json.gz, for a trace viewer, of
    --profile steps after WARM_UP. Its step() ends a step. None if there is nothing to profile."""
    count = min(run.config.profile, run.config.steps - run.first - WARM_UP)
    if count < 1 or not run.world.main:
        yield None
        return

    def write(found: torch.profiler.profile) -> None:
        run.files.beside("the profile", write_trace, found)

    def write_trace(found: torch.profiler.profile) -> None:
        begin = run.first + WARM_UP + 1
        path = run.folder / "profile" / f"steps-{begin}-{begin + count - 1}"
        shutil.rmtree(path, ignore_errors=True)  # of an earlier attempt
        with folder_atomic(path) as folder:
            found.export_chrome_trace(str(folder / "trace.json.gz"))
        tqdm.write(f"profile: {path / 'trace.json.gz'}")

    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=count, repeat=1),
        on_trace_ready=write,
        profile_memory=True,
        record_shapes=True,
    ) as found:
        yield found
