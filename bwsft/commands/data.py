"""`bwsft data`: what training would make of a data set, without training; or its records in a
file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from bwsft import config as c
from bwsft.checkpoints.resolve import plan_model, plan_tokenizer
from bwsft.commands.options import DataCommand
from bwsft.commands.train import follow_model
from bwsft.data import word_problems
from bwsft.data.columns import Columns
from bwsft.data.dataset import TokenizedSet, load_set
from bwsft.data.file_formats import Row
from bwsft.data.records import Record, normalize
from bwsft.data.sources import open_source
from bwsft.data.tokenizer import load_tokenizer
from bwsft.presets import PRESETS, for_own_data
from bwsft.training.run_data import data_options, follow_data
from bwsft.utils.claims import claimed
from bwsft.utils.files import write_atomic
from bwsft.utils.lines import printable

GENERATED = 1000  # word problems, where --limit says no other number
LOOKED_AT = 1000  # records that decide whether a chat template is needed
SHOWN = 3  # malformed records
# Options that a run has too: under its own name, or in its group `dataset`.
OF_RUN = ("model", "tokenizer", "mask_token", "logit_shift")
OF_DATASET = ("subset", "split", "columns", "template", "template_args", "turns")


def run_data(command: DataCommand) -> int:
    """Run `bwsft data` and return the exit status; ValueError or OSError for bad input."""
    if command.preset not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}, not {command.preset}")
    if command.limit is not None and command.limit < 1:
        raise ValueError("--limit must be at least 1")
    console = Console(soft_wrap=True, highlight=False)
    if command.out is not None:
        console.print(Text(write_records(command, command.out)))
        return 0
    config, examples, tokenizer = prepared(command)
    show(console, config, examples, tokenizer)
    console.print(Text("\ntrain on it:", style="bold"))
    console.print(Text(printable(f"  {shlex.join(training(command, config, examples))}")))
    return 0


def source_of(command: DataCommand) -> Any:
    """What load_set reads: the name of the source, or generated records."""
    generated = word_problems.named(command.source)
    if generated is None:
        return command.source
    if command.subset:
        raise ValueError("generated problems have no --subset, only --split train or test")
    asked = command.limit or GENERATED
    return generated.problems(asked, generated.seed or 0, command.split or "train")


def rows_of(command: DataCommand) -> Iterator[Row]:
    """(place, raw record) of the source."""
    source = source_of(command)
    if isinstance(source, list):
        return open_source(source).rows()
    return open_source(source, command.subset, command.split).rows()


# --- what training would make of it ---


def prepared(command: DataCommand) -> tuple[c.Config, TokenizedSet, Any]:
    """(config of the training, with lengths; its examples; its tokenizer)."""
    source, config = source_of(command), PRESETS[command.preset]()
    given = {name: value for name in OF_DATASET if (value := getattr(command, name)) is not None}
    if isinstance(source, list):
        given.pop("split", None)
    else:
        config = for_own_data(config)
    if command.template is None and any(map(is_conversation, well_formed(command, LOOKED_AT))):
        given["template"] = "chat"
    chosen = {name: value for name in OF_RUN if (value := getattr(command, name)) is not None}
    data = dataclasses.replace(config.dataset, on_bad="skip", **given)
    config = dataclasses.replace(config, data=command.source, dataset=data, **chosen)
    config = follow_model(config, set())
    tokenizer = load_tokenizer(plan_tokenizer(config))
    family = plan_model(config, tokenizer, c.run_folder(config)).family
    config = follow_data(config, tokenizer, family)
    options = data_options(config, family)
    return config, load_set(source, tokenizer, options, data.cache_dir), tokenizer


def well_formed(command: DataCommand, count: int) -> Iterator[Record]:
    """Those of the first `count` records that are records."""
    columns = Columns.parse(command.columns)
    for _, raw in itertools.islice(rows_of(command), count):
        try:
            yield normalize(raw, columns)
        except ValueError:
            continue


def is_conversation(record: Record) -> bool:
    """Whether only a chat template can print what comes before the answer."""
    roles = tuple(turn["role"] for turn in record.messages[:-1])
    return roles not in (("user",), ("system", "user")) or bool(record.tools)


def show(console: Console, config: c.Config, examples: TokenizedSet, tokenizer: Any) -> None:
    """Columns, lengths, what is left out, and an example."""
    report, data = examples.report, config.dataset
    read = "; ".join(f"{names} ({count:,})" for names, count in report["read"].items())
    console.print(Text(printable(f"columns read: {read}")))
    few = report | {"skipped": report["skipped"][:SHOWN]}
    console.print(Text(printable(dataclasses.replace(examples, report=few).summary())))
    blocks = config.gen_length // config.block_size
    console.print(
        f"canvas: {config.gen_length} = {blocks} blocks x {config.block_size}; template "
        f"{data.template}; the first example as the model sees it, the answer underlined:\n"
    )
    example = examples.example(0)
    seen = Text(printable(tokenizer.decode(example.prompt)), style="dim")
    seen.append(printable(tokenizer.decode(example.response)), style="not dim underline")
    console.print(seen)


def training(command: DataCommand, config: c.Config, examples: TokenizedSet) -> list[str]:
    """The words of the command that trains on the source."""
    words = ["bwsft", "train", command.preset, "--data", command.source]
    usual = PRESETS[command.preset]()
    for name in OF_RUN:
        if (value := getattr(config, name)) != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name in OF_DATASET:
        if (value := getattr(config.dataset, name)) != getattr(usual.dataset, name):
            words += [f"--dataset.{name.replace('_', '-')}", str(value)]
    if "malformed" in examples.report["dropped"]:
        words += ["--dataset.on-bad", "skip"]
    for name in ("gen_length", "max_length"):
        if (value := getattr(config, name)) != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


# --- its records in a file ---


def write_records(command: DataCommand, out: Path) -> str:
    """Write the records as JSONL, whole or not at all; returns what was written, in words."""
    with claimed(out, otherwise="exists; choose another --out, or remove it"):
        lines, faults = read_records(command)
        write_atomic(out, "".join(f"{line}\n" for line in lines))
    left_out = f"; left out {len(faults):,}, first: {faults[0]}" if faults else ""
    return printable(f"{out}: {len(lines):,} records{left_out}")


def read_records(command: DataCommand) -> tuple[list[str], list[str]]:
    """(the records as lines of JSONL, what is wrong with others); ValueError if there are none."""
    columns, lines, faults = Columns.parse(command.columns), [], []
    for place, raw in rows_of(command):
        if command.limit is not None and len(lines) == command.limit:
            break
        try:
            lines.append(json.dumps(plain_record(normalize(raw, columns)), ensure_ascii=False))
        except ValueError as error:
            faults.append(f"{place} {error}")
    if not lines:
        raise ValueError(faults[0] if faults else f"there are no records in {command.source}")
    return lines, faults


def plain_record(record: Record) -> dict[str, Any]:
    """A record as `normalize` reads it back: query and response, or else messages."""
    kind = {"type": record.kind} if record.kind else {}
    said = [turn["role"] for turn in record.messages]
    bare = all(turn.keys() == {"role", "content"} for turn in record.messages)
    if said == ["user", "assistant"] and bare and record.answers and not record.tools:
        query, response = (turn["content"] for turn in record.messages)
        return {"query": query, "response": response} | kind
    turns = [
        turn | ({} if turn["role"] != "assistant" or i in record.answers else {"weight": 0})
        for i, turn in enumerate(record.messages)
    ]
    return {"messages": turns} | ({"tools": list(record.tools)} if record.tools else {}) | kind
