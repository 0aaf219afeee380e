"""Keeps token ids on the disk: a set in one safetensors file, written whole, checked and mapped on
load; and the shards that it is made from, a folder each. Neither is ever held in memory."""

from __future__ import annotations

import hashlib
import json
import mmap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bwsft.utils import strict_json
from bwsft.utils.files import file_atomic, folder_atomic, sha256

Arrays = dict[str, np.ndarray]
COLUMNS = {
    "tokens": np.dtype("<i4"),
    "prompt_lengths": np.dtype("<i8"),
    "response_lengths": np.dtype("<i8"),
    "sample_ids": np.dtype("<i8"),
}
# The file holds its tensors in safetensors' own order: wide types first, then by name.
ORDER = sorted(COLUMNS, key=lambda name: (-COLUMNS[name].itemsize, name))
DTYPES = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}  # by safetensors' names
FACTS = "facts.json"
PIECE = 1 << 20  # bytes read, or tokens looked at, at once


def content_digest(columns: Mapping[str, tuple[int, Iterable[Any]]]) -> str:
    """SHA-256 of names, types, lengths and bytes of columns, given as (values, parts of their
    bytes); about 1 s per GB."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        count, parts = columns[name]
        digest.update(f"{name} {COLUMNS[name]} {(count,)} ".encode())
        for part in parts:
            digest.update(part)
    return digest.hexdigest()


def held(arrays: Arrays) -> dict[str, tuple[int, Iterable[Any]]]:
    """Arrays in memory, for content_digest."""
    return {name: (len(a), [np.ascontiguousarray(a).view(np.uint8)]) for name, a in arrays.items()}


def save_shard(
    folder: Path, parts: Iterable[list[np.ndarray]], facts: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Write a shard, whole or not at all: `parts` of its columns in COLUMNS' order, as they come,
    and what `facts` says once they are all there; returns that."""
    with folder_atomic(folder) as new:
        files = [(new / name).open("wb") for name in COLUMNS]
        try:
            for part in parts:
                for file, column in zip(files, part, strict=True):
                    file.write(column.tobytes())
        finally:
            for file in files:
                file.close()
        digests = {name: sha256(new / name) for name in COLUMNS}
        found = facts()
        (new / FACTS).write_text(json.dumps(found | {"sha256": digests}))
    return found


def shard_facts(folder: Path) -> dict[str, Any] | None:
    """The facts of a shard; None where it is not there or not what was written."""
    try:
        facts = strict_json.read_object(folder / FACTS)
        digests = facts.pop("sha256")
        return facts if {name: sha256(folder / name) for name in COLUMNS} == digests else None
    except (OSError, ValueError, KeyError):
        return None


def save(path: Path, shards: list[Path], facts: dict[str, Any]) -> None:
    """Write the set that shards are, one after the other, with the JSON object `facts`."""
    sizes = {name: sum((s / name).stat().st_size for s in shards) for name in COLUMNS}
    counts = {name: size // COLUMNS[name].itemsize for name, size in sizes.items()}
    files = {name: [shard / name for shard in shards] for name in COLUMNS}
    columns = {name: (counts[name], _content(files[name])) for name in COLUMNS}
    facts = facts | {"digest": content_digest(columns)}
    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(facts)}}
    start = 0
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    for name in ORDER:
        header[name] = {
            "dtype": kinds[COLUMNS[name]], "shape": [counts[name]],
            "data_offsets": [start, start := start + sizes[name]],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file_atomic(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ORDER:
            for part in _content(files[name]):
                file.write(part)


def load(path: Path) -> tuple[Arrays, dict[str, Any]] | None:
    """What `save` wrote, the arrays mapped read-only; None where there is no file or, with a
    warning, where it is damaged."""
    if not path.exists():
        return None
    try:
        arrays, facts, places = _map(path)
        columns = {
            name: (len(a), _content([path], places[name], a.nbytes)) for name, a in arrays.items()
        }
        if content_digest(columns) != facts["digest"]:
            raise ValueError("its content doesn't match its digest")
    except Exception as error:  # a wrong type anywhere in its header: it is built again anyway
        warnings.warn(f"rebuilding the damaged token cache {path}: {error}", stacklevel=2)
        return None
    return arrays, facts


def pieces(array: np.ndarray, size: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """(start, `size` values from there, or PIECE) through a long array, of which, if it is mapped,
    the process keeps no more than one piece in memory."""
    size = size or PIECE
    for start in range(0, len(array), size):
        yield start, array[start : start + size]
        mapped = getattr(array, "_mmap", None)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def _content(files: list[Path], start: int = 0, size: int | None = None) -> Iterator[bytes]:
    """The bytes of files, one after the other; of each: `size` from `start`, or all."""
    for path in files:
        with path.open("rb") as file:
            file.seek(start)
            left = path.stat().st_size - start if size is None else size
            while left and (part := file.read(min(PIECE, left))):
                left -= len(part)
                yield part


def _map(path: Path) -> tuple[Arrays, dict[str, Any], dict[str, int]]:
    """(arrays, facts, where each array begins). A safetensors file is 8 bytes of header length, a
    JSON header, then the tensors' bytes."""
    if not path.is_file():
        raise ValueError("it is not a file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError("its header is cut short")
        header = strict_json.parse(file.read(length))
    facts = strict_json.parse(header.pop("__metadata__")["facts"])
    arrays, places = {}, {}
    for name, entry in header.items():
        dtype, (count,) = DTYPES[entry["dtype"]], entry["shape"]
        start = 8 + length + entry["data_offsets"][0]
        if not 8 + length <= start <= size - count * dtype.itemsize or count < 0:
            raise ValueError(f"{name} is not within the file")
        places[name] = start
        if count:  # an empty array can't be mapped
            arrays[name] = np.memmap(path, dtype, mode="r", offset=start, shape=(count,))
        else:
            arrays[name] = np.empty(0, dtype)
    return arrays, facts, places
