"""The run's logs: append, truncate on resume, survive a torn end; and the plot."""

import json
import os

import jsonl
import pytest

from bwsft.training.metrics import JsonLog, plot_run, read_log, running_mean


def write(path, *steps, end="\n"):
    path.write_text("\n".join(json.dumps({"step": s, "loss": s / 2}) for s in steps) + end)


def test_a_new_log_starts_empty_and_grows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonLog(path, 0)
    for step in (1, 2):
        log.append({"step": step, "loss": 0.1 + step})
        assert read_log(path)[-1] == {"step": step, "loss": 0.1 + step}  # visible at once, exact
    assert log.steps == {1, 2}
    log.sync()
    log.close()


@pytest.mark.parametrize(("last", "kept"), [(0, [0]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_resuming_drops_the_lines_behind_the_checkpoint(tmp_path, last, kept):
    path = tmp_path / "eval.jsonl"
    write(path, 0, 1, 2, 3)
    log = JsonLog(path, last)
    assert log.steps == set(kept) and [r["step"] for r in read_log(path)] == kept
    log.append({"step": 7})
    log.close()
    assert [r["step"] for r in read_log(path)] == [*kept, 7]
    assert os.listdir(tmp_path) == ["eval.jsonl"]


@pytest.mark.parametrize("end", ['\n{"step": 3, "lo', '\n{"step": 3, "loss": 1.5}', "\n{"])
def test_a_torn_last_line_is_left_out(tmp_path, end):
    """Without its line end a line may be half a number: 1.5 of 1.53."""
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, end=end)
    assert [r["step"] for r in read_log(path)] == [1, 2]
    log = JsonLog(path, 5)
    log.append({"step": 3})
    log.close()
    assert path.read_text().splitlines()[-1] == '{"step": 3}'


@pytest.mark.parametrize("line", ['{"step": 1', '{"loss": 1}', "[1]", '{"step": "one"}', ""])
def test_a_damaged_line_is_named_and_nothing_is_dropped(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match="metrics.jsonl, line 2 is not a record with a step"):
        JsonLog(path, 3)
    assert path.read_bytes() == before


def test_running_mean():
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert running_mean([2.0, 4.0], 1) == [2.0, 4.0]
    assert running_mean([], 3) == []


@pytest.mark.parametrize("steps", [0, 1, 30])
def test_plot(tmp_path, steps):
    lines = [{"step": s, "loss": 2 / s, "lr": 1e-3, "grad_norm": 1.0} for s in range(1, steps + 1)]
    jsonl.write(tmp_path / "metrics.jsonl", *lines)
    (tmp_path / "eval.jsonl").write_text('{"step": 0, "nelbo": 2.0}\n' if steps else "")
    path = plot_run(tmp_path)
    assert path == tmp_path / "loss.png" and path.read_bytes()[:4] == b"\x89PNG"
    assert sorted(os.listdir(tmp_path)) == ["eval.jsonl", "loss.png", "metrics.jsonl"]
