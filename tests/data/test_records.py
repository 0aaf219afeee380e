"""Normalizing records: every shape, every complaint."""

import subprocess
import sys

import pytest

from bwsft.data.records import normalize

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


def test_importing_data_is_cheap():
    heavy = "{'transformers', 'datasets', 'peft', 'pandas', 'pyarrow'}"
    code = f"import sys, bwsft.data.dataset; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
