"""What runs, answers and results are made from, by content: digests of files, and what changed.

A content is {"files": {name: SHA-256}} of one folder, with the "commit" of what came from the Hub.
It stands as JSON in a checkpoint's state.json; answers and results carry its short digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bwsft.utils import hub, strict_json
from bwsft.utils.files import cache_folder, sha256, write_atomic

Content = dict[str, Any]
LARGE = 16 << 20  # bytes from which a file's digest is kept: a smaller one is read in no time
SETTLED = 10  # seconds without a change after which a file's times tell every later one
HEX = 12  # digits of a short digest


def content_of(folder: Path, names: Iterable[str]) -> Content:
    """The content of those of the named files that a folder holds. OSError for one that can't be
    read, ValueError for one that is being written."""
    files = {name: file_digest(folder / name) for name in names if (folder / name).is_file()}
    commit = hub.commit_of(folder)
    return {"files": files} | ({"commit": commit} if commit else {})


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes. That of a large one is kept in the cache folder (its own may be
    read-only, or somebody else's) for as long as the file is the same one to the file system.

    Size and mtime alone would not tell: a copy may keep both. Every write moves the ctime, which
    nobody can set; a file that changed a moment ago isn't noted, as its next write may fall into
    the same tick of the clock. What a disk damages by itself moves no time.
    """
    path = Path(path).resolve()
    before, began = _stamp(path), time.time()
    note = cache_folder() / "digests" / f"{short(str(path))}.json"
    # Elsewhere than on POSIX the ctime is that of creation.
    noted = os.name == "posix" and before["size"] >= LARGE
    if noted and (found := _read(note)).get("stamp") == before:
        return found["sha256"]
    digest = sha256(path)
    if _stamp(path) != before:
        raise ValueError(f"{path} is being written: wait until it is whole")
    if noted and before["changed"] / 1e9 < began - SETTLED:
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(note, json.dumps({"file": str(path), "stamp": before, "sha256": digest}))
    return digest


def _stamp(path: Path) -> dict[str, int]:
    found = path.stat()
    return {
        "device": found.st_dev, "inode": found.st_ino, "size": found.st_size,
        "modified": found.st_mtime_ns, "changed": found.st_ctime_ns,
    }  # fmt: skip


def _read(note: Path) -> dict[str, Any]:
    """A note of this module; {} for none, or what is none."""
    try:
        found = strict_json.read_object(note)
    except (OSError, ValueError):
        return {}
    digest = found.get("sha256")
    return found if isinstance(digest, str) and len(digest) == 64 else {}


def short(value: Any) -> str:
    """12 hex digits of a JSON value; of a content's files alone: where they came from does not
    matter."""
    value = value.get("files", value) if isinstance(value, Mapping) else value
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:HEX]


def difference(before: Content, now: Content) -> tuple[str, str] | None:
    """(the first file that differs, what happened to it); None between equal contents."""
    old, new = before.get("files", {}), now["files"]
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            return name, "is gone"
        if name not in old:
            return name, "is new"
        if old[name] != new[name]:
            return name, "has changed"
    return None


def refuse_other(before: Content, now: Content, folder: Path | str, since: Path | str) -> None:
    """ValueError, naming the first file, unless the content of `folder` is still what it was
    `since` something was made from it."""
    if (found := difference(before, now)) is None:
        return
    commits = [content.get("commit") for content in (before, now)]
    moved = f" (commit {commits[0]} then, {commits[1]} now)" if commits[0] != commits[1] else ""
    name, what = found
    raise ValueError(
        f"{Path(folder) / name} {what} since {since} was written{moved}: put back what it was, or "
        "start anew from what it is"
    )


def others(before: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """The names of `now` that have another digest in `before`, or none."""
    return [name for name in now if before.get(name) != now[name]]
