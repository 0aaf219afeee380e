"""What a run's base and tokenizer are by content: noted in its checkpoints, compared on return."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from bwsft import config as c
from bwsft.models.adapter_config import ADAPTER_CONFIG
from bwsft.models.loading import model_folder
from bwsft.models.lora import ADAPTER
from bwsft.models.weight_files import shard_files
from bwsft.utils import hub
from bwsft.utils.identity import Content, content_of, refuse_other


def weights_content(place: str | Path) -> Content:
    """The files that decide the numbers of a model, or of an adapter without its base, in a folder
    or of a Hub id. Errors as `load_backbone`'s."""
    folder = model_folder(place)
    if (folder / ADAPTER_CONFIG).exists():
        return content_of(folder, (ADAPTER_CONFIG, ADAPTER))
    return content_of(folder, ("config.json", *shard_files(folder)))


def noted(state: dict[str, Any] | None, name: str) -> Content | None:
    """The content that a checkpoint's state notes under a name: "base" of an adapter, or
    "tokenizer"; None where an earlier release wrote it."""
    return ((state or {}).get("identity") or {}).get(name)


def check_base(state: dict[str, Any] | None, base: str | Path, since: str | Path) -> None:
    """ValueError unless the base of an adapter is what the state in `since` says."""
    if (before := noted(state, "base")) is not None:
        refuse_other(before, weights_content(base), model_folder(base), since)


def check_tokenizer(
    state: dict[str, Any] | None, now: Content, folder: str | Path, since: str | Path
) -> None:
    """ValueError unless the tokenizer, with its chat template, is what the state says."""
    if (before := noted(state, "tokenizer")) is not None:
        refuse_other(before, now, folder, since)


def pinned(config: c.Config, state: dict[str, Any]) -> c.Config:
    """The config whose model and tokenizer are the very ones that a run began with: the commits of
    Hub ids, and of a run that has gone on since the checkpoint that it stood for."""
    commits = {name: (noted(state, name) or {}).get("commit") for name in ("base", "tokenizer")}
    model, tokenizer, base = config.model, config.tokenizer, state.get("base")
    commit = commits["base"] or (commits["tokenizer"] if tokenizer is None else None)
    if model is not None and base is not None and Path(base).exists():
        model = base
    elif model is not None and not Path(model).exists():
        model = hub.at_commit(model, commit)
    if tokenizer is not None and not Path(tokenizer).exists():
        tokenizer = hub.at_commit(tokenizer, commits["tokenizer"])
    return dataclasses.replace(config, model=model, tokenizer=tokenizer)
