"""Reads the adapter_config.json of a LoRA adapter as peft writes it, whoever trained it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Literal

import regex

from bwsft.utils import config_check, strict_json

ADAPTER_CONFIG = "adapter_config.json"
_PATTERN_SECONDS = 1  # for all patterns of a file on all names of a model


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
    lora_bias: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: tuple[str, ...] | None = None
    trainable_token_indices: tuple[int, ...] | dict[str, tuple[int, ...]] | None = None
    ensure_weight_tying: bool = False
    exclude_modules: str | tuple[str, ...] | None = None
    target_parameters: tuple[str, ...] | None = None
    alpha_pattern: dict[str, float] = dataclasses.field(default_factory=dict)
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] = True

    def token_ids(self, module: str) -> tuple[int, ...]:
        """The rows of an embedding that trainable_token_indices names."""
        found = self.trainable_token_indices
        if isinstance(found, dict):
            ids = (ids for name, ids in found.items() if f".{module}".endswith(f".{name}"))
            return next(ids, ())
        return found or ()

    def alphas(self, names: list[str]) -> dict[str, float]:
        """lora_alpha of modules, by name, where alpha_pattern gives another one: its keys are
        regular expressions for the name or its end. ``ValueError`` for one that takes too long, or
        has counted repeats, which may need more memory than there is."""
        end, found = time.monotonic() + _PATTERN_SECONDS, {}
        for pattern, alpha in self.alpha_pattern.items():
            try:
                if "{" in pattern:
                    raise regex.error("counted repeat")
                compiled = regex.compile(rf"(?:.*\.)?(?:{pattern})$")
                for name in names:
                    left = max(end - time.monotonic(), 1e-3)
                    if name not in found and compiled.match(name, timeout=left):
                        found[name] = alpha
            except (regex.error, TimeoutError, RecursionError) as error:
                raise ValueError(
                    f"{ADAPTER_CONFIG}: alpha_pattern {pattern[:80]!r} is slow or no pattern "
                    f"({str(error) or type(error).__name__}): name the modules"
                ) from None
        return found


# Where the adapter came from, or which layers it is on: the tensors' names say that better.
_PROVENANCE = frozenset(
    "auto_mapping inference_mode megatron_core peft_version qalora_group_size revision task_type "
    "layers_pattern layers_to_transform fan_in_fan_out runtime_config eva_config".split()
)


def read_adapter_config(folder: Path | str) -> AdapterConfig:
    """The adapter_config.json of a LoRA adapter (DoRA included); ValueError naming the field for
    anything else, so that no option is dropped in silence."""
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
