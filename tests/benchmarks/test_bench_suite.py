"""The GPU suite keeps what it has when time runs out; the tile search refuses wrong tiles."""

import json
import time
from pathlib import Path

import gpu_suite
import pytest
import tile_search as tiles
import torch
from bwsft_kernels import _tuning
from bwsft_kernels._tuning import Tile

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """The suite on a folder of three small scripts."""
    (tmp_path / "ok.py").write_text("print('a table'); print('{\"bench\": \"ok\"}')")
    (tmp_path / "slow.py").write_text("import time; print('one line', flush=True); time.sleep(60)")
    (tmp_path / "bad.py").write_text("raise RuntimeError('no GPU')")
    monkeypatch.setattr(gpu_suite, "HERE", tmp_path)
    return gpu_suite


def part(suite, name, file, seconds=20):
    return suite.Part(name, file, "", seconds, ("",))


def test_a_part_over_its_limit_keeps_what_it_printed(suite, tmp_path):
    slow = part(suite, "slow", "slow.py")
    found = suite.run_part(slow, suite.command(slow, "", None), 2)
    assert found["status"] == "over its limit of 2 s" and found["stdout"] == "one line\n"
    assert found["seconds"] < 10


def test_results_are_written_after_every_part(suite, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "PARTS", [
        part(suite, "first", "ok.py"), part(suite, "second", "bad.py"),
        part(suite, "third", "ok.py"),
    ])  # fmt: skip
    file = tmp_path / "new" / f"{suite.datetime.date.today()}_cpu_suite_dry.json"
    run_part, written = suite.run_part, []

    def watched(*args):
        written.append(len(json.loads(file.read_text())["parts"]) if file.exists() else 0)
        return run_part(*args)

    monkeypatch.setattr(suite, "run_part", watched)
    assert suite.main(["--dry", "--out", str(tmp_path / "new")]) == 1
    assert written == [0, 1, 2]
    parts = json.loads(file.read_text())["parts"]
    assert [p["status"] for p in parts] == [0, 1, 0]
    assert parts[0]["result"] == {"bench": "ok"} and "no GPU" in parts[1]["stderr"]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["failed"] == ["second"] and last["out"] == file.name
    assert str(tmp_path) not in json.dumps(last)


def test_no_part_starts_when_time_is_up(suite, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "PARTS", [part(suite, "first", "ok.py")])
    assert suite.main(["--dry", "--minutes", "0.01", "--out", str(tmp_path)]) == 1
    assert "first: no time left" in capsys.readouterr().out


def test_parts_name_files_and_fit_in_eight_minutes():
    assert gpu_suite.MOST == 480
    for one in gpu_suite.PARTS:
        assert one.file == "pytest" or (BENCHMARKS / one.file).exists()
        assert one.seconds <= 120
    # What matters most fits even if every part takes all it may.
    assert sum(one.seconds for one in gpu_suite.PARTS[:5]) <= gpu_suite.MOST


def test_neighbors_fit_and_differ():
    tile = Tile(128, 128, 64, 8, 3)
    found = tiles.neighbors(tile, 80)
    assert tile not in found and len(found) == len(set(found)) >= 6
    assert Tile(64, 128, 64, 8, 3) in found and Tile(128, 128, 64, 8, 4) in found
    assert Tile(128, 128, 128, 8, 3) not in found  # 192 KB of 163
    for one in found:
        assert 2 * one.stages * one.depth * (one.rows + one.cols) <= 163 << 10


def test_a_wrong_tile_and_a_broken_one_are_refused():
    key, present = ("grad_input", 80, 2), tiles.present("grad_input", 80, 512)
    best, wrong, broken = tiles.neighbors(present, 80)[:3]

    def tile():
        return _tuning.TABLE[key][0][1]

    def run():
        if tile() == broken:
            raise RuntimeError("out of resource")
        return torch.ones(3) * (2 if tile() == wrong else 1)

    def clock(run):
        run()
        return {best: 1.0, wrong: 0.5}.get(tile(), 2.0)

    before = _tuning.TABLE[key]
    found = tiles.search(key, 512, run, clock, time.monotonic() + 60)
    assert _tuning.TABLE[key] is before
    assert found["gain"] == 2 and found["proposed"] == f"TABLE['grad_input', 80, 2]: (512, {best}),"
    assert [text.partition(":")[0] for text in found["failed"]] == [str(wrong), str(broken)]
    assert str(wrong) not in found["ms"]


def test_a_small_gain_proposes_nothing():
    key, present = ("loss", 90, 2), tiles.present("loss", 90, 512)

    def clock(run):
        return 1.0 if _tuning.TABLE[key][0][1] == present else 0.98

    def search(seconds):
        return tiles.search(key, 512, lambda: torch.zeros(1), clock, time.monotonic() + seconds)

    found = search(60)
    assert found["gain"] == 1.02 and found["proposed"] is None and len(found["ms"]) > 4
    assert len(search(-1)["ms"]) == 1  # the time was up


def test_a_faster_road_is_proposed_and_a_wrong_one_refused():
    runs = {"cublas": lambda: torch.ones(2), "triton": lambda: torch.ones(2)}
    clock = {runs["cublas"]: 2.0, runs["triton"]: 1.0}.get
    found = tiles.compare_roads("grad_input", 90, 128, runs, clock)
    assert found["proposed"] == "ROADS['grad_input', 90, 2]: (128, 'triton'),"
    assert tiles.compare_roads("grad_input", 80, 128, runs, clock)["proposed"] is None
    with pytest.raises(AssertionError, match="not close"):
        runs["triton"] = lambda: torch.zeros(2)
        tiles.compare_roads("grad_input", 80, 128, runs, clock)


def test_dry_walks_all_cases(tmp_path, capsys):
    tiles.main(["--dry", "--out", str(tmp_path / "tiles.json")])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(last["found"]) == 2 * (len(tiles.CASES) + len(tiles.ROAD_CASES))
    assert json.loads((tmp_path / "tiles.json").read_text()) == last["found"]
