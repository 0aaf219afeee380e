"""Reads a checkpoint's state.json: the step, the config, the data's fingerprint, the family."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from bwsft import config as c
from bwsft.models.backbone import Family
from bwsft.utils import config_check, strict_json

STATE = "state.json"


@dataclasses.dataclass(frozen=True)
class _State:
    """What a state.json must hold; whoever saves may add to it."""

    step: int
    config: c.Config
    data: str
    family: Family
    base: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


def read_state(folder: Path) -> dict:
    """The state.json of a checkpoint folder, its config complete; ValueError if it is not ours."""
    path = Path(folder) / STATE
    try:
        found = strict_json.read_object(path)
        known = {f.name: found[f.name] for f in dataclasses.fields(_State) if f.name in found}
        state = config_check.build(_State, known, STATE)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a bwsft checkpoint state ({error})") from None
    return {**found, **json.loads(json.dumps(dataclasses.asdict(state)))}  # lists, not tuples
