"""Checkpoints: a folder `checkpoints/step-N` that appears whole or not at all.

It holds the adapter (PEFT layout) or the full model (official layout), the tokenizer,
optimizer.safetensors, state.json (step, config, data fingerprint, family) and manifest.json with
size and SHA-256 of every other file. No pickle.
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

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bwsft.checkpoints.facts import ADAPTER_CONFIG, STATE, read_adapter_config, read_state
from bwsft.training.optim import moments, restore_moments
from bwsft.utils import strict_json
from bwsft.utils.files import folder_atomic, remove_folder, sha256, sweep, write_atomic
from bwsft.version import __version__

STEP_FOLDER = re.compile(r"step-(\d+)")
MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
ADAPTER = "adapter_model.safetensors"


def save_checkpoint(
    run: Path, step: int, backbone, tokenizer, optimizer, state: dict, whole: tuple | None = None
) -> Path:
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


def save_model(model, folder: Path, weights: dict | None = None) -> None:
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


def save_tokenizer(tokenizer, folder: Path) -> None:
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
        fault = problems(folder)
        if fault is None:
            return folder, skipped
        skipped.append(fault)
    return None, skipped


def prune(newest: Path, keep_last: int) -> None:
    """Tidy up after `newest`, a checkpoint just written: it and the `keep_last` - 1 before it stay
    (0: all). Torn folders of later steps go, from which a resumed run could not go on, and the
    leftovers of writers that were killed.
    """
    run, step = newest.parent.parent, step_of(newest)
    folders = step_folders(run)
    later = [folder for folder in folders if step_of(folder) > step]
    earlier = [folder for folder in folders if step_of(folder) <= step]
    for folder in later + (earlier[keep_last:] if keep_last else []):
        remove_folder(folder)
    for place in (run, newest.parent):
        sweep(place)


def load_adapter_weights(folder: Path, backbone) -> None:
    """Overwrite the adapters of `backbone` by those in a checkpoint; ValueError unless names and
    shapes are exactly the same."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    path = Path(folder) / ADAPTER
    tensors = _read(path)
    expected = get_peft_model_state_dict(backbone.model, save_embedding_layers=False)
    if odd := sorted(set(tensors) ^ set(expected)):
        lacks = "lacks" if odd[0] in expected else "has an unknown"
        raise ValueError(f"{path} {lacks} tensor {odd[0]}: it is of another model or --lora config")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the run needs "
                f"{tuple(expected[name].shape)}"
            )
    set_peft_model_state_dict(backbone.model, tensors)


def load_optimizer(folder: Path, backbone, optimizer) -> None:
    """Put the moments of a checkpoint into a fresh optimizer of the same run."""
    path = Path(folder) / OPTIMIZER
    tensors = _read(path)
    kinds: dict[str, set[str]] = {}
    for full in tensors:
        name, _, kind = full.rpartition(".")
        kinds.setdefault(name, set()).add(kind)
    for name, found in kinds.items():
        if found != {"step", "exp_avg", "exp_avg_sq"}:
            raise ValueError(f"{path} does not hold AdamW's state of {name:.200}: {sorted(found)}")
    restore_moments(backbone, optimizer, tensors)


def _read(path: Path) -> dict:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def locate(model: str) -> tuple[str, dict | None]:
    """(folder or Hub id to load, state.json or None) for what a user calls a model.

    A run folder stands for its newest complete checkpoint. Raises ValueError for a checkpoint that
    is not whole.
    """
    path = Path(model)
    if (path / "checkpoints").is_dir():
        newest, skipped = newest_complete(path)
        if newest is None:
            why = f": {skipped[0]}" if skipped else ""
            raise ValueError(f"{path} holds no complete checkpoint{why}")
        path = newest
    elif (path / MANIFEST).exists() and (fault := problems(path, for_resume=False)):
        raise ValueError(f"{path} is not a whole checkpoint: {fault}")
    if (path / STATE).exists():
        return str(path), read_state(path)
    if (path / ADAPTER_CONFIG).exists() and not read_adapter_config(path).base_model_name_or_path:
        raise ValueError(f"{path / ADAPTER_CONFIG} names no base_model_name_or_path: add it")
    return (str(path) if path.exists() else model), None
