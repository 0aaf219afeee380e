"""The `bwsft` command. Each subcommand imports what it needs, so that --help is quick."""

from __future__ import annotations

import importlib
import os
import sys

USAGE = """usage: bwsft COMMAND [OPTIONS]

commands
  train PRESET   fine-tune; presets: {presets};
                 --config FILE: settings from a YAML or JSON file
  generate       decode prompts with a run, checkpoint or model folder
  chat           talk to a model and watch its tokens being unmasked
  evaluate       Pass@1 on GSM8K- or MATH-shaped files
  trace          draw how an answer was unmasked
  report RUN ... write runs as one HTML page: curves, loss by block and mask
                 rate, spikes, samples; --watch: while they train
  compare        decode in several context modes and compare
  replay         run again what a run kept when a loss was not finite or spiked
  export         merge a run's adapter and write a model folder
  experiment     the paper's comparisons: table, equal-tokens, block-grid, ...
  bench          run the quick benchmarks and print one table
  demo           base accuracy, Blockwise SFT, accuracy after, in five minutes

`bwsft COMMAND --help` lists the options of a command."""


# command -> (module, its options, the function that takes them and returns the exit status)
COMMANDS = {
    "generate": ("bwsft.commands.generate", "GenerateOptions", "run_generate"),
    "chat": ("bwsft.commands.chat", "ChatOptions", "run_chat"),
    "evaluate": ("bwsft.commands.evaluate", "EvaluateCommand", "run_evaluate"),
    "trace": ("bwsft.commands.trace", "TraceOptions", "run_trace"),
    "report": ("bwsft.commands.report.page", "ReportOptions", "run_report"),
    "compare": ("bwsft.commands.compare", "CompareOptions", "run_compare"),
    "replay": ("bwsft.commands.replay", "ReplayOptions", "run_replay"),
    "export": ("bwsft.commands.export", "ExportOptions", "run_export"),
    "experiment": ("bwsft.experiments.command", "ExperimentOptions", "run_experiment"),
    "bench": ("bwsft.commands.bench", "BenchOptions", "run_bench"),
    "demo": ("bwsft.commands.demo", "DemoOptions", "run_demo"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0; 2 for input that cannot be used; 1 for a
    training that failed; 130 if interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    from bwsft.presets import PRESETS

    usage = USAGE.format(presets=", ".join(PRESETS))
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return 0 if argv else 2
    name, *words = argv
    if name == "--version":
        from bwsft.version import __version__

        print(__version__)
        return 0
    if name not in ("train", *COMMANDS):
        print(f"bwsft: unknown command {name!r}\n\n{usage}", file=sys.stderr)
        return 2
    try:
        return _train(words) if name == "train" else _run(name, words)
    except (ValueError, OSError) as error:
        # ValueError is for the user (bad input); BWSFT_DEBUG=1 shows where it came from.
        if os.environ.get("BWSFT_DEBUG") == "1":
            raise
        print(f"bwsft {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before a run can save, or a second time
        print(f"bwsft {name}: interrupted", file=sys.stderr)
        return 130


def _train(argv: list[str]) -> int:
    from bwsft.commands.train import parse_train

    config = parse_train(argv)
    from bwsft.training.setup import train

    return train(config)


def _run(name: str, argv: list[str]) -> int:
    import tyro

    module, options, run = COMMANDS[name]
    found = importlib.import_module(module)
    return getattr(found, run)(tyro.cli(getattr(found, options), args=argv, prog=f"bwsft {name}"))
