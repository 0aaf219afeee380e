"""What the tensors of an adapter's file belong to in a model, told from names and shapes alone."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from bwsft.models.adapter_config import AdapterConfig
from bwsft.models.backbone import Backbone
from bwsft.models.weight_files import Shapes

PREFIX = "base_model.model."  # of every tensor in an adapter's file


def adapted(
    backbone: Backbone, shapes: Shapes, stored: AdapterConfig, file: Path
) -> dict[str, int]:
    """Name of a module, or of a parameter that holds the matrices of experts -> rank of its
    adapter, from the file's header alone."""
    modules, head = dict(backbone.model.named_modules()), backbone.head()[0]
    stacks = stacked(backbone, stored.target_parameters or (), file)
    ranks = {}
    for tensor, shape in shapes.items():
        pattern = rf"{re.escape(PREFIX)}(.+)\.lora_(?:(A|B)\.weight|embedding_(A|B))"
        found = re.fullmatch(pattern, tensor)
        if found is None:
            continue  # a whole weight; or unknown, or DoRA's magnitude: compared by name later
        name, side = found[1], found[2] or found[3]
        module, kind = modules.get(name), nn.Embedding if found[3] else nn.Linear
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear | nn.Embedding) and weight is head:
            raise ValueError(
                f"{file}: target_modules has {name:.200}, the LM head, whose loss is fused with "
                "its matrix: merge the adapter with peft, then name the merged folder"
            )
        if name in stacks:
            name, (experts, *matrix) = stacks[name]
        elif isinstance(module, kind):
            experts, matrix = 1, weight.shape if kind is nn.Linear else weight.shape[::-1]
        else:
            raise ValueError(
                f"{file} adapts {name:.200}, which is no inner matrix of this model: it is an "
                "adapter of another one"
            )
        # A is [rank, in] and B [out, rank]; of experts together [rank * experts, in] and so on.
        down = side == "A"
        if len(shape) != 2 or shape[down] != matrix[down] or shape[not down] % experts:
            raise ValueError(
                f"{file}: {tensor} has shape {shape}, which does not fit a matrix of shape "
                f"{tuple(matrix)}: it is an adapter of another model"
            )
        rank = shape[not down] // experts
        if ranks.setdefault(name, rank) != rank:
            raise ValueError(f"{file}: {name} has matrices of different rank: copy it again")
    if not ranks:
        raise ValueError(f"{file} holds no LoRA matrices")
    return ranks


def stacked(
    backbone: Backbone, targets: Sequence[str], file: Path
) -> dict[str, tuple[str, torch.Size]]:
    """Place of an adapter in a file -> the parameter [E, O, I] that it is on, and its shape. Around
    a module peft puts one for each of its parameters, that of the first innermost."""
    found, met = {}, set()
    for name, module in backbone.model.named_modules():
        own = {}
        for short, weight in module.named_parameters(recurse=False):
            whole = f"{name}.{short}"
            if weight.ndim == 3 and (hit := {t for t in targets if ends_in(whole, t)}):
                own[whole], met = weight.shape, met | hit
        for around, item in enumerate(reversed(own.items())):
            found[name + ".base_layer" * around] = item
    if unknown := set(targets) - met:
        raise ValueError(
            f"{file.parent}: target_parameters has {min(unknown):.200}, which is not the experts "
            "of a layer of this model: merge it with peft"
        )
    return found


def whole_weights(
    backbone: Backbone, shapes: Shapes, stored: AdapterConfig, file: Path
) -> dict[str, str]:
    """Tensor of the file -> parameter of the model whose place it takes: those that
    modules_to_save and bias name, and embeddings, which peft saves if their number changed."""
    parameters = dict(backbone.model.named_parameters(remove_duplicate=False))
    model = backbone.base_model
    embeddings = [m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    found = {}
    for tensor, shape in shapes.items():
        place = tensor.removeprefix(PREFIX).replace(".base_layer.", ".")
        weight = parameters.get(place)
        if weight is None or not (
            is_saved(place, stored.modules_to_save or ())
            or (stored.bias != "none" and place.endswith("bias"))
            or any(weight is other for other in embeddings)
        ):
            continue  # a LoRA matrix; or unknown: compared by name later
        if shape != tuple(weight.shape):
            raise ValueError(
                f"{file}: {tensor} has shape {shape}, the model's is {tuple(weight.shape)}: it is "
                "an adapter of another model"
            )
        found[tensor] = place
    return found


def is_saved(place: str, modules_to_save: Sequence[str]) -> bool:
    """Whether a parameter is in one of these modules, which peft knows by the end of a name."""
    parts = place.split(".")
    modules = (".".join(parts[:n]) for n in range(1, len(parts)))
    return any(module.endswith(name) for module in modules for name in modules_to_save)


def check_targets(
    backbone: Backbone, stored: AdapterConfig, ranks: dict[str, int], whole: dict[str, str],
    folder: Path | str,
) -> None:  # fmt: skip
    """``ValueError`` where adapter_config.json contradicts the tensors; a warning of names that no
    module of this model has."""
    if not stored.rank_pattern and (odd := [n for n, rank in ranks.items() if rank != stored.r]):
        raise ValueError(
            f"{folder}: adapter_config.json says r = {stored.r}, but {odd[0]} has rank "
            f"{ranks[odd[0]]}: take both files from the same adapter"
        )
    pattern, saved = isinstance(stored.target_modules, str), stored.modules_to_save or ()
    modules, unknown = [name for name, _ in backbone.model.named_modules()], []
    for target in (*(() if pattern else stored.target_modules), *saved):
        held = any(ends_in(name, target) for name in ranks) or any(
            is_saved(place, (target,)) for place in whole.values() if target in saved
        )
        if held:
            continue
        if not any(ends_in(name, target) for name in modules):
            unknown.append(target)
        elif stored.exclude_modules is None:
            raise ValueError(
                f"{folder}: adapter_config.json targets {target:.80}, but no tensor belongs to it: "
                "take both files from the same adapter"
            )
    if unknown:
        names = ", ".join(sorted(f"{name:.80}" for name in unknown))
        warnings.warn(
            f"{folder}: this model has no module {names}, which adapter_config.json names: "
            "ignored, as by peft",
            stacklevel=3,
        )


def ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
