"""The demo's drawing of an answer, and its end by Ctrl-C."""

import dataclasses
import os
import signal

from tiny_runs import before_step

from bwsft.cli import main
from bwsft.commands.demo import unmasked
from bwsft.decoding.result import Generation
from bwsft.training import run_data
from bwsft.utils.claims import lock_folder


def test_an_answer_is_drawn_up_to_its_end():
    trace = [(0, 1, 1, 0.5), (1, 0, 0, 0.5), (2, 2, 2, 0.5), (3, 3, 7, 0.9)]
    generation = dataclasses.replace(Generation([0, 1, 2], True, 4), trace=trace)
    drawn = unmasked(generation, lambda tokens: "abcdefgh"[tokens[0]], 2)
    assert drawn.plain == "a₂ b₁ │c₃ "


def test_ctrl_c_during_the_training_ends_the_whole_demo(
    tmp_path, monkeypatch, capfd, usual_interrupt
):
    monkeypatch.setattr(run_data, "GENERATED", 100)
    before_step(monkeypatch, lambda run, step: os.kill(os.getpid(), signal.SIGINT), only=1)
    folder = tmp_path / "run"
    assert main(["demo", "--problems", "1", "--steps", "4", "--out", str(folder)]) == 130
    said = capfd.readouterr()
    assert "2/4 Blockwise SFT" in said.out and "3/4" not in said.out
    assert said.err.splitlines()[-1] == "bwsft demo: interrupted" and "signal 2" not in said.err
    lock_folder(folder).close()  # nobody has it any longer
