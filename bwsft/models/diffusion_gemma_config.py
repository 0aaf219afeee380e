"""What DiffusionGemma's config.json and generation_config.json may say, checked before transformers
reads it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bwsft.models.support import DIFFUSION_GEMMA
from bwsft.models.weight_files import read_json
from bwsft.utils import config_check

_MOST_LAYERS = 1000
# Left out of text_config, these would silently take the value of the published model.
_MUST_STATE = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size "
    "max_position_embeddings num_experts top_k_experts moe_intermediate_size"
).split()
# Of a layer of full attention, by one spelling or the other.
_WIDE = {"global_head_dim": int, "num_global_key_value_heads": int | None}
_OF_LAYERS = ("head_dim", "num_key_value_heads")
_DTYPES = (None, "float64", "float32", "bfloat16", "float16")
# The published sampler's settings in generation_config.json.
_SAMPLER = {
    "max_denoising_steps": int | None, "t_min": float | None, "t_max": float | None,
    "stability_threshold": int | None, "confidence_threshold": float | None,
    "sampler_config": dict[str, str | float] | None,
}  # fmt: skip


def config_of(found: dict[str, Any]) -> PreTrainedConfig:
    """The config of a config.json, of which only the model's own fields reach transformers.
    ``ValueError`` for one that lacks a size, or fields that transformers refuses."""
    if DIFFUSION_GEMMA not in CONFIG_MAPPING:
        raise ValueError("this transformers knows no DiffusionGemma: take 5.24 or newer")
    if found.get("quantization_config"):
        raise ValueError("quantized weights are not supported: take the full checkpoint")
    if (dtype := found.get("dtype", found.get("torch_dtype"))) not in _DTYPES:
        raise ValueError(f"dtype {str(dtype):.40} is none of {', '.join(_DTYPES[1:])}")
    text, vision = (found.get(f"{name}_config") for name in ("text", "vision"))
    if not isinstance(text, dict) or not isinstance(vision, dict):
        raise ValueError("text_config and vision_config must be objects: add them")
    if missing := [name for name in _MUST_STATE if text.get(name) is None]:
        raise ValueError(f"text_config lacks {', '.join(missing)}: add the fields")
    wide = {name: config_check.convert(hint, text[name], "text_config", name)
            for name, hint in _WIDE.items() if name in text}  # fmt: skip
    if (layers := text.get("per_layer_config")) is not None:
        hint = dict[str, dict[str, int]]
        layers = config_check.convert(hint, layers, "text_config", "per_layer_config")
        wide["per_layer_config"] = {
            number: {name: value for name, value in layer.items() if name in _OF_LAYERS}
            for number, layer in layers.items()
        }
    parts = {
        "text_config": _own(f"{DIFFUSION_GEMMA}_text", text) | wide,
        "vision_config": _own("gemma4_vision", vision) | {"model_type": "gemma4_vision"},
    }
    for name, part in parts.items():
        if not 0 < part.get("num_hidden_layers", 1) <= _MOST_LAYERS:
            raise ValueError(f"num_hidden_layers of {name} must be in [1, {_MOST_LAYERS}]")
    own = _own(DIFFUSION_GEMMA, found) | {"dtype": dtype}
    return CONFIG_MAPPING[DIFFUSION_GEMMA].from_dict(own | parts)


def with_text_layers(text: PreTrainedConfig, kinds: list[str]) -> PreTrainedConfig:
    """A text_config with layers of these kinds, each as wide as its kind is in ``text``."""
    own = text.to_dict()
    wide = {text.layer_types[int(i)]: w for i, w in (own.pop("per_layer_config") or {}).items()}
    last = [*kinds[:-1], "full_attention"]  # on which the class insists
    sizes = {"num_hidden_layers": len(kinds), "layer_types": last, "per_layer_config": {}}
    made = type(text)(**own | sizes)
    made.layer_types = list(kinds)
    made.per_layer_config = {i: wide[kind] for i, kind in enumerate(kinds) if kind in wide}
    return made


def _own(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a kind of config."""
    own, common = ({f.name for f in fields(c)} for c in (CONFIG_MAPPING[kind], PreTrainedConfig))
    return {name: found[name] for name in own - common if name in found}


def sampler_of(folder: Path, ends: dict[str, Any]) -> Any:
    """The generation config of a model in ``folder``: its sampler's settings, types checked, and
    these ids. ``ValueError`` that names the file."""
    from transformers import DiffusionGemmaGenerationConfig, EntropyBoundSamplerConfig

    file = folder / "generation_config.json"
    found = read_json(file) if file.is_file() else {}
    found = {name: config_check.convert(hint, found[name], str(file), name)
             for name, hint in _SAMPLER.items() if name in found}  # fmt: skip
    try:
        if (sampler := found.get("sampler_config")) is not None:
            if sampler.pop("_cls_name", name := EntropyBoundSamplerConfig.__name__) != name:
                raise ValueError(f"sampler_config is not of {name}, the one that is known")
            found["sampler_config"] = EntropyBoundSamplerConfig(**sampler)
        return DiffusionGemmaGenerationConfig(**found, **ends)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error
