"""Opening sources: formats and archives, folders and globs, Hub data sets, records in Python."""

import bz2
import gzip
import json
import lzma

import pytest
import zstandard

from bwsft.data.records import normalize
from bwsft.data.sources import open_source
from bwsft.utils import hub as hub_module


def told(record):
    """The texts of a record of two turns."""
    return tuple(turn["content"] for turn in record.messages)


PAIR = {"query": "1+1?", "response": "2"}
ROWS = [{"question": f"{i} + 1?", "answer": f"0{i + 1}"} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
        ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}  # fmt: skip


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def parquet(rows):
    import io

    import datasets

    out = io.BytesIO()
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(out)
    return out.getvalue()


def table(rows, delimiter=","):
    lines = [rows[0], *(row.values() for row in rows)]
    return "".join(delimiter.join(line) + "\n" for line in lines).encode()


CONTENT = {
    ".jsonl": LINES, ".ndjson": LINES, ".json": json.dumps(ROWS).encode(), ".csv": table(ROWS),
    ".tsv": table(ROWS, "\t"), ".parquet": parquet(ROWS),
}  # fmt: skip


def put(path, content=LINES):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def read(source, *parts):
    """(place without the source's name, question) of every record."""
    opened = open_source(source, *parts)
    rows = [(place, normalize(raw)) for place, raw in opened.rows()]
    return [(place.removeprefix(f"{source}, "), told(record)[0]) for place, record in rows]


def questions(*arguments):
    return [question for _, question in read(*arguments)]


ASKED = [row["question"] for row in ROWS]


# --- one file ---


@pytest.mark.parametrize("archive", ["", *PACK])
@pytest.mark.parametrize("form", CONTENT)
def test_every_format_in_every_archive(tmp_path, form, archive):
    pack = PACK.get(archive, bytes)
    path = put(tmp_path / f"v1.5{form.upper()}{archive}", pack(CONTENT[form]))
    source = open_source(path)
    rows = [(place, normalize(raw)) for place, raw in source.rows()]
    unit = "line" if form in (".jsonl", ".ndjson") else "record"
    assert [place for place, _ in rows] == [f"{path}, {unit} {n}" for n in (1, 2, 3)]
    assert [told(r) for _, r in rows] == [tuple(r.values()) for r in ROWS]
    assert source.total == (3 if unit == "line" else None)
    assert source.digest == open_source(put(tmp_path / f"plain{form}", CONTENT[form])).digest
    assert list(source.rows()) == list(source.rows())  # as often as asked


@pytest.mark.parametrize("archive", PACK)
def test_archives_of_several_members_and_damaged_ones(tmp_path, archive):
    """A member per batch is how many writers append; reading one member only would lose the rest.
    Incompressible text, so that half the archive is about half the lines."""
    import random

    rng = random.Random(7)
    texts = ["".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(60)) for _ in range(400)]
    halves = [
        "".join(json.dumps({"query": t, "response": "r"}, ensure_ascii=False) + "\n" for t in part)
        for part in (texts[:200], texts[200:])
    ]
    content = b"".join(PACK[archive](half.encode()) for half in halves)
    path = put(tmp_path / f"a.jsonl{archive}", content)
    assert questions(path) == texts
    for cut in (len(content) - 1, len(content) // 2, 3):
        put(path, content[:cut])
        with pytest.raises(ValueError, match=f"a.jsonl{archive} is cut short: .* {cut:,} bytes"):
            read(path)
    put(path, content[:9000] + b"\xff\0\xaa" * 40 + content[9120:])
    with pytest.raises(ValueError, match=rf"a.jsonl{archive} is damaged near byte [\d,]+ of the"):
        read(path)
    put(path, b"no archive at all")
    with pytest.raises(ValueError, match=f"a.jsonl{archive} is damaged near byte 0 of the archive"):
        read(path)


def test_jsonl_places_and_blank_lines(tmp_path):
    """Lines end at a line feed alone: U+2028 and a lone carriage return are inside."""
    lines = b'\xef\xbb\xbf{"query": "a\xe2\x80\xa8b", "response": "b"}\r\n\n  \n{"x":\r\t1\nnull'
    path = put(tmp_path / "a.jsonl", lines)
    source = open_source(path)
    assert [place for place, _ in source.rows()] == [f"{path}, line {n}" for n in (1, 4, 5)]
    first, cut, last = (raw for _, raw in source.rows())
    assert told(normalize(first)) == ("a\u2028b", "b")
    assert last == b"null"
    with pytest.raises(ValueError, match="not valid JSON"):
        normalize(cut)


def test_digest_follows_content(tmp_path):
    one, two = put(tmp_path / "one.jsonl"), put(tmp_path / "two.jsonl")
    assert open_source(one).digest == open_source(two).digest
    assert open_source(put(tmp_path / "a.json")).digest != open_source(one).digest
    put(two, LINES + b"\n")
    assert open_source(one).digest != open_source(two).digest


@pytest.mark.parametrize(("name", "complaint"), [
    ("missing.jsonl", "missing.jsonl doesn't exist"),
    ("missing", "doesn't exist"),
    ("empty.jsonl", "empty.jsonl is empty"),
    ("empty.parquet.gz", "is empty"),
    ("folder", "is a folder without data files; known are .jsonl"),
    ("notes.txt", "can't tell the format from '.txt'; known are .jsonl"),
    ("data.gz", "can't tell the format from '.gz'; known are .jsonl"),
    ("no*.jsonl", r"no data file matches .*/no\*.jsonl"),
    ("n*t*.*", "notes.txt: can't tell the format"),
])
def test_unreadable_sources(tmp_path, name, complaint):
    for empty in ("empty.jsonl", "empty.parquet.gz", "folder/README.md", "notes.txt", "data.gz"):
        put(tmp_path / empty, b"")
    with pytest.raises(ValueError, match=complaint):
        open_source(tmp_path / name)


def test_json_array(tmp_path):
    path = put(tmp_path / "a.json", json.dumps([PAIR, {"query": "b"}], indent=1).encode())
    rows = list(open_source(path).rows())
    assert told(normalize(rows[0][1])) == ("1+1?", "2")
    with pytest.raises(ValueError, match="the response is missing"):
        normalize(rows[1][1])
    put(path, json.dumps([PAIR, PAIR])[:-5].encode())
    with pytest.raises(ValueError, match="can't read .*a.json"):
        list(open_source(path).rows())


def test_csv_reads_every_column_as_text(tmp_path):
    path = tmp_path / "a.csv"
    put(path, b'\xef\xbb\xbfquestion,answer\r\n"a, ""b""\n\xe2\x80\xa8c",007\r\n\r\nNA,\r\n')
    rows = [(place, told(normalize(raw))) for place, raw in open_source(path).rows()]
    assert rows == [
        (f"{path}, record 1", ('a, "b"\n\u2028c', "007")),
        (f"{path}, record 2", ("NA", "")),
    ]
    put(path, b"question,answer\nonly half")
    assert [told(normalize(raw)) for _, raw in open_source(path).rows()] == [("only half", "")]


@pytest.mark.parametrize(("content", "complaint"), [
    (b"question,answer\na,b\na,b,c,d\n", "can't read .*a.csv: line 3 has 4 fields, the header 2"),
    (b'question,answer\na,b\n"c,d\n', "can't read .*a.csv: line 3: unexpected end of data"),
    (b"question,answer\na,\xff\n", "a.csv is not UTF-8"),
    (b"question,answer,answer\na,b,c\n", "a.csv has several columns 'answer'"),
])
def test_csv_that_cannot_be_read(tmp_path, content, complaint):
    with pytest.raises(ValueError, match=complaint):
        read(put(tmp_path / "a.csv", content))


def test_parquet_decodes_what_is_stored_as_json(tmp_path):
    """Messages of which some have more keys than others: `datasets` writes them as JSON text."""
    answer = {"role": "assistant", "content": "b"}
    rows = [
        {"messages": [{"role": "user", "content": "a"}, answer]},
        {"messages": [{"role": "user", "content": "c", "name": 3}, answer | {"tool_calls": []}]},
    ]
    path = put(tmp_path / "a.parquet", parquet(rows))
    assert questions(path) == ["a", "c"]
    put(path, path.read_bytes()[:100])
    with pytest.raises(ValueError, match="can't read .*a.parquet"):
        read(path)


def test_fields_that_other_records_have_are_not_there(tmp_path):
    """Arrow gives every struct the fields of all of them, null where a record had none."""
    import datasets
    import pyarrow
    from pyarrow import parquet as parquet_file

    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "ask", "arguments": {"city": "x"}}]
    rows = [{"query": "q", "response": "r", "tools": [call], "id": None} for call in calls]
    rows[1]["id"] = 1
    parquet_file.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for source in (tmp_path / "a.parquet", datasets.Dataset.from_list(rows)):
        assert [row for _, row in open_source(source).rows()] == rows


# --- folders and globs ---


def lay_out(folder, *names):
    """Files whose only record asks for the file's name."""
    for name in names:
        put(folder / name, json.dumps({"query": name, "response": "r"}).encode())
    return folder


@pytest.mark.parametrize(("names", "parts", "expected"), [
    (["p-2.jsonl", "p-10.jsonl", "b/p.jsonl", ".p.jsonl"], (), None),
    (["p-2.jsonl", "p-10.jsonl", ".h/p.jsonl", "README.md", "dataset_info.json"], (), "10 2"),
    (["p-2.jsonl", "p-10.jsonl"], (None, "train"), "10 2"),
    (["data/train-00001-of-00002.jsonl", "data/train-00000-of-00002.jsonl", "data/test.jsonl"],
     (), "train-00000-of train-00001-of"),
    (["data/train.jsonl", "data/test-00000-of-00001.jsonl"], (None, "test"), "test-0"),
    (["train/1.jsonl", "train/2.jsonl", "dev/1.jsonl"], (None, "validation"), "dev/1"),
    (["m/train.jsonl", "m/test.jsonl", "s/train.jsonl"], ("m",), "m/train"),
    (["m/train.jsonl", "m/test.jsonl", "s/train.jsonl"], ("m", "test"), "m/test"),
    (["test.jsonl"], (), "test"),
    (["train_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl"], (None, "train_gen"),
     "train_gen"),
    (["train.jsonl", "test.jsonl"], (None, None, "test"), "test"),  # what an evaluation reads
])  # fmt: skip
def test_folders(tmp_path, names, parts, expected):
    folder = lay_out(tmp_path / "d", *names)
    if expected is None:
        with pytest.raises(ValueError, match="in b, the folder itself: name one by --dataset.sub"):
            open_source(folder, *parts)
        return
    found = questions(folder, *parts)
    assert [part in name for part, name in zip(expected.split(), found, strict=True)]
    places = [place for place, _ in read(folder, *parts)]
    assert places == [f"{folder}/{name}, line 1" for name in found]


@pytest.mark.parametrize(("names", "parts", "complaint"), [
    (["m/train.jsonl", "s/train.jsonl"], (), "data files in m, s: name one by --dataset.subset"),
    (["m/train.jsonl", "s/train.jsonl"], ("x",), "has no folder x with data files, only m, s"),
    (["a_dev.jsonl", "a_test.jsonl"], (), "the splits validation, test: name one by --dataset.spl"),
    (["train.jsonl", "more.jsonl"], (), "files of train and others such as more.jsonl: name a"),
    (["train.jsonl", "test.jsonl"], (None, "dev"), "no split dev: its files are of test, train"),
    (["train.jsonl"], (None, "train[:5]"), r"no slice can be taken: --dataset.limit"),
    (["1.jsonl"], (None, "test"), "no split test: its files are of none"),
    (["1.jsonl", "1.jsonl.gz"], (), "has .*/1.jsonl more than once, compressed and not"),
    (["1.jsonl", "2.csv"], (), r"of several formats \(.csv, .jsonl\): choose some by a glob"),
])
def test_folders_that_leave_it_open(tmp_path, names, parts, complaint):
    with pytest.raises(ValueError, match=complaint):
        open_source(lay_out(tmp_path / "d", *names), *parts)


def test_globs(tmp_path):
    lay_out(tmp_path, "a/2.jsonl", "a/1.jsonl", "b/3.jsonl", "a/x.csv", "[1].jsonl")
    assert questions(f"{tmp_path}/*/*.jsonl") == ["a/1.jsonl", "a/2.jsonl", "b/3.jsonl"]
    put(tmp_path / "a/4.jsonl.gz", gzip.compress(LINES))
    assert len(questions(tmp_path / "a/*.jsonl*")) == 5
    assert len(questions(f"{tmp_path}/[1].jsonl")) == 1  # the file of that name
    for name, what in (("a/*.jsonl", "a glob"), ("a/1.jsonl", "one file")):
        with pytest.raises(ValueError, match=rf"is {what}: --dataset.split .* is for Hub"):
            open_source(tmp_path / name, None, "train")


# --- `datasets` and the Hub ---


def test_tables_in_python_and_saved_ones(tmp_path):
    import datasets

    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])
    both = datasets.DatasetDict(train=train, test=test)
    both.save_to_disk(tmp_path / "both")
    train.save_to_disk(tmp_path / "one")
    assert open_source(train).digest == open_source(both).digest != open_source(test).digest
    assert open_source(train.with_format("numpy")).total == 3
    for source in (both, tmp_path / "both"):
        assert questions(source) == ASKED
        assert questions(source, None, "test") == questions(source, None, None, "test") == ASKED[:1]
        assert questions(source, None, "train[1:]+test") == [*ASKED[1:], ASKED[0]]
        with pytest.raises(ValueError, match=r"no such split: name one of train, test by --datas"):
            open_source(source, None, "dev")
        with pytest.raises(ValueError, match="is no Hub data set: --dataset.subset"):
            open_source(source, "main")
    for source in (train, train.with_format("numpy"), tmp_path / "one"):
        assert questions(source) == ASKED and questions(source, None, "train[:1]") == ASKED[:1]
    with pytest.raises(ValueError, match=r"IterableDataset is a stream .* stream.take\(n\)"):
        open_source(train.to_iterable_dataset())
    (tmp_path / "one/data-00000-of-00001.arrow").write_bytes(b"no arrow")
    with pytest.raises(ValueError, match="can't read .*one: "):
        open_source(tmp_path / "one")


def test_sequences_of_records():
    import pandas

    class Three:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return ROWS[index]

    frame = pandas.DataFrame([*ROWS, {"question": "NaN?"}])
    for source in (ROWS, tuple(ROWS), Three(), frame[:3]):
        opened = open_source(source)
        assert (opened.digest, opened.total) == (None, 3)
        assert [told(normalize(raw))[0] for _, raw in opened.rows()] == ASKED
    assert [place for place, _ in open_source(ROWS).rows()][0] == "the list, record 1"
    assert list(open_source(frame).rows())[3][1] == {"question": "NaN?", "answer": None}
    for source in ((row for row in ROWS), PAIR, None, 3):
        with pytest.raises(ValueError, match="is no source of records: give a list"):
            open_source(source)
    with pytest.raises(ValueError, match="the list is no Hub data set: --dataset.split"):
        open_source(ROWS, None, "train")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`datasets.load_dataset` finds the data set own/set in a folder laid out as on the Hub, so
    that the errors are its own; the network is out of reach."""
    import datasets
    import huggingface_hub

    folder = lay_out(tmp_path / "set", "main/train.jsonl", "main/test.jsonl", "extra/train.jsonl")
    put(folder / "README.md", b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train*}, {split: test, path: main/test*}]
- config_name: extra
  data_files: extra/*
---
""")
    real = datasets.load_dataset

    def load(path, **options):
        return real(str(folder) if path == "own/set" else path, **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_hub_ids(hub):
    source = open_source("own/set", "main")
    assert source.digest == open_source("own/set", "main", "train").digest
    assert source.digest != open_source("own/set", "main", "test").digest
    rows = [(place, raw["query"]) for place, raw in source.rows()]
    assert rows == [("own/set (train), record 1", "main/train.jsonl")]
    assert questions("own/set", "main", "train+test") == ["main/train.jsonl", "main/test.jsonl"]
    assert open_source("own/set", "main", "train[:1]").total == 1


@pytest.mark.parametrize(("source", "parts", "complaint"), [
    ("own/set", (), "several configurations: name one of main, extra by --dataset.subset"),
    ("own/set", ("man",), "no such configuration: name one of main, extra by --dataset.subset"),
    ("own/set", ("main", "dev"), "no such split: name one of train, test by --dataset.split"),
    ("own/set", ("main", "train[:x]"), r"split must be like train or train\[:100\]: --dataset"),
    ("no/such", (), r"no/such \(no such file, so taken as a Hub id\): HF_HUB_OFFLINE is set and"
     ".*; a local file or folder can be given instead"),
])
def test_hub_ids_that_cannot_be_read(hub, source, parts, complaint):
    with pytest.raises(ValueError, match=complaint) as refused:
        open_source(source, *parts)
    assert "\n" not in str(refused.value)


def test_without_a_network_the_hub_is_not_waited_for(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_module, "reachable", lambda: False)
    with pytest.raises(ValueError, match="no/such .*: the Hub can't be reached over the network"):
        open_source("no/such")
