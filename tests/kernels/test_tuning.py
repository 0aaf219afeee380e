"""The tables of roads and tiles, the opt-in search, and the guard of the current device."""

import contextlib
import types

import pytest
import torch
from bwsft_kernels import _tuning
from bwsft_kernels._device_triton import on_device

KERNELS = ("logits", "capped", "loss", "stats", "noise", "grad_input")


def test_every_key_has_a_tile_for_every_number_of_rows():
    assert set(_tuning.TABLE) == {
        (kernel, arch, size) for kernel in KERNELS for arch in (80, 90, "safe") for size in (2, 4)
    }
    for entries in _tuning.TABLE.values():
        most = [most for most, _ in entries]
        assert most == sorted(most) and most[-1] >= 1 << 40
        for _, tile in entries:
            for value in (tile.rows, tile.cols, tile.depth, tile.warps):
                assert value & (value - 1) == 0
            assert min(tile.rows, tile.cols, tile.depth) >= 16  # the least that tl.dot takes


def test_roads_cover_any_number_of_rows_and_only_known_cards_leave_cublas():
    for (operation, arch, size), entries in _tuning.ROADS.items():
        assert operation in ("logits", "loss", "grad_input") and arch in (80, 90) and size == 2
        most = [most for most, _ in entries]
        assert most == sorted(most) and most[-1] >= 1 << 40
        assert {road for _, road in entries} <= {"cublas", "triton"}


def test_the_road_of_a_number_of_rows(monkeypatch):
    roads = {("loss", 80, 2): ((100, "triton"), (_tuning.ANY_ROWS, "cublas"))}
    monkeypatch.setattr(_tuning, "ROADS", roads)
    monkeypatch.setattr(_tuning, "architecture", lambda device: 80)
    tensor, device = torch.empty(1, dtype=torch.float16), torch.device("cpu")
    for rows, possible in ((100, {"triton"}), (101, {"triton", "cublas"})):
        assert _tuning.tuned_road("loss", tensor, rows, {}) == sorted(possible)[0]
        assert _tuning.possible_roads("loss", torch.float16, rows, device) == possible
    assert _tuning.tuned_road("loss", tensor.float(), 1, {}) == "cublas"
    assert _tuning.possible_roads("logits", torch.float16, 1, device) == {"cublas"}
    monkeypatch.setenv("BWSFT_AUTOTUNE", "1")
    assert _tuning.possible_roads("logits", torch.float16, 1, device) == {"cublas", "triton"}


def test_search_of_a_road(monkeypatch, capsys):
    monkeypatch.setenv("BWSFT_AUTOTUNE", "1")
    monkeypatch.setattr(_tuning, "_found", {})
    monkeypatch.setattr(_tuning, "milliseconds", lambda run: run())
    tensor = torch.empty(1, dtype=torch.float16)
    for rows in (300, 512):
        runs = {"cublas": lambda: 2.0, "triton": lambda: 1.0}
        assert _tuning.tuned_road("grad_input", tensor, rows, runs) == "triton"
    assert capsys.readouterr().out == "ROADS['grad_input', 'safe', 2]: (512, 'triton'),\n"


@pytest.mark.parametrize("rows, tile_rows", [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128)])
def test_the_smallest_bucket_that_fits(rows, tile_rows, monkeypatch):
    monkeypatch.setattr(_tuning, "architecture", lambda device: 80)
    tensor = torch.empty(1, dtype=torch.bfloat16)
    assert _tuning.tuned("loss", tensor, rows, None).rows == tile_rows


@pytest.mark.parametrize(
    "capability, arch", [((8, 0), 80), ((9, 0), 90), ((8, 6), "safe"), ((12, 0), "safe")]
)
def test_architecture(capability, arch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _tuning.architecture(torch.device("cuda:0")) == arch
    assert _tuning.architecture(torch.device("cpu")) == "safe"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert _tuning.architecture(torch.device("cuda:0")) == "safe"


def test_search_prints_an_entry_to_paste_and_runs_once_per_bucket(monkeypatch, capsys):
    """The third tile of the list is the fastest of this made-up clock."""
    monkeypatch.setenv("BWSFT_AUTOTUNE", "1")
    monkeypatch.setattr(_tuning, "architecture", lambda device: 80)
    monkeypatch.setattr(_tuning, "_found", {})
    launched = []

    def clock(run):
        run()
        return 1.0 if launched[-1] == _tuning.TABLE["stats", 80, 2][2][1] else 2.0

    monkeypatch.setattr(_tuning, "milliseconds", clock)
    tensor = torch.empty(1, dtype=torch.float16)
    for rows in (100, 128, 70):
        tile = _tuning.tuned("stats", tensor, rows, launched.append)
        assert tile == _tuning.Tile(64, 128, 64, 4, 4)
    assert len(launched) == 4
    assert capsys.readouterr().out == (
        "TABLE['stats', 80, 2]: (128, Tile(rows=64, cols=128, depth=64, warps=4, stages=4, "
        "tma=False)),\n"
    )


def test_tiles_are_timed_without_the_gaps_between_launches(monkeypatch):
    """A graph of ten runs, behind a replay that isn't timed; two runs compile and warm up."""
    log, clock = [], types.SimpleNamespace(now=0.0)

    class Graph:
        def replay(self):
            log.append("replay")
            clock.now += 10 * 0.25

    class Event:
        def record(self):
            log.append("event")
            self.at = clock.now

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at - self.at

    @contextlib.contextmanager
    def graph(which, capture_error_mode):
        log.append("capture")
        yield
        log.append("captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    assert _tuning.milliseconds(lambda: log.append("run"), repeats=10) == 0.25
    assert log[:14] == ["run", "run", "capture", *["run"] * 10, "captured"]
    assert log[14:] == 5 * ["replay", "event", "replay", "event"]


def test_launches_happen_on_the_device_of_the_tensor(monkeypatch):
    """Liger-Kernel#1303, triton#2441: a kernel on cuda:0 that gets pointers of cuda:1."""
    entered = []

    @contextlib.contextmanager
    def device(which):
        entered.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    tensor = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    with on_device(tensor):
        assert entered == [torch.device("cuda:1")]
    with on_device(torch.empty(1)):
        assert len(entered) == 1
