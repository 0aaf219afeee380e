"""`bwsft distill`: what it keeps, that it goes on, and trainings on it that go on bit for bit."""

import json
import shutil

import jsonl
import pytest
from safetensors.torch import load_file

from bwsft.checkpoints.resolve import TINY
from bwsft.cli import main
from bwsft.data.traces import Traces
from bwsft.data.word_problems import generate
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.settings import DecoderOptions
from bwsft.evaluation.answers import extract_gsm8k

DECODING = "--gen-length 32 --block-size 16 --context block_causal --batch-size 3".split()


@pytest.fixture(scope="module")
def decoded():
    """(questions, what the embedded base answers, as tokens and as texts, and which answers are
    read again with the same tokens: the chat template takes blanks from their ends)."""
    words = {"gen_length": 32, "block_size": 16, "context": "block_causal", "template": "chat"}
    decoder = Decoder.load(str(TINY), DecoderOptions(**words))
    questions = [problem["query"] for problem in generate(6, seed=3)]
    found = list(decoder.answers(decoder.encode(questions), trace=True))
    texts = [decoder.text(one.tokens) for one in found]
    again = decoder.tokenizer([text.strip() for text in texts], add_special_tokens=False).input_ids
    return questions, found, texts, [i for i in range(6) if again[i] == found[i].tokens]


@pytest.fixture
def data(decoded, tmp_path):
    """References by which every answer but the second and the fifth is right."""
    questions, _, texts, _ = decoded
    answers = [int(extract_gsm8k(text)[0]) + (i in (1, 4)) for i, text in enumerate(texts)]
    rows = [{"query": q, "response": f"#### {a}"} for q, a in zip(questions, answers, strict=True)]
    return jsonl.write(tmp_path / "data.jsonl", *rows)


def distill(data, out, *more):
    words = ["--model", str(TINY), "--data", str(data), "--out", str(out), "--template", "chat"]
    return main(["distill", *words, *DECODING, "--shard", "2", *more])


def test_right_answers_are_kept_with_their_traces(decoded, data, tmp_path, monkeypatch, capsys):
    questions, found, texts, retold = decoded
    right = [i for i in retold if i not in (1, 4)]
    assert distill(data, tmp_path / "whole") == 0
    said = capsys.readouterr().out
    assert f"{len(right)} of 6 traces" in said and "2 wrong" in said
    assert len(right) == 3 and "1 other tokens when read again as text" in said
    shards = sorted((tmp_path / "whole").glob("*.jsonl"))
    assert [len(jsonl.read(shard)) for shard in shards] == [
        sum(i // 2 == number for i in right) for number in range(3)
    ]
    rows = [row for shard in shards for row in jsonl.read(shard)]
    for row, i in zip(rows, right, strict=True):
        assert (row["query"], row["response"]) == (questions[i], texts[i])
        assert len(row["steps"]) == 32 and min(row["steps"][: len(found[i].tokens) + 1]) >= 0
        kept = {p: step for p, step in enumerate(row["steps"]) if step >= 0}
        assert kept == {commit.position: commit.step for commit in found[i].trace}

    real, asked = Decoder.answers, []

    def answers(self, prompts, skip, trace):
        asked.append(skip)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(self, prompts, skip, trace)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "answers", answers)
        assert distill(data, tmp_path / "torn") == 130
    assert len(list((tmp_path / "torn").glob("*.jsonl"))) == 1
    assert distill(data, tmp_path / "torn") == 0
    for shard in shards:
        assert (tmp_path / "torn" / shard.name).read_bytes() == shard.read_bytes()
    capsys.readouterr()
    assert distill(data, tmp_path / "torn", "--temperature", "0.5") == 2
    assert "was begun with other settings" in capsys.readouterr().err
    assert distill(data, tmp_path / "torn", "--limit", "3") == 2
    assert "other questions or answers" in capsys.readouterr().err
    assert distill(data, tmp_path / "new", "--rule", "rcr") == 2
    assert "a trace commits each once" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


SLOW_EXACT = pytest.param("exact", marks=pytest.mark.slow)


@pytest.mark.parametrize("context", [SLOW_EXACT, "block_causal"])
def test_a_training_on_traces_goes_on_bit_for_bit(data, tmp_path, context, capsys):
    assert distill(data, tmp_path / "traces") == 0
    words = "--objective.name distill --steps 4 --save-every 2 --batch-size 2 --micro-batch-size 1"
    words += f" --block-size 16 --gen-length 32 --context {context} --eval.every 0"
    where = ["--data", str(tmp_path / "traces"), "--dataset.holdout", "0"]
    assert main(["train", "debug", *words.split(), *where, "--out", str(tmp_path / "run")]) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step-4")
    assert main(["train", "--resume", str(tmp_path / "again")]) == 0
    last = [load_file(tmp_path / f"{run}/checkpoints/step-4/model.safetensors")
            for run in ("run", "again")]  # fmt: skip
    assert all((last[0][name] == last[1][name]).all() for name in last[0])
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").open()]
    assert len(losses) == 4 and all(0 < loss < 10 for loss in losses)
    assert "not read" not in capsys.readouterr().out
    shard = tmp_path / "traces/traces-00000.jsonl"  # the same tokens in another order
    rows = jsonl.read(shard)
    rows[0]["steps"][:2] = rows[0]["steps"][1::-1]
    jsonl.write(shard, *rows)
    assert main(["train", "--resume", str(tmp_path / "again"), "--steps", "5"]) == 2
    assert "is not what" in capsys.readouterr().err


def test_one_active_block_is_traced(data, tmp_path, capsys):
    assert distill(data, tmp_path / "out", "--rule", "threshold", "--active-blocks", "2") == 2
    assert "decode one at a time" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_records_without_traces_are_refused(tmp_path, capsys):
    words = "train debug --objective.name distill --steps 1 --data"
    rows = [{"query": "1+1", "response": "2"}] * 3
    for steps in (None, "first", [0, 0.5, 1], [0]):
        file = jsonl.write(tmp_path / "data.jsonl", *({**row, "steps": steps} for row in rows))
        assert main([*words.split(), str(file), "--out", str(tmp_path / "run")]) == 2
        said = capsys.readouterr().err
        wanted = "record 1 has 1 steps" if steps == [0] else "line 1 has no list 'steps'"
        assert wanted in said
    traces = Traces.read([{"steps": [0, 2, 1]}, {"steps": []}, {"steps": [5]}])
    assert [traces.of(i).tolist() for i in range(3)] == [[0, 2, 1], [], [5]]
