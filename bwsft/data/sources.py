"""Opens every source of records: files, folders and globs of shards, Hub data sets, Python objects.

`datasets` is imported when a source needs it.
"""

from __future__ import annotations

import glob
import hashlib
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwsft.data import file_formats, splits
from bwsft.data.file_formats import FORMATS, Row, format_of, places
from bwsft.data.splits import SPLIT, SUBSET
from bwsft.utils import hub


@dataclass(frozen=True)
class Source:
    """Where records come from. `digest` changes with the content, None if it isn't worth caching;
    `rows()` yields (place, raw value) in source order, the raw value of JSONL being bytes; what is
    read as a stream says about how many bytes it has."""

    name: str
    digest: str | None
    total: int | None
    rows: Callable[[], Iterator[Row]]
    size: int = 0


def open_source(
    source: Any, subset: str | None = None, split: str | None = None, usual_split: str = "train"
) -> Source:
    """Opens a file, a folder or glob of files, a Hub id, or records in Python: a list, another
    sequence, a `datasets.Dataset` or DatasetDict, a pandas DataFrame; a Source is one already.

    `subset` is the configuration of a Hub data set (the folder in a copy of one); `split` defaults
    to `usual_split`. Raises ValueError if there is nothing to read, naming the source.
    """
    if isinstance(source, Source):
        return source
    if not isinstance(source, str | Path):
        return _open_object(source, subset, split, usual_split)
    name, path = str(source), Path(source).expanduser()
    if not name:
        raise ValueError("the name of the data is empty")
    known = format_of(path)[0] in FORMATS
    if path.is_dir():
        return _open_folder(path, name, subset, split, usual_split)
    if glob.has_magic(name) and not path.exists():
        _refuse(name, "a glob", subset, split)
        found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        return _open_files([match for match in found if not match.is_dir()], name)
    if hub.is_id(name) and not known:
        return _open_hub(name, subset, split or usual_split)
    if not path.exists():
        raise ValueError(f"data file {name} doesn't exist")
    if not known:
        found = format_of(path)[0] or path.suffix
        raise ValueError(f"{name}: can't tell the format from {found!r}; {_known()}")
    _refuse(name, "one file", subset, split)
    return _open_files([path], name)


def _known() -> str:
    archives = ", ".join(file_formats.ARCHIVES)
    return f"known are {', '.join(FORMATS)}, each also with {archives}"


def _refuse(name: str, what: str, subset: str | None, split: str | None) -> None:
    """ValueError if a subset or split is asked of what has none."""
    for value, flag in ((subset, SUBSET), (split, SPLIT)):
        if value is not None:
            raise ValueError(f"{name} is {what}: {flag} is for Hub data sets and folders")


def _open_files(paths: list[Path], name: str) -> Source:
    """Files of one format, one after the other."""
    for path in paths:
        if not path.is_file():  # a pipe would wait for a writer, and can't be read twice
            raise ValueError(f"{path} is not a regular file; write the records to one first")
    formats = sorted({format_of(path)[0] for path in paths})
    if not formats:
        raise ValueError(f"no data file matches {name}; {_known()}")
    if unknown := [form for form in formats if form not in FORMATS]:
        odd = next(path for path in paths if format_of(path)[0] == unknown[0])
        raise ValueError(f"{odd}: can't tell the format from {unknown[0]!r}; {_known()}")
    if len(formats) > 1:
        raise ValueError(
            f"{name} has files of several formats ({', '.join(formats)}): choose some by a glob "
            f"such as '*{formats[0]}'"
        )
    plain = [path.with_suffix("") if format_of(path)[1] else path for path in paths]
    if twice := [path for path, count in Counter(plain).items() if count > 1]:
        raise ValueError(f"{name} has {twice[0]} more than once, compressed and not: remove one")
    if not any(path.stat().st_size for path in paths):
        raise ValueError(f"data file {name} is empty")
    asked = Path(name).expanduser()
    named = {path: name if path == asked else str(path) for path in paths}
    found = {path: file_formats.digest(path, label) for path, label in named.items()}
    digest = hashlib.sha256(" ".join(text for text, _ in found.values()).encode()).hexdigest()
    counts = [count for _, count in found.values() if count is not None]

    def rows() -> Iterator[Row]:
        for path, label in named.items():
            yield from file_formats.rows(path, label, found[path][0])

    total = sum(counts) if len(counts) == len(paths) else None
    streamed = FORMATS[formats[0]] is not FORMATS[".json"]
    size = sum(path.stat().st_size for path in paths) if streamed else 0
    return Source(name, f"files:{digest}", total, rows, size)


def _open_folder(
    path: Path, name: str, subset: str | None, split: str | None, usual: str
) -> Source:
    """What `save_to_disk` wrote, a copy of a Hub repository, or splits."""
    kept = [(path / file).is_file() for file in ("dataset_dict.json", "state.json")]
    if not any(kept):
        chosen, files = splits.choose(path, name, subset, split, usual)
        return _open_files(files, f"{name} ({chosen})" if chosen else name)
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # of datasets, pyarrow and the file system
        raise ValueError(f"can't read {name}: {_reason(error)}") from error
    return _open_object(loaded, subset, split, usual, name)


def _open_hub(name: str, subset: str | None, split: str) -> Source:
    import datasets
    from huggingface_hub import constants

    options = {"name": subset} if subset else {}
    try:
        if not constants.HF_HUB_OFFLINE and hub.no_network():
            raise ConnectionError  # `datasets` would try for half a minute
        table = datasets.load_dataset(name, split=split, **options)
    except Exception as error:  # datasets, pyarrow, pandas and the network raise many kinds
        what = f"can't read {name} (no such file, so taken as a Hub id)"
        raise ValueError(f"{what}: {_reason(error)}") from error
    return _table_source(table, name, f"{name} ({split})")


def _table_source(table: Any, name: str, place: str) -> Source:
    """A table of `datasets`. Its own fingerprint tells how it was made, and not what the files now
    hold that it maps; both are in the digest."""
    content = _content(table)

    def rows() -> Iterator[Row]:
        yield from places(map(file_formats.without_nulls, table), place)
        if table.cache_files and _content(table) != content:
            raise file_formats.changed(name)

    digest = f"dataset:{table._fingerprint}:{content}"
    return Source(name, digest, len(table), rows, table.data.nbytes)


def _content(table: Any) -> str:
    """SHA-256 of a table's records, as Arrow writes them."""
    from pyarrow import ipc

    sink = _Digest()
    for batch in table.with_format("arrow").iter(file_formats.BATCH):
        with ipc.new_stream(sink, batch.schema) as stream:
            stream.write_table(batch)
    return sink.found.hexdigest()


class _Digest(io.RawIOBase):
    """SHA-256 of what is written."""

    def __init__(self):
        self.found = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.found.update(content)
        return memoryview(content).nbytes


def _reason(error: Exception) -> str:
    """What an error of `datasets` means, in one line, with what to do about it."""
    text = str(error.__cause__ or error).strip()
    listed = re.search(r"\[('.*?')\]", text)
    choices = listed[1].replace("'", "") if listed else "(see its page)"
    if "Config name is missing" in text:
        return f"it has several configurations: name one of {choices} by {SUBSET}"
    if "BuilderConfig" in text:
        return f"it has no such configuration: name one of {choices} by {SUBSET}"
    if "Unknown split" in text:
        return f"it has no such split: name one of {choices} by {SPLIT}"
    if "instruction format" in text:
        return f"its split must be like train or train[:100]: {SPLIT}"
    if isinstance(error, ConnectionError):
        why = hub.no_network() or "the Hub has failed to answer"
        return f"{why}; a local file or folder can be given instead"
    return text.split("\n")[0][:300]


def _open_object(
    source: Any, subset: str | None, split: str | None, usual: str, name: str | None = None
) -> Source:
    """Records in memory, or tables of `datasets`."""
    label = name or f"the {type(source).__name__}"
    _refuse(label, "no Hub data set", subset, None)
    if (datasets := sys.modules.get("datasets")) is not None:
        if isinstance(source, datasets.IterableDataset | datasets.IterableDatasetDict):
            raise ValueError(
                f"{label} is a stream without a length: give "
                "datasets.Dataset.from_list(list(stream)), or of its first records, stream.take(n)"
            )
        if isinstance(source, datasets.DatasetDict):
            split = split or splits.usual_of(list(source), usual, label)
            return _open_table(dict(source), split, f"{label} ({split})")
        if isinstance(source, datasets.Dataset):
            own = str(source.split or usual)
            return _open_table({own: source}, split or own, label)
    _refuse(label, "no Hub data set", None, split)
    if (pandas := sys.modules.get("pandas")) and isinstance(source, pandas.DataFrame):
        source = source.astype(object).where(source.notna(), None).to_dict("records")
    if isinstance(source, Mapping | bytes) or not hasattr(source, "__len__"):
        raise ValueError(f"{label} is no source of records: give a list of them")
    return Source(label, None, len(source), lambda: places(source, label))


def _open_table(tables: dict[str, Any], split: str, name: str) -> Source:
    """The records of a split of `datasets` tables, which may be a slice such as train[:100]."""
    import datasets

    try:
        lengths = {key: len(table) for key, table in tables.items()}
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except Exception as error:  # ValueError, AssertionError
        raise ValueError(f"{name}: {_reason(error)}") from error
    chosen = []
    for part in parts:
        table, rows = tables[part.splitname], range(part.from_, part.to)
        chosen.append(table if len(rows) == len(table) else table.select(rows))
    table = datasets.concatenate_datasets(chosen) if len(chosen) > 1 else chosen[0]
    if table.format["type"] not in (None, "custom"):  # custom: a transform of the user's
        table = table.with_format(None)
    return _table_source(table, name, name)
