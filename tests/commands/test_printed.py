"""What is printed of others' texts moves no cursor, and a reader that has seen enough ends nothing
with a traceback."""

import json
import os
import subprocess
import sys
import warnings

import jsonl
import pytest
from safetensors.torch import load_file, save_file

from bwsft.cli import main
from bwsft.data.tokenizer import load_tokenizer
from bwsft.decoding import pipeline
from bwsft.decoding.result import Generation
from bwsft.utils.lines import one_line, printable

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1A"  # a window's title, an empty screen, a line up


def test_what_a_terminal_would_obey_is_taken_out():
    usual = "a\tb\n\u00e9 \u00a0\u3000\u05d0 \u200d\U0001f469\u200d\U0001f680 \u200f"
    assert printable(usual) == usual
    for one in "\x00\r\x08\x1b\x7f\x9b\u2028\u202e\u2066\ud800":
        assert printable(f"a{one}b") == "a\ufffdb"
    assert one_line("a\r\nb\x1bc") == "a  b c"


@pytest.fixture
def printed(capfd):
    """printed(*words) -> all that the command prints."""

    def run(*words):
        status = main(list(map(str, words)))
        said = capfd.readouterr()
        assert "\x1b" not in said.out + said.err and "\x9b" not in said.out + said.err
        return status, said.out + said.err

    return run


def test_answers_and_prompts(printed, model_folder, tmp_path, monkeypatch):
    folder = model_folder()
    tokens = load_tokenizer(folder).encode(EVIL, add_special_tokens=False)

    def answer(*arguments, **options):
        yield 0, Generation(tokens, True, 1)

    trace = {
        "run": "0", "question": EVIL, "gen_length": 2, "block_size": 2, "tokens": {"7": EVIL},
        "commits": [[0, 1, 7, 0.5]],
    }  # fmt: skip
    status, said = printed("trace", jsonl.write(tmp_path / "t.jsonl", trace))
    assert status == 0 and said.count("\ufffd]0;owned") == 2
    monkeypatch.setattr(pipeline, "decode_stream", answer)
    status, said = printed(
        "generate", "--model", folder, "--prompt", "x", "--template", "none",
        "--gen-length", 8, "--block-size", 4,
    )
    assert status == 0 and "]0;owned" in said


def test_keys_of_records(printed, tmp_path):
    file = jsonl.write(tmp_path / "d.jsonl", {"query": "1", "response": "2", EVIL: 3})
    assert printed("data", file, "--out", tmp_path / "o.jsonl")[0] == 0
    file = jsonl.write(tmp_path / "e.jsonl", {EVIL: "1"})
    assert printed("data", file, "--out", tmp_path / "p.jsonl")[0] == 2
    outputs = jsonl.write(tmp_path / "f.jsonl", {"question": "1", "output": "2", EVIL: "3"})
    assert printed("evaluate", "--task", "gsm8k", "--outputs", outputs)[0] == 2


def test_names_of_tensors_and_settings(printed, model_folder):
    folder = model_folder()
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {EVIL: weights["model.transformer.wte.weight"].clone()},
              folder / "model.safetensors", {"format": "pt"})
    status, said = printed("generate", "--model", folder, "--prompt", "x")
    assert status == 2 and "]0;owned" in said
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": EVIL}))
    assert printed("generate", "--model", folder, "--prompt", "x")[0] == 2


def test_warnings(printed, monkeypatch):
    def warn(argv):
        warnings.warn(f"a tensor called {EVIL}", stacklevel=1)
        return 0

    monkeypatch.setattr("bwsft.cli._train", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning",
            lambda *said: sys.stderr.write(warnings.formatwarning(*said[:4])),
        )
        assert "]0;owned" in printed("train")[1]


@pytest.mark.parametrize("words", [
    ["--help"], ["train", "--help"], ["train", "debug", "--print-config"],
])  # fmt: skip
def test_a_reader_that_has_seen_enough(words, tmp_path):
    """As head, which closes the pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "bwsft", *words], cwd=tmp_path, stdout=writer,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(writer)
    assert "Broken" not in done.stderr and "Traceback" not in done.stderr
    assert done.returncode == 141
