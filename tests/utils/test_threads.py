"""Threads: as many as there are idle cores, unless the user says how many."""

import pytest
import torch

from bwsft.utils import threads


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(idle, quota) -> four cores of ours with these shares of idle time, a fifth of others;
    torch would take four threads. The counts it was told are returned."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)

    def build(idle, quota="max 100000"):
        monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
        monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
        (tmp_path / "cpu.max").write_text(quota)

        def write(time):
            rows = [
                f"cpu{i} {100 + time - round(time * share)} 0 0 {50 + round(time * share)} 0 0 0 0"
                for i, share in enumerate([*idle, 1.0])
            ]
            (tmp_path / "stat").write_text("\n".join(["cpu 1 2 3 4", *rows, "intr 5", ""]))

        write(0)
        monkeypatch.setattr(threads.time, "sleep", lambda _: write(100))
        return told

    return build


@pytest.mark.parametrize(("idle", "quota", "expected"), [
    ([1, 1, 1, 1], "max 100000", []),
    ([0.98, 0.9, 1, 0.95], "max 100000", []),  # a little is always going on
    ([0, 0, 0, 0], "max 100000", [1]),
    ([1, 0.1, 0.9, 0], "max 100000", [2]),
    ([1, 1, 1, 1], "150000 100000", [2]),
    ([1, 1, 1, 1], "50000 100000", [1]),
])
def test_busy_cores_are_left_alone(machine, capsys, idle, quota, expected):
    told = machine(idle, quota)
    threads.leave_busy_cores()
    assert told == expected
    said = capsys.readouterr().err
    assert bool(expected) == ("OMP_NUM_THREADS=4 takes them all" in said)


def test_the_user_decides(machine, monkeypatch):
    told = machine([0, 0, 0, 0])
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    threads.leave_busy_cores()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "STAT", threads.STAT.with_name("none"))  # as on macOS
    threads.leave_busy_cores()
    assert told == []
