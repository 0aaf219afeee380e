"""Reads one file of records: JSONL, JSON, CSV, TSV or Parquet, compressed or not.

Rows are (place, raw value) in the file's order, the raw value of JSONL being the line's bytes.
Everything but a JSON document and a compressed Parquet file is read as a stream.
"""

from __future__ import annotations

import bz2
import csv
import hashlib
import io
import itertools
import lzma
import reprlib
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from bwsft.utils import lines, strict_json

Row = tuple[str, Any]
CHUNK = 1 << 14  # bytes of an archive inflated at once: zstd may make 2^15 times as many of them
BATCH = 1024  # Parquet rows
LONGEST_FIELD = 2**31 - 1  # of a CSV; Python's default of 128 kB is less than a long answer


def _zstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


ARCHIVES: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": _zstd,
}


def format_of(path: Path) -> tuple[str, str]:
    """The format's suffix, of FORMATS or not, and the archive's, "" if there is none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    archive = suffixes.pop() if suffixes and suffixes[-1] in ARCHIVES else ""
    return suffixes[-1] if suffixes else "", archive


def open_bytes(path: Path, name: str) -> IO[bytes]:
    """The content of a file, inflated if its last suffix says so. Reading raises ValueError where
    the archive is damaged or cut short."""
    archive = format_of(path)[1]
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"can't read {name}: {error.strerror}") from error
    if not archive:
        return file
    return io.BufferedReader(_Inflated(_inflate(file, ARCHIVES[archive], name)))


def read_text(path: Path, name: str) -> str:
    """The whole text of a file, inflated; ValueError for what is not UTF-8."""
    with open_bytes(path, name) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: not UTF-8 text (byte {error.start})") from error


def digest(path: Path, name: str) -> tuple[str, int | None]:
    """SHA-256 of the file's format and content, and the records of a JSONL, as its line ends. What
    is wrong with an archive is found here: a damaged one may inflate to other text for a while."""
    form = format_of(path)[0]
    with open_bytes(path, name) as file:
        found, count = _digest(form, file)
    return found, count if FORMATS[form] is _json_lines else None


def _digest(form: str, file: IO[bytes]) -> tuple[str, int]:
    """SHA-256 of a format and all bytes of a file, and its line feeds."""
    found, count = hashlib.sha256(f"{form}:".encode()), 0
    while chunk := file.read(1 << 20):
        found.update(chunk)
        count += chunk.count(b"\n")
    return found.hexdigest(), count


def rows(path: Path, name: str, expected: str) -> Iterator[Row]:
    """The records of a file whose format is one of FORMATS, with their places. Who reads them all
    gets a ValueError at the end unless the bytes that were read have the `digest` expected."""
    form = format_of(path)[0]
    with open_bytes(path, name) as file:
        if FORMATS[form] is _parquet and file.seekable():  # read here and there
            yield from _parquet(file, name)
            file.seek(0)
            found = _digest(form, file)[0]
        else:
            hashed = _Hashed(file, hashlib.sha256(f"{form}:".encode()))
            yield from FORMATS[form](io.BufferedReader(hashed, 1 << 16), name)
            found = hashed.digest.hexdigest()
    if found != expected:
        raise changed(name)


def changed(name: str) -> ValueError:
    """Of a source whose records are not those that its digest is of."""
    return ValueError(f"{name} has changed while it was read: give the command again")


def places(values: Iterable[Any], name: str) -> Iterator[Row]:
    for number, value in enumerate(values, start=1):
        yield f"{name}, record {number}", value


def without_nulls(value: Any, column: bool = True) -> Any:
    """A value of Arrow without the nulls of objects within its columns: a struct has the fields of
    all records, and what a record did not have is null there."""
    if isinstance(value, dict):
        return {k: without_nulls(v, False) for k, v in value.items() if column or v is not None}
    return [without_nulls(v, False) for v in value] if isinstance(value, list) else value


def _inflate(file: IO[bytes], new_engine: Callable[[], Any], name: str) -> Iterator[bytes]:
    """The content of an archive of one or several members. Every engine has the interface of
    bz2.BZ2Decompressor: decompress, eof and unused_data."""
    engine, done = new_engine(), 0
    with file:
        while packed := file.read(CHUNK):
            done += len(packed)
            while packed:
                if engine.eof:
                    engine = new_engine()
                try:
                    yield engine.decompress(packed)
                except Exception as error:  # every library has its own
                    place = f"near byte {done - len(packed):,} of the archive"
                    raise ValueError(f"{name} is damaged {place}: {error}") from error
                packed = engine.unused_data if engine.eof else b""
    if done and not engine.eof:
        raise ValueError(f"{name} is cut short: the archive's {done:,} bytes are not all of it")


class _Inflated(io.RawIOBase):
    """Chunks of bytes as a file."""

    def __init__(self, chunks: Iterator[bytes]):
        self.chunks, self.rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.rest:
            chunk = next(self.chunks, None)
            if chunk is None:
                return 0
            self.rest = memoryview(chunk)
        count = min(len(buffer), len(self.rest))
        buffer[:count], self.rest = self.rest[:count], self.rest[count:]
        return count


class _Hashed(io.RawIOBase):
    """A file whose bytes go into a digest as they are read."""

    def __init__(self, file: IO[bytes], digest: Any):
        self.file, self.digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.file.readinto(buffer)
        self.digest.update(memoryview(buffer)[:count])
        return count


def _json_lines(file: IO[bytes], name: str) -> Iterator[Row]:
    for number, line in lines.numbered(file):
        yield f"{name}, line {number}", line


def _json(file: IO[bytes], name: str) -> Iterator[Row]:
    """An array of records, or what JSONL holds under another name."""
    content = file.read()
    try:
        text = content.decode("utf-8-sig")
        whole = [line for line in lines.split(text) if line.strip()]
        if all(line.startswith("{") and line.rstrip().endswith("}") for line in whole):
            found = [strict_json.parse(line) for line in whole]
        else:
            found = strict_json.parse(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"can't read {name}: it is not UTF-8 (byte {error.start + 1})") from error
    except ValueError as error:
        raise ValueError(f"can't read {name}: it {error}") from error
    yield from places(found if isinstance(found, list) else [found], name)


def _table(file: IO[bytes], name: str, delimiter: str = ",") -> Iterator[Row]:
    """Rows of a CSV with a header, every field as text: an answer column of bare numbers stays
    what it is. A row that is too short has empty fields."""
    csv.field_size_limit(LONGEST_FIELD)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        filled = (row for row in reader if row)
        header = next(filled, [])
        if twice := sorted({column for column in header if header.count(column) > 1}):
            raise ValueError(f"{name} has several columns {reprlib.repr(twice[0])}: keep one")
        for number, row in enumerate(filled, start=1):
            if any(row[len(header) :]):
                raise ValueError(
                    f"can't read {name}: line {reader.line_num} has {len(row)} fields, the header "
                    f"{len(header)}; a field with {delimiter!r} in it needs quotes"
                )
            fields = itertools.zip_longest(header, row[: len(header)], fillvalue="")
            yield f"{name}, record {number}", dict(fields)
    except UnicodeDecodeError as error:
        place = f"after line {reader.line_num}, {error.reason}"
        raise ValueError(f"{name} is not UTF-8 ({place})") from error
    except csv.Error as error:
        raise ValueError(f"can't read {name}: line {reader.line_num}: {error}") from error


def _tabbed(file: IO[bytes], name: str) -> Iterator[Row]:
    yield from _table(file, name, delimiter="\t")


def _parquet(file: IO[bytes], name: str) -> Iterator[Row]:
    """Rows of a Parquet file, with the columns decoded that `datasets` writes as JSON."""
    import datasets
    from pyarrow import parquet

    with tempfile.TemporaryFile() as seekable:
        if not file.seekable():
            shutil.copyfileobj(file, seekable)
            file = seekable
        try:
            table = parquet.ParquetFile(file)
            features = datasets.Features.from_arrow_schema(table.schema_arrow)
            batches = (batch.to_pylist() for batch in table.iter_batches(BATCH))
            decoded = map(features.decode_example, itertools.chain.from_iterable(batches))
            yield from places(map(without_nulls, decoded), name)
        except Exception as error:  # pyarrow raises many kinds
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"can't read {name}: {reason[:300]}") from error


FORMATS: dict[str, Callable[[IO[bytes], str], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _table,
    ".tsv": _tabbed,
    ".parquet": _parquet,
}
