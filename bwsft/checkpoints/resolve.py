"""Finds and loads the model that a name stands for: a checkpoint, a run folder, the embedded tiny
base, or a small random LLaDA; for training and for decoding."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bwsft import config as c
from bwsft.checkpoints.contents import check_base, noted, weights_content
from bwsft.checkpoints.folders import MANIFEST, newest_complete, problems
from bwsft.checkpoints.generation_config import DecodingContract, contract_of_state, read_contract
from bwsft.checkpoints.state import STATE, read_state
from bwsft.data.tokenizer import (
    add_mask_token,
    load_tokenizer,
    mask_id_for,
    tokenizer_content,
)
from bwsft.models.adapter_config import ADAPTER_CONFIG, read_adapter_config
from bwsft.models.backbone import Backbone, Family
from bwsft.models.families import Facts, family_of
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import (
    JSON_FILES,
    check_model,
    load_backbone,
    model_folder,
    new_backbone,
    read_family,
)
from bwsft.models.lora import load_adapter
from bwsft.models.quantization import quantize, require_bitsandbytes
from bwsft.models.support import DIFFUSION_GEMMA, kind_of
from bwsft.models.weight_files import read_json
from bwsft.utils import hub
from bwsft.utils.devices import pick_device
from bwsft.utils.identity import short

# The tiny LLaDA that ships with the package: base of the demo and of runs without --model.
TINY = Path(__file__).parents[1] / "tiny"
EMBEDDED = "embedded"
# Folder of a run that holds the random model under its adapter.
OWN_BASE = "base"
# What a foreign model does not say, and a user can.
GUESSED = ("template", "context", "block_size", "gen_length")
BLOCK_SIZES = ("block_size", "canvas_length")  # names in a config.json


@dataclass(frozen=True)
class ModelPlan:
    """A model that is known by its config and not built yet."""

    family: Family
    base: str
    """What an adapter's checkpoint names as its base: a folder, a Hub id or EMBEDDED."""
    build: Callable[[torch.device], Backbone]
    is_random: bool = False
    """Nobody else has this base: a run that trains an adapter on it must keep it."""

    @property
    def place(self) -> str:
        """Where the base is: a folder, which a random one gets when it is built, or a Hub id."""
        return str(TINY) if self.base == EMBEDDED else self.base


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


def canvas_of(model: str) -> int | None:
    """Tokens of a canvas that a model fills with random tokens; None of a model with a [MASK], and
    of one that is not there or not known."""
    try:
        found = read_json(model_folder(locate(model)[0], ("config.json",)) / "config.json")
    except (OSError, ValueError):  # whoever loads it says what is wrong
        return None
    size = found.get("canvas_length", 256)
    return size if kind_of(found) == DIFFUSION_GEMMA and isinstance(size, int) else None


def plan_tokenizer(config: c.Config) -> str:
    """Folder or Hub id of the run's tokenizer; ValueError for a --model that can't be loaded."""
    source = locate(config.model)[0] if config.model else str(TINY)
    check_model(source)
    return config.tokenizer or source


def plan_model(config: c.Config, tokenizer: Any, folder: Path) -> ModelPlan:
    """The checkpoint that --model names, the embedded base, or a small random LLaDA. The tokenizer
    learns --mask-token."""
    if config.mask_token is not None:
        add_mask_token(tokenizer, config.mask_token)
    if config.model is None and config.tokenizer is not None:
        plan = random_model(config, tokenizer, folder)
    else:
        plan = stored_model(config, tokenizer)
    check_shift(config.logit_shift, plan.family)
    return plan


def check_shift(asked: int | None, family: Family) -> None:
    """ValueError if a user asks for another logit shift than the model's."""
    if asked not in (None, family.logit_shift):
        raise ValueError(
            f"--logit-shift {asked}: in this model it is {family.logit_shift}; leave the option out"
        )


def stored_model(config: c.Config, tokenizer: Any) -> ModelPlan:
    """The checkpoint that --model names, or the embedded base."""
    source = locate(config.model)[0] if config.model else str(TINY)
    if (Path(source) / "adapter_config.json").exists():
        raise ValueError(
            f"{source} is an adapter: merge it first (bwsft export --model {config.model} "
            "--out DIR) and train from DIR"
        )
    if config.lora.quantize:
        require_bitsandbytes()
    facts = Facts.of_tokenizer(tokenizer, config.logit_shift)
    family = read_family(source, facts)
    check_mask(config.mask_token, tokenizer, family)

    def build(device: torch.device) -> Backbone:
        dtype = weight_dtype(config, device)
        place = "cpu" if config.lora.quantize else device
        backbone = load_backbone(source, dtype=dtype, device=place, facts=facts)
        note_block_size(backbone, config.block_size, warn=True)
        if config.lora.quantize:
            quantize(backbone, device)
        return backbone

    return ModelPlan(family, source if config.model else EMBEDDED, build)


def check_mask(asked: str | None, tokenizer: Any, family: Family) -> None:
    """ValueError if the tokenizer's [MASK] is not the model's, or if a user names one for a model
    that has none."""
    if family.noise == "mask":
        mask_id_for(tokenizer, family.mask_id)
    elif asked is not None:
        raise ValueError("--mask-token: undecided tokens of this model are random, leave it out")


def note_block_size(backbone: Backbone, size: int, *, warn: bool = False) -> None:
    """Where config.json has a block size (SDAR's, DiffusionGemma's canvas), it becomes that of the
    training."""
    config = backbone.base_model.config
    for name in filter(partial(hasattr, config), BLOCK_SIZES):
        own = getattr(config, name)
        if warn and own not in (None, size):
            made = f"the model was made for blocks of {own}"
            warnings.warn(f"{made}, --block-size is {size}", stacklevel=2)
        setattr(config, name, size)


def random_model(config: c.Config, tokenizer: Any, folder: Path) -> ModelPlan:
    """A random LLaDA of shape --init with the tokenizer's vocabulary and a [MASK] id."""
    mask_id = mask_id_for(tokenizer)
    llada = LladaConfig(
        **dataclasses.asdict(config.init),
        # Rows in multiples of 64 keep the head's matmul on fast paths.
        vocab_size=-(-max(len(tokenizer), mask_id + 1) // 64) * 64,
        max_sequence_length=max(1024, (config.max_length or 0) + (config.gen_length or 0)),
        mask_token_id=mask_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    base = folder / OWN_BASE

    def build(device: torch.device) -> Backbone:
        if base.is_dir():  # of the run that goes on: another torch may draw other weights
            return load_backbone(base, device=device)
        return new_backbone(llada, config.seed, device=device)

    return ModelPlan(family_of(llada), str(base), build, is_random=True)


def weight_dtype(config: c.Config, device: torch.device) -> torch.dtype:
    """fp32 on the CPU and for full fine-tuning, whose small updates bf16 would swallow; bf16 for a
    frozen base on CUDA."""
    return torch.bfloat16 if device.type == "cuda" and config.lora.rank > 0 else torch.float32


def own_memory(backbone: Backbone) -> None:
    """Copy weights that are views of a mapped file, which may start at any offset.

    MKL promises the same bits from run to run for arrays aligned to 64 bytes only, which the copies
    are: a resumed run maps another file than the one it goes on from.
    """
    for parameter in backbone.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


@dataclass(frozen=True)
class Trained:
    """A model ready to decode, and what its checkpoint remembers of its training."""

    backbone: Backbone
    tokenizer: Any
    state: dict | None
    folder: str
    contract: DecodingContract
    """How to decode it."""
    assumed: tuple[str, ...] = ()
    """Fields of the contract that nothing says: the model is a foreign one."""


def load_trained(
    model: str | None, *, tokenizer: str | None = None, device: str = "auto",
    dtype: torch.dtype | None = None, mask_token: str | None = None,
    logit_shift: int | None = None,
) -> Trained:  # fmt: skip
    """Load a run folder, checkpoint, exported or foreign model folder or Hub id, in eval mode.

    None is the embedded base. dtype defaults to fp32 on the CPU and bf16 on CUDA. `mask_token` and
    `logit_shift` are of a model that says neither; ValueError where it says otherwise.
    """
    source, state = locate(model) if model else (str(TINY), None)
    place = pick_device(device)
    dtype = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    adapter = (Path(source) / "adapter_config.json").exists()
    base = adapter_base(source, state) if adapter else source
    if not adapter:
        check_model(base)
    words = load_tokenizer(tokenizer_place(source, state, tokenizer))
    if mask_token is not None:
        add_mask_token(words, mask_token)
    contract, facts = known_contract(source, state), Facts.of_tokenizer(words, logit_shift)
    if contract is not None:  # an adapter's base may not know its [MASK]
        facts = Facts(contract.mask_id, contract.logit_shift, facts.eos_id)
    try:
        if adapter:
            check_base(state, base, source)
        backbone = load_backbone(base, dtype=dtype, device=place, facts=facts)
    except FileNotFoundError as error:
        if not adapter:
            raise
        raise FileNotFoundError(f"{error}; it is the base of the adapter in {source}") from error
    if mask_token is not None:
        check_mask(mask_token, words, backbone.family)
    check_shift(logit_shift, backbone.family)
    if adapter:
        load_adapter(backbone, source)
    assumed = ()
    if contract is not None:
        contract.check(backbone.family, source)
        note_block_size(backbone, contract.block_size)
    else:
        contract, assumed = assumed_contract(backbone, words)
    said = {name: getattr(contract, name) for name in ("end_ids", "clean_attention")}
    backbone.family = dataclasses.replace(backbone.family, **said)
    return Trained(backbone.eval(), words, state, source, contract, assumed)


def tokenizer_place(source: str, state: dict | None, chosen: str | None = None) -> str:
    """The folder or Hub id of a located model's tokenizer, unless another is chosen."""
    folder = Path(source)
    beside = any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    if chosen or beside or not (folder / ADAPTER_CONFIG).exists():
        return chosen or source
    return adapter_base(source, state)  # peft saves an adapter without a tokenizer


def known_contract(source: str, state: dict | None) -> DecodingContract | None:
    """How the model of `locate` is to be decoded, where it says so: in its generation_config.json
    or, in older checkpoints, in their state alone."""
    contract = read_contract(source if state else model_folder(source, JSON_FILES))
    return contract_of_state(state) if contract is None and state else contract


def assumed_contract(
    backbone: Backbone, tokenizer: Any
) -> tuple[DecodingContract, tuple[str, ...]]:
    """(what is taken for the contract of a foreign model, the names of what is a mere guess)."""
    family = backbone.family
    block_causal = family.attention == "block_causal"  # it can decode in no other mode
    found = (getattr(backbone.base_model.config, name, None) for name in BLOCK_SIZES)
    made_for = next(filter(None, found), None)
    size = made_for or c.Config.block_size
    config = c.Config(
        block_size=size, gen_length=-(-c.Config.gen_length // size) * size,
        context="block_causal" if block_causal else "exact",
        clean_attention=family.clean_attention,
    )  # fmt: skip
    known = ["context"] * block_causal + ["block_size"] * (made_for is not None)
    guesses = (name for name in GUESSED if name not in known)
    return DecodingContract.of(config, family, tokenizer), tuple(guesses)


def adapter_base(source: str, state: dict | None) -> str:
    """The folder or Hub id of the model that an adapter belongs to."""
    if state is None:
        return read_adapter_config(source).base_model_name_or_path  # locate has seen that it is one
    if state["base"] == EMBEDDED:
        return str(TINY)
    checkpoints = Path(source).parent
    beside = checkpoints.parent / OWN_BASE  # found there though the run folder was moved
    if checkpoints.name == "checkpoints" and beside.is_dir():
        return str(beside)
    base, commit = state["base"], (noted(state, "base") or {}).get("commit")
    return base if Path(base).exists() else hub.at_commit(base, commit)


def identity_of(source: str, state: dict | None, tokenizer: Any) -> dict[str, str]:
    """Short digests of what `locate` has found and of its tokenizer: they change with any weight,
    with those of an adapter's base too, and with the chat template."""
    weights = weights_content(source)["files"]
    if ADAPTER_CONFIG in weights:
        weights = [weights, weights_content(adapter_base(source, state))["files"]]
    return {"weights": short(weights), "tokenizer": short(tokenizer_content(tokenizer))}
