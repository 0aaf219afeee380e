"""The command line of `bwsft train`: a preset, a file of settings over it, flags over both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from bwsft import config as c
from bwsft.commands.train_flags import show_all, show_common, spelled
from bwsft.data import word_problems
from bwsft.presets import PRESETS, for_own_data
from bwsft.utils import config_check, config_file
from bwsft.utils.lines import say
from bwsft.utils.spelling import meant

RUN_CONFIG = "config.json"
ABOUT = """Fine-tune from a preset's settings. --config FILE takes settings from a YAML or JSON
file (which may name the preset, as preset: debug), or from the config.json of a run; PRESET
--print-config writes such a file. --resume RUN needs no preset."""


@dataclass(frozen=True)
class TrainFlags(c.Config):
    """A training run's settings, and where they come from."""

    config: str | None = None
    """YAML or JSON file of settings by the names of the flags, which win over it; config.json of a
    run: a new run with its settings."""
    print_config: bool = False
    """Print all settings as a YAML file for --config, and end."""
    dry_run: bool = False
    """Print tokens, FLOPs and memory of a run on sequences of nominal length, and end."""
    memory: str | None = None
    """With --dry-run or --fit: what the run must fit, as 24GiB; none: the CUDA device's own."""
    fit: bool = False
    """Take settings that fit: fewer sequences at a time, else --grad-checkpointing, nf4 or a lower
    rank too."""


def parse_train(argv: list[str]) -> c.Config:
    """Config of `bwsft train [PRESET] [--config FILE] [--overrides]`.

    With --resume of a started run its stored config is the default, so that preset and flags need
    not be said again. SystemExit after --help, --help-all, --print-config and
    --dry-run.
    """
    argv, path = take(spelled(argv), "--config")
    words = argv[1:] if argv and not argv[0].startswith("-") else argv
    settings = {} if path is None else read_settings(Path(path))
    base = starting_point(argv[: len(argv) - len(words)], words, settings, path)
    if "--help-all" in words:
        show_all(TrainFlags(**vars(base), config=path), about(base))
    if {"-h", "--help"} & set(words):
        show_common(base, about(base))
    given = {word.partition("=")[0] for word in words}
    if "--steps" in given:
        if "--epochs" in given:
            raise ValueError("--steps and --epochs both say how long to train: leave one out")
        base = dataclasses.replace(base, epochs=None)  # flags win over a file
    base = TrainFlags(**vars(base), config=path)
    flags = tyro.cli(TrainFlags, default=base, args=words, prog="bwsft train")
    names = [field.name for field in dataclasses.fields(c.Config)]
    config = c.Config(**{name: getattr(flags, name) for name in names})
    config = follow_model(config, given | {
        f"--{name}".replace("_", "-") for name in config_check.flat(settings)
    })  # fmt: skip
    c.validate(config)
    return after_counting(config, flags)


def follow_model(config: c.Config, given: set[str]) -> c.Config:
    """The config with the objective of a model whose undecided tokens are random ones, its context
    mode and its block size, as far as neither the flags `given` nor a file says them."""
    name, uniform = config.model, config.objective.name == "uniform"
    if name is None or config.resume or "--objective.name" in given and not uniform:
        return config
    named = "diffusiongemma" in name.lower().replace("_", "").replace("-", "")
    if not Path(name).is_dir() and (uniform or not named):  # of other Hub ids nothing is asked here
        return config
    from bwsft.checkpoints.resolve import canvas_of

    if (size := canvas_of(name)) is None:
        return config
    size = config.block_size if "--block-size" in given else size
    length = config.gen_length and -(-config.gen_length // size) * size
    if length != config.gen_length:
        say(f"--gen-length {length}: whole canvases of {size}")
    settings = {"context": "block_causal", "clean_attention": "causal"}
    settings = {k: v for k, v in settings.items() if f"--{k}".replace("_", "-") not in given}
    objective = dataclasses.replace(config.objective, name="uniform")
    return dataclasses.replace(
        config, block_size=size, gen_length=length, objective=objective, **settings
    )


def after_counting(config: c.Config, flags: TrainFlags) -> c.Config:
    """The config, with settings that fit if that is asked for. SystemExit after --print-config and
    --dry-run."""
    if flags.memory is not None and not (flags.fit or flags.dry_run):
        raise ValueError("--memory is for --fit, which takes settings, or --dry-run, which names "
                         "them: add one")
    if flags.fit:
        from bwsft.commands.dry_run import fitted

        config = fitted(config, flags.memory)
    if flags.print_config:
        say(config_file.text(config), end="")
        raise SystemExit(0)
    if flags.dry_run:
        from bwsft.commands.dry_run import print_cost

        print_cost(config, flags.memory)
        raise SystemExit(0)
    return config


def starting_point(
    line: list[str], words: list[str], settings: dict[str, Any], path: str | None
) -> c.Config:
    """The settings that the flags `words` change: those of the preset (that `line` holds, in one
    word or none), the file at `path` or the run to go on with."""
    run = take(words, "--resume")[1] or settings.get("resume")
    stored = c.stored(Path(run)) if isinstance(run, str) else None
    if path is not None and (stored is None or line or "preset" in settings):
        line = [named_preset(line, settings, path)]
    elif stored is None and not line and {"-h", "--help", "--help-all"} & set(words):
        return dataclasses.replace(PRESETS["llada-8b-lora"](), preset="")
    elif stored is None or line:
        line = [known_preset(line, run)]
    if stored is not None and line in ([], [stored.preset]):
        base = dataclasses.replace(stored, out=None)
    else:
        base = PRESETS[line[0]]()
        data = take(words, "--data")[1] or settings.get("data")
        if data and word_problems.named(data) is None:
            base = for_own_data(base)
    if path is None:
        return base
    if settings.get("epochs") is not None and "steps" in settings:
        raise ValueError(f"{path}: steps and epochs both say how long to train: leave one out")
    return config_file.update(base, settings, path)


def known_preset(line: list[str], run: str | None) -> str:
    """The preset in `line`. ValueError if there is none, or an unknown one."""
    if not line:
        why = f"{run} has no config.json yet: " if run else ""
        raise ValueError(
            f"{why}name a preset ({', '.join(PRESETS)}), --config FILE or the run of --resume RUN"
        )
    if line[0] not in PRESETS:
        hint = meant(line[0], PRESETS)
        raise ValueError(f"unknown preset {line[0]:.80}, none of {', '.join(PRESETS)}{hint}")
    return line[0]


def about(base: c.Config) -> str:
    """The text above the flags; without a preset, the presets."""
    if base.preset:
        return ABOUT
    docs = {name: " ".join((make.__doc__ or "").split()) for name, make in PRESETS.items()}
    lines = [f"  {name}: {doc}" for name, doc in docs.items()]
    return "\n".join([ABOUT, "", "Presets:", *lines, "", "The values below are llada-8b-lora's."])


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
        hint = meant(str(preset), PRESETS)
        raise ValueError(f"{path}: preset is none of {', '.join(PRESETS)}{hint}")
    if line not in ([], [preset]):
        raise ValueError(f"{path} starts from preset {preset}, the command line from {line[0]}")
    return preset
