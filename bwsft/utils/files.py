"""Writes files and folders so that a reader never sees half of one, nor a second writer."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no locks outside POSIX
    fcntl = None

LOCK = ".lock"


def cache_folder(chosen: str | Path | None = None) -> Path:
    """Where what can be made again is kept: the folder that is asked for, $BWSFT_CACHE or
    ~/.cache/bwsft."""
    usual = os.environ.get("BWSFT_CACHE") or Path.home() / ".cache" / "bwsft"
    return Path(chosen or usual).expanduser()


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
        with naming(path):
            temporary.write_bytes(data)
            fsync_path(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block says which file it is about: that of a write to a full disk doesn't,
    and a temporary file's name helps nobody."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


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


def remove_folder(path: Path) -> None:
    """Delete a folder. It loses its name first: killed half-way, this leaves a temporary folder and
    not half of what others take for whole."""
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def lock_folder(folder: Path) -> IO[bytes]:
    """Take a run folder for this process; ValueError if another one has it.

    The lock is on `folder`/.lock (flock) and ends with the returned file: when it is closed, or
    with the process, SIGKILL included. Where the system or the file system has no locks, it is no
    more than a file.
    """
    path = Path(folder) / LOCK
    handle = open(path, "a+b", buffering=0)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        owner = handle.read(40).decode(errors="replace").strip() or "another process"
        handle.close()
        raise ValueError(
            f"{folder} is being written by {owner}: wait until it has ended, or stop it"
        ) from None
    except OSError as error:  # some network file systems have none
        warnings.warn(f"can't lock {path} ({error.strerror}): start no second run", stacklevel=2)
    with contextlib.suppress(OSError):  # a full disk: the name is a courtesy
        handle.truncate(0)
        handle.write(f"process {os.getpid()}\n".encode())
    return handle


def locked(folder: Path) -> bool | None:
    """Whether a process has taken a run folder; None where the system has no locks to ask."""
    path = Path(folder) / LOCK
    if not path.exists():
        return False
    if fcntl is None:
        return None
    with open(path, "rb") as handle:  # a shared lock, and only for a moment
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
    return False


def sweep(folder: Path) -> None:
    """Remove the temporary files and folders that killed writers left in `folder`, whose only
    writer must be the caller."""
    for leftover in Path(folder).glob(".*.tmp"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        digest = hashlib.sha256()
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
