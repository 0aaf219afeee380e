"""Tokenizes a data set into the token cache, shard by shard and in several processes.

Every process reads the whole source, so that each sees whether it still is what its digest says,
and takes a shard that nobody has taken whenever it is done with one. Shards that are there stay: an
interrupted preparation goes on where it was. What the other processes leave undone this one makes,
and it joins the shards; the file is the same for any number of processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bwsft.data import sources, token_cache
from bwsft.data import tokenizer as tokenizer_module
from bwsft.data.chat_template import Prepared, Template
from bwsft.data.examples import DataOptions, ExampleReader, joined
from bwsft.utils.claims import lock_folder, locked
from bwsft.utils.files import remove_folder, sweep
from bwsft.utils.freed_memory import give_back
from bwsft.utils.lines import say

SHARD = 4096  # records
PER_WORKER = 8 << 20  # bytes of a source that pay for the start of another process
MOST_WORKERS = 16
TAKEN = ".taken"  # the suffix of an empty file: a process makes the shard beside it
# What decides how a record becomes token ids, beside the tokenizer.
DECISIVE = ("template", "template_args", "columns", "turns", "on_bad", "exclude_type")

Numbered = tuple[int, tuple[str, Any]]  # a record's number, and (place, raw value)
Progress = Callable[[int], Any]


def in_memory(
    source: sources.Source, template: Template, options: DataOptions
) -> tuple[token_cache.Arrays, dict[str, Any]]:
    """(arrays of all well-formed records, what became of the others)."""
    reader = ExampleReader(template, options)
    with progress_bar(source) as bar:
        parts = list(tokenized(enumerate(source.rows()), reader, bar.update))
    check_any(reader.records, source)
    columns = zip(*parts, strict=True)
    arrays = {
        name: np.concatenate(c) for name, c in zip(token_cache.COLUMNS, columns, strict=True)
    }
    digest = token_cache.content_digest(token_cache.held(arrays))
    return arrays, joined([reader.facts()]) | {"digest": digest}


def prepare(
    path: Path, source: sources.Source, template: Template, options: DataOptions,
    place: str | None = None,
) -> bool:  # fmt: skip
    """Make the token cache at `path`; False, with a warning, where nothing can be written there.
    Another process that makes the same one is waited for. `place`: what open_source opens `source`
    by in another process, if it can."""
    parts, made = path.with_suffix(".parts"), not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        with _alone(parts) as waited:
            try:
                if not (waited and token_cache.load(path)):
                    _make(path, parts, source, template, options, place)
            except ValueError:  # of the data: nothing to go on with
                remove_folder(parts)
                if made:
                    with contextlib.suppress(OSError):  # others write there too
                        path.parent.rmdir()
                raise
            remove_folder(parts)
    except OSError as error:
        warnings.warn(f"can't cache tokens in {path.parent}: {error.strerror}", stacklevel=3)
        return False
    return True


def _make(
    path: Path, parts: Path, source: sources.Source, template: Template, options: DataOptions,
    place: str | None,
) -> None:  # fmt: skip
    with progress_bar(source) as bar:
        if place is not None and (count := workers(source.size)) > 1:
            job = {"source": place, "digest": source.digest, "parts": str(parts)}
            _in_processes(count, job, source, template, options, bar)
        bar.reset(source.total)
        shards = list(write_shards(parts, source, template, options, SHARD, bar.update))
    found = joined(facts for _, facts in shards)
    check_any(found["records"], source)
    token_cache.save(path, [folder for folder, _ in shards], found)


def write_shards(
    parts: Path, source: sources.Source, template: Template, options: DataOptions,
    size: int, progress: Progress, shared: bool = False,
) -> Iterator[tuple[Path, dict[str, Any]]]:  # fmt: skip
    """(folder, facts) of the shards of `size` records, each made unless it is there; `shared`: of
    those that no other process has taken before."""
    grouped = itertools.groupby(enumerate(source.rows()), lambda row: row[0] // size)
    for number, rows in grouped:
        folder = parts / f"{number:06}"
        if shared and not _take(folder):
            continue
        facts = token_cache.shard_facts(folder) if folder.is_dir() else None
        if facts is None:
            if folder.is_dir():  # damaged
                remove_folder(folder)
            reader = ExampleReader(template, options)
            columns = tokenized(rows, reader, progress)
            facts = token_cache.save_shard(folder, columns, reader.facts)
        else:
            progress(facts["records"])
        yield folder, facts


def _take(folder: Path) -> bool:
    """Whether a shard is this process's to make: nobody had taken it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.with_suffix(TAKEN).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def tokenized(
    rows: Iterable[Numbered], reader: ExampleReader, progress: Progress
) -> Iterator[list[np.ndarray]]:
    """Columns of all examples of some records, some examples at a time, and at first of none."""

    def ready() -> Iterator[tuple[int, Prepared]]:
        for number, row in rows:
            yield from reader.examples(number, *row)
            progress(1)

    def characters(item: tuple[int, Prepared]) -> int:
        return len(item[1].prompt) + len(item[1].response)

    yield _flatten([], [])
    for chunk in tokenizer_module.chunks(ready(), characters):
        ids, texts = zip(*chunk, strict=True)
        yield _flatten(reader.template.tokenize(texts), ids)


def _flatten(encoded: list[tuple[list, list]], sample_ids: Sequence[int]) -> list[np.ndarray]:
    flat = array("i")  # of 4 bytes, as the tokens' column
    for prompt, response in encoded:
        flat.extend(prompt)
        flat.extend(response)
    lengths = [[len(pair[side]) for pair in encoded] for side in (0, 1)]
    columns = zip((flat, *lengths, sample_ids), token_cache.COLUMNS.values(), strict=True)
    return [np.array(column, dtype=dtype) for column, dtype in columns]


def check_any(records: int, source: sources.Source) -> None:
    if not records:
        raise ValueError(f"there are no records in {source.name}")


def progress_bar(source: sources.Source) -> tqdm:
    """With records/s and the time left, where somebody looks."""
    return tqdm(total=source.total, desc="tokenizing", unit=" records", disable=None)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Hold a folder of shards, made if need be, as the only process; whether another one had it."""
    waited = False
    while True:
        try:
            folder.mkdir(exist_ok=True)
            lock = lock_folder(folder)
            break
        except FileNotFoundError:  # another process has just ended and removed it
            continue
        except ValueError:
            if not (folder.exists() and locked(folder)):
                raise
            if not waited:
                waited = True
                say(f"waiting for another process, which prepares the same data in {folder}")
            time.sleep(0.3)
    with lock:
        yield waited


# --- the other processes ---


def workers(size: int) -> int:
    """How many processes a source of so many bytes is worth."""
    asked = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if asked else os.cpu_count() or 1
    return min(cores, MOST_WORKERS, size // PER_WORKER)


def _in_processes(
    count: int, job: dict[str, Any], source: sources.Source, template: Template,
    options: DataOptions, bar: tqdm,
) -> None:  # fmt: skip
    """Make shards in `count` processes, of which this is one. One that fails ends them all: what is
    wrong is found, and said, when this one makes what is left."""
    parts = Path(job["parts"])
    for old in parts.glob(f"*{TAKEN}"):
        old.unlink()
    with tempfile.TemporaryDirectory() as words, contextlib.ExitStack() as stack:
        template.tokenizer.save_pretrained(words)
        job |= {
            "size": SHARD, "subset": options.subset, "split": options.split, "tokenizer": words,
            "words": tokenizer_module.tokenizer_digest(template.tokenizer),
            "options": {name: getattr(options, name) for name in DECISIVE},
        }  # fmt: skip
        give_back()
        others = [_start(job, stack) for _ in range(1, count)]
        for process in others:
            threading.Thread(target=_count, args=(process, bar), daemon=True).start()
        with contextlib.suppress(ValueError):
            for _ in write_shards(parts, source, template, options, SHARD, bar.update, shared=True):
                if any(process.poll() for process in others):
                    return
            for process in others:
                process.wait()


def _start(job: dict[str, Any], stack: contextlib.ExitStack) -> subprocess.Popen:
    """A process that makes its shards of `job`. It ends with this one: its stdin closes."""
    here = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "bwsft.data.preparation_worker"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": here, "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.kill)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
    return process


def _count(process: subprocess.Popen, bar: tqdm) -> None:
    """Show what a process says that it has done: a number of records a line."""
    for line in process.stdout:
        bar.update(int(line))
