"""Hostile model, adapter and tokenizer folders: each is loaded, or refused in one sentence; no code
in them runs and no pattern in them hangs. (Data and run files: test_fuzz_readers.py.)"""

import json
import os
import re
import shutil
import signal
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from bwsft import config as c
from bwsft.cli import main
from bwsft.data.chat_template import Template
from bwsft.data.records import normalize
from bwsft.data.tokenizer import load_tokenizer
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import load_backbone, new_backbone, read_family
from bwsft.models.lora import ADAPTER, add_lora, load_adapter

SHAPE = dict(d_model=16, n_layers=2, n_heads=2, mlp_hidden_size=24, max_sequence_length=64)
IDS = dict(vocab_size=320, mask_token_id=257, eos_token_id=256, pad_token_id=256)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIRD = ["5", True, None, 1.5, -1, 0, 10**9, 10**30, float("inf"), float("nan"), [1], {"a": 1}]
PLACE = "model.transformer.blocks.0.q_proj"


def tiny(**fields):
    return new_backbone(LladaConfig(**(SHAPE | IDS | fields)), 1)


@pytest.fixture(scope="module")
def originals(tmp_path_factory, tokenizer_folder):
    """{kind: {file name: content}} of a good model, adapter and tokenizer."""
    root = tmp_path_factory.mktemp("originals")
    tiny().model.save_pretrained(root / "model")
    backbone = tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        add_lora(backbone, c.LoraConfig(rank=3, alpha=6.0), 0)
        backbone.model.save_pretrained(root / "adapter", save_embedding_layers=False)
    os.remove(root / "adapter" / "README.md")
    shutil.copytree(tokenizer_folder, root / "tokenizer")
    kinds = ("model", "adapter", "tokenizer")
    return {k: {p.name: p.read_bytes() for p in (root / k).iterdir()} for k in kinds}


@pytest.fixture
def attempt(originals, tmp_path):
    """attempt(kind, **{file: content}) -> the refusal of a folder with these files, or None."""

    def use(kind, files, **options):
        folder = tmp_path / f"{kind} ü"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in (originals[kind] | files).items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                LOAD[kind](folder, **options)
        except (ValueError, OSError) as error:
            message = str(error)
            assert kind in message or "chat template" in message, message
            assert len(message) < 700 and "Traceback" not in message, message
            return message
        return None

    return use


def use_tokenizer(folder):
    words = load_tokenizer(folder)
    for name in ("chat", "none"):
        template = Template(words, name)
        template.tokenize([template.prepare(normalize({"query": "1+1", "response": "2"}))])


LOAD = {
    "model": lambda folder: (read_family(folder), load_backbone(folder)),
    "adapter": lambda folder, base=None: load_adapter(base or tiny(), folder),
    "tokenizer": use_tokenizer,
}


@pytest.fixture(autouse=True)
def no_hang():
    """A pattern or a pipe may hold Python's own loop up, where pytest's timeout waits."""
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("kind", LOAD)
def test_good_folders_load(attempt, kind):
    assert attempt(kind, {}) is None


# --- safetensors ---


def header_of(content):
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def edited(content, **entry):
    """The file with the header's entry of one tensor changed."""
    header, rest = header_of(content)
    name = next(name for name in header if PLACE in name)
    header[name] |= entry
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


FALSE = {
    "header longer than the file": lambda b: (len(b) * 2).to_bytes(8, "little") + b[8:],
    "header of 2^64 bytes": lambda b: b"\xff" * 8 + b[8:],
    "header of no bytes": lambda b: bytes(8) + b[8:],
    "header shorter than itself": lambda b: (9).to_bytes(8, "little") + b[8:],
    "deep header": lambda b: (500_000).to_bytes(8, "little") + b'{"a":' * 100_000,
    "not JSON": lambda b: b[:8] + b"x" * (len(b) - 8),
    "nothing": lambda b: b"",
    "cut in the header": lambda b: b[:100],
    "cut in the data": lambda b: b[:-1],
    "one byte more": lambda b: b + b"x",
    "offsets beyond the file": lambda b: edited(b, data_offsets=[0, 10**12]),
    "negative offset": lambda b: edited(b, data_offsets=[-8, 0]),
    "overlapping": lambda b: edited(b, data_offsets=[0, 1024]),
    "one offset": lambda b: edited(b, data_offsets=[5]),
    "text as offsets": lambda b: edited(b, data_offsets="x"),
    "huge shape": lambda b: edited(b, shape=[2**62, 2**62]),
    "negative shape": lambda b: edited(b, shape=[-16, -16]),
    "no such dtype": lambda b: edited(b, dtype="F1000"),
    "whole numbers": lambda b: edited(b, dtype="I32"),
    "half the width": lambda b: edited(b, dtype="F16"),
}


@pytest.mark.parametrize("fault", FALSE)
@pytest.mark.parametrize(("kind", "file"), [("model", WEIGHTS), ("adapter", ADAPTER)])
def test_false_safetensors(attempt, originals, kind, file, fault):
    message = attempt(kind, {file: FALSE[fault](originals[kind][file])})
    assert (message is None) == (kind == "adapter" and fault == "whole numbers"), message


@pytest.mark.parametrize(("kind", "file"), [("model", WEIGHTS), ("adapter", ADAPTER)])
@pytest.mark.parametrize("examples", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_damaged_safetensors(attempt, originals, kind, file, examples):
    good = originals[kind][file]
    end = 8 + int.from_bytes(good[:8], "little")

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, end - 1), st.integers(0, 255)), max_size=4))
    def check(patches):
        content = bytearray(good)
        for place, byte in patches:
            content[place] = byte
        attempt(kind, {file: bytes(content)})

    check()


@pytest.mark.parametrize(("shard", "word"), [
    ("../model.safetensors", "outside the folder"), ("/etc/passwd", "outside the folder"),
    ("..", "which is not there"), (3, "outside the folder"), (None, "outside the folder"),
    ("gone.safetensors", "which is not there"), ("config.json", "damaged or cut short"),
])  # fmt: skip
def test_an_index_that_names_what_it_must_not(originals, tmp_path, shard, word):
    for name, content in originals["model"].items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / WEIGHTS).rename(tmp_path / "weights.safetensors")
    names = load_file(tmp_path / "weights.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "weights.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert load_backbone(tmp_path).family.mask_id == 257
    for metadata in (None, [], "x"):
        (tmp_path / INDEX).write_text(json.dumps(index | {"metadata": metadata}))
        with pytest.raises(ValueError, match="has no metadata"):
            load_backbone(tmp_path)
    index["weight_map"][next(iter(names))] = shard
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises((ValueError, OSError), match=word):
        load_backbone(tmp_path)


# --- config.json ---

# What transformers would take from a config.json and act on.
POISON = {
    "attn_implementation": "evil/kernel", "_attn_implementation": [1], "attribute_map": 3,
    "__class__": "x", "check": 1, "to_dict": {}, "sub_configs": 1, "id2label": [1],
    "transformers_weights": "../other.safetensors", "experts_implementation": "evil/kernel",
}  # fmt: skip


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_wrong_values_in_a_config(attempt, originals, every):
    good = json.loads(originals["model"]["config.json"])
    assert len(good) > 40
    refused = 0
    for number, name in enumerate([*good, "dtype", "auto_map", "quantization_config"]):
        for value in WEIRD[number % every :: every]:
            text = json.dumps(good | {name: value})
            refused += attempt("model", {"config.json": text}) is not None
    assert refused > 60 / every


@pytest.mark.parametrize("name", ["n_layers", "d_model", "vocab_size", "mlp_hidden_size"])
def test_sizes_that_no_memory_holds(attempt, originals, name):
    """Compared with what is stored before anything is built: a billion layers take forever even
    without their numbers."""
    good = json.loads(originals["model"]["config.json"])
    assert attempt("model", {"config.json": json.dumps(good | {name: 2**27})})


@pytest.mark.parametrize("name", POISON)
def test_only_fields_of_the_model_reach_transformers(attempt, originals, name):
    good = json.loads(originals["model"]["config.json"])
    assert attempt("model", {"config.json": json.dumps(good | {name: POISON[name]})}) is None


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"a":' * 9999, '{"eos_token_id": 1, "eos_token_id": 2}', "\x00", "", b"\xff\xfe{"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_no_config(attempt, name, content):
    assert name in attempt("model", {name: content})


def test_an_adapter_beside_the_weights_is_not_followed(attempt, originals):
    assert "holds an adapter" in attempt("model", originals["adapter"])


# --- adapters ---

SLOW_PATTERN = "(.*)*(.*)*(.*)*(.*)*x"


def adapter_config(originals, **changes):
    return json.dumps(json.loads(originals["adapter"]["adapter_config.json"]) | changes)


@pytest.mark.parametrize(("changes", "word"), [
    ({"target_modules": SLOW_PATTERN}, None),
    ({"rank_pattern": {SLOW_PATTERN: 2}}, None),
    ({"alpha_pattern": {SLOW_PATTERN: 2}}, None),  # the timed engine sees that it needs an x
    ({"alpha_pattern": {r"(?:\w|\w\w|\w\w\w|[\w.])*(?<!j)": 2}}, "alpha_pattern .* is slow"),
    ({"alpha_pattern": {"((a{9999}){9999}){9999}": 2}}, "no pattern .counted repeat"),
    ({"alpha_pattern": {"q_proj(": 2}}, "no pattern .missing"),
    ({"r": 8}, "says r = 8, but .* has rank 3"),
    ({"r": 10**9}, "has rank 3"),
    ({"target_modules": ["q_proj", "wte"]}, "targets wte, but no tensor"),
    ({"use_dora": True}, "lacks tensor .*magnitude"),
    ({"peft_type": "PROMPT_TUNING"}, "peft_type must be 'LORA'"),
    ({"megatron_config": {"x": 1}}, "option megatron_config is not supported"),
    ({"modules_to_save": ["wte"]}, "targets wte, but no tensor"),
    ({"trainable_token_indices": ["a"]}, "trainable_token_indices"),
    ({"layer_replication": [[0, 1]]}, "option layer_replication is not supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights must be"),
    ({"lora_alpha": 0}, "must be positive"),
    ({"surprise": 1}, "option surprise is not supported"),
])
def test_adapter_configs_against_their_tensors(attempt, originals, changes, word):
    message = attempt("adapter", {"adapter_config.json": adapter_config(originals, **changes)})
    assert message is None if word is None else re.search(word, message)


def renamed(old, new):
    return lambda w: {name.replace(old, new): tensor for name, tensor in w.items()}


OTHER_MODELS = {
    "other names": (renamed("transformer.blocks", "layers"), "adapter of another one"),
    "on the head": (renamed("blocks.0.ff_out", "ff_out"), "target_modules has .*the LM head"),
    "no names": (renamed("base_model.model.", ""), "holds no LoRA matrices"),
    "half": (lambda w: {n: t for n, t in w.items() if "lora_A" in n}, "lacks tensor"),
    "one more": (lambda w: w | {"extra": torch.zeros(2)}, "unknown tensor extra"),
    "three dimensions": (lambda w: {n: t[None] for n, t in w.items()}, "does not fit"),
    "two ranks": (lambda w: w | {f"base_model.model.{PLACE}.lora_A.weight": torch.ones(2, 16)},
                  "different rank|has rank 2"),
    "rank 0": (lambda w: {n: t[:0] if "_A" in n else t[:, :0] for n, t in w.items()}, "rank 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", OTHER_MODELS)
def test_adapters_of_another_model(originals, tmp_path, fault):
    for name, content in originals["adapter"].items():
        (tmp_path / name).write_bytes(content)
    change, word = OTHER_MODELS[fault]
    tensors = {n: t.contiguous() for n, t in change(load_file(tmp_path / ADAPTER)).items()}
    save_file(tensors, tmp_path / ADAPTER)
    with pytest.raises(ValueError, match=word):
        load_adapter(tiny(), tmp_path)


@pytest.mark.parametrize("fields", [{"d_model": 32}, {"n_layers": 1}, {"mlp_hidden_size": 32}])
def test_an_adapter_of_another_size(attempt, fields):
    assert "of another" in attempt("adapter", {}, base=tiny(**fields))


def test_the_adapters_that_fit_are_applied(originals, tmp_path):
    """Also with fewer targets than a pattern would hit, and ranks and scales of their own."""
    shapes = {"A": (2, 16), "B": (16, 2)}
    where = f"base_model.model.{PLACE}.lora_"
    tensors = {f"{where}{side}.weight": torch.ones(shape) for side, shape in shapes.items()}
    (tmp_path / ADAPTER).write_bytes(save(tensors))
    fields = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 5}, "target_modules": ".*"}
    (tmp_path / "adapter_config.json").write_text(adapter_config(originals, **fields))
    backbone, before = tiny(), tiny().model.state_dict()
    load_adapter(backbone, tmp_path)
    assert not any(p.requires_grad for p in backbone.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = backbone.model.merge_and_unload().state_dict()
    for name, tensor in before.items():  # B A is 2 everywhere, alpha / r is 5 / 2
        torch.testing.assert_close(merged[name], tensor + 5 * (name == f"{PLACE}.weight"))


# --- tokenizers ---


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_wrong_values_in_a_tokenizer(attempt, originals, name, every):
    good = json.loads(originals["tokenizer"][name])
    fields = [*good, "auto_map", "chat_template", "added_tokens_decoder", "padding_side"]
    for number, field in enumerate(fields):
        for value in WEIRD[number % every :: every]:
            attempt("tokenizer", {name: json.dumps(good | {field: value})})


@pytest.mark.parametrize(
    "content", [b"", b"[" * 99_999, bytes(range(256)), "{}", '{"model": {"type": "BPE"}}']
)
def test_files_that_are_no_tokenizer(attempt, content):
    assert "tokenizer" in attempt("tokenizer", {"tokenizer.json": content})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_is_no_tokenizer(originals, tmp_path, name):
    for file, content in originals["tokenizer"].items():
        (tmp_path / file).write_bytes(content)
    os.remove(tmp_path / name)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is not a file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("template", [
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include 'MARK' %}", "{{ messages[9].content }}", "{{", "{{ 1 / 0 }}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
])  # fmt: skip
def test_chat_templates_run_in_a_sandbox(attempt, tmp_path, template):
    mark = tmp_path / "ran"
    message = attempt("tokenizer", {"chat_template.jinja": template.replace("MARK", str(mark))})
    assert "chat template" in message or "tokenizer" in message
    assert not mark.exists()


# --- through the command line ---


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
@pytest.mark.parametrize("kind", ["pipe", "folder", "noise"])
def test_the_command_says_what_is_wrong(originals, tmp_path, capsys, name, kind):
    for file, content in (originals["model"] | originals["tokenizer"]).items():
        (tmp_path / file).write_bytes(content)
    os.remove(tmp_path / name)
    make = {"pipe": os.mkfifo, "folder": os.mkdir, "noise": lambda p: p.write_bytes(b"\x93" * 99)}
    make[kind](tmp_path / name)
    argv = ["generate", "--model", str(tmp_path), "--prompt", "1", "--gen-length", "4"]
    assert main([*argv, "--block-size", "4"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("bwsft generate: ") and str(tmp_path) in captured.err
    assert captured.err.count("\n") == 1 and not captured.out
