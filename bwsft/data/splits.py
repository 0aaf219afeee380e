"""Finds the files of one split in a folder.

Layouts are those of the Hub, such as data/train-00000-of-00003.parquet or SUBSET/test.jsonl, and
plain shards. Files come in the order of their names, part-10 before part-2.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from bwsft.data.file_formats import FORMATS, format_of

SUBSET = "--dataset.subset (bwsft train) or --subset"
SPLIT = "--dataset.split (bwsft train) or --split"
# What `datasets`, huggingface_hub and tokenizers write beside data.
METADATA = {"dataset_info.json", "dataset_infos.json", "metadata.json", "config.json"}
WORDS = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test",
    "evaluation": "test", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation",
}  # fmt: skip


def choose(
    folder: Path, name: str, subset: str | None, split: str | None, usual: str
) -> tuple[str | None, list[Path]]:
    """The split (None if the names tell none) and its files. ValueError, saying what is there, for
    a folder that leaves open what is meant."""
    groups = _groups(folder)
    if not groups:
        known = ", ".join(FORMATS)
        raise ValueError(f"{name} is a folder without data files; known are {known}")
    if subset is not None and subset not in groups:
        raise ValueError(f"{name} has no folder {subset} with data files, only {_listed(groups)}")
    if subset is None and len(groups) > 1:
        suffix = "".join(format_of(next(iter(groups.values()))[0]))
        raise ValueError(
            f"{name} has data files in {_listed(groups)}: name one by {SUBSET}, or give a glob "
            f"such as '{name}/**/*{suffix}'"
        )
    files = groups[subset or next(iter(groups))]
    splits: dict[str | None, list[Path]] = defaultdict(list)
    for file in files:
        splits[split_of(file.relative_to(folder))].append(file)
    if set(splits) == {None} and split in (None, "train"):
        return split, files
    named = [key for key in splits if key is not None]
    if split is not None and split not in named:
        hint = "; of a folder's files no slice can be taken: --dataset.limit takes the first ones"
        raise ValueError(
            f"{name} has no split {split}: its files are of {', '.join(named) or 'none'} ({SPLIT})"
            + (hint if re.search(r"[\[+]", split) else "")
        )
    if split is None and None in splits:
        odd = splits[None][0].relative_to(folder)
        raise ValueError(
            f"{name} has files of {', '.join(named)} and others such as {odd}: name a split by "
            f"{SPLIT}, or give a glob"
        )
    chosen = split or usual_of(named, usual, name)
    return chosen, splits[chosen]


def usual_of(splits: Collection[str], usual: str, name: str) -> str:
    """The split that is meant where none is named: the usual one, or the only one."""
    if usual in splits or len(splits) == 1:
        return usual if usual in splits else next(iter(splits))
    raise ValueError(f"{name} has the splits {', '.join(splits)}: name one by {SPLIT}")


def split_of(path: Path) -> str | None:
    """The split that a path within a folder names, if any."""
    stem = path.name.partition(".")[0]
    if match := re.fullmatch(r"(\w+)-\d{5}-of-\d{5}", stem):
        return match[1]
    for part in (stem, *reversed(path.parts[:-1])):
        for word in re.findall(r"[a-z]+", part.lower()):
            if word in WORDS:
                return WORDS[word]
    return None


def _groups(folder: Path) -> dict[str, list[Path]]:
    """Data files by the folder on the first level that is a subset's; "." for all others."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        inner = path.relative_to(folder)
        hidden = any(part.startswith((".", "_")) for part in inner.parts)
        if hidden or path.name in METADATA or format_of(path)[0] not in FORMATS or path.is_dir():
            continue
        top = inner.parts[0] if len(inner.parts) > 1 else "."
        groups["." if top == "data" or split_of(Path(top)) else top].append(path)
    return groups


def _listed(groups: Collection[str]) -> str:
    return ", ".join("the folder itself" if group == "." else group for group in groups)
