"""Keeps token arrays in one safetensors file: written whole, checked and mapped on load."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from bwsft.utils import strict_json
from bwsft.utils.files import sweep, write_atomic

Arrays = dict[str, np.ndarray]
# Safetensors' names of the two dtypes that a token set needs.
DTYPES = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


def content_digest(arrays: Arrays) -> str:
    """SHA-256 of names, shapes and bytes; about 1 s per GB."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(memoryview(array.reshape(-1)).cast("B"))
    return digest.hexdigest()


def save(path: Path, arrays: Arrays, facts: dict[str, Any]) -> None:
    """Writes int32/int64 `arrays` and the JSON object `facts`; `facts["digest"]` must be their
    content_digest. A folder that can't be written costs a warning, not the run."""
    from safetensors import numpy as safetensors

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        write_atomic(path, safetensors.save(arrays, metadata={"facts": json.dumps(facts)}))
    except OSError as error:
        warnings.warn(f"can't cache tokens in {path.parent}: {error.strerror}", stacklevel=2)


def load(path: Path) -> tuple[Arrays, dict[str, Any]] | None:
    """What `save` wrote, the arrays mapped read-only; None where there is no file or, with a
    warning, where it is damaged."""
    if not path.exists():
        return None
    try:
        arrays, facts = _map(path)
        if content_digest(arrays) != facts["digest"]:
            raise ValueError("its content doesn't match its digest")
    except Exception as error:  # a wrong type anywhere in its header: it is built again anyway
        warnings.warn(f"rebuilding the damaged token cache {path}: {error}", stacklevel=2)
        return None
    return arrays, facts


def _map(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """A safetensors file is 8 bytes of header length, a JSON header, then the tensors' bytes."""
    if not path.is_file():
        raise ValueError("it is not a file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError("its header is cut short")
        header = strict_json.parse(file.read(length))
    facts = strict_json.parse(header.pop("__metadata__")["facts"])
    arrays = {}
    for name, entry in header.items():
        dtype, (count,) = DTYPES[entry["dtype"]], entry["shape"]
        start = 8 + length + entry["data_offsets"][0]
        if not 8 + length <= start <= size - count * dtype.itemsize or count < 0:
            raise ValueError(f"{name} is not within the file")
        if count:  # an empty array can't be mapped
            arrays[name] = np.memmap(path, dtype, mode="r", offset=start, shape=(count,))
        else:
            arrays[name] = np.empty(0, dtype)
    return arrays, facts
