"""A stranger's first hour: a fresh clone, a fresh home, and what the output says to do next."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness_tasks import SUMS, write_task

ROOT = Path(__file__).resolve().parents[2]
DATA = os.environ.get("BWSFT_DATA_DIR")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def hour(tmp_path_factory):
    """hour(words) runs a command of the clone and returns what it printed."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout: there is nothing to clone")
    base = tmp_path_factory.mktemp("first_hour")
    clone, home = base / "clone", base / "home"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    home.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BWSFT", "HF_", "PYTHON"))}
    paths = os.pathsep.join(map(str, (clone, clone / "kernels" / "torch-ext")))
    env = kept | {"HOME": str(home), "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}

    def run(command, *more, status=0):
        words = shlex.split(command) if isinstance(command, str) else list(command)
        assert words.pop(0) == "bwsft"
        words = [sys.executable, "-m", "bwsft", *words, *more]
        done = subprocess.run(words, cwd=base, env=env, capture_output=True, text=True)
        assert done.returncode == status, f"{words}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    run.base, run.env = base, env
    return run


def named(output, start):
    """The command that a line of output names after `start`."""
    found = re.findall(rf"{re.escape(start)} *(bwsft .*)", output)
    assert found, f"no line {start!r} in {output[-2000:]}"
    return found[-1].strip()


def accuracy(hour, command, name):
    hour(command, "--json", name)
    return json.loads((hour.base / name).read_text())["ladder_accuracy"]


def harness_score(hour, model):
    """exact_match of lm-evaluation-harness on the problems of test.jsonl."""
    asked = [json.loads(line) for line in (hour.base / "test.jsonl").read_text().splitlines()]
    rows = [
        {"question": p["query"], "answer": p["response"].replace("The answer is:", "####")}
        for p in asked
    ]
    folder = hour.base / "tasks"
    folder.mkdir()
    write_task(folder, "sums", "generate_until", rows, SUMS)
    words = [sys.executable, "-m", "bwsft.lm_eval_model", "run", "--model", "bwsft"]
    words += ["--model_args", f"pretrained={model}", "--tasks", "sums", "--include_path", folder]
    done = subprocess.run(words, cwd=hour.base, env=hour.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(re.search(r"\|sums.*exact_match\W+([0-9.]+)", done.stdout)[1])


def test_demo(hour):
    output = hour("bwsft demo --steps 4 --problems 4")
    assert "after Blockwise SFT" in output and "run folder:" in output


def test_train_score_export_and_go_on(hour):
    trained = hour("bwsft train debug --steps 40")
    first, last = re.search(r"NELBO ([\d.]+) -> ([\d.]+)", trained).groups()
    assert float(last) < float(first)
    hour(named(trained, "test problems:"))
    answer = hour(named(trained, "ask it:"))
    assert "The answer is:" in answer
    score = named(trained, "score it:")
    before = accuracy(hour, score, "run.json")
    export = named(trained, "hand it on:")
    hour(export)
    run, out = (shlex.split(export)[shlex.split(export).index(f) + 1] for f in ("--model", "--out"))
    assert accuracy(hour, score.replace(f"--model {run}", f"--model {out}"), "out.json") == before
    assert before > 0.2
    if importlib.util.find_spec("lm_eval"):
        assert harness_score(hour, out) == pytest.approx(before, abs=1e-3)
    code = (
        "import bwsft, json, sys\n"
        "asked = [json.loads(line) for line in open('test.jsonl')][0]['query']\n"
        "assert bwsft.generate(sys.argv[1], asked) == bwsft.load(sys.argv[2]).generate(asked)\n"
    )
    words = [sys.executable, "-c", code, run, out]
    subprocess.run(words, cwd=hour.base, env=hour.env, check=True)
    longer = hour(f"bwsft train --resume {run} --steps 44")
    assert "44" in longer and (hour.base / run / "checkpoints" / "step-44").is_dir()
    hour(["bwsft", "train", "--resume", f"{run}x"], status=2)


def test_own_records(hour):
    rows = [
        {"messages": [{"role": "user", "content": f"{a} + {a}?"},
                      {"role": "assistant", "content": f"{a} + {a} is {2 * a}."}], "id": a}
        for a in range(12)
    ]  # fmt: skip
    (hour.base / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = hour("bwsft data own.jsonl")
    assert "kept 12 of 12" in shown and "id (12)" in shown
    trained = hour(named(shown, "train on it:\n"), "--steps", "4", "--out", "runs/own")
    assert "1 held out" in trained
    said = hour(f"{named(trained, 'see it:')} runs/debug-seed42")
    assert "No samples" not in said
    assert (hour.base / "report.html").stat().st_size > 10_000


@pytest.mark.skipif(not DATA, reason="BWSFT_DATA_DIR is not set")
def test_gsm8k(hour):
    shutil.copy(Path(DATA) / "gsm8k" / "train.jsonl", hour.base / "gsm8k.jsonl")
    refused = hour("bwsft train debug --data gsm8k.jsonl --max-length 72 --out x", status=2)
    assert "--max-length" in refused
    shown = hour("bwsft data gsm8k.jsonl")
    command = named(shown, "train on it:\n")
    trained = hour(command, "--steps", "1", "--out", "runs/gsm8k", "--batch-size", "2",
                   "--micro-batch-size", "2", "--eval-every", "0")  # fmt: skip
    assert "run folder: runs/gsm8k" in trained
