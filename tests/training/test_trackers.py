"""Trackers hear what the JSONL files say, and never cost a run."""

import importlib.util
import json
import struct

import pytest
from accelerate.utils import LoggerType

from bwsft import config as c
from bwsft.cli import main
from bwsft.training import trackers
from bwsft.training.metrics import read_log
from bwsft.training.setup import train


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


class Listener:
    name = "listener"

    def __init__(self, fails_at=None):
        self.said, self.fails_at, self.finished = [], fails_at, 0

    def log(self, values, step):
        if step == self.fails_at:
            raise ConnectionError("the server is away")
        self.said.append((step, values))

    def finish(self):
        self.finished += 1


def test_a_tracker_hears_every_line(tiny, monkeypatch):
    listener = Listener()
    monkeypatch.setattr(trackers, "start", lambda run: [listener])
    assert train(tiny()) == 0
    folder = c.run_folder(tiny())
    said = {"metrics": [], "eval": []}
    for step, values in listener.said:
        (kind,) = {name.split("/")[0] for name in values}
        said[kind].append({"step": step} | {k.split("/")[1]: v for k, v in values.items()})
    assert said["metrics"] == read_log(folder / "metrics.jsonl")
    assert said["eval"] == read_log(folder / "eval.jsonl")
    assert listener.finished == 1


def test_a_tracker_that_fails_is_left_out(tiny, monkeypatch, capsys):
    good, bad = Listener(), Listener(fails_at=3)
    monkeypatch.setattr(trackers, "start", lambda run: [bad, good])
    config = tiny(eval=c.EvalConfig(every=0))
    assert train(config) == 0
    assert [step for step, _ in bad.said] == [1, 2]
    assert [step for step, _ in good.said] == list(range(1, 11))
    assert len(read_log(c.run_folder(config) / "metrics.jsonl")) == 10
    assert capsys.readouterr().err.count("listener is left out from here on: the server is") == 1


def test_unknown_and_missing_ones_are_named(tiny, monkeypatch, capsys, tmp_path):
    with pytest.raises(ValueError, match="--trackers tensorbord is unknown; known are tensorboard"):
        c.validate(tiny(trackers="wandb,tensorbord"))
    assert c.tracker_names(tiny(trackers=" wandb, mlflow,wandb")) == ["wandb", "mlflow"]
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "none"
    assert main(["train", "debug", "--trackers", "wandb", "--out", str(out)]) == 2
    assert "--trackers wandb: the package is missing; pip install wandb" in capsys.readouterr().err
    assert not out.exists()


def events(path):
    """Scalars of a TensorBoard file, {tag: {step: value}}: records of length, 4 bytes, an Event
    message, 4 bytes."""
    from tensorboard.compat.proto.event_pb2 import Event

    data, found, at = path.read_bytes(), {}, 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += length + 16
        for value in event.summary.value:
            number = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
            found.setdefault(value.tag, {})[event.step] = number
    return found


@needs("tensorboard")
def test_tensorboard(tiny):
    config = tiny(trackers="tensorboard")
    assert train(config) == 0
    folder = c.run_folder(config)
    found = {}
    for path in (folder / "tensorboard").rglob("events.*"):
        found |= events(path)
    for line in read_log(folder / "metrics.jsonl"):
        for name in ("loss", "lr", "grad_norm", "data_seconds"):
            value = found[f"metrics/{name}"][line["step"]]
            assert value == pytest.approx(line[name], rel=1e-6)  # fp32
    assert sorted(found["eval/nelbo"]) == [0, 4, 8, 10]


STAND_IN = """
import json, pathlib
config, said = {}, []

class Run:
    def log(self, values, step):
        said.append([step, values])

    def finish(self):
        pathlib.Path("trackio.json").write_text(json.dumps([named, config, said]))

def init(**options):
    global named
    named = options
    return Run()
"""


def test_trackio(tiny, monkeypatch, tmp_path):
    """What the package is told, by a stand-in that has what accelerate uses of it."""
    (tmp_path / "trackio.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    # accelerate looks once, when it is imported, what is installed
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TRACKIO])
    monkeypatch.chdir(tmp_path)
    config = tiny(trackers="trackio")
    assert train(config) == 0
    named, told, said = json.loads((tmp_path / "trackio.json").read_text())
    assert named == {"project": "bwsft", "name": "run", "group": "run"}
    assert told["optim.lr"] == config.optim.lr and told["block_size"] == 4
    assert [step for step, values in said if "eval/nelbo" in values] == [0, 4, 8, 10]
    losses = {step: values["metrics/loss"] for step, values in said if "metrics/loss" in values}
    lines = read_log(c.run_folder(config) / "metrics.jsonl")
    assert losses == {line["step"]: line["loss"] for line in lines}


@needs("wandb")
def test_wandb_offline(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = tiny(trackers="wandb")
    assert train(config) == 0
    assert list((c.run_folder(config) / "wandb").glob("offline-run-*"))


@needs("mlflow")
def test_mlflow_offline(tiny, monkeypatch, tmp_path):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    config = tiny(trackers="mlflow")
    assert train(config) == 0
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.data.metrics["metrics/loss"] == read_log(
        c.run_folder(config) / "metrics.jsonl"
    )[-1]["loss"]
    assert run.data.params["optim.lr"] == json.dumps(config.optim.lr)
