"""Kill a training run again and again, and compare what is left with a run that nobody killed.

    python tests/kills.py --kills 50 [--seed 0] [--context exact|cached|block_causal]
        [--processes 1]

Every life of the run is a process of its own (torchrun's with --processes) that SIGKILL ends:
at a random step, in the middle of writing a checkpoint, or before the first step. Exit status 1
unless the curves equal those of the uninterrupted run bit for bit and nothing is torn or left over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from bwsft.checkpoints.folders import problems, step_folders
from bwsft.config import from_json
from bwsft.training.metrics import read_log

SAVE_EVERY = 4
PATIENCE = 300  # seconds without a step after which a life counts as hanging
# How a life ends: once each, then this often.
MOMENTS = {"starting": 1, "writing a checkpoint": 3, "at a step": 6}


class Failed(Exception):
    """The run was not what it should be."""


@dataclass
class Soak:
    """One soaked run and its reference, below `folder`."""

    folder: Path
    kills: int = 50
    seed: int = 0
    context: str = "exact"
    processes: int = 1
    steps: int = 0
    ended: Counter = field(default_factory=Counter)
    """How many lives ended at which moment."""
    mid_write: int = 0
    """Kills that left the temporary folder of a checkpoint behind."""

    def __post_init__(self) -> None:
        self.steps = self.steps or 5 * self.kills + 10
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [{"query": f"{7 * i}+{i}", "response": f"{8 * i}{'!' * (i % 7)}"} for i in range(60)]
        self.data = self.folder / "sums.jsonl"
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.run, self.reference = self.folder / "killed", self.folder / "reference"

    def command(self, run: Path) -> list[str]:
        """The command of one life of `run`: it starts the run, or goes on with it."""
        python = [sys.executable, "-m"]
        if self.processes > 1:
            python += ["torch.distributed.run", "--standalone", "--nproc-per-node"]
            python += [str(self.processes), "-m"]
        if (run / "config.json").exists():
            return [*python, "bwsft", "train", "debug", "--resume", str(run)]
        draws = ["--draws-per-context", "2"] if self.context == "cached" else []
        return [
            *python, "bwsft", "train", "debug", "--resume" if run.exists() else "--out", str(run),
            "--data", str(self.data), "--dataset.cache-dir", str(self.folder / "cache"),
            "--steps", str(self.steps), "--save-every", str(SAVE_EVERY), "--keep-last", "3",
            "--block-size", "4", "--gen-length", "16", "--max-length", "48",
            "--batch-size", "6", "--micro-batch-size", "3", "--dataset.holdout", "6",
            "--eval.every", "10", "--eval.draws", "1", "--context", self.context, *draws,
        ]  # fmt: skip

    def start(self, run: Path) -> subprocess.Popen:
        with open(self.folder / "output.txt", "wb") as output:
            return subprocess.Popen(
                self.command(run),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )

    def finish(self, run: Path) -> None:
        """Let `run` go on to its end."""
        process = self.start(run)
        try:
            process.wait(timeout=PATIENCE + self.steps)
        finally:
            kill(process)
        if process.returncode:
            raise Failed(f"a life ended by itself with status {process.returncode}:{self.tail()}")

    def tail(self) -> str:
        return "\n" + (self.folder / "output.txt").read_text(errors="replace")[-2000:]

    def soak(self) -> None:
        """Start, kill and restart the run `kills` times, checking after every kill."""
        rng = random.Random(self.seed)
        moments = [*MOMENTS, *rng.choices(list(MOMENTS), list(MOMENTS.values()), k=self.kills)]
        with tqdm(total=self.kills, unit="kill", dynamic_ncols=True, disable=None) as bar:
            for number, moment in enumerate(moments[: self.kills]):
                left = self.kills - number
                self.live(moment, rng, 2 * (self.steps - self.done()) // (left + 1))
                self.check_after_kill()
                self.ended[moment] += 1
                bar.set_postfix_str(f"step {self.done()} of {self.steps}, killed {moment}")
                bar.update()

    def live(self, moment: str, rng: random.Random, most: int) -> None:
        """One life, killed at `moment`, after at most `most` steps if it is not the first."""
        survive, share = rng.randint(0, max(most, 1)), rng.random()
        kept, log = newest(self.run), inode(self.run / "metrics.jsonl")
        halves = temporaries(self.run)
        process = self.start(self.run)
        try:
            if moment == "starting" and share < 0.5:
                time.sleep(6 * share)  # imports, data, model
            else:
                # Before the first step the log is written anew, up to the checkpoint.
                self.wait(process, lambda: inode(self.run / "metrics.jsonl") != log)
            if moment != "starting":
                goal = min(kept + 1 + survive, self.steps - 1)
                self.wait(process, lambda: self.done() >= goal)
                if moment == "writing a checkpoint":
                    self.wait(process, lambda: temporaries(self.run) - halves)
                    share /= 3  # a tiny checkpoint is written in 20 ms
                time.sleep(share * 0.03)
        finally:
            ended = process.poll()
            kill(process)
        if ended is not None:
            raise Failed(f"a life ended by itself with status {ended}:{self.tail()}")
        self.mid_write += bool(temporaries(self.run) - halves)

    def wait(self, process: subprocess.Popen, condition) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if process.poll() is not None:
                raise Failed(f"a life ended with status {process.returncode}:{self.tail()}")
            if time.monotonic() > deadline:
                raise Failed(f"no progress for {PATIENCE} s:{self.tail()}")
            time.sleep(0.001)

    def done(self) -> int:
        """Complete lines of metrics.jsonl."""
        log = self.run / "metrics.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def check_after_kill(self) -> None:
        """Whatever bears its final name is whole."""
        if torn := [fault for f in step_folders(self.run) if (fault := problems(f))]:
            raise Failed(f"torn: {'; '.join(torn)}")
        steps = [record["step"] for record in read_log(self.run / "metrics.jsonl")]
        if steps != list(range(1, len(steps) + 1)):
            raise Failed(f"metrics.jsonl holds steps {steps}")
        read_log(self.run / "eval.jsonl")
        if (self.run / "config.json").exists():
            from_json((self.run / "config.json").read_text())

    def check_at_the_end(self) -> None:
        """The killed run is the uninterrupted one."""
        self.check_after_kill()
        ours, theirs = curves(self.run), curves(self.reference)
        for name in theirs:
            if ours[name] != theirs[name]:
                raise Failed(f"{name} differs:\n{first_difference(ours[name], theirs[name])}")
        if len(theirs["metrics.jsonl"]) != self.steps or len(theirs["eval.jsonl"]) < 2:
            raise Failed("the reference is not complete")
        if end_state(self.run) != end_state(self.reference):
            raise Failed("the last checkpoints differ")
        if left := [str(p) for p in self.run.rglob(".*") if p.name != ".lock"]:
            raise Failed(f"left over: {', '.join(left)}")
        if (self.run / "loss.png").read_bytes()[:4] != b"\x89PNG":
            raise Failed("loss.png is torn")


def kill(process: subprocess.Popen) -> None:
    """SIGKILL for a life and its children: torchrun's would go on without it."""
    for pid in family(process.pid) if process.poll() is None else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def family(pid: int) -> list[int]:
    """A process and all that it started, from /proc where there is one."""
    found = [pid]
    for parent in found:
        for listed in Path("/proc").glob(f"{parent}/task/*/children"):
            with contextlib.suppress(OSError):  # it has just ended
                found += map(int, listed.read_text().split())
    return found


def newest(run: Path) -> int:
    """Step of the newest checkpoint."""
    folders = step_folders(run)
    return int(folders[0].name.removeprefix("step-")) if folders else 0


def temporaries(run: Path) -> set[str]:
    """Checkpoints being written, or left half written."""
    folder = run / "checkpoints"
    return {n for n in os.listdir(folder) if n.endswith(".tmp")} if folder.exists() else set()


def inode(path: Path) -> int:
    return path.stat().st_ino if path.exists() else 0


def curves(run: Path) -> dict[str, list[dict]]:
    """Both logs without the times."""
    return {
        name: [
            {k: v for k, v in record.items() if "second" not in k or k.startswith("supervised")}
            for record in read_log(run / name)
        ]
        for name in ("metrics.jsonl", "eval.jsonl")
    }


def first_difference(ours: list, theirs: list) -> str:
    pairs = ((a, b) for a, b in zip(ours, theirs, strict=False) if a != b)
    return "{}\n{}".format(*next(pairs, (f"{len(ours)} lines", f"{len(theirs)} lines")))


def end_state(run: Path) -> dict:
    """Names of the checkpoints, and the digests of the last one's files."""
    folders = step_folders(run)
    files = json.loads((folders[0] / "manifest.json").read_text())
    del files["state.json"]  # it names the folder
    return {"names": [f.name for f in folders], "files": files}


def soak(work: Soak) -> str:
    """Run the whole of it; returns the summary, raises Failed."""
    began = time.monotonic()
    work.finish(work.reference)
    work.soak()
    work.finish(work.run)
    work.check_at_the_end()
    moments = ", ".join(f"{count} {moment}" for moment, count in work.ended.items())
    return (
        f"{work.kills} kills ({moments}; {work.mid_write} left half a checkpoint behind), "
        f"{work.steps} steps, context {work.context}, {work.processes} process(es): curves, "
        f"evaluations and last checkpoint identical, 0 torn files, 0 left over; "
        f"{time.monotonic() - began:.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="updates; 0: five a kill and ten")
    parser.add_argument("--context", choices=("exact", "cached", "block_causal"), default="exact")
    parser.add_argument("--processes", type=int, default=1)
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(f"soak: {soak(Soak(Path(folder), **options))}")
        except Failed as error:
            print(f"soak: FAILED: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
