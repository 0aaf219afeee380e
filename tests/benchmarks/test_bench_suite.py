"""The GPU suite keeps what it has when time runs out; the tile search refuses wrong tiles."""

import json
import time
import zipfile
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
    found = suite.run_part(slow, suite.command(slow, "", None), 2, tmp_path)
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


def wheel(folder, name):
    """A wheel of one module, called as its package."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "ANSWER = 42\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
                                          "Requires-Dist: torch==0.1\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_peers_come_from_wheels_without_a_network_and_a_missing_one_stops_nothing(
    suite, tmp_path, monkeypatch, capsys
):
    wheel(tmp_path / "wheels", "own_peer")
    (tmp_path / "uses.py").write_text("import json, own_peer as p\n"
                                      "print(json.dumps({'answer': p.ANSWER, 'at': p.__file__}))")
    monkeypatch.setattr(suite, "PEERS", ("absent-peer==1.0", "own-peer==1.0"))
    monkeypatch.setattr(suite, "PARTS", [
        part(suite, "bad", "bad.py"), part(suite, "gone", "gone.py"),
        part(suite, "uses", "uses.py"),
    ])  # fmt: skip
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody answers there
    argv = ["--dry", "--wheels", str(tmp_path / "wheels"), "--out", str(tmp_path / "out")]
    assert suite.main(argv) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["failed"] == ["absent-peer==1.0", "bad", "gone"]
    (file,) = (tmp_path / "out").glob("*_suite_dry.json")
    absent, own, *_, uses = json.loads(file.read_text())["parts"]
    assert "absent-peer" in absent["stderr"] and own["status"] == 0
    assert uses["result"]["answer"] == 42 and not Path(uses["result"]["at"]).exists()


def test_a_part_that_cannot_start_is_a_result(suite, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "PARTS", [part(suite, n, "ok.py") for n in ("first", "next")])
    popen, calls = suite.subprocess.Popen, []

    def refuses_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise OSError("Cannot allocate memory")
        return popen(*args, **kwargs)

    monkeypatch.setattr(suite.subprocess, "Popen", refuses_once)
    assert suite.main(["--dry", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "first: OSError: Cannot allocate memory in 0 s\nnext: 0 in " in out


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


def test_a_wrong_tile_and_a_broken_one_are_refused_and_cublas_loses():
    key, present = ("grad_input", 90, 2), tiles.present("grad_input", 90, 512)
    now, best, wrong, broken, *_ = tiles.tiles_to_try(key, 512)
    assert now == present and best.tma  # TMA's tile comes first

    def tile():
        return _tuning.TABLE[key][0][1]

    def run():
        if tile() == broken:
            raise RuntimeError("out of resource")
        return torch.ones(3) * (1.01 if tile() == wrong else 1)

    def cublas():
        raise AssertionError("timed, not run")

    def clock(timed):
        if timed is cublas:
            return 1.5
        timed()
        return {best: 1.0, wrong: 0.5}.get(tile(), 2.0)

    before, runs = _tuning.TABLE[key], {"cublas": cublas, "triton": run}
    found = tiles.search(key, 512, runs, clock, time.monotonic() + 60)
    assert _tuning.TABLE[key] is before
    assert found["gain"] == 2 and found["cublas_ms"] == 1.5
    assert found["proposed"] == [f"TABLE['grad_input', 90, 2]: (512, {best}),",
                                 "ROADS['grad_input', 90, 2]: (512, 'triton'),"]
    assert [text.partition(":")[0] for text in found["failed"]] == [str(wrong), str(broken)]
    assert str(wrong) not in found["ms"]


def test_a_small_gain_proposes_nothing():
    key, present = ("loss", 90, 2), tiles.present("loss", 90, 512)

    def clock(run):
        return 1.0 if _tuning.TABLE[key][0][1] == present else 0.98

    def search(seconds):
        runs = dict.fromkeys(("cublas", "triton"), lambda: torch.zeros(1))
        return tiles.search(key, 512, runs, clock, time.monotonic() + seconds)

    found = search(60)
    assert found["gain"] == 1.02 and not found["proposed"] and len(found["ms"]) > 4
    assert len(search(-1)["ms"]) == 1  # the time was up


def test_a_road_that_lost_is_proposed_away():
    key = ("grad_input", 80, 2)
    assert tiles.present_road(key, 512) == "triton"
    runs = {"cublas": object(), "triton": lambda: torch.zeros(1)}
    found = tiles.search(key, 512, runs, lambda run: 1 + (run is not runs["cublas"]), 0)
    assert found["proposed"] == ["ROADS['grad_input', 80, 2]: (512, 'cublas'),"]


def test_a_case_that_fails_stops_no_other(monkeypatch, capsys, tmp_path):
    def fails(kernel, rows):
        raise RuntimeError(f"no memory for {kernel}")

    monkeypatch.setattr(tiles, "launchers", fails)
    found = tiles.measure(("loss", 80, 2), 512, False, time.monotonic() + 60)
    assert found["failed"] == ["RuntimeError: no memory for loss"] and not found["ms"]


def test_dry_walks_all_cases(tmp_path, capsys):
    assert tiles.main(["--dry", "--out", str(tmp_path / "tiles.json")]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(last["found"]) == 2 * len(tiles.CASES)
    assert json.loads((tmp_path / "tiles.json").read_text()) == last["found"]
