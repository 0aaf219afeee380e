"""Claims a path before anything is written to it, so that nobody's file is overwritten and no file
has two writers. A claim ends with its process, SIGKILL included."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from bwsft.utils.files import NOT_THROUGH, flock, is_at, naming

LOCK = ".lock"
HEAD = 4096  # first bytes of a file, by which its writer is known
OWNER = re.compile(rb"process \d+\s*")


@contextlib.contextmanager
def claimed(
    path: Path, ours: Callable[[bytes], bool] | None = None,
    otherwise: str | Callable[[bytes], str] = "exists: name another file",
) -> Iterator[IO[bytes]]:  # fmt: skip
    """Hold the file `path`, its folders made, as the only process that writes it; yield it open for
    reading and appending. `write_atomic` may replace it meanwhile.

    ValueError for a file with content, unless ours(its first bytes), as `otherwise` (of them) says
    it; for a symlink or anything else that is no file; and for one that another process has
    claimed. A file that was made here and is still empty at the end goes again.
    """
    path = Path(path)
    with _made(path.parent), contextlib.ExitStack() as stack:
        handle, made, free = _hold(path)
        stack.enter_context(handle)
        if free is False:
            raise ValueError(
                f"{path} is being written by another process: wait until it has ended, or name "
                "another file"
            )
        head = handle.read(HEAD)
        # Where nothing can be locked, only who made the file may have it.
        if not (made or (ours(head) if head and ours else not head and free)):
            raise ValueError(f"{path} {otherwise(head) if callable(otherwise) else otherwise}")
        try:
            yield handle
        finally:
            if made and not os.fstat(handle.fileno()).st_size and is_at(handle.fileno(), path):
                path.unlink()


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """A folder and those above it; what was made here and is still empty at the end goes again."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for place in missing:
            with contextlib.suppress(OSError):  # no longer empty
                place.rmdir()


def _hold(path: Path) -> tuple[IO[bytes], bool, bool | None]:
    """(the file, whether it was made here, what locking it gave: `flock`)."""
    flags = os.O_RDWR | os.O_APPEND | NOT_THROUGH
    while True:
        try:
            descriptor, made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            try:
                descriptor, made = os.open(path, flags), False
            except FileNotFoundError:  # gone again
                continue
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise ValueError(f"{path} is a symlink: name the file itself") from None
                if error.errno == errno.EISDIR:
                    raise ValueError(f"{path} is a folder: name a file") from None
                raise
        handle = os.fdopen(descriptor, "r+b", buffering=0)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            handle.close()
            raise ValueError(f"{path} is not a file: name another one")
        free = flock(descriptor)
        if free is False or is_at(descriptor, path):
            return handle, made, free
        handle.close()  # its owner removed it before it was locked here


def lock_folder(folder: Path) -> IO[bytes]:
    """Take a run folder for this process; ValueError if another one has it.

    The lock is on `folder`/.lock (flock) and ends with the returned file: when it is closed, or
    with the process. Where the system or the file system has no locks, it is no more than a file.
    """
    path = Path(folder) / LOCK
    handle, _, free = _hold(path)
    said = handle.read(40)
    if free is False:
        handle.close()
        owner = said.decode(errors="replace").strip() or "another process"
        raise ValueError(
            f"{folder} is being written by {owner}: wait until it has ended, or stop it"
        )
    if free is None:
        warnings.warn(f"can't lock {path} (no locks here): start no second run", stacklevel=2)
    if not said or OWNER.fullmatch(said):  # nobody else's content is touched
        with contextlib.suppress(OSError):  # a full disk: the name is a courtesy
            handle.truncate(0)
            handle.write(f"process {os.getpid()}\n".encode())
    return handle


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Hold a folder, made if need be, for what this process alone writes there. ValueError if it
    holds more than hidden files. If it then holds its lock alone, it goes again."""
    folder = Path(folder)
    with _made(folder), lock_folder(folder):
        if any(not name.startswith(".") for name in os.listdir(folder)):
            raise ValueError(f"{folder} exists: another process was quicker, name another folder")
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if os.listdir(folder) == [LOCK]:
                    (folder / LOCK).unlink()


def locked(folder: Path) -> bool | None:
    """Whether a process has taken a run folder; None where the system has no locks to ask."""
    try:
        handle = os.open(Path(folder) / LOCK, os.O_RDONLY | NOT_THROUGH)
    except FileNotFoundError:
        return False
    try:
        free = flock(handle, shared=True)  # only for a moment
    finally:
        os.close(handle)
    return None if free is None else not free
