"""The JSON files of a checkpoint that say what it is: state.json, and an adapter's config."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from bwsft import config as c
from bwsft.models.backbone import Family
from bwsft.utils import config_check, strict_json

STATE, ADAPTER_CONFIG = "state.json", "adapter_config.json"


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
