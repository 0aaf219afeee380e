"""Builds a backbone from a checkpoint, after checking every file of it, or from a config alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from bwsft.data.tokenizer import add_mask_token, merged_end_ids
from bwsft.models.backbone import Backbone, Family
from bwsft.models.diffusion_gemma_config import sampler_of
from bwsft.models.families import (
    Facts,
    _sentence,
    family_of,
    model_class,
    read_config,
    wrap,
)
from bwsft.models.support import DECODERS, PUBLISHED, SUPPORTED, check_supported
from bwsft.models.weight_files import (
    Shapes,
    check_tensors,
    read_json,
    stored_shapes,
    stored_state,
)
from bwsft.utils import hub, strict_json

JSON_FILES = ("*.json",)


def load_backbone(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu",
    attn_implementation: str | None = None, facts: Facts | None = None,
) -> Backbone:  # fmt: skip
    """The model in folder ``path`` (or of a Hugging Face repository id), in eval mode.

    ``dtype`` defaults to the checkpoint's own. ``attn_implementation="flash_attention_2"`` takes
    the flash-attn package on CUDA instead of torch's varlen attention (LLaDA). ``facts`` fill in
    what config.json does not say. Config, index and the header of every shard are checked before
    a weight is read. ``FileNotFoundError`` for a missing file, ``ValueError`` for one that is
    damaged, does not fit the config, or is of an unsupported model.
    """
    check_model(path)
    folder = model_folder(path)
    if (folder / "adapter_config.json").exists():  # transformers would load its base instead
        raise ValueError(f"{folder} holds an adapter, not a model: name a model folder")
    config = read_config(folder, facts)
    family = _family(folder, config)
    stored = stored_shapes(folder)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    if layers > len(stored):  # building as many, if only on paper, may take forever
        raise ValueError(
            f"{folder} holds {len(stored)} tensors, too few for the {layers} layers of "
            "its config.json: take weights and config from the same checkpoint"
        )
    expected, tied = _expected_shapes(config, folder)
    check_tensors(stored, expected, folder, tied)
    options: dict[str, Any] = {"dtype": "auto" if dtype is None else dtype}
    if torch.device(device).type != "cpu":
        options["device_map"] = {"": device}
    if attn_implementation is not None:
        if config.model_type != "llada":
            raise ValueError(f"attn_implementation is for LLaDA, not for {config.model_type}")
        options["attn_implementation"] = attn_implementation
    # Given, so that nothing but what is checked of generation_config.json is read.
    ends = {"eos_token_id": list(family.end_ids), "pad_token_id": text.pad_token_id}
    known = GenerationConfig(**ends) if family.noise == "mask" else sampler_of(folder, ends)
    options |= {"config": config, "generation_config": known}
    model = model_class(config).from_pretrained(folder, **options)
    try:
        return wrap(model, family)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def read_family(path: str | Path, facts: Facts | None = None) -> Family:
    """The family of the model in ``path``, from its JSON files alone; errors as
    :func:`load_backbone`."""
    check_model(path)
    folder = model_folder(path, JSON_FILES)
    return _family(folder, read_config(folder, facts))


def new_backbone(
    config: PreTrainedConfig, seed: int = 0, *, dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Backbone:  # fmt: skip
    """A model of random weights, the same for the same seed, whatever ``dtype`` and ``device``
    (they are drawn in float32 on the CPU). The caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)(config)
    return wrap(model.to(device=device, dtype=dtype), family_of(config))


def as_backbone(model: Any) -> Backbone:
    """The Backbone around a loaded model of transformers or peft (one that is a Backbone already
    comes back as it is). ``ValueError`` for one of an unknown family, for an adapter that is not in
    its layers, or without a [MASK]: :func:`set_mask` gives it one."""
    if isinstance(model, Backbone):
        return model
    inner = getattr(model, "get_base_model", lambda: model)()
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    if not isinstance(inner, PreTrainedModel) or kind not in SUPPORTED:
        raise ValueError(
            f"{type(inner).__name__} is not a LLaDA of bwsft, nor another model that it knows "
            f"({', '.join(SUPPORTED)}): import bwsft before AutoModelForCausalLM.from_pretrained, "
            "or pass a Backbone of bwsft.models"
        )
    if not isinstance(inner, model_class(inner.config)):
        raise ValueError(
            f"{type(inner).__name__} is not a LLaDA of bwsft, nor a {kind} with its LM head: load "
            f"{model_class(inner.config).__name__}"
        )
    if adapters := getattr(model, "peft_config", None):
        from bwsft.models.expert_lora import multiply_in_turn

        check_adapters(adapters.values())
        multiply_in_turn(model)
    backbone = wrap(inner, family_of(inner.config))
    backbone.model = model
    return backbone


def check_adapters(adapters: Iterable[Any]) -> None:
    """``ValueError`` for an adapter of peft, by its config, that is not in the model's layers."""
    beyond = ("is_prompt_learning", "is_adaption_prompt", "alora_invocation_tokens")
    for adapter in adapters:
        if any(getattr(adapter, name, None) for name in beyond):
            raise ValueError(
                f"peft_type {adapter.peft_type.value}: what it adds is added in PeftModel.forward, "
                "which packed batches do not pass: take LoRA, without alora_invocation_tokens"
            )


def set_mask(model: PreTrainedModel, tokenizer: Any, mask_token: str, logit_shift: int) -> None:
    """Give a loaded model of transformers, and its tokenizer, a [MASK], as `bwsft train` does for
    --mask-token and --logit-shift; both are changed in place. ``ValueError`` for a shift that the
    family does not have."""
    kind, config = model.config.model_type, model.config
    if kind in DECODERS:
        config.logit_shift = logit_shift
    elif logit_shift != (own := PUBLISHED.get(kind, {}).get("logit_shift", 0)):
        raise ValueError(f"logit_shift is {own} in a model of type {kind}, not {logit_shift}")
    config.mask_token_id = add_mask_token(tokenizer, mask_token)
    if config.eos_token_id is None:
        config.eos_token_id = Facts.of_tokenizer(tokenizer).eos_id


def check_model(path: str | Path) -> None:
    """``ValueError`` for a model that bwsft does not load, by its config.json: of a Hub id nothing
    else is downloaded. A folder without one passes; whoever reads it says what is missing."""
    file = model_folder(path, ("config.json",)) / "config.json"
    if file.is_file():
        check_supported(read_json(file), file)


def model_folder(path: str | Path, files: Sequence[str] = (*JSON_FILES, "*.safetensors")) -> Path:
    """The folder ``path``, or the one into which ``files`` of a Hub id were downloaded.
    ``FileNotFoundError`` for neither."""
    folder = Path(path)
    if folder.is_dir():
        strict_json.check_regular(folder)
        return folder
    looks_like_repository = str(path).count("/") == 1 and not str(path).startswith((".", "/", "~"))
    if not looks_like_repository or folder.exists():
        raise FileNotFoundError(f"{path} is not a folder: give a model folder or a repository id")
    return hub.snapshot(str(path), files)


def _family(folder: Path, config: PreTrainedConfig) -> Family:
    """The config's family, with the end ids that generation_config.json (optional) adds."""
    try:
        family = family_of(config)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    file = folder / "generation_config.json"
    ids = read_json(file).get("eos_token_id") if file.is_file() else None
    ids = ids if isinstance(ids, list) else [ids]
    added = [i for i in ids if type(i) is int and 0 <= i < family.vocab_size]
    return replace(family, end_ids=merged_end_ids(family.end_ids, added))


def _expected_shapes(config: PreTrainedConfig, folder: Path) -> tuple[Shapes, dict[str, str]]:
    """Shapes of the model's tensors, and which are tied to which."""
    try:
        with torch.device("meta"):
            model = model_class(config)(config)
    except Exception as error:  # sizes that do not fit together fail wherever they first meet
        raise ValueError(
            f"{folder / 'config.json'} describes a model that cannot be built ({_sentence(error)})"
        ) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_state(model).items()}
    return shapes, dict(model.all_tied_weights_keys)
