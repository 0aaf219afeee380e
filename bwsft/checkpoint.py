"""Checkpoints: a folder `checkpoints/step-N` that appears whole or not at all.

It holds the adapter (PEFT layout) or the full model (official layout), the tokenizer,
optimizer.safetensors, state.json (step, config, data fingerprint, family) and manifest.json with
size and SHA-256 of every other file. No pickle.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bwsft.files import folder_atomic, sha256, write_atomic
from bwsft.optim import moments, restore_moments

STEP_FOLDER = re.compile(r"step-(\d+)")


def save_checkpoint(run: Path, step: int, backbone, tokenizer, optimizer, state: dict) -> Path:
    """Write checkpoints/step-`step` of a run folder and return it.

    state: JSON-able facts of the run; `step` and the backbone's family are added.
    """
    path = Path(run) / "checkpoints" / f"step-{step}"
    if path.exists():  # a resumed run may pass a step whose folder was found torn
        shutil.rmtree(path)
    with folder_atomic(path) as folder:
        backbone.model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card
        tokenizer.save_pretrained(folder)
        save_file(moments(backbone, optimizer), folder / "optimizer.safetensors")
        family = dataclasses.asdict(backbone.family)
        write_atomic(
            folder / "state.json", json.dumps({**state, "step": step, "family": family}, indent=2)
        )
        _write_manifest(folder)
    return path


def _write_manifest(folder: Path) -> None:
    files = {
        str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256(p)}
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    write_atomic(folder / "manifest.json", json.dumps(files, indent=2))


def problems(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None if every file is as the manifest says."""
    manifest = folder / "manifest.json"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))
        expected = {folder / name: (f["bytes"], f["sha256"]) for name, f in files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{manifest} cannot be read ({type(error).__name__})"
    for path, (size, digest) in expected.items():
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes instead of {size}"
        if sha256(path) != digest:
            return f"{path} has changed since it was written (checksum differs)"
    return None


def step_folders(run: Path) -> list[Path]:
    """Checkpoint folders of a run, newest first, whole or not."""
    found = [p for p in (Path(run) / "checkpoints").glob("step-*") if STEP_FOLDER.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(p.name.split("-")[1]), reverse=True)


def newest_complete(run: Path) -> tuple[Path | None, list[str]]:
    """(newest whole checkpoint or None, what is wrong with newer ones that were skipped)."""
    skipped = []
    for folder in step_folders(run):
        fault = problems(folder)
        if fault is None:
            return folder, skipped
        skipped.append(fault)
    return None, skipped


def prune(run: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints (0: keep all)."""
    for folder in step_folders(run)[keep_last:] if keep_last else []:
        shutil.rmtree(folder)


def read_state(folder: Path) -> dict:
    """The state.json of a checkpoint folder; ValueError if it is not one of ours."""
    path = Path(folder) / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        state["step"], state["config"], state["data"], state["family"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a bwsft checkpoint state ({error})") from None
    return state


def load_weights(folder: Path, backbone) -> None:
    """Overwrite the trainable weights of `backbone` by those in a checkpoint of the same run."""
    folder = Path(folder)
    if (folder / "adapter_config.json").exists():
        from peft import set_peft_model_state_dict

        tensors = _read(folder / "adapter_model.safetensors")
        result = set_peft_model_state_dict(backbone.model, tensors)
        if result.unexpected_keys:
            raise ValueError(f"{folder}: unexpected adapter tensor {result.unexpected_keys[0]}")
        return
    from bwsft.backbones.load import load_backbone

    dtype = next(backbone.model.parameters()).dtype
    backbone.model.load_state_dict(load_backbone(folder, dtype=dtype).model.state_dict())


def load_optimizer(folder: Path, backbone, optimizer) -> None:
    restore_moments(backbone, optimizer, _read(Path(folder) / "optimizer.safetensors"))


def _read(path: Path) -> dict:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def locate(model: str) -> tuple[str, dict | None]:
    """(folder or Hub id to load, state.json or None) for what a user calls a model.

    A run folder stands for its newest complete checkpoint.
    """
    path = Path(model)
    if (path / "checkpoints").is_dir():
        newest, skipped = newest_complete(path)
        if newest is None:
            why = f": {skipped[0]}" if skipped else ""
            raise ValueError(f"{path} holds no complete checkpoint{why}")
        path = newest
    if (path / "state.json").exists():
        return str(path), read_state(path)
    return (str(path) if path.exists() else model), None
