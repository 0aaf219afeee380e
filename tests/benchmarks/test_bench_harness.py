"""Interleaved timing, failures, memory and tables of the benchmarks' harness."""

import json
import time
from argparse import Namespace

import pytest
import torch
from lib import harness, memory, output

CPU = torch.device("cpu")


def steps(log, **seconds):
    def variant(name, duration):
        def step():
            log.append(name)
            until = time.process_time() + duration
            while time.process_time() < until:
                pass
            yield "first"
            yield "second"

        return step

    return {name: variant(name, duration) for name, duration in seconds.items()}


def test_variants_alternate_and_the_first_round_warms_up():
    log, results = [], {name: harness.Result(name) for name in "ab"}
    harness.time_interleaved(steps(log, a=0.01, b=0), results, CPU, 3)
    assert log == list("ab" * 4) and results["a"].rounds == results["b"].rounds == 3
    a = results["a"]
    assert a.low_s <= a.median_s <= a.high_s and a.median_s >= 0.01 > results["b"].median_s
    assert set(a.phases) == {"first", "second", "total"} and a.phases["first"] >= 0.01
    log.clear()
    harness.time_interleaved(steps(log, a=0, b=0), results, CPU, 1, warm=True)
    assert log == list("ab")


def test_a_slow_variant_stops_and_a_failed_one_says_why(monkeypatch):
    monkeypatch.setattr(harness, "SLOW_SECONDS", 0.015)
    log, names = [], ("slow", "quick", "full", "wrong")
    results = {name: harness.Result(name) for name in names}
    found = steps(log, slow=0.02, quick=0)

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    def wrong():
        raise RuntimeError("one line\nanother")
        yield

    harness.time_interleaved({**found, "full": full, "wrong": wrong}, results, CPU, 4)
    assert log.count("slow") == 2 and log.count("quick") == 5
    assert results["full"].note == "out of memory" and results["full"].median_s is None
    assert results["wrong"].note == "RuntimeError: one line"


def test_one_thread_is_timed_without_its_neighbours(monkeypatch):
    def step():
        time.sleep(0.05)  # as if another program ran
        yield "all"

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert harness.timed(step, CPU)["total"] < 0.02
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert harness.timed(step, CPU)["total"] >= 0.05


class Stream:
    """A GPU that works off its queue while the host's clock runs: both in seconds."""

    def __init__(self, monkeypatch):
        self.host = self.done = 0.0
        cuda = {"_sleep": lambda cycles: self.launch(cycles / 2e9), "synchronize": self.wait,
                "Event": lambda enable_timing: Event(self)}
        for name, fake in cuda.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def launch(self, seconds):
        self.done = max(self.done, self.host) + seconds

    def wait(self):
        self.host = max(self.host, self.done)


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.at = max(self.stream.done, self.stream.host)

    def query(self):
        return self.stream.host >= self.at

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def test_a_gpu_that_waits_for_the_host_is_not_slow(monkeypatch):
    """Two kernels of 1 ms, between which the host takes 7; a step that synchronizes pays."""
    stream = Stream(monkeypatch)

    def step(synchronizes):
        for phase in ("forward", "backward"):
            stream.host += 0.007
            stream.launch(0.001)
            if synchronizes:
                stream.wait()
            yield phase

    results = {name: harness.Result(name) for name in ("queued", "waits")}
    steps = {"queued": lambda: step(False), "waits": lambda: step(True)}
    harness.time_interleaved(steps, results, torch.device("cuda"), 3, gaps=False)
    queued, waits = results.values()
    assert queued.median_s == pytest.approx(0.002) and not queued.extra["host gaps"]
    assert queued.phases["forward"] == queued.phases["backward"] == pytest.approx(0.001)
    # The first wait is for what was held, the second kernel comes 7 ms later.
    assert waits.median_s == pytest.approx(0.009) and waits.extra["host gaps"] == "counted"


def test_cost_and_share_of_the_roofline():
    def step():
        x = torch.ones(8, 16) @ torch.ones(16, 4)
        x.view(4, 8).add_(1)
        yield "all"

    result = harness.Result("x", median_s=2.0)
    harness.count_cost(step, result)
    assert result.flops == 2 * 8 * 16 * 4 and result.operators == 4  # the view does no work
    assert harness.Peak(1024.0).share(result) == 0.5
    result.traffic_bytes = 300
    assert harness.Peak(1024.0, 100.0).share(result) == 1.5
    assert harness.Peak().share(result) is None


def test_memory_is_the_peak_above_what_was_held():
    held = torch.ones(8 << 20)

    def step():
        torch.ones(16 << 20)  # 64 MiB, gone at once
        yield "all"

    result = harness.Result("x")
    memory.measure_here(step, CPU, result)
    assert 60 << 20 < result.peak_bytes < 80 << 20 and result.baseline_bytes > held.nbytes


def test_peak_of_this_cpu_is_plausible():
    peak = harness.peak_of(CPU)
    assert 1e9 < peak.flops < 1e13 and 1e8 < peak.bytes < 1e12


def test_tables_leave_empty_columns_out_and_files_leave_empty_fields_out(tmp_path, capsys):
    fast = harness.Result("naive", median_s=2.0, low_s=1.5, high_s=2.5, flops=4 * 10**12,
                          phases={"total": 2.0, "all": 2.0}, extra={"steps": 12})
    missing = harness.Result("peer", note="not installed")
    rows = output.cells([fast, missing], harness.Peak(4e12))
    assert rows == [
        ["variant", "total ms", "20-80 %", "x naive", "GFLOP", "of roofline", "steps"],
        ["naive", "2,000", "1,500-2,500", "1.00", "4,000", "50.0%", "12"],
        ["peer", "", "", "", "", "", ""],
    ]
    args = Namespace(json=tmp_path / "out.json", plot=None)
    head = {"device": "cpu", "commit": "abc"}
    output.finish(args, "x", head, [({"rows": 1}, [fast, missing])], ["A remark."])
    remark, last = capsys.readouterr().out.splitlines()
    assert remark == "A remark." and json.loads(last) == {
        "bench": "x", "device": "cpu", "commit": "abc",
        "variants": {"naive": {"median_s": 2.0, "flops": 4 * 10**12}}, "speedup": {"naive": 1.0},
    }  # fmt: skip
    (point,) = json.loads(args.json.read_text())["points"]
    assert point["results"][1] == {"name": "peer", "note": "not installed", "rounds": 0}


def test_the_command_names_no_file_of_this_machine():
    args = Namespace(command=["/home/me/benchmarks/bench_x.py", "--quick", "--json",
                                    "/home/me/a.json", "--rows", "8", "--plot=/b.png"])
    head = output.header(CPU, harness.Peak(), args)
    assert head["command"] == "python benchmarks/bench_x.py --quick --rows 8"
    assert len(head["commit"]) == 12 or head["commit"] == "unknown"
