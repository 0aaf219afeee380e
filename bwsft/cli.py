"""The `bwsft` command. Each subcommand imports what it needs, so that --help is quick."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

USAGE = """usage: bwsft COMMAND [OPTIONS]

commands
  train PRESET   fine-tune; presets: {presets}
  generate       decode prompts with a run, checkpoint or model folder
  chat           talk to a model and watch its tokens being unmasked
  evaluate       Pass@1 on GSM8K- or MATH-shaped files
  trace          draw how an answer was unmasked
  report RUN     write a run as one HTML page: curves, samples, unmasking
  compare        decode in several context modes and compare
  replay         run again what a run kept when a loss was not finite or spiked
  export         merge a run's adapter and write a model folder
  experiment     the paper's comparisons: table, equal-tokens, block-grid, ...
  bench          run the quick benchmarks and print one table
  demo           base accuracy, Blockwise SFT, accuracy after, in five minutes

`bwsft COMMAND --help` lists the options of a command."""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0; 2 for input that cannot be used; 1 for a
    training that failed; 130 if interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    commands = {
        "train": _train,
        "generate": _generate,
        "chat": _chat,
        "evaluate": _evaluate,
        "trace": _trace,
        "report": _report,
        "compare": _compare,
        "replay": _replay,
        "export": _export,
        "experiment": _experiment,
        "bench": _bench,
        "demo": _demo,
    }
    from bwsft.presets import PRESETS

    usage = USAGE.format(presets=", ".join(PRESETS))
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return 0 if argv else 2
    if argv[0] == "--version":
        from bwsft.version import __version__

        print(__version__)
        return 0
    if argv[0] not in commands:
        print(f"bwsft: unknown command {argv[0]!r}\n\n{usage}", file=sys.stderr)
        return 2
    try:
        return commands[argv[0]](argv[1:])
    except (ValueError, OSError) as error:
        # ValueError is for the user (bad input); BWSFT_DEBUG=1 shows where it came from.
        if os.environ.get("BWSFT_DEBUG") == "1":
            raise
        print(f"bwsft {argv[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before a run can save, or a second time
        print(f"bwsft {argv[0]}: interrupted", file=sys.stderr)
        return 130


def _train(argv: list[str]) -> int:
    config = parse_train(argv)
    from bwsft.training.setup import train

    return train(config)


def _generate(argv: list[str]) -> int:
    import tyro

    from bwsft.commands.generate import GenerateOptions, run_generate

    return run_generate(tyro.cli(GenerateOptions, args=argv, prog="bwsft generate"))


def _chat(argv: list[str]) -> int:
    import tyro

    from bwsft.commands.chat import ChatOptions, run_chat

    return run_chat(tyro.cli(ChatOptions, args=argv, prog="bwsft chat"))


def _evaluate(argv: list[str]) -> int:
    import tyro

    from bwsft.commands.evaluate import EvaluateCommand, run_evaluate

    return run_evaluate(tyro.cli(EvaluateCommand, args=argv, prog="bwsft evaluate"))


def _trace(argv: list[str]) -> int:
    import tyro

    from bwsft.commands.trace import TraceOptions, run_trace

    return run_trace(tyro.cli(TraceOptions, args=argv, prog="bwsft trace"))


def _report(argv: list[str]) -> int:
    import tyro

    from bwsft.commands.report.page import ReportOptions, run_report

    return run_report(tyro.cli(ReportOptions, args=argv, prog="bwsft report"))


def _compare(argv: list[str]) -> int:
    import tyro

    from bwsft.commands.compare import CompareOptions, run_compare

    return run_compare(tyro.cli(CompareOptions, args=argv, prog="bwsft compare"))


def _replay(argv: list[str]) -> int:
    import tyro

    from bwsft.commands.replay import ReplayOptions, run_replay

    return run_replay(tyro.cli(ReplayOptions, args=argv, prog="bwsft replay"))


def _export(argv: list[str]) -> int:
    import tyro

    from bwsft.commands.export import ExportOptions, run_export

    return run_export(tyro.cli(ExportOptions, args=argv, prog="bwsft export"))


def _experiment(argv: list[str]) -> int:
    import tyro

    from bwsft.experiments.command import ExperimentOptions, run_experiment

    return run_experiment(tyro.cli(ExperimentOptions, args=argv, prog="bwsft experiment"))


def _bench(argv: list[str]) -> int:
    import tyro

    from bwsft.commands.bench import BenchOptions, run_bench

    return run_bench(tyro.cli(BenchOptions, args=argv, prog="bwsft bench"))


def _demo(argv: list[str]) -> int:
    import tyro

    from bwsft.commands.demo import DemoOptions, run_demo

    return run_demo(tyro.cli(DemoOptions, args=argv, prog="bwsft demo"))


def parse_train(argv: list[str]):
    """Config of `bwsft train PRESET [--overrides]`.

    With --resume of a started run its stored config is the default, so that the other flags need
    not be said again.
    """
    import tyro

    from bwsft import config as c
    from bwsft.presets import PRESETS

    argv = c.with_new_flags(argv)
    defaults = {name: make() for name, make in PRESETS.items()}
    stored = _stored_config(argv)
    if stored is not None and stored.preset in defaults:
        defaults[stored.preset] = dataclasses.replace(stored, out=None)
    presets = {n: ((PRESETS[n].__doc__ or ""), d) for n, d in defaults.items()}
    config = tyro.extras.overridable_config_cli(presets, args=argv, prog="bwsft train")
    c.validate(config)
    return config


def _stored_config(argv: list[str]):
    from bwsft.config import from_json
    from bwsft.utils.strict_json import read_text

    for i, word in enumerate(argv):
        if word == "--resume" and i + 1 < len(argv):
            path = Path(argv[i + 1]) / "config.json"
        elif word.startswith("--resume="):
            path = Path(word.partition("=")[2]) / "config.json"
        else:
            continue
        return from_json(read_text(path), str(path)) if path.exists() else None
    return None
