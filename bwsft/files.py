"""Writing files and folders so that a reader never sees half of one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file through a temporary neighbour, fsync and rename."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


@contextlib.contextmanager
def folder_atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` by one rename when the block succeeds."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        for entry in temporary.rglob("*"):
            fsync_path(entry)
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        digest = hashlib.sha256()
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
