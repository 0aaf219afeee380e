"""`bwsft data`: what it says of a data set, the command it suggests, and the files it writes."""

import json
import shlex

import jsonl
import pytest

from bwsft import config as c
from bwsft.checkpoints.resolve import TINY
from bwsft.cli import main
from bwsft.commands.data import plain_record
from bwsft.commands.train import parse_train
from bwsft.data.records import normalize
from bwsft.data.word_problems import generate
from bwsft.evaluation.answer_files import read_references

TURNS = [
    {"role": "user", "content": "Name a\x1b[31m color"}, {"role": "assistant", "content": "red"},
    {"role": "user", "content": "another"}, {"role": "assistant", "content": "blue"},
]  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BWSFT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def said(capsys, *words):
    capsys.readouterr()
    status = main(["data", *words])
    out, err = capsys.readouterr()
    return status, out, err


def suggested(out):
    """The words after `bwsft train` of the command at the end of the output."""
    words = shlex.split(out.splitlines()[-1])
    assert words[:2] == ["bwsft", "train"]
    return words[2:]


def test_a_small_set_of_ones_own(here, capsys):
    """Columns of other names, an empty answer, a record without one: all are said with the place,
    and the suggested command trains, the hold-out being a tenth."""
    rows = [{"ask": f"What is {i} and {i}?", "say": f"{i + i}" * 9, "url": "u"} for i in range(21)]
    rows += [{"ask": "Why?", "say": " ", "url": "u"}, {"ask": "How?"}]
    jsonl.write(here / "my own.jsonl", *rows)
    words = ["my own.jsonl", "--columns", "prompt=ask,response=say"]
    status, out, _ = said(capsys, *words)
    assert status == 0
    for text in (
        "columns read: ask, say (22)", "kept 21 of 23 records",
        "dropped 1: empty response (first: my own.jsonl, line 22)",
        "my own.jsonl, line 23 has no column 'say'", "not read: url (22)",
        "What is 0 and 0?<|assistant|>000000000<|end|>",
    ):  # fmt: skip
        assert text in out
    command = suggested(out)
    assert "--dataset.on-bad" in command and "--gen-length" in command
    assert main(["train", *command, "--steps", "1", "--out", "run"]) == 0
    out = capsys.readouterr().out
    assert "19 examples, 2 held out" in out and "longer than" not in out
    _, same, _ = said(capsys, "my own.jsonl", "--dataset.columns", "prompt=ask,response=say")
    assert suggested(same) == command


def test_conversations_get_the_chat_template(here, capsys):
    jsonl.write(here / "a.jsonl", *[{"messages": TURNS}] * 3)
    _, out, _ = said(capsys, "a.jsonl", "--preset", "llada-8b-lora", "--model", str(TINY))
    assert "\x1b[31m" not in out and "Name a�[31m color" in out
    config = parse_train(suggested(out))
    assert (config.preset, config.model, config.dataset.template) == (
        "llada-8b-lora", str(TINY), "chat",
    )  # fmt: skip
    assert config.gen_length == 32  # the least: a block


def test_generated_problems_in_a_file(here, capsys):
    words = ["wordproblems-9-seed2", "--split", "test", "--out", "test.jsonl", "--limit", "7"]
    status, out, _ = said(capsys, *words)
    assert (status, out) == (0, "test.jsonl: 7 records\n")
    assert jsonl.read(here / "test.jsonl") == generate(7, 2, "test")
    references = read_references(here / "test.jsonl", "gsm8k")
    ends = {row["query"]: row["response"].rpartition(" ")[2] for row in generate(7, 2, "test")}
    assert dict(references.values()) == ends
    status, _, err = said(capsys, *words)
    assert status == 2 and err == (
        "bwsft data: test.jsonl exists; choose another --out, or remove it\n"
    )
    _, out, _ = said(capsys, "wordproblems-9-seed2")
    assert suggested(out) == ["debug", "--data", "wordproblems-9-seed2"]


def test_records_are_written_as_training_reads_them(here, capsys):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    rows = [
        {"question": "q\u2028", "answer": "a", "type": "t"},
        {"instruction": "i", "input": "n", "output": "o"},
        {"messages": [*TURNS[:1], TURNS[1] | {"weight": 0}, *TURNS[2:]]},
        {"messages": [TURNS[0], {"role": "assistant", "tool_calls": [call], "content": None},
                      {"role": "tool", "content": "2"}, TURNS[3]], "tools": [{"name": "f"}]},
        {"query": "q", "response": "left out", "weight": 0},
        {"query": "no answer"},
    ]  # fmt: skip
    jsonl.write(here / "in.jsonl", *rows)
    status, out, _ = said(capsys, "in.jsonl", "--out", "out.jsonl")
    assert status == 0 and out.startswith("out.jsonl: 5 records; left out 1, first: in.jsonl, line")
    for before, line in zip(rows, (here / "out.jsonl").read_text().split("\n"), strict=False):
        if line:
            was, now = normalize(before), normalize(json.loads(line))
            for name in ("messages", "answers", "tools", "kind"):
                assert getattr(now, name) == getattr(was, name), line
            assert plain_record(now) == json.loads(line)
    said(capsys, "in.jsonl", "--out", "two.jsonl", "--limit", "2")
    assert (here / "two.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize(("words", "message"), [
    (["nothing.jsonl"], "data file nothing.jsonl doesn't exist"),
    (["a.jsonl", "--preset", "huge"], "--preset must be one of debug, "),
    (["a.jsonl", "--limit", "0"], "--limit must be at least 1"),
    (["wordproblems-9", "--subset", "x"], "generated problems have no --subset"),
    (["wordproblems-9", "--split", "dev"], "unknown split 'dev'; known are train, test"),
    (["a.jsonl", "--out", "b.jsonl"], "a.jsonl, line 1 has none of"),
    (["a.jsonl"], "say what they are by --dataset.columns prompt=NAME,response=NAME"),
])
def test_refusals(here, capsys, words, message):
    jsonl.write(here / "a.jsonl", {"x": "1", "y": "2"})
    status, out, err = said(capsys, *words)
    assert status == 2 and message in err and not (here / "b.jsonl").exists()


def test_lengths_that_are_set_stay(here):
    """And those of what reproduces the paper; of other data they are left open."""
    def lengths(*words):
        config = parse_train([*words])
        return config.gen_length, config.max_length, config.dataset.holdout

    data = ["--data", "my.jsonl"]
    assert lengths("debug", *data) == lengths("sdar-4b-lora", "--data=x/y") == (None,) * 3
    assert lengths("debug", *data, "--gen-length", "16")[:2] == (16, None)
    assert lengths("paper", *data) == (128, 256, 64)
    assert lengths("debug") == lengths("debug", "--data", "wordproblems-20") == (40, 72, 16)
    (here / "run.yaml").write_text("preset: debug\ndata: my.jsonl\nmax_length: 99\n")
    assert lengths("--config", "run.yaml") == (None, 99, None)
    (here / "run").mkdir()
    stored = c.Config(preset="debug", data="my.jsonl", gen_length=32)
    (here / "run" / "config.json").write_text(c.to_json(stored))
    assert lengths("debug", *data, "--resume", "run") == (32, 256, 64)
