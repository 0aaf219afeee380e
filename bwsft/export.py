"""`bwsft export`: a checkpoint as a model folder in the official layout, adapters merged."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bwsft.backbones.base import Backbone
from bwsft.checkpoint import save_model, save_tokenizer
from bwsft.files import folder_atomic
from bwsft.models import Trained, adapter_base, load_trained


@dataclass(frozen=True)
class ExportOptions:
    """Write a trained model as a folder that transformers, bwsft and LLaDA's own code load."""

    model: str
    """Run folder, checkpoint or model folder; a run folder stands for its newest checkpoint."""
    out: Path
    """Folder to write; it must not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the stored weights; default: that of the base model for an adapter (merged in
    float32, rounded once), and that of the checkpoint otherwise."""


def run_export(options: ExportOptions) -> int:
    """Run `bwsft export` and return the exit status; ValueError or OSError for bad input.

    The folder appears whole or not at all. Needs the model's size in memory, in the wider of the
    stored dtype and --dtype.
    """
    out = Path(options.out)
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists: name a folder that does not")
    trained = load_trained(options.model, device="cpu", dtype="auto")  # as stored
    backbone = trained.backbone
    stored = backbone.head()[0].dtype
    target = getattr(torch, options.dtype) if options.dtype else stored
    wide = torch.promote_types(stored, target)
    if wide != stored:  # else a half-precision base would take its float32 adapter with it
        backbone.model.to(wide)
    lost = merge_adapter(backbone, target) if hasattr(backbone.model, "peft_config") else None
    backbone.model.to(target)
    with folder_atomic(out) as folder:
        write_model(trained, code_origin(options.model, trained), folder)
    report(trained, out, target, lost)
    return 0


@torch.no_grad()
def merge_adapter(backbone: Backbone, target: torch.dtype) -> float:
    """Add the LoRA update to the base weights, matrix by matrix in float32, each rounded once to
    `target`, and take the adapter off. Returns the share of the update's norm that rounding moved.

    ValueError for an adapter that is more than low-rank updates of matrices.
    """
    name = backbone.model.active_adapter
    config = backbone.model.peft_config[name]
    beyond = [f for f in ("use_dora", "modules_to_save", "lora_bias") if getattr(config, f, None)]
    beyond += ["bias"] if config.bias != "none" else []
    if config.peft_type != "LORA" or beyond:
        raise ValueError(
            f"export merges plain LoRA adapters; this one is {config.peft_type.value} with "
            f"{', '.join(beyond) or 'no LoRA matrices'}: merge it with peft"
        )
    moved = total = 0.0
    for layer in backbone.model.modules():
        if not hasattr(layer, "lora_A") or name not in layer.lora_A:
            continue
        weight = layer.get_base_layer().weight
        delta = layer.get_delta_weight(name).float()  # scale * B A; the adapter is float32
        merged = weight.float() + delta
        rounded = merged.to(target)
        moved += float((rounded.float() - merged).square().sum(dtype=torch.float64))
        total += float(delta.square().sum(dtype=torch.float64))
        weight.copy_(rounded)
    backbone.model = backbone.model.unload()
    return (moved / total) ** 0.5 if total else 0.0


def code_origin(model: str, trained: Trained) -> str | None:
    """Folder or Hub id of the model that was trained: its own modelling code may lie there."""
    if (Path(trained.folder) / "adapter_config.json").exists():
        return adapter_base(trained.folder, trained.state)
    return trained.state["config"]["model"] if trained.state else model


def write_model(trained: Trained, origin: str | None, folder: Path) -> None:
    """Weights, config, tokenizer and generation config; the official code where it is at hand."""
    model, family = trained.backbone.model, trained.backbone.family
    keep_code(model.config, origin, folder)
    save_model(model, folder)
    save_tokenizer(trained.tokenizer, folder)
    generation = {"eos_token_id": list(family.end_ids), "pad_token_id": model.config.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def keep_code(config, origin: str | None, folder: Path) -> None:
    """Copy the modelling code that config.json's auto_map names, or name its repository instead;
    without either, auto_map would point at files that are not there and goes."""
    named = getattr(config, "auto_map", None)
    if not named:
        return
    if not all(re.fullmatch(r"([\w./-]+--)?\w+\.\w+", target) for target in named.values()):
        raise ValueError(f"auto_map of {origin}'s config.json names no classes: {named}")
    files = {f"{target.split('.')[0]}.py" for target in named.values() if "--" not in target}
    source = Path(origin or "")
    if origin and all((source / file).is_file() for file in files):
        for file in files:
            shutil.copyfile(source / file, folder / file)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", origin or "") and not source.exists():
        config.auto_map = {
            auto: target if "--" in target else f"{origin}--{target}"
            for auto, target in named.items()
        }
    else:
        del config.auto_map


def report(trained: Trained, out: Path, target: torch.dtype, lost: float | None) -> None:
    """What was written, what rounding cost, and how to decode it as it was trained."""
    dtype = str(target).removeprefix("torch.")
    size = sum(p.numel() * p.element_size() for p in trained.backbone.parameters())
    print(f"{out}: {'adapter merged, ' if lost is not None else ''}{dtype}, {size / 1e9:.3g} GB")
    if lost:
        print(
            f"rounding to {dtype} moved the adapter's update by {lost:.2%} of its norm "
            "(--dtype float32 keeps it)"
        )
    if trained.state:
        config = trained.state["config"]
        print(
            f"decode as trained: bwsft generate --model {out} --template {trained.template()} "
            f"--gen-length {config['gen_length']} --block-size {config['block_size']}"
        )
