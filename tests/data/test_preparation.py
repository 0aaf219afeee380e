"""Preparation by shards and processes: the same file as by one, gone on with, waited for."""

import io
import json
import threading
import time
from types import SimpleNamespace

import jsonl
import pytest
from safetensors import safe_open
from tiny_tokenizer import byte_tokenizer

from bwsft.data import preparation, preparation_worker, token_cache
from bwsft.data.dataset import load_set
from bwsft.data.examples import DataOptions
from bwsft.data.sources import open_source
from bwsft.data.tokenizer import tokenizer_digest
from bwsft.utils.claims import lock_folder

OPTIONS = DataOptions(template="none", on_bad="skip")
COUNT = 100
TEMPLATE = "{% for m in messages %}{{ m['content'] + '<|eos|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(("<|eos|>", "<|odd|>"), eos_token="<|eos|>", chat_template=TEMPLATE)


@pytest.fixture
def source(tmp_path):
    """Records, some of them malformed, empty, or with a special token, a column of their own."""
    rows = [
        {"query": f"q{i}", "response": f"<|odd|>{'r' * (i % 13)}", f"column {i % 31}": 1}
        for i in range(COUNT)
    ]
    for i in range(3, COUNT, 4):
        del rows[i]["response"]
    rows[50]["query"], rows[90]["query"] = " ", "zzz"
    return jsonl.write(tmp_path / "rows.jsonl", *rows)


def prepared(source, tokenizer, folder, options=OPTIONS):
    """(the set, the bytes of its cache)."""
    kept = load_set(source, tokenizer, options, folder)
    (path,) = folder.iterdir()  # no shards are left
    return kept, path.read_bytes()


@pytest.fixture
def shards_of_8(monkeypatch):
    monkeypatch.setattr(preparation, "SHARD", 8)


def test_processes_make_the_same_file(source, tokenizer, tmp_path, shards_of_8, monkeypatch):
    alone, content = prepared(source, tokenizer, tmp_path / "alone")
    monkeypatch.setattr(preparation, "workers", lambda size: 3)
    (path,) = (tmp_path / "alone").iterdir()
    left = tmp_path / "together" / path.with_suffix(".parts").name
    left.mkdir(parents=True)
    (left / "000003.taken").touch()  # by a process that was killed
    here, tokenized, took, take = [], preparation.tokenized, [], preparation._take

    def wait_for_others(*given):
        until = time.monotonic() + 60
        while len(here) == 1 and time.monotonic() < until:
            if len(list(tmp_path.glob("together/*.parts/000???"))) > 1:
                break
            time.sleep(0.01)
        here.append(1)
        return tokenized(*given)

    monkeypatch.setattr(preparation, "tokenized", wait_for_others)
    monkeypatch.setattr(preparation, "_take", lambda shard: took.append(take(shard)) or took[-1])
    together, same = prepared(source, tokenizer, tmp_path / "together")
    assert same == content and together.report == alone.report
    assert len(took) == 13 and 1 <= sum(took) < 13
    assert len(here) == sum(took)  # the others made what they took
    monkeypatch.undo()
    whole, _ = prepared(source, tokenizer, tmp_path / "one shard")
    memory = load_set(jsonl.read(source), tokenizer, OPTIONS)
    for other in (whole, memory):
        assert other.fingerprint == alone.fingerprint
        assert other.report["dropped"] == alone.report["dropped"]
    assert whole.report == alone.report and whole.report["skipped"][19]["where"].endswith("line 80")
    with safe_open(next((tmp_path / "alone").iterdir()), "np") as file:
        assert file.get_tensor("tokens").tolist() == alone.tokens.tolist()


@pytest.mark.slow
def test_an_interrupted_preparation_goes_on(source, tokenizer, tmp_path, shards_of_8, monkeypatch):
    _, content = prepared(source, tokenizer, tmp_path / "alone")
    tokenized, done = preparation.tokenized, []

    def killed(rows, *more):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(1)
        return tokenized(rows, *more)

    cache = tmp_path / "cache"
    monkeypatch.setattr(preparation, "tokenized", killed)
    with pytest.raises(KeyboardInterrupt):
        load_set(source, tokenizer, OPTIONS, cache)
    (parts,) = cache.iterdir()
    (parts / "000001" / "tokens").write_bytes(b"1234")  # damaged meanwhile
    done[:] = [1] * 6
    _, again = prepared(source, tokenizer, cache)
    assert again == content and len(done) - 6 == 13 - 5 + 1


def test_what_is_wrong_is_said_by_its_first_place(source, tokenizer, tmp_path, shards_of_8,
                                                  monkeypatch):  # fmt: skip
    monkeypatch.setattr(preparation, "workers", lambda size: 2)
    stop = DataOptions(template="none")
    with pytest.raises(ValueError, match="rows.jsonl, line 4 has 'query' but no 'response'"):
        load_set(source, tokenizer, stop, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_two_that_prepare_the_same_wait(source, tokenizer, tmp_path, capsys):
    cache = tmp_path / "cache"
    _, content = prepared(source, tokenizer, cache)
    (path,) = cache.iterdir()
    path.unlink()
    parts = path.with_suffix(".parts")
    parts.mkdir()
    lock = lock_folder(parts)  # another process

    def finish():
        path.write_bytes(content)
        lock.close()

    timer = threading.Timer(0.5, finish)
    timer.start()
    assert prepared(source, tokenizer, cache)[1] == content
    timer.join()
    assert "waiting for another process" in capsys.readouterr().out


def test_a_mapped_array_is_looked_through_by_pieces(source, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "PIECE", 64)
    monkeypatch.setattr(preparation, "SHARD", 8)
    kept, _ = prepared(source, tokenizer, tmp_path / "cache")
    seen = [i for _, piece in token_cache.pieces(kept.tokens) for i in piece.tolist()]
    assert seen == kept.tokens.tolist() and len(seen) > 10 * 64
    unknown = DataOptions(template="none", on_bad="skip", vocab_size=256)
    with pytest.raises(ValueError, match="record 1 of .* token id 256, outside"):
        load_set(source, tokenizer, unknown, tmp_path / "cache")
    (z,) = tokenizer("z", add_special_tokens=False)["input_ids"]
    late = DataOptions(template="none", on_bad="skip", mask_id=z)
    with pytest.raises(ValueError, match="record 91 of"):
        load_set(source, tokenizer, late, tmp_path / "cache")


@pytest.mark.parametrize("wrong", ["digest", "words"])
def test_a_worker_makes_nothing_of_another_source_or_tokenizer(
    source, tokenizer, tmp_path, monkeypatch, wrong
):
    """As they are when a file is written anew after its digest was taken."""
    tokenizer.save_pretrained(tmp_path / "words")
    job = {
        "source": str(source), "digest": open_source(source).digest, "subset": None, "split": None,
        "tokenizer": str(tmp_path / "words"), "words": tokenizer_digest(tokenizer), "size": 8,
        "parts": str(tmp_path / "parts"),
        "options": {name: getattr(OPTIONS, name) for name in preparation.DECISIVE},
    }  # fmt: skip
    monkeypatch.setattr(preparation_worker, "end_with", lambda stdin: None)
    for status, changed in ((1, {wrong: "another"}), (0, {})):
        line = io.BytesIO(json.dumps(job | changed).encode() + b"\n")
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=line))
        assert preparation_worker.main() == status
        assert (tmp_path / "parts").exists() == (status == 0)
