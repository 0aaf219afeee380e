"""Runs that are interfered with, and resumed."""

import dataclasses

from bwsft.training import trainer as t


def before_step(monkeypatch, act, only=None):
    """act(run, step) at the start of every update, or of update `only` (from 0)."""
    original = t.train_step

    def step(run, index):
        if only in (None, index):
            act(run, index)
        return original(run, index)

    monkeypatch.setattr(t, "train_step", step)


def resumed(config, folder):
    return dataclasses.replace(config, out=None, resume=str(folder))
