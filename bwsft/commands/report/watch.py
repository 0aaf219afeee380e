"""`bwsft report --watch`: the page of a run that is still training, written again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from bwsft.commands.report.recorded import Recorded, read_run, time_left
from bwsft.utils.claims import LOCK, locked
from bwsft.utils.lines import say

EVERY = 5.0  # seconds between two looks, and between two loads of the page
LOGS = ("metrics.jsonl", "eval.jsonl")


def follow(
    folders: tuple[Path, ...], path: Path, write: Callable[[list[bool]], list[Recorded]]
) -> None:
    """write(which runs go on), the page at `path`, whenever a run has written something, until all
    have ended. Ctrl-C: once more, as if they had, and KeyboardInterrupt."""
    wait_for(folders)
    told = None
    try:
        with tqdm(unit="step") as bar:
            while any(going := [goes_on(folder) for folder in folders]):
                began = time.monotonic()
                if (now := (going, sizes(folders))) != told:
                    runs = write(going)
                    if told is None:
                        bar.write(str(path))
                        bar.initial = sum(run.done for run in runs)
                    bar.n, bar.total = sum(r.done for r in runs), sum(r.config.steps for r in runs)
                    bar.refresh()
                    told = now
                # Long logs take long to read: spend a tenth of the time on it at most.
                time.sleep(max(EVERY, 10 * (time.monotonic() - began)))
    except KeyboardInterrupt:
        if told is not None:
            write([False for _ in folders])
        raise


def wait_for(folders: tuple[Path, ...]) -> None:
    """Return when every folder is a run's: `bwsft train` makes it when data and model are read."""
    for folder in folders:
        if not (folder / "config.json").exists():
            say(f"waiting for {folder} to become a run folder; Ctrl-C ends", file=sys.stderr)
        while not (folder / "config.json").exists():
            time.sleep(EVERY)


def goes_on(folder: Path) -> bool:
    """Whether a process trains in a run folder, as its lock says."""
    taken = locked(folder)
    if taken is None:
        run = read_run(folder, "")
        return run.done < run.config.steps
    # The lock is taken a moment after the folder becomes a run's.
    return taken or not ((folder / LOCK).exists() or (folder / LOGS[0]).exists())


def sizes(folders: tuple[Path, ...]) -> list[int]:
    """Bytes of the logs, which tell whether something is new."""
    logs = (folder / name for folder in folders for name in LOGS)
    return [path.stat().st_size if path.exists() else 0 for path in logs]


def live(runs: list[Recorded], going: list[bool]) -> dict:
    """What the page says of the progress."""
    rows = []
    for run, goes in zip(runs, going, strict=True):
        left = time_left(run)
        rest = f"; about {left} left" if goes and left else "" if goes else "; ended"
        said = f"{run.done:,} of {run.config.steps:,} updates{rest}"
        rows.append({"name": run.name, "done": run.done, "steps": run.config.steps, "said": said})
    return {"every": EVERY, "runs": rows}
