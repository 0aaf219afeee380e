"""`bwsft report` of several runs in one page, of spikes, and of runs in progress."""

import dataclasses
import json
import os
import signal
import time
import types

import jsonl
import pytest
from tiny_report import data_of, small_run

from bwsft import config as c
from bwsft.cli import main
from bwsft.commands.report import watch
from bwsft.commands.report.page import side_by_side
from bwsft.utils.claims import lock_folder


def line(step, **changes):
    numbers = {"loss": 2.0, "lr": 1e-5, "grad_norm": 0.5, "tokens": 100, "supervised_tokens": 25}
    return {"step": step, **numbers, "seconds": 0.5, **changes}


def test_runs_are_laid_over_one_another(tmp_path, tiny, monkeypatch):
    """A run of its own checkpoint, and one without data.json, as older ones have none."""
    monkeypatch.chdir(tmp_path)
    one, other = tmp_path / "one", tmp_path / "other"
    small_run(one, steps=3, config=tiny())
    changed = tiny(optim=c.OptimConfig(lr=1e-4), out="elsewhere")
    small_run(other, steps=5, config=changed)
    (one / "data.json").write_text(json.dumps({
        "source": None, "records": 9, "examples": 9, "kept": 8, "dropped": {"too long": 1},
        "unread": {"url": 7}, "skipped": [{"where": "d.jsonl, line 2", "reason": "is torn"}],
        "gen_length": 16, "longer_than_gen_length": 0.25, "train": 6, "held_out": 2,
        "lengths": dict.fromkeys(("prompt", "response"), {"50%": 3, "90%": 4, "max": 1500}),
    }))  # fmt: skip
    assert main(["report", "one", "other", "--samples", "1", "--steps", "4"]) == 0
    data = data_of(tmp_path / "report.html")
    assert [run["name"] for run in data["runs"]] == ["one", "other"]
    assert [len(run["curves"]["step"]) for run in data["runs"]] == [3, 5]
    assert data["settings"]["differ"]["rows"] == [["optim.lr", "0.003", "0.0001"]]
    counts = {label: values for label, *values in data["counts"]["rows"]}
    assert counts["kept"] == ["8 (88.89%)", "–"] and counts["dropped: too long"][0] == "1"
    assert counts["not read: url"][0] == "7" and counts["held out"][0] == "2"
    assert counts["malformed: d.jsonl, line 2"][0] == "is torn"
    assert counts["prompt tokens"][0] == "median 3, 90 % up to 4, longest 1,500"
    # Both start from the same random base, which is shown once.
    [[answer]] = [sample["answers"] for sample in data["samples"]]
    assert answer["name"] == "base of one and other"
    (one / "data.json").write_text('{"source": 1}')
    assert main(["report", "one", "--samples", "0"]) == 2


def test_answers_to_one_prompt_stand_side_by_side():
    def sample(question, **answers):
        rows = [{"name": name.replace("_", "-"), "text": text} for name, text in answers.items()]
        return {"question": question, "reference": "r", "answers": rows}

    found = side_by_side(["A", "B"], [
        [sample("q", base="x", step_1="y"), sample("p", base="x")],
        [sample("q", base="z", step_1="y")],
    ])  # fmt: skip
    said = {s["question"]: [(a["name"], a["text"]) for a in s["answers"]] for s in found}
    assert said == {
        "q": [("base of A", "x"), ("step-1 of A", "y"), ("base of B", "z"), ("step-1 of B", "y")],
        "p": [("base of A", "x")],
    }


def test_spikes_are_those_of_the_guard(tmp_path):
    config = c.Config(preset="debug", steps=9, watch=c.WatchConfig(spike_window=4))
    run = small_run(tmp_path / "run", config=config)
    loss = "loss 21 is 10 times the 90th percentile of the last 2 updates"
    norm = "grad norm 26 is 52 times the 90th percentile of the last 4 updates"
    rows = [
        line(1), line(2), line(3, loss=21.0, spike=loss, skipped=True), line(4),
        line(5, grad_norm=26.0, spike=norm),
    ]  # fmt: skip
    jsonl.write(run / "metrics.jsonl", *rows)
    for step, what in ((5, "the same"), (6, "loss nan")):
        kept = run / "repro" / f"step-{step}"
        kept.mkdir(parents=True)
        (kept / "repro.json").write_text(json.dumps({"step": step - 1, "what": what}))
    (run / "repro" / "step-7").mkdir()  # its writer was killed
    assert main(["report", str(run), "--samples", "0"]) == 0
    data = data_of(run / "report.html")
    replay = f"bwsft replay {run}/repro/step-"
    assert data["runs"][0]["spikes"] == [
        [3, loss, "its update was left out"],
        [5, norm, f"the run went on; {replay}5"],
        [6, "loss nan", f"the run ended; {replay}6"],
    ]  # fmt: skip
    assert dict(data["facts"]["rows"])["spikes"] == "3, 1 left out"


def sleep_by(monkeypatch, act):
    """act() for each pause of the watch."""
    clock = types.SimpleNamespace(sleep=lambda seconds: act(), monotonic=time.monotonic)
    monkeypatch.setattr(watch, "time", clock)


@pytest.fixture
def training(tmp_path, tiny, monkeypatch):
    """training(*acts) -> run folder that is locked as by a training of 10 updates; at the n-th
    pause of the watch the n-th act happens."""

    def start(*acts):
        run = small_run(tmp_path / "run", steps=2, config=tiny(dataset=c.DataConfig(holdout=0)))
        lock, left = lock_folder(run), list(acts)
        sleep_by(monkeypatch, lambda: left.pop(0)(run, lock))
        return run

    return start


def page_says(found):
    def look(run, lock):
        data = data_of(run / "report.html")
        found.append((data["live"]["runs"][0]["said"], len(data["runs"][0]["curves"]["step"])))

    return look


def grow(run, lock):
    with open(run / "metrics.jsonl", "a") as log:
        log.write(json.dumps(line(3)) + "\n")


def test_watch_follows_a_run_to_its_end(training, capsys):
    found = []
    end = [page_says(found), grow, page_says(found), lambda run, lock: lock.close()]
    run = training(*end)
    assert main(["report", str(run), "--watch"]) == 0
    assert found == [
        ("2 of 10 updates; about 4 s left", 2), ("3 of 10 updates; about 4 s left", 3),
    ]  # fmt: skip
    data = data_of(run / "report.html")
    assert data["live"] is None and "--dataset.holdout 0" in data["notes"][0]
    assert capsys.readouterr().out.splitlines() == [str(run / "report.html")] * 2


def test_ctrl_c_ends_the_watch_and_leaves_a_page_that_stands_still(
    training, capsys, usual_interrupt
):
    run = training(grow, lambda run, lock: os.kill(os.getpid(), signal.SIGINT))
    assert main(["report", str(run), "--watch"]) == 130
    data = data_of(run / "report.html")
    assert data["live"] is None and data["runs"][0]["curves"]["step"] == [1, 2, 3]
    assert capsys.readouterr().err.splitlines()[-1] == "bwsft report: interrupted"


def test_watch_waits_for_a_run_that_is_about_to_begin(tmp_path, tiny, monkeypatch, capsys):
    run, held = tmp_path / "run", []

    def begin():
        if not run.exists():
            run.mkdir()
            (run / "config.json").write_text(c.to_json(tiny(dataset=c.DataConfig(holdout=0))))
        elif not held:  # a moment later
            held.append(lock_folder(run))
        else:
            jsonl.write(run / "metrics.jsonl", line(1))
            held[0].close()

    sleep_by(monkeypatch, begin)
    assert main(["report", str(run), "--watch"]) == 0
    assert f"waiting for {run} to become a run folder" in capsys.readouterr().err
    assert data_of(run / "report.html")["runs"][0]["curves"]["step"] == [1]


def test_without_locks_a_run_goes_on_until_its_last_update(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(watch, "locked", lambda folder: None)
    config = tiny(steps=3)
    assert not watch.goes_on(small_run(tmp_path / "done", steps=3, config=config))
    later = dataclasses.replace(config, steps=4)
    assert watch.goes_on(small_run(tmp_path / "not", steps=3, config=later))
