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
from typing import Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bwsft import __version__, config_check, strict_json
from bwsft import config as c
from bwsft.backbones.base import Family
from bwsft.files import folder_atomic, sha256, sweep, write_atomic
from bwsft.optim import moments, restore_moments

STEP_FOLDER = re.compile(r"step-(\d+)")
STATE, MANIFEST = "state.json", "manifest.json"
OPTIMIZER = "optimizer.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_checkpoint(run: Path, step: int, backbone, tokenizer, optimizer, state: dict) -> Path:
    """Write checkpoints/step-`step` of a run folder and return it.

    state: JSON-able facts of the run; `step`, the backbone's family and versions are added. Raises
    OSError, with what to do, if the disk doesn't take it; nothing of it is then left.
    """
    path = Path(run) / "checkpoints" / f"step-{step}"
    family = dataclasses.asdict(backbone.family)
    state = {**state, "step": step, "family": family, "versions": versions()}
    try:
        with folder_atomic(path) as folder:
            save_model(backbone.model, folder)
            tokenizer.save_pretrained(folder)
            save_file(moments(backbone, optimizer), folder / OPTIMIZER)
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


def save_model(model, folder: Path) -> None:
    """Write a model in the official layout, or its adapter in PEFT's where it has one."""
    with _without_bars():
        if hasattr(model, "peft_config"):
            # "auto" would ask the Hub for the base's config, to learn whether it was resized.
            model.save_pretrained(folder, save_embedding_layers=False)
            (folder / "README.md").unlink(missing_ok=True)  # an empty model card
        else:
            model.save_pretrained(folder)


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
        shutil.rmtree(folder)
    for place in (run, newest.parent):
        sweep(place)


@dataclasses.dataclass(frozen=True)
class _State:
    """What a state.json must hold; whoever saves may add to it."""

    step: int
    config: c.Config
    data: str
    family: Family
    base: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


def read_state(folder: Path) -> dict:
    """The state.json of a checkpoint folder, its config complete; ValueError if it is not ours."""
    path = Path(folder) / STATE
    try:
        found = strict_json.read_object(path)
        known = {f.name: found[f.name] for f in dataclasses.fields(_State) if f.name in found}
        state = config_check.build(_State, known, STATE)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a bwsft checkpoint state ({error})") from None
    return {**found, **json.loads(json.dumps(dataclasses.asdict(state)))}  # lists, not tuples


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The options of an adapter_config.json that decide what its tensors mean."""

    peft_type: Literal["LORA"]
    r: int
    lora_alpha: float
    target_modules: str | tuple[str, ...]
    base_model_name_or_path: str | None = None
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    alpha_pattern: dict[str, float] = dataclasses.field(default_factory=dict)
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] = True


# Where the adapter came from, or which layers it is on: the tensors' names say that better.
_PROVENANCE = frozenset(
    "auto_mapping inference_mode megatron_core peft_version qalora_group_size revision task_type "
    "layers_pattern layers_to_transform exclude_modules fan_in_fan_out runtime_config eva_config"
    " ensure_weight_tying".split()
)


def read_adapter_config(folder: Path | str) -> AdapterConfig:
    """The adapter_config.json of a plain LoRA adapter (DoRA included); ValueError naming the field
    for anything else, so that no option is dropped in silence."""
    path = Path(folder) / ADAPTER_CONFIG
    found = strict_json.read_object(path)
    names = {field.name for field in dataclasses.fields(AdapterConfig)}
    for name, value in found.items():
        if name not in names | _PROVENANCE and value not in (None, False, "none", [], {}):
            raise ValueError(f"{path}: option {name:.80} is not supported: merge it with peft")
    known = {name: value for name, value in found.items() if name in names}
    config = config_check.build(AdapterConfig, known, str(path))
    if config.r < 1 or not config.lora_alpha > 0:
        raise ValueError(f"{path}: r and lora_alpha must be positive")
    return config


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
