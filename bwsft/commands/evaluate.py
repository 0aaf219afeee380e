"""`bwsft evaluate`: the scoring of bwsft/evaluation/pass_at_1.py, with a decoder for --model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from bwsft.decoding.pipeline import DecoderOptions, make_decoder
from bwsft.decoding.result import Decoded
from bwsft.evaluation.pass_at_1 import EvaluateOptions, evaluate


@dataclass(frozen=True)
class EvaluateCommand(DecoderOptions, EvaluateOptions):
    """Score existing outputs (--outputs), or decode with a model (--model) and score that."""


def run_evaluate(command: EvaluateCommand) -> int:
    """Run `bwsft evaluate` and return the exit status; ValueError or OSError for bad input, and
    ValueError where math-verify is missing or does not start."""

    def decode(questions: list[str]) -> Sequence[Decoded]:
        # Loaded here, when evaluate has checked files and questions.
        return make_decoder(str(command.model), command)(questions)

    options = command
    if command.model is None:  # how a model decodes is no setting of a file's score
        names = [field.name for field in dataclasses.fields(EvaluateOptions)]
        options = EvaluateOptions(**{name: getattr(command, name) for name in names})
    try:
        evaluate(options, decode if command.model else None)
    except (ImportError, RuntimeError) as error:
        if "math-verify" not in str(error):
            raise
        raise ValueError(str(error)) from error
    return 0
