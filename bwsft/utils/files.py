"""Writes files and folders so that a reader never sees half of one, and clears away what killed
writers left. (Who may write where: claims.py.)"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no locks outside POSIX
    fcntl = None

# A name that nobody else gives: what bears it and is not locked was left by a killed writer.
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.bwsft\.tmp")

# No symlink is followed, no pipe waited for.
NOT_THROUGH = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


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
    with file_atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def file_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that becomes `path` by one rename when the block succeeds."""
    path = Path(path)
    with naming(path), _temporary(path, lambda new: new.touch(exist_ok=False)) as temporary:
        with temporary.open("wb") as file:
            yield file
        fsync_path(temporary)
        os.replace(temporary, path)
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
    """Yield a temporary folder that becomes `path` by one rename when the block succeeds. What
    killed writers left beside it goes first."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    with _temporary(path, Path.mkdir) as temporary:
        yield temporary
        for entry in temporary.rglob("*"):
            fsync_path(entry)
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder. It loses its name first: killed half-way, this leaves a temporary folder and
    not half of what others take for whole."""
    hidden = _hidden(path)
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.bwsft.tmp")


@contextlib.contextmanager
def _temporary(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """A new file or folder beside `path`, locked against another process' sweep, and gone after
    the block unless it was renamed."""
    handle = None
    while handle is None:
        temporary = _hidden(path)
        make(temporary)
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked: another one
            handle = os.open(temporary, os.O_RDONLY)
            if flock(handle, shared=True) is False or not is_at(handle, temporary):
                os.close(handle)
                handle = None
    try:
        yield temporary
    finally:
        _remove(temporary)
        os.close(handle)


def _remove(path: Path) -> None:
    """Delete a file or folder as far as that is possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def flock(handle: int, shared: bool = False) -> bool | None:
    """Lock an open file or folder until it is closed; False if another has it, None where the
    system or the file system has no such locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems
        return None
    return True


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def sweep(folder: Path, alone: bool = False) -> None:
    """Remove the temporary files and folders that killed writers left in `folder`: those with a
    name of ours that no process has locked. alone: the caller is the folder's only writer, so that
    they go even where nothing can be locked."""
    for leftover in Path(folder).glob(".*.bwsft.tmp"):
        if not TEMPORARY.fullmatch(leftover.name):
            continue
        try:
            handle = os.open(leftover, os.O_RDONLY | NOT_THROUGH)
        except OSError:  # a symlink, which we never make; or gone
            continue
        try:
            free = flock(handle)
            if free or (free is None and alone):
                _remove(leftover)
        finally:
            os.close(handle)


def sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        digest = hashlib.sha256()
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
