"""The front door: `import bwsft`, its help, and the five names that it offers."""

import pydoc
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import bwsft


def examples():
    """The indented blocks of help(bwsft), from its text as a terminal shows it."""
    shown = pydoc.render_doc(bwsft, renderer=pydoc.plaintext)
    description = textwrap.dedent(shown.partition("DESCRIPTION\n")[2].partition("\nPACKAGE")[0])
    return shown, re.split(r"^(?=\d\. )", description, flags=re.M)[1:]


def test_help_shows_six_things_and_each_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BWSFT_CACHE", str(tmp_path / "cache"))
    shown, things = examples()
    assert len(things) == 6 and all(f"\n    {name}(" in shown for name in ("train", "load"))
    names = {}
    for number, thing in enumerate(things, 1):
        lines = [line for line in thing.splitlines() if line.startswith("    ") or not line]
        code = textwrap.dedent("\n".join(lines))
        assert code.strip(), thing
        exec(compile(code, f"help, thing {number}", "exec"), names)
    assert names["trainer"].state.global_step == 4
    assert names["run"] == Path("run") and (tmp_path / "run/loss.png").exists()
    assert isinstance(names["answer"], str) and len(names["answers"]) == 2
    assert names["answers"][0] == bwsft.generate("run", "3 + 4")
    assert names["decoder"].config.context == "cached"  # as the Trainer's folder says
    changed = {"context": "exact", "gen_length": 8}
    answer = names["decoder"].generate("3 + 4", **changed)
    assert answer == bwsft.generate("trained", "3 + 4", **changed) != names["answer"]
    assert answer == bwsft.generate(names["decoder"], "3 + 4", **changed)
    with pytest.raises(ValueError, match="model is a Linear: name its folder"):
        bwsft.generate(torch.nn.Linear(2, 2), "3 + 4")
    assert "kept 64 of 64 records" in capsys.readouterr().out


def test_names():
    assert set(bwsft.__all__) - {"__version__"} == {
        "BlockwiseConfig", "BlockwiseTrainer", "generate", "load", "train"
    }  # fmt: skip
    assert all(hasattr(bwsft, name) for name in bwsft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = bwsft.Trainer


def test_train_takes_presets_configs_and_changes(tiny, tmp_path):
    changes = {"out": tmp_path / "own", "eval": {"every": 0}, "seed": 5}
    with ThreadPoolExecutor(1) as pool:  # a thread that can take no signal, as a server's
        run = pool.submit(bwsft.train, tiny(steps=1), **changes).result()
    assert run == tmp_path / "own" and (run / "checkpoints/step-1").is_dir()
    with pytest.raises(ValueError, match="'llada' is no preset: take one of debug, "):
        bwsft.train("llada")
    with pytest.raises(ValueError, match="bwsft.train: unknown setting stepz; did you mean steps"):
        bwsft.train("debug", stepz=3)
    with pytest.raises(ValueError, match="block-size 7 must divide"):
        bwsft.train("debug", block_size=7)
    with pytest.raises(RuntimeError, match="other failed"):  # weights of 1e30 overflow at once
        bwsft.train(tiny(steps=9), out=tmp_path / "other", optim={"lr": 1e30, "warmup": 0.0})
