"""The model families: from a config.json to a checked config, a Family and a Backbone.

model_type       attention      a position predicts    [MASK]
llada lladamoe   full           its own token          config.json
Dream            full           the next token         config.json
a2d-*            full           its own token          config.json, else the tokenizer
sdar sdar_moe    block-causal   its own token          config.json, else the published id
llada2_moe       block-causal   its own token          config.json, else the published id
Fast_dLLM_Qwen   block-causal   the next token         config.json, else the published id
diffusion_gemma  block-causal   its own token          none: undecided tokens are random ones
qwen2 qwen3      full, made     its own or the next    config.json (mask_token_id, logit_shift),
llama            so here        token: logit_shift     else `Facts`
bert modernbert  full           its own token          config.json, else the tokenizer

What config.json leaves out is written into it once known, so that a saved model says all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from bwsft.data.tokenizer import load_tokenizer, own_mask_id
from bwsft.models import dream_sdar as dream_sdar  # registers Dream, SDAR, ... with transformers
from bwsft.models import experts as experts  # and the mixtures of experts
from bwsft.models.backbone import Backbone, Family
from bwsft.models.diffusion_gemma import DiffusionGemmaBackbone
from bwsft.models.diffusion_gemma_config import config_of
from bwsft.models.hf_decoder import new_decoder
from bwsft.models.llada import LladaBackbone
from bwsft.models.llada_config import FIELD_TYPES, LladaConfig
from bwsft.models.mask_row import add_mask_row, fill_mask_row
from bwsft.models.support import (
    DECODERS,
    DIFFUSION_GEMMA,
    ENCODERS,
    MIXTURES,
    PUBLISHED,
    check_supported,
    kind_of,
)
from bwsft.models.weight_files import read_json
from bwsft.utils import config_check

# <|eot_id|> of LLaDA's published vocabulary ends a turn; config.json names only <|endoftext|>.
_LLADA_MASK_ID, _LLADA_EOT_ID = 126336, 126348

# Left out of a config.json, these would silently take the value of some large model.
_LLADA_MUST_STATE = tuple(
    "d_model n_layers n_heads vocab_size max_sequence_length rope_theta rms_norm_eps".split()
)
_MUST_STATE = tuple(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size "
    "max_position_embeddings".split()
)
_MOST_LAYERS = 10_000  # a config of more takes forever to build, before anything is compared
_DTYPES = Literal["float64", "float32", "bfloat16", "float16"] | None
# What transformers may know of a config.json beside the model's own fields.
_KEPT = {
    "architectures": tuple[str, ...] | None,
    "auto_map": dict[str, str] | None,
    "dtype": _DTYPES,
    "torch_dtype": _DTYPES,
}
_FACTS = {"mask_token_id": int | None, "logit_shift": Literal[0, 1] | None}
# Names of older transformers for fields of today.
_OLDER = tuple(
    "rope_theta rope_scaling partial_rotary_factor global_rope_theta local_rope_theta "
    "global_attn_every_n_layers".split()
)


@dataclass(frozen=True)
class Facts:
    """What a model's user knows and its config.json may leave out; None: unknown."""

    mask_id: int | None = None
    """Token id of [MASK]; the number of embeddings asks for one more, the mean of the others."""
    logit_shift: int | None = None
    """1: position i predicts token i + 1, as in an autoregressive model; 0: its own token."""
    eos_id: int | None = None

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, logit_shift: int | None = None) -> Facts:
        """[MASK] and the end token of a tokenizer: [SEP] where it has one, as BERT's."""
        end = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
        return cls(own_mask_id(tokenizer), logit_shift, end)


def read_config(folder: Path, facts: Facts | None = None) -> PreTrainedConfig:
    """The config in a folder, types checked, with its [MASK], end token and logit shift; what
    config.json lacks comes from ``facts``, else from the folder's tokenizer. ``ValueError``, or
    ``FileNotFoundError``, that names the file."""
    file = folder / "config.json"
    found = read_json(file)
    check_supported(found, file)
    kind = kind_of(found)
    if kind == DIFFUSION_GEMMA:
        return _made(lambda: config_of(found), file)
    own, must = kind == LladaConfig.model_type, must_state(kind)
    if missing := [name for name in must if found.get(name) is None]:
        raise ValueError(f"{file} lacks {', '.join(missing)}: add the fields")
    if found.get("quantization_config"):
        raise ValueError(f"{file}: quantized weights are not supported: take the full checkpoint")
    # transformers checks the types of its own models' fields.
    hints = FIELD_TYPES if own else _FACTS | dict.fromkeys(must, int)
    typed = {name: hint for name, hint in (_KEPT | hints).items() if name in found}
    for name, hint in typed.items():
        config_check.convert(hint, found[name], str(file), name)
    config = _build(kind, found, typed, file)
    return config if own else _complete(config, facts or Facts(), folder)


def must_state(kind: str) -> tuple[str, ...]:
    """Fields that a config.json of this kind must have."""
    if kind == LladaConfig.model_type:
        return _LLADA_MUST_STATE
    if kind not in MIXTURES:
        return _MUST_STATE
    names = (*_MUST_STATE, "moe_intermediate_size", "num_experts", "num_experts_per_tok")
    return tuple(CONFIG_MAPPING[kind].attribute_map.get(name, name) for name in names)


def _build(kind: str, found: dict, typed: dict[str, Any], file: Path) -> PreTrainedConfig:
    """Only the model's own fields and _KEPT reach transformers, to which others are attributes to
    overwrite, or code to load (attn_implementation)."""
    config_class = CONFIG_MAPPING[kind]
    names = [*typed, "rope_scaling", "rope_parameters"]  # refused by LladaConfig if set
    if kind != LladaConfig.model_type:
        if not 0 < found["num_hidden_layers"] <= _MOST_LAYERS:
            raise ValueError(f"{file}: num_hidden_layers must be between 1 and {_MOST_LAYERS:,}")
        common = {field.name for field in fields(PreTrainedConfig)}
        names += [*_OLDER, *({field.name for field in fields(config_class)} - common)]
        found = {"eos_token_id": None} | found  # not that of the first Llama or ModernBERT
    given = {name: found[name] for name in names if name in found}
    return _made(lambda: config_class.from_dict(given), file)


def _made(make: Callable[[], PreTrainedConfig], file: Path) -> PreTrainedConfig:
    try:
        return make()
    except Exception as error:  # a wrong value fails wherever it is first used
        raise ValueError(f"{file}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    """The last line of a message: huggingface_hub's strict checks put the reason there."""
    said = [line.strip() for line in str(error).split("\n") if line.strip()]
    return f"{said[-1]:.300}" if said else type(error).__name__


def _complete(config: PreTrainedConfig, facts: Facts, folder: Path) -> PreTrainedConfig:
    """Write into the config what it lacks."""
    if config.model_type not in DECODERS:
        facts = replace(facts, logit_shift=0)
    known = {
        "mask_token_id": facts.mask_id, "logit_shift": facts.logit_shift,
        "eos_token_id": facts.eos_id,
    }  # fmt: skip
    lacking = [name for name in known if getattr(config, name, None) is None]
    if any(known[name] is None for name in lacking) and (folder / "tokenizer.json").exists():
        own = Facts.of_tokenizer(load_tokenizer(folder))
        known["mask_token_id"] = own.mask_id if facts.mask_id is None else facts.mask_id
        known["eos_token_id"] = own.eos_id if facts.eos_id is None else facts.eos_id
    for name in lacking:
        if known[name] is None:
            raise ValueError(f"{folder / 'config.json'} lacks {name}: {_REMEDY[name]}")
        if known[name] >= config.vocab_size + (name == "mask_token_id"):  # which may be a new row
            raise ValueError(
                f"{name} would be {known[name]}, as the tokenizer has it, but {folder} has "
                f"{config.vocab_size} token ids: the tokenizer does not belong to this model"
            )
        if name != "logit_shift" or config.model_type in DECODERS:
            setattr(config, name, known[name])
    return config


_BOTH = (
    "an autoregressive model has none; train it with --mask-token '<|mask|>' --logit-shift 1 (it "
    "predicts the next token) or 0, or add mask_token_id and logit_shift to config.json"
)
_IN_PLACE = (
    "take the tokenizer's with bwsft.models.loading.set_mask(model, tokenizer, "
    "tokenizer.mask_token, logit_shift=0)"
)
_REMEDY = {
    "mask_token_id": _BOTH,
    "logit_shift": _BOTH,
    "eos_token_id": "add the id of the token that ends a text",
}


def family_of(config: PreTrainedConfig) -> Family:
    """The family's facts from a complete config; ``ValueError`` if it names no mask or end
    token."""
    kind, config = config.model_type, config.get_text_config()
    size, fixed = config.vocab_size, PUBLISHED.get(kind, {})
    grows = kind in (*DECODERS, *ENCODERS)  # by a row, where [MASK] is a new id
    ends = config.eos_token_id
    ends = tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    mask_id = getattr(config, "mask_token_id", None)
    if fixed.get("noise") == "uniform":
        mask_id = config.pad_token_id
    shift = fixed.get("logit_shift", 0)
    shift = getattr(config, "logit_shift", None) if kind in DECODERS else shift
    if grows and None in (mask_id, shift):
        raise ValueError(f"the model has no [MASK]: {_IN_PLACE if kind in ENCODERS else _BOTH}")
    if not isinstance(mask_id, int) or not 0 <= mask_id < size + grows:
        raise ValueError(f"config field mask_token_id={mask_id} is no token id below {size}")
    if not ends or not all(isinstance(i, int) and 0 <= i < size for i in ends):
        raise ValueError(f"config field eos_token_id={config.eos_token_id} is no id below {size}")
    if mask_id == _LLADA_MASK_ID and kind == LladaConfig.model_type and size > _LLADA_EOT_ID:
        ends += (_LLADA_EOT_ID,)
    return Family(
        mask_id=mask_id, eos_id=ends[0], end_ids=ends, vocab_size=max(size, mask_id + 1),
        max_positions=config.max_position_embeddings,
        softcap=getattr(config, "final_logit_softcapping", None),
        **fixed | {"logit_shift": shift},
    )  # fmt: skip


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that transformers, or bwsft, has for this config: the model with its LM head."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING
    if config.model_type in ENCODERS:
        known = MODEL_FOR_MASKED_LM_MAPPING
    elif config.model_type == DIFFUSION_GEMMA:
        known = MODEL_FOR_MULTIMODAL_LM_MAPPING
    return known[type(config)]


def wrap(model: PreTrainedModel, family: Family) -> Backbone:
    """A transformers model as a Backbone, grown by a row if [MASK] is a new id; a row of [MASK]
    that was never trained becomes the mean of those that were."""
    kind = model.config.model_type
    if kind == DIFFUSION_GEMMA:
        return DiffusionGemmaBackbone(model, family)
    if kind != LladaConfig.model_type:
        add_mask_row(model, family.mask_id)
    fill_mask_row(model, family.mask_id)
    if kind == LladaConfig.model_type:
        return LladaBackbone(model, family)
    if kind in ENCODERS:
        from bwsft.models.hf_encoder import new_encoder

        return new_encoder(model, family)
    return new_decoder(model, family)
