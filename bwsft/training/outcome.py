"""What a training says at its end: what it reached, and the commands that come next."""

from __future__ import annotations

import shlex
from pathlib import Path

from bwsft import config as c
from bwsft.data import word_problems
from bwsft.training.metrics import read_log

TEST_SEED = 1  # of the generated question: no training problem has its numbers


def outcome(folder: Path, config: c.Config, done: int) -> list[str]:
    """Lines for the user: what held-out examples say before and after, and how to go on."""
    scores = [entry["nelbo"] for entry in read_log(folder / "eval.jsonl")]
    lines = []
    if len(scores) > 1:
        what = config.objective.held_out
        lines.append(f"{what} {scores[0]:.4f} -> {scores[-1]:.4f} nats per token")
    run = shlex.quote(str(folder))
    if done < config.steps:
        stopped = f"stopped after step {done} of {config.steps}; go on with"
        return [*lines, f"{stopped} bwsft train --resume {run}"]
    generated = word_problems.named(config.data)
    question, score = "TEXT", []
    if generated is not None:
        (problem,) = generated.problems(1, TEST_SEED, "test")
        question = problem["query"]
        data = f"{generated.kind}-{generated.largest}-seed{TEST_SEED}"
        score = [
            f"test problems: bwsft data {data} --split test --limit 100 --out test.jsonl",
            f"score it: bwsft evaluate --task gsm8k --model {run} --data test.jsonl",
        ]
    return [
        *lines,
        f"ask it: bwsft generate --model {run} --prompt {shlex.quote(question)}",
        *score,
        f"see it: bwsft report {run}",
        f"hand it on: bwsft export --model {run} --out {run}-model",
        f"run folder: {folder}",
    ]
