"""The command line of `bwsft train`: a preset, a file of settings over it, flags over both."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from bwsft import config as c
from bwsft.data import word_problems
from bwsft.presets import PRESETS, for_own_data
from bwsft.utils import config_file
from bwsft.utils.strict_json import read_text

OLD_FLAGS = {"--objective.mdlm.normalise": "--objective.mdlm.normalize"}  # old spelling
RUN_CONFIG = "config.json"
ABOUT = """Fine-tune. PRESET --help lists the settings, each of them a flag. --config FILE takes
settings from a YAML or JSON file (which may name the preset, as preset: debug), or from the
config.json of a run; PRESET --print-config writes such a file."""


@dataclass(frozen=True)
class TrainFlags(c.Config):
    """A training run's settings, and where they come from."""

    config: str | None = None
    """YAML or JSON file of settings by the names of the flags, which win over it; config.json of a
    run: a new run with its settings."""
    print_config: bool = False
    """Print all settings as a YAML file for --config, and end."""


def parse_train(argv: list[str]) -> c.Config:
    """Config of `bwsft train [PRESET] [--config FILE] [--overrides]`.

    With --resume of a started run its stored config is the default, so that the other flags need
    not be said again. SystemExit after --help and --print-config.
    """
    argv, path = take(with_new_flags(argv), "--config")
    settings = {} if path is None else read_settings(Path(path))
    if path is not None:
        line = [word for word in argv[:1] if not word.startswith("-")]
        argv = [named_preset(line, settings, path), *argv[len(line) :]]
    defaults = {name: make() for name, make in PRESETS.items()}
    stored = stored_config(take(argv, "--resume")[1] or settings.get("resume"))
    data = take(argv, "--data")[1] or settings.get("data")
    if stored is None and data and word_problems.named(data) is None:
        defaults = {name: for_own_data(config) for name, config in defaults.items()}
    if stored is not None and stored.preset in defaults:
        defaults[stored.preset] = dataclasses.replace(stored, out=None)
    if path is not None:
        defaults[argv[0]] = config_file.update(defaults[argv[0]], settings, path)
    presets = {
        name: (PRESETS[name].__doc__ or "", TrainFlags(**vars(config), config=path))
        for name, config in defaults.items()
    }
    flags = tyro.extras.overridable_config_cli(
        presets, args=argv, prog="bwsft train", description=ABOUT
    )
    names = [field.name for field in dataclasses.fields(c.Config)]
    config = c.Config(**{name: getattr(flags, name) for name in names})
    c.validate(config)
    if flags.print_config:
        print(config_file.text(config), end="")
        raise SystemExit(0)
    return config


def take(argv: list[str], flag: str) -> tuple[list[str], str | None]:
    """The words without a flag and its value, and the value. ValueError if it has none, or two."""
    rest, found, words = [], [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name != flag:
            rest.append(word)
        elif (value := value if equals else next(words, None)) is None:
            raise ValueError(f"{flag} needs a value")
        else:
            found.append(value)
    if len(found) > 1:
        raise ValueError(f"{flag} is given twice")
    return rest, found[0] if found else None


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a file. Those of a run's config.json are for another run: without its
    folder."""
    settings = config_file.read(path)
    if path.name == RUN_CONFIG:
        settings = {k: v for k, v in settings.items() if k not in ("out", "resume")}
    return settings


def named_preset(line: list[str], settings: dict[str, Any], path: str) -> str:
    """The preset that the file names, or the line (in one word or none). ValueError if neither
    does, or both differ."""
    preset = settings.get("preset") or next(iter(line), None)
    if preset is None:
        raise ValueError(f"{path} names no preset: add one of {', '.join(PRESETS)} as preset:")
    if not isinstance(preset, str) or preset not in PRESETS:
        close = difflib.get_close_matches(str(preset), PRESETS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{path}: preset is none of {', '.join(PRESETS)}{hint}")
    if line not in ([], [preset]):
        raise ValueError(f"{path} starts from preset {preset}, the command line from {line[0]}")
    return preset


def with_new_flags(argv: list[str]) -> list[str]:
    """The words of a command line with a flag's name of today for an older one, which a line on
    stderr names."""
    words = list(argv)
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if (now := OLD_FLAGS.get(flag)) is not None:
            print(f"{flag} is called {now} now", file=sys.stderr)
            words[i] = now + equals + value
    return words


def stored_config(folder: Any) -> c.Config | None:
    """The config of a run that was started in `folder`."""
    path = Path(folder) / RUN_CONFIG if isinstance(folder, str) else None
    return c.from_json(read_text(path), str(path)) if path and path.exists() else None
