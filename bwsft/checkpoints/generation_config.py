"""How a model is to be decoded, in the generation_config.json of its folder.

Checkpoints, exports and the folders of BlockwiseTrainer carry it: under the key "bwsft" what
bwsft needs to decode as the model was trained, and beside it the fields by which transformers and
the official code of LLaDA, Dream and SDAR call the same facts.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bwsft import config as c
from bwsft.data.chat_template import Template
from bwsft.data.tokenizer import merged_end_ids
from bwsft.models.backbone import Backbone, Family
from bwsft.utils import config_check, strict_json
from bwsft.utils.files import write_atomic

FILE, KEY = "generation_config.json", "bwsft"
OWN_FILE = "bwsft.json"  # for a model whose sampler refuses fields that it does not know


@dataclass(frozen=True, kw_only=True)
class DecodingContract:
    """What decoding must know of a training. ValueError for values that fill no canvas."""

    template: Literal["metamath", "chat", "none"]
    template_args: str | None = None
    context: Literal["exact", "cached", "block_causal"]
    block_size: int
    gen_length: int
    canvas: Literal["fixed", "response", "padded"]
    block_origin: Literal["response", "absolute"]
    end_ids: tuple[int, ...]
    logit_shift: Literal[0, 1]
    mask_id: int
    clean_attention: Literal["block", "causal"] = "block"

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= self.gen_length or self.gen_length % self.block_size:
            raise ValueError(
                f"block_size {self.block_size} must divide gen_length {self.gen_length}"
            )
        if not self.end_ids or min(*self.end_ids, self.mask_id) < 0:
            raise ValueError("end_ids must be token ids, one at least, and mask_id another")

    @classmethod
    def of(cls, config: c.Config, family: Family, tokenizer: Any = None) -> DecodingContract:
        """That of a model trained with `config`; with a tokenizer, its template's end ids come
        first."""
        data = config.dataset
        ends = Template(tokenizer, data.template, data.template_args).end_ids if tokenizer else ()
        return cls(
            template=data.template, template_args=data.template_args,
            context=config.context, block_size=config.block_size, gen_length=config.gen_length,
            canvas=data.canvas, block_origin=family.block_origin,
            end_ids=merged_end_ids(ends, family.end_ids), logit_shift=family.logit_shift,
            mask_id=family.mask_id, clean_attention=config.clean_attention,
        )  # fmt: skip

    def check(self, family: Family, folder: Path | str) -> None:
        """ValueError unless it is one for this model."""
        for name in ("mask_id", "logit_shift", "block_origin"):
            said, own = getattr(self, name), getattr(family, name)
            if said != own:
                raise ValueError(
                    f"{Path(folder) / FILE} says {name} {said}, and the model's is {own}: take "
                    "both from the same folder"
                )
        if max(self.end_ids) >= family.vocab_size:
            raise ValueError(f"{Path(folder) / FILE}: end_ids has {max(self.end_ids)}, no token id")


def contract_of_state(state: dict) -> DecodingContract:
    """The contract that a checkpoint's state implies: config and family say all of it."""
    family = state["family"] | {"end_ids": tuple(state["family"]["end_ids"])}
    return DecodingContract.of(c.from_json(json.dumps(state["config"])), Family(**family))


def read_contract(folder: Path | str) -> DecodingContract | None:
    """What a folder's generation_config.json says, or the file for those that cannot say it; None
    where nothing is said; ValueError, naming the file, for what is no contract."""
    files = (Path(folder) / name for name in (OWN_FILE, FILE))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    found = strict_json.read_object(file).get(KEY)
    if isinstance(found, dict):  # a later version may say more
        names = {field.name for field in dataclasses.fields(DecodingContract)}
        found = {name: value for name, value in found.items() if name in names}
    if found is None:
        return None
    try:
        return config_check.build(DecodingContract, found, KEY)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def write_generation_config(
    folder: Path | str, backbone: Backbone, contract: DecodingContract | None
) -> None:
    """Write generation_config.json; without a contract, the model's token ids alone. A model that
    has a sampler of its own keeps its settings, and the contract goes beside them."""
    config, family = backbone.base_model.config, backbone.family
    if family.noise != "mask":
        sampler = copy.copy(backbone.base_model.generation_config)
        sampler.eos_token_id = list(contract.end_ids if contract else family.end_ids)
        write_atomic(Path(folder) / FILE, sampler.to_json_string())
        if contract:
            content = {KEY: dataclasses.asdict(contract)}
            write_atomic(Path(folder) / OWN_FILE, json.dumps(content, indent=2) + "\n")
        return
    values: dict[str, Any] = {
        "bos_token_id": getattr(config, "bos_token_id", None),
        "eos_token_id": list(contract.end_ids if contract else family.end_ids),
        "pad_token_id": config.pad_token_id,
        "mask_token_id": family.mask_id,
        "mask_id": family.mask_id,
    }
    if contract:
        values |= official_names(contract, config.model_type)
        values[KEY] = dataclasses.asdict(contract)
        if contract.clean_attention == DecodingContract.clean_attention:  # the usual goes unsaid
            del values[KEY]["clean_attention"]
    values = {name: value for name, value in values.items() if value is not None}
    write_atomic(Path(folder) / FILE, json.dumps(values, indent=2) + "\n")


def official_names(contract: DecodingContract, model_type: str) -> dict[str, Any]:
    """Decoding one token per step, the most confident first, in the words of the official code:
    `steps` are those of the whole canvas, SDAR's `denoising_steps` those of a block."""
    size, length = contract.block_size, contract.gen_length
    sdar = {"denoising_steps": size, "remasking_strategy": "low_confidence_static"}
    own: dict[str, dict[str, Any]] = {
        "llada": {"remasking": "low_confidence"},
        "Dream": {"alg": "maskgit_plus", "max_new_tokens": length},
        "sdar": sdar, "sdar_moe": sdar,
    }
    shape = {"block_size": size, "block_length": size, "gen_length": length, "steps": length}
    return shape | own.get(model_type, {})
