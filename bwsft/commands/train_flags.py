"""The flags of `bwsft train`: how they may be spelled, and the help with those that matter."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from typing import Annotated, Any, NoReturn

import tyro

from bwsft import config as c
from bwsft.utils import config_file
from bwsft.utils.config_check import flat
from bwsft.utils.lines import say
from bwsft.utils.spelling import meant

# The settings that `bwsft train PRESET --help` shows, by their short names.
COMMON = {
    "data": ("model", "data", "subset", "split", "template", "out", "resume"),
    "training": (
        "epochs", "steps", "batch-size", "micro-batch-size", "lr", "warmup", "lora-rank", "seed"
    ),
    "blocks": ("objective", "block-size", "gen-length", "context"),
    "progress": ("eval-every",),
}  # fmt: skip
OWN = ("--config", "--print-config", "--no-print-config", "--dry-run",
       "--no-dry-run", "--memory", "--fit", "--no-fit", "--help", "--help-all", "-h")
OLD_FLAGS = {"--objective.mdlm.normalise": "--objective.mdlm.normalize"}  # old spelling
# What other trainers call a setting -> its name here.
ELSEWHERE = {
    "--learning-rate": "--lr", "--num-epochs": "--epochs", "--num-train-epochs": "--epochs",
    "--max-steps": "--steps", "--output-dir": "--out", "--lora-r": "--lora-rank",
    "--per-device-train-batch-size": "--micro-batch-size", "--warmup-ratio": "--warmup",
    "--gradient-accumulation-steps": "--batch-size", "--save-steps": "--save-every",
    "--eval-steps": "--eval-every", "--max-seq-length": "--max-length", "--dataset": "--data",
    "--gradient-checkpointing": "--grad-checkpointing", "--lr-floor": "--floor",
    "--resume-from-checkpoint": "--resume", "--max-grad-norm": "--clip",
}  # fmt: skip
MORE = "bwsft train {preset} --help-all lists the other settings, each of them a flag."


def spellings() -> dict[str, str]:
    """Every way to write a flag -> the flag by its path: --optim.lr is --optim-lr and, as no other
    setting ends so, --lr; --objective.name is --objective."""
    paths = {}
    for path, value in flat(dataclasses.asdict(c.Config())).items():
        head, dot, last = path.rpartition(".")
        for name in (last, f"no_{last}") if isinstance(value, bool) else (last,):
            full = f"--{head}{dot}{name}".replace("_", "-")
            paths[full] = f"--{head}" if name == "name" else f"--{name}".replace("_", "-")
    count = Counter(paths.values())
    short = {last: path for path, last in paths.items() if count[last] == 1}
    joined = {path.replace(".", "-"): path for path in paths}
    return short | joined | {path: path for path in paths}


def spelled(argv: list[str]) -> list[str]:
    """The words of a command line with every flag by its path. An older name of a flag is named on
    stderr; ValueError for a flag that is none."""
    known, words = spellings(), []
    for word in argv:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag == "--":
            words.append(word)
            continue
        flag = flag.replace("_", "-")
        if (now := OLD_FLAGS.get(flag)) is not None:
            say(f"{flag} is called {now} now", file=sys.stderr)
            flag = now
        if flag in ELSEWHERE:
            raise ValueError(f"unknown flag {flag}: it is called {ELSEWHERE[flag]} here")
        if flag not in known and flag not in OWN:
            hint = meant(flag, [*known, *OWN])
            raise ValueError(f"unknown flag {flag:.80}{hint or '; --help-all lists all'}")
        words.append(known.get(flag, flag) + equals + value)
    return words


def show_common(config: c.Config, about: str) -> NoReturn:
    """Print the settings of COMMON with their values in `config`, and end."""
    known = {path: rest for path, *rest in config_file.described(config)}
    paths, values, groups = spellings(), flat(dataclasses.asdict(config)), []
    for title, names in COMMON.items():
        fields = []
        for name in names:
            path = paths[f"--{name}"].removeprefix("--").replace("-", "_")
            hint, doc = known[path]
            shown = Annotated[hint, tyro.conf.arg(help=" ".join(doc.split()))]
            fields.append((name.replace("-", "_"), shown, dataclasses.field(default=values[path])))
        group = dataclasses.make_dataclass(title, fields)
        group.__doc__ = ""
        groups.append((title, group, dataclasses.field(default_factory=group)))
    print_help(dataclasses.make_dataclass("Common", groups)(), config.preset, about, MORE)


def show_all(flags: c.Config, about: str) -> NoReturn:
    """Print every setting with its value in `flags`, and end."""
    print_help(flags, flags.preset, about, "")


def print_help(values: Any, preset: str, about: str, more: str) -> NoReturn:
    preset = preset or "PRESET"
    about = f"{about}\n\n{more.format(preset=preset)}".strip()
    tyro.cli(
        type(values), default=values, args=["--help"], prog=f"bwsft train {preset}",
        description=about, config=(tyro.conf.OmitArgPrefixes,) if more else None,
    )  # fmt: skip
    raise SystemExit(0)
