"""Writes, checks and prunes checkpoints: folders `checkpoints/step-N`, whole or not there at all.

It holds the adapter (PEFT layout) or the full model (official layout), the tokenizer,
generation_config.json (how to decode), optimizer.safetensors, state.json (step, config, data
fingerprint, family) and manifest.json with size and SHA-256 of every other file. No pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from bwsft.checkpoints.generation_config import contract_of_state, write_generation_config
from bwsft.checkpoints.optimizer_state import OPTIMIZER, moments
from bwsft.checkpoints.state import STATE
from bwsft.models.backbone import Backbone
from bwsft.utils import strict_json
from bwsft.utils.files import folder_atomic, remove_folder, sha256, sweep, write_atomic
from bwsft.version import __version__

STEP_FOLDER = re.compile(r"step-(\d+)")
MANIFEST = "manifest.json"


def save_checkpoint(
    run: Path, step: int, backbone: Backbone, tokenizer: Any, optimizer: Optimizer,
    state: dict[str, Any], whole: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None,
) -> Path:  # fmt: skip
    """Write checkpoints/step-`step` of a run folder and return it.

    state: JSON-able facts of the run; `step`, the backbone's family and versions are added. whole:
    (weights by their names in backbone.model, moments) of a sharded model. Raises OSError, with
    what to do, if the disk doesn't take it; nothing of it is then left.
    """
    weights, tensors = whole or (None, moments(backbone, optimizer))
    path = Path(run) / "checkpoints" / f"step-{step}"
    family = dataclasses.asdict(backbone.family)
    state = {**state, "step": step, "family": family, "versions": versions()}
    try:
        with folder_atomic(path) as folder:
            save_model(backbone.model, folder, weights)
            save_tokenizer(tokenizer, folder)
            write_generation_config(folder, backbone, contract_of_state(state))
            save_file(tensors, folder / OPTIMIZER)
            write_atomic(folder / STATE, json.dumps(state, indent=2))
            _write_manifest(folder)
            if path.exists():  # torn: a whole one would have been resumed from
                shutil.rmtree(path)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{path} could not be written ({error}); make room, then go on with --resume {run}"
        ) from error
    return path


def versions() -> dict[str, str]:
    """Versions of what decides a number, as a checkpoint records them."""
    found = {"python": platform.python_version(), "bwsft": __version__}
    for name in ("torch", "transformers", "peft", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def save_model(model: nn.Module, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write a model in the official layout, or its adapter in PEFT's where it has one. weights: of
    a sharded model, whole; of an adapter's they may be all that there is."""
    whole = {"state_dict": weights} if weights else {}
    with _without_bars():
        if hasattr(model, "peft_config"):
            # "auto" would ask the Hub for the base's config, to learn whether it was resized.
            model.save_pretrained(folder, save_embedding_layers=False, **whole)
            (folder / "README.md").unlink(missing_ok=True)  # an empty model card
        else:
            model.save_pretrained(folder, **whole)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files; OSError where the disk doesn't take them."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # tokenizers knows no narrower class
        raise OSError(f"{folder / 'tokenizer.json'}: {error}") from error


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """transformers draws bars for its files, across the training's own."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _write_manifest(folder: Path) -> None:
    files = {
        str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256(p)}
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    write_atomic(folder / MANIFEST, json.dumps(files, indent=2))


def problems(folder: Path, for_resume: bool = True) -> str | None:
    """What is wrong with a checkpoint folder, or None if every file is as the manifest says.

    Without `for_resume` the optimizer's file, two thirds of the bytes, may have been left out.
    """
    manifest = folder / MANIFEST
    try:
        files = strict_json.read_object(manifest)
        expected = {folder / name: (f["bytes"], f["sha256"]) for name, f in files.items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{manifest} cannot be read ({type(error).__name__})"
    for name in (STATE, OPTIMIZER):
        if name not in files:
            return f"{manifest} does not list {name}"
    if not for_resume and not (folder / OPTIMIZER).exists():
        del expected[folder / OPTIMIZER]
    for path, (size, digest) in expected.items():
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes instead of {size}"
        if sha256(path) != digest:
            return f"{path} has changed since it was written (checksum differs)"
    return None


def step_of(folder: Path) -> int:
    return int(STEP_FOLDER.fullmatch(folder.name)[1])


def step_folders(run: Path) -> list[Path]:
    """Checkpoint folders of a run, newest first, whole or not."""
    found = [p for p in (Path(run) / "checkpoints").glob("step-*") if STEP_FOLDER.fullmatch(p.name)]
    return sorted(found, key=step_of, reverse=True)


def newest_complete(run: Path) -> tuple[Path | None, list[str]]:
    """(newest whole checkpoint or None, what is wrong with newer ones that were skipped)."""
    skipped = []
    for folder in step_folders(run):
        if (fault := problems(folder)) is None:
            return folder, skipped
        skipped.append(fault)
    return None, skipped


def prune(newest: Path, keep_last: int) -> list[str]:
    """Tidy up after `newest`, a checkpoint just written: it and the `keep_last` - 1 before it stay
    (0: all). Torn folders of later steps go, from which a resumed run could not go on, and the
    leftovers of writers that were killed. Returns what could not be deleted, a sentence each.
    """
    run, step = newest.parent.parent, step_of(newest)
    folders = step_folders(run)
    later = [folder for folder in folders if step_of(folder) > step]
    earlier = [folder for folder in folders if step_of(folder) <= step]
    faults = []
    for folder in later + (earlier[keep_last:] if keep_last else []):
        try:
            remove_folder(folder)
        except OSError as error:
            faults.append(f"{folder} could not be deleted: {error}")
    for place in (run, newest.parent):
        sweep(place, alone=True)
    return faults
