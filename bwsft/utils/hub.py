"""The Hugging Face Hub: files of a repository, and what to say where there is no network."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from pathlib import Path

TIMEOUT = 10  # seconds
ID = re.compile(r"[\w.-]+/[\w.-]+")
RUNS = "runs"  # the folder of runs: never a name on the Hub


def is_id(name: str | None) -> bool:
    """Whether a name can be one of the Hub's: ORG/NAME, and nothing here is called so."""
    named = bool(name) and ID.fullmatch(name) is not None
    return named and not name.startswith(f"{RUNS}/") and not Path(name).exists()


@functools.cache
def reachable() -> bool:
    """Whether the Hub answers at all. Asked once in a process, as its libraries would try again for
    minutes, file by file."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception:  # of an HTTP library that differs between versions
        return False
    return True


def no_network() -> str | None:
    """Why nothing can be downloaded; None where it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and it was not downloaded before"
    return None if reachable() else "the Hub can't be reached over the network"


def split_name(name: str) -> tuple[str, str | None]:
    """(repository, revision or None) of OWNER/NAME@REVISION."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def at_commit(name: str, commit: str | None) -> str:
    """The name of a repository at a commit, if one is given and the name says no revision."""
    repository, revision = split_name(name)
    return name if revision or not commit else f"{repository}@{commit}"


def commit_of(folder: Path) -> str | None:
    """The commit of a downloaded snapshot; None for any other folder."""
    kept = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    return folder.name if kept else None


def snapshot(name: str, patterns: Collection[str]) -> Path:
    """The folder with those files of a repository (OWNER/NAME, or OWNER/NAME@REVISION), downloaded
    if there is a network and they are not here yet. FileNotFoundError, in one sentence, where they
    can't be had."""
    from huggingface_hub import errors, snapshot_download

    if Path(name).parts[:1] == (RUNS,):
        raise FileNotFoundError(f"there is no {name}: name a run that is here, or a model")
    why = no_network()
    options = {"allow_patterns": list(patterns), "local_files_only": why is not None}
    try:
        repository, revision = split_name(name)
        return Path(snapshot_download(repository, revision=revision, **options))
    except errors.GatedRepoError as error:
        cause, reason = error, "accept the terms on its page, then `hf auth login`"
    except errors.RepositoryNotFoundError as error:
        cause, reason = error, "the Hub knows no such repository, or not to you (`hf auth login`)"
    except (OSError, ValueError) as error:
        cause, reason = error, why or f"{type(error).__name__}, {str(error).partition(chr(10))[0]}"
    raise FileNotFoundError(
        f"{name} is neither a folder here nor a repository that could be downloaded: "
        f"{reason:.300}; a local folder can be given instead"
    ) from cause
