"""Normalizing records: every shape, every complaint."""

import json
import subprocess
import sys

import pytest

from bwsft.data.columns import Columns
from bwsft.data.records import Record, conversation, normalize

PAIR = {"query": "1+1?", "response": "2"}


def said(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def pair(query, response):
    return Record(tuple(said(("user", query), ("assistant", response))), (1,))


ASKED = said(("user", "1+1?"), ("assistant", "2"))


def chat(*turns):
    return {"messages": said(*turns)}


@pytest.mark.parametrize(("raw", "unread"), [
    (PAIR, ()),
    (PAIR | {"original_question": "1 and 1?", "empty": "", "none": None}, ("original_question",)),
    ({"question": "1+1?", "answer": "2"}, ()),
    ({"problem": "1+1?", "solution": "2", "answer": "two"}, ("answer",)),
    ({"prompt": "1+1?", "completion": "2", "response": None}, ()),
    ({"problem": "1+1?", "completion": "2", "level": 3}, ("level",)),
    ({"instruction": "1+1?", "input": "", "output": "2"}, ()),
    ({"input": "1+1?", "output": 2}, ()),
    ({"messages": ASKED, "problem": "1+1?"}, ("problem",)),
    ({"messages": json.dumps(ASKED)}, ()),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"text": "1?"}]},
                   {"role": "assistant", "content": "2", "name": None}]}, ()),
    ({"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}, ()),
    ({"prompt": ASKED[:1], "completion": ASKED[1:]}, ()),
    ({"prompt": ASKED[:1], "response": "2"}, ()),
    ({"prompt": ASKED}, ()),
    ({"messages": [*ASKED, *said(("user", "and?"))]}, ("turns after the last answer",)),
    (b'{"query": "1+1?", "response": "2"}\r\n', ()),
])
def test_shapes(raw, unread):
    record = normalize(raw)
    assert (record.messages, record.answers) == (tuple(ASKED), (1,))
    assert record.unread == unread


@pytest.mark.parametrize(("raw", "asked"), [
    ({"instruction": "Add.", "input": "1 and 1", "output": "2"}, "Add.\n\n1 and 1"),
    ({"instruction": "Add.", "context": "1 and 1", "response": "2"}, "Add.\n\n1 and 1"),
])
def test_text_under_an_instruction(raw, asked):
    assert normalize(raw).messages[0]["content"] == asked


def test_columns_by_name():
    raw = {"frage": "1+1?", "antwort": "2", "text": "Rome", "url": "x", "messages": "no"}
    columns = Columns.parse("query=frage, response=antwort,input=text,ignore=url")
    record = normalize(raw, columns)
    assert record.messages == tuple(said(("user", "1+1?\n\nRome"), ("assistant", "2")))
    assert record.unread == ("messages",)
    with pytest.raises(ValueError, match="no column 'frage', which --dataset.columns names"):
        normalize(PAIR, columns)
    for text, complaint in (
        ("query", "not 'query'"), ("colour=a", "'colour' is nothing that a column can be"),
        ("query=a,problem=b", "two columns for prompt"),
    ):
        with pytest.raises(ValueError, match=complaint):
            Columns.parse(text)


def test_the_other_roles():
    tools = [{"type": "function", "function": {"name": "add"}}]
    raw = PAIR | {"system": "Brief.", "history": [["0?", "1"]], "type": "GSM", "tools": tools}
    record = normalize(raw)
    assert record.messages == (
        *said(("system", "Brief."), ("user", "0?"), ("assistant", "1")), *ASKED
    )
    assert (record.answers, record.kind, record.tools) == ((2, 4), "GSM", tuple(tools))
    assert record.unread == ()
    assert normalize(raw | {"tools": json.dumps(tools)}).tools == tuple(tools)
    own = chat(("system", "Long."), ("user", "a"), ("assistant", "b")) | {"system": "Brief."}
    assert normalize(own).unread == ("system",)
    assert normalize(own).messages[0]["content"] == "Long."


@pytest.mark.parametrize("weight", [0, 0.0, False, "0", "0.0", "False"])
def test_weight_zero_is_no_answer(weight):
    assert normalize(PAIR | {"weight": weight}).answers == ()
    turns = [*ASKED, ASKED[0], ASKED[1] | {"weight": weight}]
    record = normalize({"messages": turns})
    assert (record.answers, record.last) == ((1,), 3)
    assert "weight" not in record.messages[3]
    assert normalize(PAIR | {"weight": "1.0"}).answers == (1,)


def test_tool_turns_are_left_to_the_template():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        ASKED[0], {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"}, ASKED[1],
    ]
    record = normalize({"messages": turns})
    assert record.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert record.messages[2] == turns[2]
    assert record.answers == (1, 3)


def test_conversations_to_answer():
    assert conversation({"question": "1+1?"}) == ASKED[:1]
    assert conversation(PAIR) == conversation({"messages": ASKED}) == ASKED[:1]
    turns = [*ASKED, *said(("user", "and?"))]
    assert conversation({"messages": turns, "system": "s"}) == [*said(("system", "s")), *turns]
    with pytest.raises(ValueError, match="has none of"):
        conversation({"answer_of": "x"})


@pytest.mark.parametrize(("raw", "complaint"), [
    (b'{"query": "1+1?", "respo', "not valid JSON.*column 19 of 24.*cut in half"),
    (b'{"query": "\xff"}', r"not UTF-8 \(byte 12"),
    (b"[1, 2]", "is a list, expected an object"),
    (b'"text"', "is text, expected an object"),
    (b"null", "is null, expected"),
    (b"3", "is a number, expected"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"query": "a", "response": ' + b"1" * 5000 + b"}", "not valid JSON"),
    (b'{"query": "a", "response": "b\\ud83d"}', "half of a surrogate pair.* after 'b'"),
    ({}, "has none of query/response"),
    ({"text": "a"}, r"has none of .*keys are \['text'\]: say what they are by --dataset.columns"),
    ({"query": "a"}, "'query' but no 'response'"),
    ({"question": "a", "answer": None}, "'question' but no 'answer'"),
    ({"response": "a"}, "'response' but no 'query'"),
    ({"query": ["a"], "response": "2"}, "'query' is a list, expected text"),
    ({"query": "a", "response": {}}, "'response' is an object, expected text"),
    ({"query": "a", "response": True}, "'response' is a boolean, expected text"),
    ({"query": "a", "response": float("nan")}, "'response' is nan, which is no number and no text"),
    ({"query": float("-inf"), "response": "a"}, "'query' is -inf"),
    ({"messages": []}, "non-empty list"),
    ({"messages": "hi"}, "non-empty list"),
    ({"messages": ["hi"]}, "message 0 is text"),
    ({"messages": [{"role": "user"}]}, "content of message 0' is null"),
    ({"messages": [{"content": "a"}]}, "message 0 has role None: say who speaks"),
    (chat(("user", "a")), "ends with a user message: the response is missing"),
    (chat(("assistant", "a")), "no user message before"),
    (chat(("user", "a"), ("assistant", ["b"])), "content of message 1' is a list"),
    (chat(("user", [{"type": "image_url"}]), ("assistant", "b")), "part of type 'image_url'"),
    (PAIR | {"tools": "add"}, "'tools' is not valid JSON"),
    (PAIR | {"history": ["a"]}, "'history' must be a list"),
    (PAIR | {"weight": [1]}, "'weight' is a list"),
])
def test_malformed(raw, complaint):
    with pytest.raises(ValueError, match=complaint):
        normalize(raw)


def test_importing_data_is_cheap():
    heavy = "{'transformers', 'datasets', 'peft', 'pandas', 'pyarrow'}"
    code = f"import sys, bwsft.data.dataset; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
