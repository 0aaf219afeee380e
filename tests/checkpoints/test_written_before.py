"""A run folder and an exported model that an earlier version wrote: they open and go on here.

Both come from version 0.1.0 before its modules moved into rooms: `bwsft train debug --tokenizer
tokenizer --init.d-model 16 --init.n-layers 1 --steps 4 --context cached --lora.rank 2 ...` of which
the checkpoint of step 2 and the log of all four steps are kept, and `bwsft export --model run`.
"""

import json
import shutil
from pathlib import Path

import pytest

from bwsft import cli

FOLDER = Path(__file__).with_name("written_before")
PROMPT = "Tom has 5 bags"
ANSWER = "999�����9��9�99�"


@pytest.fixture
def here(tmp_path, monkeypatch):
    shutil.copytree(FOLDER, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    monkeypatch.setenv("BWSFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "old"


def test_an_old_run_goes_on_where_it_was(here):
    logs = {name: (here / f"run/{name}.jsonl").read_text() for name in ("metrics", "eval")}
    assert cli.main(["train", "debug", "--resume", "run"]) == 0
    for name, column in (("metrics", "loss"), ("eval", "nelbo")):
        before, after = (
            [(line["step"], line[column]) for line in map(json.loads, text.splitlines())]
            for text in (logs[name], (here / f"run/{name}.jsonl").read_text())
        )
        assert [step for step, _ in after] == [step for step, _ in before]
        # The sums of another CPU may be in another order.
        assert [v for _, v in after] == pytest.approx([v for _, v in before], rel=1e-5)
    assert (here / "run/checkpoints/step-4/manifest.json").exists()


@pytest.mark.parametrize("model", ["run", "export"])
def test_old_weights_decode_as_they_did(here, model, capsys):
    if model == "run":  # the answer was given at step 4
        assert cli.main(["train", "debug", "--resume", "run"]) == 0
        capsys.readouterr()
    words = f"--model {model} --gen-length 16 --block-size 8 --context cached --template chat"
    assert cli.main(["generate", *words.split(), "--prompt", PROMPT]) == 0
    assert capsys.readouterr().out.splitlines()[0] == ANSWER
