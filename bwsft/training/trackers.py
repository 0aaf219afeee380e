"""Where a run's numbers go: metrics.jsonl and eval.jsonl, and trackers that are told the same."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bwsft import config as c
from bwsft.training.metrics import JsonLog
from bwsft.utils.config_check import flat
from bwsft.utils.lines import say

if TYPE_CHECKING:
    from bwsft.training.trainer import Run


class Logs:
    """The two JSONL files of a run, the source of truth, and its trackers. Rank 0 alone has any."""

    def __init__(self, run: Run):
        self.files: dict[str, JsonLog] = {}
        self._trackers: list[Any] = []
        if run.world.main:
            self._trackers = start(run)
            names = ("metrics", "eval")
            self.files = {n: JsonLog(run.folder / f"{n}.jsonl", run.first) for n in names}

    @property
    def evaluated(self) -> set[int]:
        """Steps with a line in eval.jsonl (on rank 0)."""
        return self.files["eval"].steps if self.files else set()

    def append(self, name: str, record: dict) -> None:
        """A line with its `step` for file `name`, "metrics" or "eval"."""
        if self.files:
            self.files[name].append(record)
        values = {f"{name}/{key}": value for key, value in record.items() if key != "step"}
        self._tell(lambda tracker: tracker.log(values, step=record["step"]))

    def _tell(self, act: Callable[[Any], None]) -> None:
        """act(tracker) for each. One that fails is dropped: it must not cost the run."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # whatever a third party's client raises
                self._trackers.remove(tracker)
                say(f"{tracker.name} is left out from here on: {error}", file=sys.stderr)

    def sync(self) -> None:
        for file in self.files.values():
            file.sync()

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self._tell(lambda tracker: tracker.finish())


def check_installed(config: c.Config) -> None:
    """ValueError for a tracker whose package is missing."""
    for name in c.tracker_names(config):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--trackers {name}: the package is missing; pip install {name}")


def start(run: Run) -> list[Any]:
    """accelerate's trackers that --trackers names, told the config. They write into the run folder
    or wherever their own environment variables say (WANDB_MODE=offline needs no network)."""
    names = c.tracker_names(run.config)
    if not names:
        return []
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(
        log_with=names, cpu=run.device.type == "cpu", mixed_precision="no",
        project_config=ProjectConfiguration(logging_dir=str(run.folder / "tensorboard")),
    )  # fmt: skip
    name = run.folder.name
    own = {
        # A resumed run is another run of the same group.
        "wandb": {"name": name, "group": name, "dir": str(run.folder)},
        "trackio": {"name": name, "group": name},
        "mlflow": {"run_name": name},
    }
    options = plain(dataclasses.asdict(run.config))
    with contextlib.redirect_stdout(sys.stderr):  # their banners
        accelerator.init_trackers("bwsft", config=options, init_kwargs=own)
    return accelerator.trackers


def plain(tree: dict) -> dict[str, int | float | str | bool]:
    """Nested options as one table of plain values, which is all that TensorBoard takes."""
    return {
        path: value if isinstance(value, int | float | str | bool) else str(value)
        for path, value in flat(tree).items()
    }
