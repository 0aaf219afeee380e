"""The soak harness with three kills, and that it would notice: a torn file, a changed curve, a
leftover. (All of it: python tests/kills.py --kills 50.)"""

import json
import shutil

import jsonl
import kills as soak
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    """A run killed once at every kind of moment, and its reference."""
    work = soak.Soak(tmp_path_factory.mktemp("soak"), kills=3, steps=12)
    assert "3 kills" in soak.soak(work)
    return work


@pytest.fixture
def copy(soaked, tmp_path):
    """The soaked run again, to be damaged."""
    shutil.copytree(soaked.folder, tmp_path / "copy")
    work = soak.Soak(tmp_path / "copy", kills=3, steps=12)
    work.check_at_the_end()
    return work


@pytest.mark.timeout(600)
def test_three_kills(soaked):
    assert dict(soaked.ended) == dict.fromkeys(soak.MOMENTS, 1)


def edit_line(path, number, **changes):
    lines = jsonl.read(path)
    lines[number] |= changes
    jsonl.write(path, *lines)


def change_loss(work):
    log = work.run / "metrics.jsonl"
    edit_line(log, 5, loss=jsonl.read(log)[5]["loss"] * (1 + 1e-15) + 1e-16)


def drop_step(work):
    log = work.run / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:5] + lines[6:]))


def double_step(work):
    edit_line(work.run / "metrics.jsonl", 6, step=6)


def cut_weights(work):
    weights = soak.step_folders(work.run)[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def other_weights(work):
    manifest = soak.step_folders(work.reference)[0] / "manifest.json"
    files = json.loads(manifest.read_text())
    files["model.safetensors"]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(files))


@pytest.mark.parametrize(("damage", "word"), [
    (change_loss, "metrics.jsonl differs"),
    (lambda w: edit_line(w.run / "eval.jsonl", 1, nelbo=0.5), "eval.jsonl differs"),
    (drop_step, "holds steps"),
    (double_step, "holds steps"),
    (cut_weights, "torn"),
    (other_weights, "last checkpoints differ"),
    (lambda w: (w.run / ".config.json.1234.tmp").touch(), "left over"),
    (lambda w: (w.run / "checkpoints" / ".step-9.12.tmp").mkdir(), "left over"),
    (lambda w: shutil.rmtree(soak.step_folders(w.run)[-1]), "last checkpoints differ"),
    (lambda w: (w.run / "loss.png").write_bytes(b""), "loss.png is torn"),
])
def test_it_notices(copy, damage, word):
    damage(copy)
    with pytest.raises(soak.Failed, match=word):
        copy.check_at_the_end()
