"""Tokenized sets: what is kept, dropped and refused, and the cache on disk."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from jsonl import write
from tiny_tokenizer import byte_tokenizer

from bwsft.data import chat_template, preparation, token_cache
from bwsft.data import dataset as data
from bwsft.data import tokenizer as tokenizer_module
from bwsft.data.dataset import load_set
from bwsft.data.examples import DataOptions
from bwsft.data.packing import CanvasLayout, pack
from bwsft.data.selection import canvas_lengths

EOS = 256
PLAIN = DataOptions(template="none", max_length=20, gen_length=8)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(eos_token="<|eos|>")


def records(*pairs):
    return [{"query": query, "response": response} for query, response in pairs]


MIXED = records(
    ("q", "r"), ("too long" * 3, "r"), ("  ", "empty prompt"), ("q", "\n"),
    ("exactly", "20 tokens..."), ("one over", "20 tokens..."), ("longer", "than 8 ids"),
)


FIRST = {
    "empty prompt": "the list, record 3", "empty response": "the list, record 4",
    "longer than max_length 20": "record 2",
}  # fmt: skip


def test_kept_dropped_and_reported(tokenizer):
    kept = load_set(MIXED, tokenizer, PLAIN)
    assert kept.sample_ids.tolist() == [0, 4, 6]
    text = [(tokenizer.decode(kept.prompt(i)), tokenizer.decode(kept.response(i))) for i in (0, 1)]
    assert text == [("q", "r<|eos|>"), ("exactly", "20 tokens...<|eos|>")]
    assert all(kept.response(i).tolist().count(EOS) == 1 for i in range(3))
    assert kept.prompt(0).dtype == kept.response(0).dtype == np.int32
    assert kept.report == {
        "records": 7,
        "examples": 7,
        "unit": "records",
        "kept": 3,
        "dropped": {"empty prompt": 1, "empty response": 1, "longer than max_length 20": 2},
        "first": FIRST,
        "read": {"query, response": 7},
        "unread": {},
        "skipped": [],
        "gen_length": 8,
        "longer_than_gen_length": 2 / 3,
        "lengths": {
            "prompt": {"min": 1, "50%": 6, "90%": 7, "99%": 7, "max": 7},
            "response": {"min": 2, "50%": 11, "90%": 13, "99%": 13, "max": 13},
            "both": {"min": 3, "50%": 17, "90%": 20, "99%": 20, "max": 20},
        },
    }
    assert json.loads(json.dumps(kept.report)) == kept.report
    lines = kept.summary().splitlines()
    assert lines[0] == "kept 3 of 7 records (42.86%)"
    longer = "longer than max_length 20"
    assert f"  dropped 2: {longer} (first: {FIRST[longer]})" in lines
    assert lines[-1] == "  66.7% of responses exceed gen_length 8"


def turns(*texts, **last):
    said = [{"role": "user assistant".split()[i % 2], "content": t} for i, t in enumerate(texts)]
    said[-1] |= last
    return {"messages": said}


def test_every_column_is_read_or_named(tokenizer):
    rows = [
        {"query": "a", "response": "b", "context": "c", "id": i, "url": None, "type": "x"}
        for i in range(1, 4)
    ]
    kept = load_set(rows, tokenizer, PLAIN)
    assert kept.report["unread"] == {"context": 3, "id": 3, "type": 3}  # in this order
    (line,) = (line for line in kept.summary().splitlines() if "not read" in line)
    assert line.startswith("  not read: context (3), id (3), type (3); --dataset.columns input=")
    options = dataclasses.replace(PLAIN, columns="ignore=id,input=context", exclude_type="y")
    kept = load_set(rows, tokenizer, options)
    assert kept.report["unread"] == {}
    assert "not read" not in kept.summary()
    assert tokenizer.decode(kept.prompt(0)) == "a\n\nc"
    rows = [{"query": "a", "response": "b", f"k{i}": 1} for i in range(30)]
    many = load_set(rows, tokenizer, PLAIN)
    assert many.report["unread"]["others"] == 10


def test_weight_zero_is_left_out_and_counted(tokenizer):
    rows = records(("a", "b"), ("a", "c"))
    rows[1] |= {"weight": 0}
    rows.append(turns("a", "d", train=0))
    kept = load_set(rows, tokenizer, PLAIN)
    assert [tokenizer.decode(kept.response(i)) for i in range(2)] == ["b<|eos|>", "d<|eos|>"]
    assert kept.report["dropped"] == {"weight 0": 1}
    assert kept.report["unread"] == {"train": 1}  # no template prints it


def test_all_turns_of_a_conversation(tokenizer):
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = (
        "{% for m in messages %}{{ m['content'] + ('<|eos|>' if loop.index0 % 2 else '=') }}"
        "{% endfor %}"
    )
    rows = [turns(*"abcdef"), turns("g", "h"), turns("i", "", "k", "l", weight=0)]
    rows.append(turns(*"mnop") | {"weight": 0})  # both of its turns
    options = DataOptions(template="chat", max_length=20, turns="all")
    kept = load_set(rows, chatty, options)
    texts = [(chatty.decode(kept.prompt(i)), chatty.decode(kept.response(i))) for i in range(4)]
    last = ("a=b<|eos|>c=d<|eos|>e=", "f<|eos|>")
    assert texts == [
        last, ("a=b<|eos|>c=", "d<|eos|>"), ("a=", "b<|eos|>"), ("g=", "h<|eos|>"),
    ]
    assert kept.record_numbers.tolist() == [0, 0, 0, 1]
    assert len(set(kept.sample_ids.tolist())) == 4
    assert kept.report["dropped"] == {"weight 0": 3, "empty response": 1}
    assert kept.summary().startswith("kept 4 of 8 turns of 4 records (50.00%)")
    # The last turn keeps its number, so its masks do not depend on the option.
    alone = load_set(rows, chatty, dataclasses.replace(options, turns="last"))
    assert alone.sample_ids.tolist() == [kept.sample_ids[0], kept.sample_ids[3]] == [0, 1]
    assert (chatty.decode(alone.prompt(0)), chatty.decode(alone.response(0))) == last


def test_nothing_left(tokenizer):
    with pytest.raises(ValueError, match="none of the 2 records is left: 1 empty response, 1 long"):
        load_set(records(("q", ""), ("q" * 30, "r")), tokenizer, PLAIN)
    with pytest.raises(ValueError, match="there are no records in the list"):
        load_set([], tokenizer, PLAIN)


def test_blank_file(tokenizer, tmp_path):
    path = tmp_path / "blank.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="there are no records in .*blank.jsonl"):
        load_set(path, tokenizer, PLAIN, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_malformed_record_stops_or_is_skipped(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", *records(("a", "b")) * 2, *[{"query": "c"}] * 25)
    with path.open("a") as file:
        file.write('{"query": "cut')
    fault = r"a.jsonl, line 3 has 'query' but no 'response'.* by --dataset.on-bad skip"
    with pytest.raises(ValueError, match=fault):
        load_set(path, tokenizer, PLAIN, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    options = DataOptions(template="none", on_bad="skip")
    for _ in range(2):  # built, then from the cache
        kept = load_set(path, tokenizer, options, tmp_path)
        assert kept.sample_ids.tolist() == [0, 1]
        assert kept.report["dropped"] == {"malformed": 26}
        assert [entry["where"] for entry in kept.report["skipped"]] == [
            f"{path}, line {n}" for n in range(3, 23)
        ]
        assert kept.report["skipped"][0]["reason"].startswith("has 'query' but no 'response'")
    assert f"    {path}, line 3 has 'query'" in kept.summary()
    with pytest.raises(ValueError, match="none of the 1 records is left: 1 malformed; .*'query'"):
        load_set([{"query": "c"}], tokenizer, options)


def test_records_of_an_excluded_type(tokenizer):
    rows = [row | {"type": t} for row, t in zip(MIXED, ["GSM_SV", "MATH_SV"] * 4, strict=False)]
    options = DataOptions(template="none", max_length=40, exclude_type="GSM")
    kept = load_set(rows, tokenizer, options)
    assert kept.sample_ids.tolist() == [1, 5]
    assert kept.report["dropped"] == {"type contains GSM": 4, "empty response": 1}


def test_options_are_checked():
    with pytest.raises(ValueError, match="on_bad is 'ignore', not 'stop' or 'skip'"):
        DataOptions(on_bad="ignore")
    with pytest.raises(ValueError, match="max_length must be at least 2"):
        DataOptions(max_length=1)


def test_mask_and_vocabulary_are_checked(tokenizer):
    rows = records(("fine", "ok"), ("X" * 30, "dropped"), ("a", "an X here"))
    ids = tokenizer("X")["input_ids"]

    def check(**options):
        load_set(rows, tokenizer, DataOptions(template="none", max_length=20, **options))

    with pytest.raises(ValueError, match=rf"record 3 of the list contains \[MASK\], id {ids[0]}"):
        check(mask_id=ids[0])
    with pytest.raises(ValueError, match="record 1 .* token id 256, outside .* vocabulary of 256"):
        check(vocab_size=256)
    check(mask_id=257, vocab_size=257)
    rows.pop()  # what is left of "X" is in a dropped example
    check(mask_id=ids[0])


def test_selection_and_canvas(tokenizer):
    whole = load_set(MIXED, tokenizer, PLAIN)
    part = whole.select(np.array([2, 0]))
    assert part.sample_ids.tolist() == [6, 0]
    assert part.prompt(0).tolist() == whole.prompt(2).tolist()
    assert part.response(1).tolist() == whole.response(0).tolist()
    assert part.fingerprint == whole.fingerprint
    example = whole.example(1, visit=3)
    assert (example.sample_id, example.visit, len(example.response)) == (4, 3, 13)
    layout = CanvasLayout(mask_id=257, eos_id=EOS, block_size=4, gen_length=8, max_length=20)
    lengths = canvas_lengths(whole.prompt_lengths, whole.response_lengths, layout).tolist()
    assert lengths == [pack([whole.example(i)], layout).max_length for i in range(3)]
    assert lengths[1] == 7 + 16
    options = dataclasses.replace(PLAIN, layout=layout, max_positions=22)
    kept = load_set(MIXED, tokenizer, options)
    assert kept.sample_ids.tolist() == [0, 6] and kept.fingerprint == whole.fingerprint
    assert kept.report["dropped"]["canvas longer than the model's 22 positions"] == 1


@pytest.mark.parametrize(("changes", "way"), [
    ({"max_length": 2}, "--max-length 26 keeps them all, --max-length 20 half of them"),
    ({"max_positions": 8}, "; give --gen-length 4 or less"),
    ({"max_positions": 3}, "; no block fits after the prompts: lower --block-size"),
    ({"max_positions": 2}, "; the model has 2 positions: choose a --model with more"),
    ({"max_length": 2, "max_positions": 21}, "; --max-length 21 keeps those that the model"),
])
def test_nothing_left_names_the_way(tokenizer, changes, way):
    """The way that a message names is one: with it examples are left."""
    layout = CanvasLayout(mask_id=257, eos_id=EOS, block_size=4, gen_length=8, max_length=20)
    options = dataclasses.replace(PLAIN, layout=layout, max_positions=64)
    rows = [row for row in MIXED if row["query"].strip() and row["response"].strip()]
    with pytest.raises(ValueError) as refused:
        load_set(rows, tokenizer, dataclasses.replace(options, **changes))
    assert way in str(refused.value)
    if "--max-length 26" in way:
        assert len(load_set(rows, tokenizer, dataclasses.replace(options, max_length=26))) == 5
        assert len(load_set(rows, tokenizer, dataclasses.replace(options, max_length=20))) == 3
    elif "--gen-length" in way:
        short = dataclasses.replace(layout, gen_length=4)
        assert len(load_set(rows, tokenizer, dataclasses.replace(options, layout=short, **changes)))


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source.jsonl", *records(*((f"q{i}", f"r{i}") for i in range(30))))


def tokens_of(kept):
    return [(kept.prompt(i).tolist(), kept.response(i).tolist()) for i in range(len(kept))]


def test_cache_is_used_and_mapped(tokenizer, source, tmp_path, monkeypatch):
    first = load_set(source, tokenizer, PLAIN, tmp_path / "cache")
    monkeypatch.setattr(preparation, "tokenized", None)  # any further tokenizing fails
    second = load_set(source, tokenizer, PLAIN, tmp_path / "cache")
    assert isinstance(second.tokens, np.memmap) and not second.tokens.flags.writeable
    assert tokens_of(first) == tokens_of(second)
    assert first.fingerprint == second.fingerprint
    assert first.report == second.report
    # The same tokens serve another limit, under another fingerprint.
    tight = load_set(
        source, tokenizer, DataOptions(template="none", max_length=5), tmp_path / "cache"
    )
    assert len(tight) == 10
    assert tight.fingerprint != first.fingerprint
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".safetensors"]


def test_cache_follows_all_that_makes_ids(tokenizer, source, tmp_path, monkeypatch):
    def entries():
        return len(list((tmp_path / "cache").iterdir()))

    first = load_set(source, tokenizer, PLAIN, tmp_path / "cache")
    copied = tmp_path / "copied.jsonl"
    copied.write_bytes(source.read_bytes())
    assert load_set(copied, tokenizer, PLAIN, tmp_path / "cache").fingerprint == first.fingerprint
    assert entries() == 1
    copied.write_bytes(source.read_bytes().replace(b"r29", b"r28"))
    assert load_set(copied, tokenizer, PLAIN, tmp_path / "cache").fingerprint != first.fingerprint
    assert entries() == 2
    other = DataOptions(template="metamath", max_length=300)
    assert load_set(source, tokenizer, other, tmp_path / "cache").fingerprint != first.fingerprint
    assert entries() == 3
    load_set(source, tokenizer, DataOptions(template="none", on_bad="skip"), tmp_path / "cache")
    load_set(source, tokenizer, DataOptions(template="none", exclude_type="x"), tmp_path / "cache")
    assert entries() == 5
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(["q1"])
    other = load_set(source, grown, PLAIN, tmp_path / "cache")
    assert other.fingerprint != first.fingerprint
    assert other.prompt(1).tolist() == [257]
    assert entries() == 6
    files = data._code_files()
    made = {"chat_template", "columns", "dataset", "examples", "records", "sources", "tokenizer"}
    assert made | {"strict_json", "lines", "file_formats"} <= {file.stem for file in files}
    for at in (0, len(files) - 1):
        edited = tmp_path / "edited.py"
        edited.write_text(files[at].read_text() + "# edited\n")
        changed = [*files[:at], edited, *files[at + 1 :]]
        monkeypatch.setattr(data, "_code_files", lambda changed=changed: changed)
        load_set(source, tokenizer, PLAIN, tmp_path / "cache")
    assert entries() == 8


@pytest.mark.parametrize("damage", ["truncated", "flipped", "garbage", "empty", "header"])
def test_damaged_cache_is_rebuilt(tokenizer, source, tmp_path, damage):
    cache = tmp_path / "cache"
    first = tokens_of(load_set(source, tokenizer, PLAIN, cache))
    (path,) = cache.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[:-40]
    elif damage == "flipped":
        content[-1] ^= 1
    elif damage == "header":
        content[:8] = (2**40).to_bytes(8, "little")
    else:
        content = b"garbage" * 50 if damage == "garbage" else b""
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="rebuilding the damaged token cache"):
        again = load_set(source, tokenizer, PLAIN, cache)
    assert tokens_of(again) == first
    assert list(cache.iterdir()) == [path]
    assert token_cache.load(path) is not None


def test_what_a_killed_process_half_cached_goes(tokenizer, source, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in (".1f.safetensors.1234abcd.bwsft.tmp", ".mine.tmp"):
        (cache / name).touch()
    load_set(source, tokenizer, PLAIN, cache)
    assert [p.name for p in cache.iterdir() if p.suffix == ".tmp"] == [".mine.tmp"]


def test_a_run_survives_an_unwritable_cache(tokenizer, source, tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="can't cache tokens in"):
        assert len(load_set(source, tokenizer, PLAIN, tmp_path / "file" / "cache")) == 30


def test_default_cache_folder(tokenizer, source, tmp_path, monkeypatch):
    monkeypatch.setenv("BWSFT_CACHE", str(tmp_path / "from_env"))
    load_set(source, tokenizer, PLAIN)
    assert len(list((tmp_path / "from_env").iterdir())) == 1
    load_set(records(("a", "b")), tokenizer, PLAIN)  # a list isn't cached
    assert len(list((tmp_path / "from_env").iterdir())) == 1
    monkeypatch.delenv("BWSFT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_set(source, tokenizer, PLAIN)
    assert len(list((tmp_path / "home" / ".cache" / "bwsft").iterdir())) == 1


@pytest.mark.parametrize("limits", [{"CHUNK": 3}, {"CHARACTERS": 8}])
def test_chunks_join_seamlessly(tokenizer, monkeypatch, limits):
    rows = records(*((f"q{i}", f"r{i}") for i in range(10)), ("", "dropped"), ("z", "z"))
    whole = load_set(rows, tokenizer, PLAIN)
    for name, limit in limits.items():
        monkeypatch.setattr(tokenizer_module, name, limit)
    parts = load_set(rows, tokenizer, PLAIN)
    assert tokens_of(whole) == tokens_of(parts)
    assert parts.sample_ids.tolist() == [*range(10), 11]
    assert whole.fingerprint == parts.fingerprint


@pytest.mark.parametrize("special", ["", "<|eos|>"])
def test_a_call_of_the_tokenizer_is_bounded_by_characters(tokenizer, monkeypatch, special):
    rows = records(*((f"q{i}", "r" * 700 + special) for i in range(6)), ("q", "r" * 3000 + special))
    calls, encode = [], chat_template.encode

    def spied(backend):
        def encode_batch_fast(texts, **options):
            calls.append(texts)
            return backend.encode_batch_fast(texts, **options)

        return SimpleNamespace(
            encode_batch_fast=encode_batch_fast, no_truncation=backend.no_truncation,
            no_padding=backend.no_padding,
        )  # fmt: skip

    monkeypatch.setattr(
        chat_template, "encode", lambda backend, texts: encode(spied(backend), texts)
    )
    monkeypatch.setattr(tokenizer_module, "CHARACTERS", 2000)
    options = dataclasses.replace(PLAIN, max_length=10_000)
    assert len(load_set(rows, tokenizer, options)) == 7
    assert all(sum(map(len, texts)) <= 2000 or len(texts) == 1 for texts in calls)
    assert max(map(len, calls)) > 1
