"""Reading sources and normalizing records: every shape, every complaint."""

import json
import subprocess
import sys

import pytest

from bwsft.data.records import Record, normalize
from bwsft.data.sources import open_source

PAIR = {"query": "1+1?", "response": "2"}


@pytest.mark.parametrize("raw", [
    PAIR,
    PAIR | {"type": "GSM_Rephrased", "original_question": "1 and 1?"},
    {"question": "1+1?", "answer": "2"},
    {"problem": "1+1?", "solution": "2", "answer": "two"},
    {"prompt": "1+1?", "response": "2"},
    {"prompt": "1+1?", "completion": "2", "response": None},
    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]},
    b'{"query": "1+1?", "response": "2"}\r\n',
])
def test_shapes(raw):
    record = normalize(raw)
    assert (record.messages, record.response) == ((("user", "1+1?"),), "2")


def test_the_type_field():
    assert normalize(PAIR | {"type": "GSM_Rephrased"}).kind == "GSM_Rephrased"
    assert normalize(PAIR | {"type": None}).kind == normalize(PAIR).kind == ""
    turns = chat(("user", "a"), ("assistant", "b"))
    assert normalize(turns | {"type": "MATH"}).kind == "MATH"


def test_chat_keeps_earlier_turns():
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]
    record = normalize({"messages": messages})
    assert record.messages == tuple((role, f"text {i}") for i, role in enumerate(roles[:-1]))
    assert record.response == "text 4"


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(("raw", "complaint"), [
    (b'{"query": "1+1?", "respo', "not valid JSON.*column 19 of 24.*cut in half"),
    (b'{"query": "\xff"}', r"not UTF-8 \(byte 12"),
    (b"[1, 2]", "is a list, expected an object"),
    (b'"text"', "is text, expected an object"),
    (b"null", "is null, expected"),
    (b"3", "is a number, expected"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"query": "a", "response": ' + b"1" * 5000 + b"}", "not valid JSON"),
    (b'{"query": "a", "response": "\\ud83d"}', "'response' contains half of a surrogate"),
    ({}, "has none of query/response"),
    ({"text": "a"}, r"has none of .*keys are \['text'\]"),
    ({"query": "a"}, "'query' but no 'response'"),
    ({"question": "a", "answer": None}, "'question' but no 'answer'"),
    ({"response": "a"}, "'response' but no 'query'"),
    ({"query": "a", "response": 2}, "'response' is a number, expected text"),
    ({"query": ["a"], "response": "2"}, "'query' is a list, expected text"),
    ({"query": "a", "response": {}}, "'response' is an object, expected text"),
    ({"query": "a", "response": True}, "'response' is a boolean, expected text"),
    ({"messages": []}, "non-empty list"),
    ({"messages": "hi"}, "non-empty list"),
    ({"messages": ["hi"]}, "message 0 is text"),
    ({"messages": [{"role": "user"}]}, "content of message 0' is null"),
    (chat(("user", "a")), "ends with a user message: the response is missing"),
    (chat(("assistant", "a")), "no user message right before"),
    (chat(("user", "a"), ("assistant", "b"), ("assistant", "c")), "no user message right"),
    (chat(("user", "a"), ("tool", "b"), ("assistant", "c")), "message 1 has role 'tool'"),
    (chat(("user", "a"), ("system", "b"), ("assistant", "c")), "only the first may be one"),
    (chat(("user", "a"), ("assistant", ["b"])), "content of message 1' is a list"),
])
def test_malformed(raw, complaint):
    with pytest.raises(ValueError, match=complaint):
        normalize(raw)


def test_jsonl_places_and_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"query": "a", "response": "b"}\r\n\n  \n{"x":\nnull')
    source = open_source(path)
    assert [place for place, _ in source.rows()] == [f"{path}, line {n}" for n in (1, 4, 5)]
    first, cut, last = (raw for _, raw in source.rows())
    assert normalize(first) == Record((("user", "a"),), "b")
    assert last == b"null"
    with pytest.raises(ValueError, match="not valid JSON"):
        normalize(cut)


def test_digest_follows_content(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text(json.dumps(PAIR) + "\n")
    two.write_text(json.dumps(PAIR) + "\n")
    assert open_source(one).digest == open_source(two).digest
    two.write_text(json.dumps(PAIR) + " \n")
    assert open_source(one).digest != open_source(two).digest


@pytest.mark.parametrize(("name", "complaint"), [
    ("missing.jsonl", "missing.jsonl doesn't exist"),
    ("missing", "doesn't exist"),
    ("empty.jsonl", "empty.jsonl is empty"),
    ("empty.parquet", "is empty"),
    ("folder", "is a folder"),
    ("notes.txt", "can't tell the format from '.txt'; known are .jsonl"),
])
def test_unreadable_sources(tmp_path, name, complaint):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=complaint):
        open_source(tmp_path / name)


@pytest.fixture
def table_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def read(path):
    return [
        (place.removeprefix(f"{path}, "), normalize(raw)) for place, raw in open_source(path).rows()
    ]


def test_json_array(tmp_path, table_cache):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([PAIR, {"query": "b", "response": None}], indent=1))
    rows = list(open_source(path).rows())
    assert normalize(rows[0][1]) == Record((("user", "1+1?"),), "2")
    with pytest.raises(ValueError, match="the response is missing"):
        normalize(rows[1][1])
    path.write_text(json.dumps([PAIR, PAIR])[:-5])
    with pytest.raises(ValueError, match="can't read .*a.json"):
        list(open_source(path).rows())


def test_csv_reads_every_column_as_text(tmp_path, table_cache):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfquestion,answer\n"a, ""b""\nc",007\nNA,\n')
    assert read(path) == [
        ("record 1", Record((("user", 'a, "b"\nc'),), "007")),
        ("record 2", Record((("user", "NA"),), "")),
    ]
    path.write_bytes(b"question,answer\nonly half")
    assert read(path)[0][1].response == ""  # counted as an empty response
    path.write_bytes(b"question,answer\na,b\na,b,c,d\n")
    with pytest.raises(ValueError, match="can't read .*a.csv"):
        read(path)
    path.write_bytes(b"question,answer\na,\xff\n")
    with pytest.raises(ValueError, match="a.csv is not UTF-8"):
        read(path)


def test_parquet_with_messages(tmp_path, table_cache):
    import datasets

    path = tmp_path / "a.parquet"
    rows = [chat(("user", "a"), ("assistant", "b")), chat(("user", "c"), ("assistant", "d"))]
    datasets.Dataset.from_list(rows).to_parquet(path)
    assert [record.response for _, record in read(path)] == ["b", "d"]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="can't read .*a.parquet"):
        read(path)


def test_hub_id(monkeypatch):
    import datasets

    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        if args[0] == "no/such":
            raise ConnectionError("unreachable\nmore")
        return datasets.Dataset.from_list([PAIR])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source("openai/gsm8k")
    assert calls == [(("openai/gsm8k",), {"split": "train"})]
    for _ in range(2):
        assert [place for place, _ in source.rows()] == ["openai/gsm8k (train), record 1"]
    with pytest.raises(ValueError, match=r"no/such \(no such file, so taken.*: unreachable$"):
        open_source("no/such")


def test_importing_data_is_cheap():
    heavy = "{'transformers', 'datasets', 'peft', 'pandas', 'pyarrow'}"
    code = f"import sys, bwsft.data.dataset; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
