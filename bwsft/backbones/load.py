"""Builds a backbone from a checkpoint, after checking every file of it, or from a config alone."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from bwsft import config_check, strict_json

from .base import Backbone, Family
from .llada import LladaBackbone, LladaConfig, LladaForMaskedDiffusion, family_of
from .llada_config import FIELD_TYPES

# Left out of a config.json, these would silently take the 8B model's value.
_MUST_STATE = (
    "d_model",
    "n_layers",
    "n_heads",
    "vocab_size",
    "max_sequence_length",
    "rope_theta",
    "rms_norm_eps",
)
_DTYPES = Literal["float64", "float32", "bfloat16", "float16"] | None
# What transformers may know of a config.json beside LLaDA's own fields.
_KEPT = {
    "architectures": tuple[str, ...] | None,
    "auto_map": dict[str, str] | None,
    "dtype": _DTYPES,
    "torch_dtype": _DTYPES,
}
_FLOATS = ("F64", "F32", "BF16", "F16")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_NAMED = 3  # tensors named in one message


def load_backbone(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
) -> Backbone:
    """The model in folder ``path`` (or of a Hugging Face repository id), in eval mode.

    ``dtype`` defaults to the checkpoint's own. ``attn_implementation="flash_attention_2"`` takes
    the flash-attn package on CUDA instead of torch's varlen attention. Config, index and the
    header of every shard are checked before a weight is read. ``FileNotFoundError`` for a missing
    file, ``ValueError`` for one that is damaged, does not fit the config, or is of an
    unsupported model.
    """
    folder = _folder(path)
    if (folder / "adapter_config.json").exists():  # transformers would load its base instead
        raise ValueError(f"{folder} holds an adapter, not a model: name a model folder")
    config = _read_config(folder)
    stored = _stored_shapes(folder)
    if config.n_layers > len(stored):  # building as many, if only on paper, may take for ever
        raise ValueError(
            f"{folder} holds {len(stored)} tensors, too few for the {config.n_layers} layers of "
            "its config.json: take weights and config from the same checkpoint"
        )
    _check_tensors(stored, _expected_shapes(config), folder)
    options: dict[str, Any] = {"dtype": "auto" if dtype is None else dtype}
    if torch.device(device).type != "cpu":
        options["device_map"] = {"": device}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    model = LladaForMaskedDiffusion.from_pretrained(folder, config=config, **options)
    return LladaBackbone(model, _family(folder, config))


def read_family(path: str | Path) -> Family:
    """The family of the model in ``path``, from its JSON files alone; errors as
    :func:`load_backbone`."""
    folder = _folder(path)
    return _family(folder, _read_config(folder))


def new_backbone(
    config: LladaConfig,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Backbone:
    """A model of random weights, the same for the same seed, whatever ``dtype`` and ``device``
    (they are drawn in float32 on the CPU). The caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LladaForMaskedDiffusion(config)
    return LladaBackbone(model.to(device=device, dtype=dtype), family_of(config))


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    if folder.is_dir():
        strict_json.check_regular(folder)
        return folder
    looks_like_repository = str(path).count("/") == 1 and not str(path).startswith((".", "/", "~"))
    if not looks_like_repository or folder.exists():
        raise FileNotFoundError(f"{path} is not a folder: give a model folder or a repository id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{path} is neither a folder here nor a repository that could be downloaded "
            f"({type(error).__name__})"
        ) from error


def _read_json(file: Path) -> dict:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: give the folder of a complete checkpoint")
    return strict_json.read_object(file)


def _read_config(folder: Path) -> LladaConfig:
    """The config, types checked. Only LLaDA's own fields and _KEPT reach transformers, to which
    others are attributes to overwrite, or code to load (attn_implementation)."""
    file = folder / "config.json"
    fields = _read_json(file)
    if (model_type := fields.get("model_type")) != LladaConfig.model_type:
        raise ValueError(
            f"{file} has model_type {reprlib.repr(model_type)}: this version of bwsft loads "
            f"{LladaConfig.model_type!r} only"
        )
    if missing := [name for name in _MUST_STATE if fields.get(name) is None]:
        raise ValueError(f"{file} lacks {', '.join(missing)}: add the fields")
    if fields.get("quantization_config"):
        raise ValueError(f"{file}: quantised weights are not supported: take the full checkpoint")
    wanted = {name: hint for name, hint in (FIELD_TYPES | _KEPT).items() if name in fields}
    for name, hint in wanted.items():
        config_check.convert(hint, fields[name], str(file), name)
    for name in ("rope_scaling", "rope_parameters"):  # refused by LladaConfig if set
        wanted[name] = None
    try:
        return LladaConfig.from_dict({name: fields[name] for name in wanted if name in fields})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _family(folder: Path, config: LladaConfig) -> Family:
    """The config's family, with the end ids that generation_config.json (optional) adds."""
    try:
        family = family_of(config)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    file = folder / "generation_config.json"
    ids = _read_json(file).get("eos_token_id") if file.is_file() else None
    ids = ids if isinstance(ids, list) else [ids]
    added = [i for i in ids if type(i) is int and 0 <= i < family.vocab_size]
    return replace(family, end_ids=tuple(dict.fromkeys((*family.end_ids, *added))))


def _shard_files(folder: Path) -> dict[str, list[str] | None]:
    """Shard name -> the tensors that the index places there (None: no index says)."""
    if (folder / _SINGLE).is_file():  # transformers takes it too where there is an index beside
        return {_SINGLE: None}
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {_INDEX} nor {_SINGLE}: only safetensors weights are read"
        )
    index = _read_json(folder / _INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / _INDEX} has no weight_map: copy the index again")
    if not isinstance(index.get("metadata"), dict):  # transformers relies on it
        raise ValueError(f"{folder / _INDEX} has no metadata: copy the index again")
    shards: dict[str, list[str] | None] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{folder / _INDEX} names a shard outside the folder: {shard!r}")
        shards.setdefault(shard, []).append(tensor)
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise FileNotFoundError(
            f"{folder / _INDEX} names {', '.join(missing)}, which is not there: download the "
            "checkpoint again"
        )
    return shards


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every stored tensor, read from the shards' headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for shard, indexed in _shard_files(folder).items():
        file = folder / shard
        try:
            with safe_open(file, framework="pt") as handle:
                slices = {name: handle.get_slice(name) for name in handle.keys()}
                stored = {name: tuple(part.get_shape()) for name, part in slices.items()}
                kinds = {name: part.get_dtype() for name, part in slices.items()}
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is damaged or cut short ({error}): download it again"
            ) from error
        if odd := [name for name, kind in kinds.items() if kind not in _FLOATS]:
            raise ValueError(
                f"{file}: {odd[0]} is stored as {kinds[odd[0]]}, not as floating-point numbers: "
                "take the checkpoint before quantisation"
            )
        if indexed is not None and set(indexed) != set(stored):
            raise ValueError(
                f"{file} and {_INDEX} disagree about {_some(set(indexed) ^ set(stored))}: "
                "download both again"
            )
        shapes.update(stored)
    return shapes


def _expected_shapes(config: LladaConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = LladaForMaskedDiffusion(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _check_tensors(stored: dict, expected: dict, folder: Path) -> None:
    """``ValueError`` unless exactly the expected tensors are stored, in the expected shapes."""
    missing, unexpected = expected.keys() - stored.keys(), stored.keys() - expected.keys()
    if missing:
        raise ValueError(f"{folder} lacks tensors that its config needs: {_some(missing)}")
    if unexpected:
        raise ValueError(f"{folder} has tensors that its config does not know: {_some(unexpected)}")
    for name, shape in expected.items():
        if stored[name] != shape:
            raise ValueError(
                f"{name} in {folder} has shape {stored[name]}, but config.json asks for {shape}: "
                "take weights and config from the same checkpoint"
            )


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
