"""What stands beside the weights of an exported folder: tokenizer files and the official code.

They are copied from where the trained model came from, byte for byte where other programs can use
them so. No code is run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwsft.checkpoints.folders import save_tokenizer
from bwsft.checkpoints.resolve import TINY, Trained, adapter_base, locate
from bwsft.data.tokenizer import CONFIG, TOKENIZER_FILES, load_tokenizer
from bwsft.utils import hub, strict_json

# Of a tokenizer_config.json: names of transformers 5 alone.
NEW_CLASS, NEW_FIELDS = "TokenizersBackend", ("backend", "is_local", "local_files_only")
TINY_NAME = "the tiny LLaDA that ships with bwsft"


@dataclass(frozen=True)
class Origin:
    """Where a trained model came from: folders or Hub ids."""

    model: str | None
    tokenizer: str
    own: str = ""
    """What it is, where bwsft made it itself and `model` is None."""


def origin_of(model: str, trained: Trained) -> Origin:
    """The start of the chain of runs, each of which went on from the one before it."""
    name, state, folder = model, trained.state, trained.folder
    tokenizer, seen = None, set()
    while folder not in seen:
        seen.add(folder)
        adapted = (Path(folder) / "adapter_config.json").exists()
        if state is None and not adapted:
            break
        given = state["config"] if state else {"tokenizer": folder}
        tokenizer = tokenizer or given.get("tokenizer")
        name = adapter_base(folder, state) if adapted else given["model"]
        if name is not None and hub.is_id(hub.split_name(name)[0]):
            name = hub.split_name(name)[0]
        if name in (None, str(TINY)):
            own = "a random LLaDA" if name is None and given["tokenizer"] else TINY_NAME
            return Origin(None, tokenizer or str(TINY), own)
        if not adapted and "model" in state.get("local", ()):
            name = str(Path(name).absolute())  # no id on the Hub, though it is no longer there
        try:
            folder, state = locate(name)
        except (OSError, ValueError):  # a run that is no longer whole
            return Origin(name, tokenizer or folder)
    return Origin(name, tokenizer or folder)


def write_tokenizer(trained: Trained, origin: str, folder: Path) -> None:
    """The origin's own files where they are those of the tokenizer that was trained with, what
    transformers writes otherwise; readable by transformers 4 either way."""
    source = tokenizer_folder(origin)
    try:
        copied = source is not None and same(load_tokenizer(source), trained.tokenizer)
    except ValueError:  # the checkpoint's is whole, or it would not have been loaded
        copied = False
    if copied:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                copy(source / name, folder / name, source)
    else:
        save_tokenizer(trained.tokenizer, folder)
    if not (folder / CONFIG).exists():
        return
    config = strict_json.read_object(folder / CONFIG)
    settled = for_transformers_4(config)
    if named := settled.pop("auto_map", None):
        settled |= {"auto_map": kept} if (kept := settle(named, origin)) else {}
    if settled != config:
        (folder / CONFIG).write_text(json.dumps(settled, indent=2, ensure_ascii=False) + "\n")


def tokenizer_folder(origin: str) -> Path | None:
    """The folder of a tokenizer's files; None where they cannot be had."""
    if Path(origin).is_dir():
        return Path(origin)
    if not hub.is_id(origin):
        return None
    try:
        return hub.snapshot(origin, TOKENIZER_FILES)
    except FileNotFoundError:
        return None


def same(a: Any, b: Any) -> bool:
    """Whether two tokenizers have the same tokens in the same roles and the same chat template."""
    return (
        a.get_vocab() == b.get_vocab()
        and a.special_tokens_map == b.special_tokens_map
        and a.chat_template == b.chat_template
        and set(a.added_tokens_decoder) == set(b.added_tokens_decoder)
    )


def for_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json as transformers 4 reads it, and 5 too."""
    config = dict(config)
    if config.get("tokenizer_class") == NEW_CLASS:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        for name in NEW_FIELDS:
            config.pop(name, None)
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config


def spell_config(file: Path) -> None:
    """Say what config.json says in names of transformers 5 alone in those of 4 too, which would
    take its defaults instead."""
    config = strict_json.read_object(file)
    more: dict[str, Any] = {"torch_dtype": config["dtype"]} if "dtype" in config else {}
    rope = dict(config.get("rope_parameters") or {})
    if (theta := rope.pop("rope_theta", None)) is not None:
        plain = rope.get("rope_type", "default") == "default"
        more |= {"rope_theta": theta, "rope_scaling": None if plain else rope}
    if more:
        file.write_text(json.dumps(config | more, indent=2, sort_keys=True) + "\n")


def write_code(config: Any, origin: Origin, folder: Path) -> None:
    """Copy the Python files beside the model that was trained, packages too, and those beside its
    tokenizer; `auto_map` of a config names them, or the repository they are in, or goes."""
    for place in (origin.model, origin.tokenizer):
        if place is not None and Path(place).is_dir():
            copy_code(Path(place), folder)
    if named := getattr(config, "auto_map", None):
        config.auto_map = settle(named, origin.model)
        if not config.auto_map:
            del config.auto_map


def copy_code(source: Path, folder: Path) -> None:
    packages = [path.parent for path in source.glob("*/__init__.py")]
    files = [*source.glob("*.py"), *(file for p in packages for file in p.rglob("*.py"))]
    for file in files:
        target = folder / file.relative_to(source)
        if file.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            copy(file, target, source)


def copy(file: Path, target: Path, source: Path) -> None:
    """Copy a file of the model folder `source`; ValueError for one that is a symlink out of it, to
    what may be nobody's to publish. The Hub's cache keeps the files of its snapshots elsewhere."""
    home = source.resolve()
    if home.parent.name == "snapshots":
        home = home.parent.parent
    if not file.resolve().is_relative_to(home):
        raise ValueError(f"{file} is a symlink out of its folder: put the file itself there")
    shutil.copyfile(file, target)


def settle(auto_map: Any, origin: str | None) -> dict | None:
    """An auto_map whose code is found: in the folder, or in the repository `origin`; None where
    it is in neither. ValueError for one that names no classes."""
    targets = list(_targets(auto_map.values() if isinstance(auto_map, dict) else [auto_map]))
    if not all(
        isinstance(t, str) and re.fullmatch(r"([\w./-]+--)?[\w.]+\.\w+", t) for t in targets
    ):
        raise ValueError(f"auto_map of {origin}'s configuration names no classes: {auto_map}")
    own = [target.rpartition(".")[0] for target in targets if "--" not in target]
    if origin and all((Path(origin) / f"{name.replace('.', '/')}.py").is_file() for name in own):
        return auto_map
    if not hub.is_id(origin):
        return None

    def there(target: Any) -> Any:
        if isinstance(target, list):
            return [there(one) for one in target]
        return target if target is None or "--" in target else f"{origin}--{target}"

    return {auto: there(target) for auto, target in auto_map.items()}


def _targets(values: Iterable[Any]) -> Iterable[Any]:
    """The classes that an auto_map names: one for an entry, or [slow, fast], either None."""
    for value in values:
        yield from (v for v in value if v is not None) if isinstance(value, list) else (value,)
