"""`bwsft evaluate`: Pass@1 of a file's outputs, or of a model's answers to the questions."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Column, Table

from bwsft.commands.options import EvaluateCommand
from bwsft.decoding.pipeline import AskedModel
from bwsft.evaluation.pass_at_1 import EvaluateOptions, evaluate
from bwsft.utils.lines import say


def run_evaluate(command: EvaluateCommand) -> int:
    """Run `bwsft evaluate` and return the exit status; ValueError or OSError for bad input, and
    ValueError where math-verify is missing or does not start."""

    try:
        if command.model is None:  # how a model decodes is no setting of a file's score
            names = [field.name for field in dataclasses.fields(EvaluateOptions)]
            result = evaluate(EvaluateOptions(**{name: getattr(command, name) for name in names}))
        else:  # it is loaded when evaluate has checked files and questions
            asked = AskedModel(str(command.model), command)
            result = evaluate(command, asked.decode, asked.identity)
    except (ImportError, RuntimeError) as error:
        if "math-verify" not in str(error):
            raise
        raise ValueError(str(error)) from error
    print_report(result)
    return 0


def print_report(result: dict) -> None:
    """The result of `evaluate` as a table on stdout."""

    def percent(share: float | None) -> str:
        return "unknown" if share is None else f"{100 * share:.2f} %"

    low, high = result["ci95"]
    value, title = Column("value", justify="right"), f"Pass@1 on {result['task']}"
    table = Table("figure", value, title=title, title_justify="left")
    for rule in ("ladder", "strict"):
        interval = f"  [{100 * low:.2f}, {100 * high:.2f}]" if rule == result["rule"] else ""
        table.add_row(f"accuracy, {rule} rule", percent(result[f"{rule}_accuracy"]) + interval)
    table.add_row("questions scored", str(result["count"]))
    for name in ("disagreements", "truncated", "no_answer", "mean_tokens", "tokens_per_forward",
                 "missing_reference", "not_attempted", "conflicting_references",
                 "verify_failures"):
        value = result[name]
        if name in ("truncated", "no_answer"):
            value = percent(value)
        if value not in (None, 0):
            digits = 2 if name == "tokens_per_forward" else 1
            title = {"tokens_per_forward": "tokens per forward (TPF)"}.get(name)
            table.add_row(title or name.replace("_", " "), f"{value:.{digits}f}"
                          if isinstance(value, float) else str(value))
    for rung, number in result["extractors"].items():
        table.add_row(f"answers from: {rung}", str(number))
    console = Console()
    console.print(table)
    if result["unused_fields"]:
        say("fields not read: " + ", ".join(result["unused_fields"]))
    say(f"every output: {result['saved']}")
