"""Formats, references and complaints of the files that an evaluation reads."""

import gzip
import json

import pytest
from jsonl import write

from bwsft.evaluation.answer_files import question_key, read_outputs, read_references
from bwsft.evaluation.pass_at_1 import EvaluateOptions, evaluate


@pytest.mark.parametrize("name, text", [
    ("a.jsonl", '{"question": "Q", "output": "5"}\n\n{"question": "R", "output": "6"}\n'),
    ("a.txt", '{"question": "Q", "output": "5"}\n{"question": "R", "output": "6"}'),
    ("a.json", '[{"query": "Q", "response": "5"},\n {"problem": "R", "generation": "6"}]'),
    ("a.json", '\ufeff{"generations": [{"question": "Q", "generations": "5"},'
               '{"question": "R", "generations": "6"}], "gen_length": 128, "rate": 0.1}'),
    ("a.json", '{\n "generations": [\n {"prompt": "Q", "outputs": ["5"]},\n'
               ' {"prompt": "R", "outputs": ["6"]}\n]\n}'),
])
def test_all_formats_read_alike(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    outputs, header, unused = read_outputs(path, "gsm8k")
    assert [(o.question, o.text) for o in outputs] == [("Q", "5"), ("R", "6")]
    assert unused == []
    assert header == ({"gen_length": 128, "rate": "0.1"} if "gen_length" in text else {})


def test_references_of_the_three_shapes(tmp_path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps([
        {"question": "A", "answer": "1 + 1 = <<1+1=2>>2\n#### 2,000"},
        {"query": "B", "response": "so\n#### 3\nThe answer is: 3", "type": "GSM_AnsAug"},
    ]))
    assert [ref for _, ref in read_references(path, "gsm8k").values()] == ["2,000", "3"]
    path.write_text(json.dumps([
        {"problem": "C", "solution": "$\\boxed{9}$ is it", "answer": "\\frac{1}{2}"},
        {"problem": "D", "solution": "so $\\boxed{\\frac{3}{4}}$."},
    ]))
    assert [ref for _, ref in read_references(path, "math").values()] == [
        "\\frac{1}{2}", "\\frac{3}{4}"]


def test_references_of_every_source_with_exact_numbers(tmp_path):
    """Floats arrive as the shortest text of their value, from Parquet as from JSON."""
    import pyarrow
    from pyarrow import parquet

    rows = [{"question": "A", "answer": 18.0}, {"question": "B", "answer": 0.1}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "d").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "d/test.jsonl").write_text(text)
    (tmp_path / "d/train.jsonl").write_text('{"question": "C", "answer": 1}\n')
    (tmp_path / "a.csv").write_text("question,answer\nA,18\nB,0.1\n")
    for name in ("a.parquet", "a.jsonl.gz", "d", "d/te*.jsonl", "a.csv"):
        found = read_references(tmp_path / name, "gsm8k")
        assert list(found.values()) == [("A", "18"), ("B", "0.1")], name
    assert list(read_references(tmp_path / "d", "gsm8k", split="train").values()) == [("C", "1")]
    with pytest.raises(ValueError, match="a.csv is one file: .*--split is for Hub"):
        read_references(tmp_path / "a.csv", "gsm8k", split="test")
    with pytest.raises(ValueError, match="--subset, --split and --columns are of --data"):
        evaluate(EvaluateOptions("gsm8k", outputs=tmp_path / "a.csv", split="test"))


def test_question_key_ignores_spelling_only():
    assert question_key(" A\u00a0\u201cb\u201d\n c\u2019s ") == question_key("A \"b\" c's")
    assert question_key("2 hens") != question_key("3 hens")


@pytest.mark.parametrize("name, text, message", [
    ("a.jsonl", '{"question": "Q", "output": "5"}\n{"question": "Q", "outp', r"a.jsonl:2:\d+: not"),
    ("a.json", '[{"question": "Q",\n "output" "5"}]', r"a.json:2:11: not valid JSON"),
    ("a.json", '[{"question": "Q", "output": "5", "ground_truth": NaN}]', "NaN is no JSON value"),
    ("a.json", "[]", "holds no records"),
    ("a.jsonl", "", "holds no records"),
    ("a.json", "3", "needs JSONL, a list, or an object"),
    ("a.json", '{"items": []}', "needs JSONL, a list, or an object"),
    ("a.json", '["text"]', "record 1 is a str, not an object"),
    ("a.json", '[{"input": "Q", "output": "5"}]', "record 1 has no question: .* has input, output"),
    ("a.json", '[{"question": "Q", "text": "5"}]', "record 1 has no output: .* has question, text"),
    ("a.json", '[{"question": "Q", "output": [5]}]', "field output must be text"),
    ("a.json", '[{"question": "Q", "outputs": []}]', "field outputs must be text"),
    ("a.json", '[{"question": 4, "output": "5"}]', "must be a question's text"),
    ("a.json", '[{"question": "Q", "output": "5", "answer": [1]}]', "reference must be text"),
    ("a.json", '[{"question": "Q", "output": "5", "answer": "x^2"}]', "is no number; .* math"),
    ("a.json", '[{"question": "Q", "output": "5", "truth": 5}]',
     r"no references \(fields not read: truth\): give --data"),
])
def test_bad_output_files_get_one_clear_sentence(tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        evaluate(EvaluateOptions("gsm8k", outputs=tmp_path / name))
    assert not (tmp_path / "runs").exists()


def test_references_of_conversations_and_named_columns(tmp_path):
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "#### 2"}]
    system = {"role": "system", "content": "Be brief."}
    path = write(
        tmp_path / "a.jsonl", {"messages": turns}, {"messages": [system, *turns]},
        {"messages": [*turns, {"role": "user", "content": "and 1?"}], "answer": 3},
    )
    found = list(read_references(path, "gsm8k").values())
    assert found == [
        ("1+1?", "2"), ([system, turns[0]], "2"),
        ([*turns, {"role": "user", "content": "and 1?"}], "3"),
    ]
    outputs = write(tmp_path / "o.jsonl", *({"question": q, "output": "so 2"} for q, _ in found))
    read, _, _ = read_outputs(outputs, "gsm8k")
    assert [question_key(output.question) for output in read] == list(
        read_references(path, "gsm8k")
    )
    named = write(tmp_path / "b.jsonl", {"q": "1+1?", "a": "2", "answer": "never"})
    columns = "prompt=q,response=a"
    assert list(read_references(named, "gsm8k", columns=columns).values()) == [("1+1?", "2")]
