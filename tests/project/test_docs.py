"""README.md and docs/: commands parse, files exist, targets exist, snippets compile and run."""

import contextlib
import hashlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import tyro

from bwsft import cli, presets
from bwsft import config as c
from bwsft.commands import compare
from bwsft.commands.options import CompareOptions
from bwsft.commands.train import parse_train
from bwsft.commands.train_flags import spellings
from bwsft.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages whose Python stands on its own, block after block; the README's shows parts of other code.
RUN = ("docs/use_the_loss.md", "docs/write_an_objective.md")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
COMMANDS = set(re.findall(r"^  ([a-z]+) ", cli.USAGE, re.M))
WORDS = ("bwsft", "python", "torchrun", "accelerate", "make")

pages = pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)


class Parsed(Exception):
    """A command line went through its parser."""


def blocks(path, language):
    found = FENCE.findall(path.read_text(encoding="utf-8"))
    return [body for name, body in found if name == language]


def spans(path):
    """Inline code, with line breaks as blanks."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def commands(path):
    """Command lines as words: those of fenced blocks, and inline ones with arguments."""
    fenced = "\n".join(blocks(path, "") + blocks(path, "bash")).replace("\\\n", " ").splitlines()
    # "bwsft train" in a sentence names the command; "make demo" is whole.
    inline = [s for s in spans(path) if len(s.split()) > 2 or s.startswith("make ")]
    for line in [*fenced, *inline]:
        if line.split(" ")[0] in WORDS and "..." not in line:
            yield shlex.split(line, comments=True)


def bwsft_words(words):
    """What follows `bwsft` or `-m bwsft`; None if the command is another."""
    if words[0] == "bwsft":
        return words[1:]
    at = words.index("-m") if "-m" in words else None
    return words[at + 2 :] if at is not None and words[at + 1] == "bwsft" else None


def parse(words, monkeypatch):
    """Parse a `bwsft` command line without running it."""
    if words[0] == "train":
        if "--resume" in words:  # of a run that a reader has made
            run = Path(words[words.index("--resume") + 1])
            run.mkdir(parents=True)
            (run / "config.json").write_text(c.to_json(presets.debug()))
        return parse_train(words[1:])
    real = tyro.cli

    def parsed(*arguments, **options):
        found = real(*arguments, **options)
        if isinstance(found, CompareOptions):
            compare.check(found)
        raise Parsed

    monkeypatch.setattr(tyro, "cli", parsed)
    with pytest.raises(Parsed):
        assert cli.main(words) == 0


@pages
def test_commands_parse(path, monkeypatch, capsys, tmp_path_factory):
    for words in commands(path):
        if (own := bwsft_words(words)) is None:
            continue
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("cwd"))
            try:
                parse(own, patch)
            except SystemExit as stop:
                said = capsys.readouterr()
                assert stop.code == 0, f"{shlex.join(words)}\n{said.err or said.out}"
            except (ValueError, OSError) as error:
                pytest.fail(f"{shlex.join(words)}: {error}")


@pages
def test_scripts_have_the_flags(path):
    for words in commands(path):
        if words[0] != "python" or not words[1].endswith(".py"):
            continue
        sources = (ROOT / words[1]).read_text(encoding="utf-8")
        if words[1].startswith("benchmarks/"):
            sources += (ROOT / "benchmarks/lib/harness.py").read_text(encoding="utf-8")
        flags = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
        missing = {flag for flag in flags if f'"{flag}"' not in sources}
        assert not missing, f"{shlex.join(words)}: no {missing}"


@pages
def test_make_targets_exist(path):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    named = {word for words in commands(path) if words[0] == "make" for word in words[1:]}
    assert named <= set(targets)


@pages
def test_files_exist(path):
    text = path.read_text(encoding="utf-8")
    named = re.findall(
        r"(?<![\w/.-])((?:bwsft|kernels|benchmarks|tests|examples|docs)/[\w./*-]*[\w*/])", text
    )
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing += [link for link in links if not (path.parent / link).exists()]
    assert not missing


@pytest.fixture(scope="module")
def known_flags():
    """Every flag of every command, from its --help, and of the benchmarks and the soaks."""
    found = {"--help", "--help-all", "--version", *spellings()}
    for name in COMMANDS:
        words = [name, "debug", "--help-all"] if name == "train" else [name, "--help"]
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.suppress(SystemExit):
            cli.main(words)
        found |= set(re.findall(r"--[a-z][\w.-]*", stream.getvalue()))
    scripts = ROOT / "tests/kills.py", ROOT / "tests/soak.py"
    for script in [*(ROOT / "benchmarks").rglob("*.py"), *scripts]:
        found |= set(re.findall(r'"(--[\w-]+)"', script.read_text(encoding="utf-8")))
    return found


@pages
def test_flags_and_commands_named_in_the_text_exist(path, known_flags):
    words = [word for span in spans(path) if span.startswith("--") for word in span.split()]
    assert {w.partition("=")[0] for w in words if w.startswith("--")} <= known_flags
    assert {m[1] for span in spans(path) if (m := re.match(r"bwsft ([a-z]+)", span))} <= COMMANDS


@pages
def test_yaml_examples_are_settings(path, tmp_path):
    for body in blocks(path, "yaml"):
        (tmp_path / "run.yaml").write_text(body)
        assert parse_train(["--config", str(tmp_path / "run.yaml")])


@pages
def test_python_compiles_and_what_stands_alone_runs(path):
    code = blocks(path, "python")
    for number, body in enumerate(code):
        compile(body, f"{path.name}, block {number}", "exec")
    if str(path.relative_to(ROOT)) in RUN:
        assert code
        exec(compile("\n".join(code), path.name, "exec"), {"__name__": "docs"})


def test_the_table_of_record_shapes(tmp_path):
    """Each record does in each command what its cell says."""
    from bwsft.data.records import normalize, question
    from bwsft.evaluation.answer_files import read_references

    page = (ROOT / "docs/train_your_data.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `{")]
    assert len(rows) >= 10 and all(cell.strip() for row in rows for cell in row)

    def evaluate(raw):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(raw))
        assert [answer for _, answer in read_references(path, "gsm8k").values()] == ["2"]

    def train(raw):
        record = normalize(raw)
        assert record.messages[-1] == {"role": "assistant", "content": "2"}
        assert record.last in record.answers and record.unread == ()

    def generate(raw):
        asked = question(raw)
        if isinstance(asked, str):
            assert asked in ("1+1?", "Add.\n\n1 and 1")
        else:
            assert asked[-1]["role"] in ("user", "tool")

    for record, *cells in rows:
        raw = json.loads(re.search(r"`(.*?)`", record)[1])
        for cell, command in zip(cells, (train, generate, evaluate), strict=True):
            if cell.strip().startswith("no:"):
                with pytest.raises(ValueError):
                    command(raw)
            else:
                command(raw)


def test_the_paper_is_cited_and_the_license_is_whole():
    title = (
        "Blockwise SFT for Diffusion Language Models: Reconciling Bidirectional Attention and "
        "Autoregressive Decoding"
    )
    citing = ("README.md", "docs/write_an_objective.md", "docs/context_modes.md", "CITATION.cff")
    for name in (*citing, "bwsft/objectives/blockwise.py"):
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert title in text and "2508.19529" in text, name
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation and "\nlicense: Apache-2.0\n" in citation
    license = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(license).hexdigest() == (  # that of apache.org
        "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    )
