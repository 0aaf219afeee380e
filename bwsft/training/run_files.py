"""The folder of a run: opening or resuming it, its checkpoints, and batches to look at again."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from bwsft import config as c
from bwsft.checkpoints import folders
from bwsft.checkpoints.folders import newest_complete, save_checkpoint, step_of
from bwsft.checkpoints.optimizer_state import moments
from bwsft.checkpoints.state import read_state
from bwsft.training.distributed import World
from bwsft.training.trackers import Logs
from bwsft.utils.claims import LOCK
from bwsft.utils.devices import device_name
from bwsft.utils.files import folder_atomic, write_atomic
from bwsft.utils.identity import Content
from bwsft.utils.lines import printable, say

if TYPE_CHECKING:
    from bwsft.training.trainer import Run

REPRO, FACTS, BATCH = "repro", "repro.json", "batch.safetensors"
DATA = "data.json"
# A resumed run may differ from its config in these. Another device, micro-batch or kind of
# parallelism changes rounding and dropout, the others change no later loss at all (unless a spike's
# update is left out).
FREE_ON_RESUME = set(
    "out resume save_every keep_last grad_checkpointing fused_ops micro_batch_size device parallel "
    "profile trackers watch.spike_factor watch.spike_norm_factor watch.spike_action "
    "watch.spike_window eval.every eval.draws dataset.cache_dir "
    "data dataset.subset dataset.split "  # moved; the records must be the same
    "steps epochs".split()  # a longer or shorter run, which bwsft/training/length.py announces
)


def open_shared(config: c.Config, world: World) -> tuple[Path, Path | None]:
    """open_run by rank 0, for all ranks."""
    folder, checkpoint = world.on_main(open_run, config) or (c.run_folder(config), None)
    step = int(world.from_main(-1 if checkpoint is None else step_of(checkpoint)))
    return folder, None if step < 0 else folder / "checkpoints" / f"step-{step}"


def open_run(config: c.Config) -> tuple[Path, Path | None]:
    """(run folder, checkpoint to go on from or None). Refuses folders it must not touch."""
    folder = c.run_folder(config)
    if config.resume is None:
        # A lock alone is of one that ended before it began.
        if folder.exists() and not (folder.is_dir() and os.listdir(folder) == [LOCK]):
            raise ValueError(
                f"{folder} exists; choose another --out, or go on with it by --resume {folder}"
            )
        return folder, None
    stored = folder / "config.json"
    if (started := c.stored(folder)) is not None:
        refuse_changes(started, config, stored)
    # A writer that was killed at once leaves hidden files at most.
    elif not folder.is_dir() or any(not p.name.startswith(".") for p in folder.iterdir()):
        raise ValueError(f"--resume {folder}: this is not a run folder, it has no config.json")
    checkpoint, skipped = newest_complete(folder)
    for fault in skipped:
        say(f"skipping a checkpoint that is not whole: {fault}")
    if checkpoint is None:
        say(f"{folder} has no complete checkpoint: starting at step 0")
    else:
        state = read_state(checkpoint)
        written = c.from_json(json.dumps(state["config"]), str(checkpoint))
        refuse_changes(written, config, checkpoint)
        say(f"resuming from {checkpoint}")
        if (writer := state.get("versions", {}).get("torch")) != folders.versions()["torch"]:
            say(f"  torch is no longer {writer}: losses may differ in their last bits")
        before, now = state.get("threads"), torch.get_num_threads()
        if state.get("device") == "cpu" and before not in (None, now):
            say(
                f"  threads {before} -> {now}: losses may differ in their last bits "
                f"(OMP_NUM_THREADS={before} keeps them)"
            )
    return folder, checkpoint


def refuse_changes(stored: c.Config, now: c.Config, where: Path) -> None:
    """Raise ValueError unless `now` differs from the config stored `where` in free fields only."""
    changed = [
        line
        for line in c.differences(stored, now)
        if line.split(":")[0] not in FREE_ON_RESUME
    ]
    if changed:
        raise ValueError(
            f"--resume: {where} was started otherwise: {'; '.join(changed)}; leave these options "
            "out, or start a new run"
        )


@dataclass(frozen=True)
class RunFiles:
    """The files of one run folder."""

    folder: Path
    tokenizer: Any
    base: str | None
    """Model that an adapter belongs to; None for full fine-tuning."""
    identity: dict[str, Content]
    """The contents of the tokenizer, and of an adapter's base."""
    faults: list[str] = field(default_factory=list)
    """What failed beside the run, on rank 0."""

    def beside(self, what: str, act: Callable, *arguments: Any) -> Any:
        """act(*arguments), which the run can do without: None if it fails, and a note of it."""
        try:
            return act(*arguments)
        except Exception as error:  # whatever a library raises
            self.note(f"{what}: {str(error) or type(error).__name__}")
            return None

    def note(self, fault: str) -> None:
        """Say what failed, once, and keep it for the end of the run."""
        if fault not in self.faults:
            self.faults.append(fault)
            tqdm.write(printable(fault))

    def save(self, run: Run, done: int, logs: Logs) -> None:
        """Checkpoint after `done` steps. Every rank must call it; rank 0 writes."""
        whole = None
        if run.world.sharded:
            whole = run.weights(), run.world.gather(moments(run.backbone, run.optimizer))
        run.world.on_main(self._write, run, done, logs, whole)

    def _write(self, run: Run, done: int, logs: Logs, whole: tuple[dict, dict] | None) -> None:
        logs.sync()
        state = {
            "config": json.loads(c.to_json(run.config)),
            "data": run.data.examples.fingerprint,
            "base": self.base,
            "identity": self.identity,
            "examples": {
                "train": len(run.data.train_index), "held_out": len(run.data.holdout_index)
            },
            # Which of these were folders and files here, and not names on the Hub.
            "local": [
                name for name in ("model", "data", "tokenizer")
                if (value := getattr(run.config, name)) and Path(value).exists()
            ],
            "device": device_name(run.device),
            "threads": torch.get_num_threads(),
        }
        model = run.backbone, self.tokenizer, run.optimizer
        path = save_checkpoint(self.folder, done, *model, state, whole)
        faults = self.beside("old checkpoints", folders.prune, path, run.config.keep_last)
        for fault in faults or ():
            self.note(fault)

    def note_data(self, run: Run) -> None:
        """Write data.json: which records the run reads, and what became of them."""
        data = run.data
        facts = {
            "source": run.config.data, "fingerprint": data.examples.fingerprint,
            "train": len(data.train_index), "held_out": len(data.holdout_index),
            **data.examples.report,
        }  # fmt: skip
        write_atomic(self.folder / DATA, json.dumps(facts, indent=2) + "\n")

    def repros(self) -> list[Path]:
        """Folders of the batches that were kept."""
        return repros(self.folder)

    def newest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        return newest_complete(self.folder)[0]

    def keep(
        self, run: Run, step: int, samples: list[tuple[int, int]], part: range, what: str,
        weights: dict[str, Tensor],
    ) -> str:  # fmt: skip
        """Write RUN/repro/step-N: the packed batch, what was wrong, and the model as it met the
        batch (as Run.weights gives it). Returns what became of it, in words: a full disk must not
        hide what ended the run."""
        path = self.folder / REPRO / f"step-{step + 1}"
        chosen = [samples[i] for i in part]
        batch = {k: v for k, v in vars(run.data.pack(chosen)).items() if v is not None}
        facts = {
            "what": what, "step": step, "first": part.start, "sequences": len(samples),
            "sample_ids": run.data.sample_ids(chosen), "max_length": batch.pop("max_length"),
            "config": dataclasses.asdict(run.config),
        }  # fmt: skip
        if path.exists():  # the same step of an earlier attempt
            path = path.with_name(f"{path.name}-{int(time.time())}")
        try:
            with folder_atomic(path) as folder:
                save_file(batch, folder / BATCH)
                write_atomic(folder / FACTS, json.dumps(facts, indent=2) + "\n")
                folders.save_model(run.backbone.model, folder, weights or None)
        except (OSError, SafetensorError) as error:
            return f"which could not be kept ({error})"
        return f"run them again (bwsft replay {path})"


def repros(folder: Path) -> list[Path]:
    """Folders of the batches that a run kept, in the order of their steps."""
    found = (folder / REPRO).glob("step-*")
    return sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
