"""Hostile files for every reader of data and of a run's files: each is read, or refused in one
sentence that names the file. (Models and tokenizers: test_fuzz_models.py.)"""

import dataclasses
import json
import os
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thinning import thinned

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints import folders as k
from bwsft.checkpoints.state import read_state
from bwsft.data import token_cache
from bwsft.data.dataset import load_set
from bwsft.data.tokenizer import load_tokenizer
from bwsft.decoding.result_file import ResultFile, result_file
from bwsft.evaluation.answer_files import read_outputs, read_references
from bwsft.models.adapter_config import read_adapter_config
from bwsft.training.metrics import JsonLog, plot_run
from bwsft.utils.strict_json import read_object, read_text

RECORD = {"query": "1+1", "response": "2", "type": "x"}
ANSWER = {"question": "1+1", "output": "2", "answer": "#### 2", "tokens": 3, "truncated": False}
COMMITS = [[0, 1, 7, 0.5], [1, 0, 8, 0.25]]
TRACE = {"question": "2?", "gen_length": 4, "block_size": 2, "tokens": {"7": "a", "8": "b"}}
FAMILY = {"mask_id": 3, "eos_id": 2, "end_ids": [2], "vocab_size": 9, "max_positions": 9}
CONFIG = dataclasses.asdict(presets.debug())
STATE = {"step": 2, "config": CONFIG, "data": "d", "family": FAMILY, "base": None}
ADAPTER = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
    "base_model_name_or_path": "base", "rank_pattern": {"a": 1},
}  # fmt: skip
METRICS = [{"step": s, "loss": 1.5, "lr": 0.1, "grad_norm": 1.0} for s in (1, 2)]


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def parquet(*records):
    import io

    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(records)), out)
    return out.getvalue()


def cached_tokens(path):
    import numpy as np

    columns = [np.arange(5, dtype=dtype) for dtype in token_cache.COLUMNS.values()]
    token_cache.save_shard(path.parent / "shard", [columns], dict)
    token_cache.save(path, [path.parent / "shard"], {})
    return path.read_bytes()


def open_log(path):
    JsonLog(path, 9).close()


def read_cache(path):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if token_cache.load(path) is None and found:
            raise ValueError(str(found[0].message))


def read_manifest(path):
    if fault := k.problems(path.parent):
        raise ValueError(fault)


# file name -> (a good file, what reads it)
def open_results(path, *asked):
    with result_file(path, True) as file:
        ResultFile(path, file, *asked)


READERS = {
    "data.jsonl": (lines(RECORD, RECORD), "load_set"),
    "data.json": (json.dumps([RECORD, RECORD]).encode(), "load_set"),
    "data.csv": (b"question,answer\n1+1,2\n", "load_set"),
    "data.parquet": (parquet(RECORD, RECORD), "load_set"),
    "outputs.jsonl": (lines(ANSWER), lambda p: read_outputs(p, "gsm8k")),
    "outputs.json": (json.dumps({"generations": [ANSWER]}).encode(),
                     lambda p: read_outputs(p, "math")),
    "references.json": (json.dumps([ANSWER]).encode(), lambda p: read_references(p, "gsm8k")),
    "results.jsonl": (lines({"run": "0" * 12, "question": "a", "output": "b"}),
                      lambda p: open_results(p, "0" * 12, ["a", "c"], {})),
    "metrics.jsonl": (lines(*METRICS), open_log),
    "config.json": (json.dumps(CONFIG).encode(), lambda p: c.from_json(read_text(p))),
    "state.json": (json.dumps(STATE).encode(), lambda p: read_state(p.parent)),
    "manifest.json": (b'{"state.json": {"bytes": 0, "sha256": "0"}}', read_manifest),
    "adapter_config.json": (json.dumps(ADAPTER).encode(), lambda p: read_adapter_config(p.parent)),
    "tokens.safetensors": ("cached_tokens", read_cache),
}  # fmt: skip
DATA = {name for name, (_, read) in READERS.items() if read == "load_set"}

DEEP = b"[" * 100_000
CORPUS = {
    "empty": b"",
    "blank": b"\n\n  \n",
    "NUL": b"\0" * 64,
    "every byte": bytes(range(256)) * 8,
    "UTF-16": json.dumps(RECORD).encode("utf-16"),
    "latin-1": '{"query": "é", "question": "é"}\n'.encode("latin-1"),
    "BOM": b"\xef\xbb\xbf{}",
    "cut": b'{"query": "1+1", "resp',
    "deep list": DEEP,
    "deep object": b'{"a":' * 100_000,
    "deep inside": b'{"query":' + DEEP + b"}",
    # Nested as far as a parser follows: what repeats a value in a message may fail where it didn't.
    "deep but closed": b'{"query":' + b"[" * 900 + b"]" * 900 + b"}",
    "key twice": b'{"step": 1, "step": 2, "query": "a", "query": "b", "response": "c"}\n',
    "NaN": b'{"step": NaN, "query": NaN, "question": NaN}\n',
    "beyond floats": b'{"step": 1e999, "query": -1e999, "question": "a", "output": 1e999}\n',
    "tiny float": b'{"question": "a", "output": "b", "answer": 1e-999999999}\n',
    "large float": b'{"question": "a", "output": "b", "answer": 1e999999999}\n',
    "large number in text": b'{"question": "a", "output": "1e99999999", "answer": "1e99999999"}\n',
    "5000 digits": b'{"step": ' + b"1" * 5000 + b', "query": ' + b"1" * 5000 + b"}\n",
    "4000 digits": b'{"step": ' + b"1" * 4000 + b', "question": "a", "answer": ' + b"1" * 4000
                   + b', "output": "b"}\n',
    "half a surrogate": b'{"step": "\\ud800", "query": "\\ud800", "response": "\\udfff"}\n',
    "half a surrogate as key": b'{"\\ud800": 1}\n',
    "long key": b'{"' + b"k" * 300_000 + b'": 1}\n',
    "long header": b"question," + b"x" * 200_000 + b"\na,b\n",
    "long field": b"question,answer\na," + b"x" * 2_000_000 + b"\n",
    "open quote": b'question,answer\n"a,b\nc,d\n',
    "same columns": b"question,question,answer\na,b,c\n",
    "ragged": b"question,answer\na,b,c,d,e\n",
    "other bytes later": b"question,answer\n" + b"a,b\n" * 3000 + b"\xe9,b\n",
    "parquet magic": b"PAR1" + b"\xff" * 64 + b"\xff\xff\xff\x7fPAR1",
    "list of lists": b"[[[]]]",
    "scalar": b"3",
    "wrong kinds": b'{"step": [], "config": [], "family": 3, "query": {}, "messages": [[]]}\n',
    "header beyond file": (2**63).to_bytes(8, "little") + b"{}",
    "header of nothing": (2).to_bytes(8, "little") + b"[]",
}  # fmt: skip
WEIRD = [
    "5", True, None, 1.5, -1, 2**63, 10**400, float("nan"), float("inf"), [], {}, [1], {"a": 1},
    "", "a\0b", "\ud800", "x" * 5000, "../../etc/passwd", [[[[]]]],
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def reader(tmp_path, tokenizer, monkeypatch):
    """reader(name) -> (good content, read): read(content) writes and reads a file of this name,
    and fails unless a refusal is one short sentence that names it."""
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # thousands of small files

    def make(name):
        good, read = READERS[name]
        path = tmp_path / "a folder ü" / name
        path.parent.mkdir(exist_ok=True)
        if good == "cached_tokens":
            good = cached_tokens(path)
        if read == "load_set":
            def read(path):
                load_set(path, tokenizer, cache_dir=tmp_path / "cache")

        def attempt(content):
            path.write_bytes(content)
            return refusal(read, path)

        return good, attempt

    return make


def refusal(read, path):
    """The sentence with which `read` refuses a file, None if it takes it."""
    try:
        read(path)
    except (ValueError, OSError) as error:
        message = str(error)
        assert path.name in message or str(path.parent) in message, message[:900]
        assert len(message) < 700, message[:900]
        assert "Traceback" not in message and message.count("\n") == 0, message
        return message
    return None


@pytest.mark.parametrize("name", READERS)
def test_good_files_are_read(reader, name):
    """So what the others are refused for is their fault."""
    good, read = reader(name)
    message = read(good)
    assert message is None or (name == "manifest.json" and "does not list" in message)


@pytest.mark.parametrize("fault", CORPUS)
@pytest.mark.parametrize("name", READERS)
def test_corpus(reader, name, fault):
    message = reader(name)[1](CORPUS[fault])
    if fault in ("every byte", "cut", "deep list", "deep object", "parquet magic"):
        # A log's or result's only line without its end is what a killed writer leaves.
        assert message or name in ("results.jsonl", "metrics.jsonl")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("examples", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_bytes(reader, name, examples):
    """A good file, cut, with bytes changed, doubled or put in."""
    good, read = reader(name)
    places = st.integers(0, len(good) - 1)
    patches = st.lists(st.tuples(places, st.binary(min_size=0, max_size=4)), max_size=3)

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
    @given(patches, st.integers(0, len(good)), st.sampled_from([1, 2]))
    def check(patches, end, times):
        content = bytearray(good)
        for place, patch in patches:
            content[place : place + len(patch)] = patch
        read(bytes(content[:end] if end % 3 == 0 else content) * times)

    check()


def paths_of(tree, path=()):
    yield path
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs if isinstance(tree, dict | list) else ():
        yield from paths_of(value, (*path, key)) if isinstance(value, dict | list) else [
            (*path, key)
        ]


def replaced(tree, path, value):
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


TREES = {
    "data.jsonl": {"messages": [{"role": "user", "content": "a"},
                                {"role": "assistant", "content": "b"}]},
    "data.json": [RECORD], "outputs.json": {"generations": [ANSWER]},
    "references.json": [ANSWER], "results.jsonl": {"run": "0" * 12, "question": "a"},
    "metrics.jsonl": METRICS[0], "config.json": CONFIG, "state.json": STATE,
    "manifest.json": {n: {"bytes": 1, "sha256": "a"} for n in (k.STATE, k.OPTIMIZER, "../up")},
    "adapter_config.json": ADAPTER,
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(list(TREES)))
def test_wrong_values_everywhere(reader, name):
    """Every value of a good document replaced by every odd one; by a third where that is slow."""
    _, read = reader(name)
    places = list(paths_of(TREES[name]))
    step = 3 if name in ("state.json", "config.json") else 1
    for number, place in enumerate(places):
        for value in WEIRD[number % step :: step]:
            read(json.dumps(replaced(TREES[name], place, value)).encode() + b"\n")


@pytest.mark.slow
@settings(max_examples=1000, derandomize=True, database=None, deadline=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["step", "query", "response", "config", "family", "a"]),
                      inner, max_size=4),
))  # fmt: skip
def test_any_json(tmp_path_factory, tokenizer_folder, document):
    folder = tmp_path_factory.getbasetemp()
    for name in ("state.json", "adapter_config.json", "outputs.json", "manifest.json"):
        path = folder / name
        path.write_text(json.dumps(document))
        refusal(READERS[name][1], path)


@pytest.mark.parametrize("value", ["1", None, True, float("nan"), float("inf"), 10**400, [1]])
def test_a_log_that_cannot_be_drawn(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(METRICS[0], METRICS[1] | {"loss": value}))
    with pytest.raises(ValueError, match="metrics.jsonl, step 2 has no number 'loss'"):
        plot_run(tmp_path)


# --- what is no file, or no longer one ---

ODD = {"folder": os.mkdir, "pipe": os.mkfifo, "dangling link": lambda p: os.symlink("nowhere", p)}


@pytest.mark.timeout(60)  # reading a pipe would wait forever
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file(tmp_path, tokenizer, name, kind):
    path, read = tmp_path / name, READERS[name][1]
    ODD[kind](path)
    if read == "load_set":
        message = refusal(lambda p: load_set(p, tokenizer, cache_dir=tmp_path), path)
    else:
        message = refusal(read, path)
    # A link to nothing is a file that isn't there yet to whoever writes one.
    assert message or kind == "dangling link"


@pytest.mark.slow
def test_a_line_of_50_megabytes(tmp_path, tokenizer):
    path = tmp_path / "long.jsonl"
    path.write_bytes(lines(RECORD) + b'{"query": "1", "response": "' + b"2" * 50_000_000 + b'"}\n')
    kept = load_set(path, tokenizer, cache_dir=tmp_path)
    assert len(kept) == 1 and kept.report["dropped"] == {"longer than 1,000,000 characters": 1}


def test_a_sparse_terabyte_is_no_config(tmp_path):
    path = tmp_path / "config.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="config.json has 1,099,511,627,776 bytes"):
        read_object(path)
