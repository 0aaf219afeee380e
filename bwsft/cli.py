"""The `bwsft` command. Each subcommand imports what it needs, so that --help is quick."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from bwsft.utils.lines import printable, say
from bwsft.utils.spelling import meant
from bwsft.utils.terminal import let_go, reader_gone

USAGE = """usage: bwsft COMMAND [OPTIONS]

commands
  train PRESET   fine-tune; presets: {presets};
                 --config FILE: settings from a YAML or JSON file;
                 --resume RUN: go on with a run
  data SOURCE    look at a data set before training: columns, lengths, what is left out
  prepare PRESET tokenize the data of a training beforehand, without a GPU
  generate       decode prompts with a run, checkpoint or model folder
  chat           talk to a model and watch its tokens being unmasked
  evaluate       Pass@1 on GSM8K- or MATH-shaped files
  trace          draw how an answer was unmasked
  report RUN ... write runs as one HTML page: curves, loss by block and mask
                 rate, spikes, samples; --watch: while they train
  compare        decode in several context modes and compare
  distill        keep a model's careful decodings, to train it for fewer passes
  replay         run again what a run kept when a loss was not finite or spiked
  export         merge a run's adapter and write a model folder
  experiment     the paper's comparisons: table, equal-tokens, block-grid, ...
  bench          run the quick benchmarks and print one table
  doctor         versions, device, kernels in use, caches, and a self-test
  demo           base accuracy, Blockwise SFT, accuracy after, in five minutes

`bwsft COMMAND --help` lists the options of a command."""


# command -> (its options, the function that takes them and returns the exit status). The options'
# modules import nothing heavy: --help needs no other.
OPTIONS = "bwsft.commands.options"
COMMANDS = {
    "data": (f"{OPTIONS}:DataCommand", "bwsft.commands.data:run_data"),
    "generate": (f"{OPTIONS}:GenerateOptions", "bwsft.commands.generate:run_generate"),
    "chat": (f"{OPTIONS}:ChatOptions", "bwsft.commands.chat:run_chat"),
    "evaluate": (f"{OPTIONS}:EvaluateCommand", "bwsft.commands.evaluate:run_evaluate"),
    "trace": (f"{OPTIONS}:TraceOptions", "bwsft.commands.trace:run_trace"),
    "report": (f"{OPTIONS}:ReportOptions", "bwsft.commands.report.page:run_report"),
    "compare": (f"{OPTIONS}:CompareOptions", "bwsft.commands.compare:run_compare"),
    "distill": (f"{OPTIONS}:DistillOptions", "bwsft.commands.distill:run_distill"),
    "replay": (f"{OPTIONS}:ReplayOptions", "bwsft.commands.replay:run_replay"),
    "export": (f"{OPTIONS}:ExportOptions", "bwsft.commands.export:run_export"),
    "experiment": (
        "bwsft.experiments.options:ExperimentOptions", "bwsft.experiments.command:run_experiment"
    ),
    "bench": (f"{OPTIONS}:BenchOptions", "bwsft.commands.bench:run_bench"),
    "doctor": (f"{OPTIONS}:DoctorOptions", "bwsft.commands.doctor:run_doctor"),
    "demo": (f"{OPTIONS}:DemoOptions", "bwsft.commands.demo:run_demo"),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0; 2 for input that cannot be used; 1 for a
    training that failed; 130 if interrupted; 141 if nobody reads the output any more."""
    try:
        with _printable_warnings():
            return _command(argv)
    except BrokenPipeError:  # _command: of stdout or stderr
        return 141
    finally:
        let_go()


@contextlib.contextmanager
def _printable_warnings() -> Iterator[None]:
    """They may name somebody's tensors and files."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda *said, **more: printable(usual(*said, **more))
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _command(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    from bwsft.presets import PRESETS

    usage = USAGE.format(presets=", ".join(PRESETS))
    if not argv or argv[0] in ("-h", "--help"):
        say(usage)
        return 0 if argv else 2
    name, *words = argv
    if name == "--version":
        from bwsft.version import __version__

        say(__version__)
        return 0
    if name not in ("train", "prepare", *COMMANDS):
        hint = meant(name, ("train", "prepare", *COMMANDS))
        say(f"bwsft: unknown command {name!r}{hint}\n\n{usage}", file=sys.stderr)
        return 2
    try:
        if name == "prepare":  # with the flags of train
            return _ready(lambda: _named("bwsft.commands.prepare:run_prepare"))(words)
        return _train(words) if name == "train" else _run(name, words)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and reader_gone():
            raise
        # ValueError is for the user (bad input); BWSFT_DEBUG=1 shows where it came from.
        if os.environ.get("BWSFT_DEBUG") == "1":
            raise
        say(f"bwsft {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before a run can save, or a second time
        say(f"bwsft {name}: interrupted", file=sys.stderr)
        return 130


def _train(argv: list[str]) -> int:
    from bwsft.commands.train import parse_train

    config = parse_train(argv)
    return _ready(lambda: _named("bwsft.training.setup:train"))(config)


def _run(name: str, argv: list[str]) -> int:
    import tyro

    options, run = COMMANDS[name]
    asked = tyro.cli(_named(options), args=argv, prog=f"bwsft {name}")
    return _ready(lambda: _named(run))(asked)


def _ready(load: Callable[[], Callable[..., int]]) -> Callable[..., int]:
    """A command's function; if loading it is what imports torch, that takes idle cores only."""
    ours = "torch" not in sys.modules
    run = load()
    if ours and "torch" in sys.modules:
        from bwsft.utils.threads import leave_busy_cores

        leave_busy_cores()
    return run


def _named(place: str) -> Any:
    """What `module:name` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
