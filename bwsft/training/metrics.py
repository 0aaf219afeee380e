"""What a run writes down: metrics.jsonl, eval.jsonl and the loss curve."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

from bwsft.utils import lines, strict_json
from bwsft.utils.files import naming, write_atomic


class JsonLog:
    """An append-only JSONL file whose lines carry a `step`.

    Opening it for a run that has done `last_step` steps drops the lines after them, and a torn
    last line: the steps they tell of are run again.
    """

    def __init__(self, path: Path, last_step: int):
        kept = [record for record in read_log(path) if record["step"] <= last_step]
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))
        self.steps = {record["step"] for record in kept}
        self.path = Path(path)
        self._handle = open(path, "a", encoding="utf-8")

    def append(self, record: dict) -> None:
        with naming(self.path):
            self._handle.write(json.dumps(record) + "\n")
            self._handle.flush()
        self.steps.add(record["step"])

    def sync(self) -> None:
        """To the disk: a checkpoint must not outlive the lines of its steps."""
        with naming(self.path):
            os.fsync(self._handle.fileno())

    def close(self) -> None:
        with naming(self.path):  # it may have to write the rest of a line first
            self._handle.close()


def read_log(path: Path) -> list[dict]:
    """Records of a JSONL log, in order; a last line without its end (a killed writer) is left out.

    Raises ValueError, naming the line, for any other line that isn't a record.
    """
    if not Path(path).exists():
        return []
    records = []
    for number, line in enumerate(lines.finished(strict_json.read_text(path)), start=1):
        try:
            record = strict_json.parse(line)
            step = record["step"]
        except (ValueError, TypeError, KeyError):
            step = None
        if type(step) is not int or not 0 <= step < 2**53:
            raise ValueError(f"{path}, line {number} is not a record with a step: remove the line")
        records.append(record)
    return records


def column(path: Path, records: list[dict], name: str) -> list[float]:
    """One number of every record of the log `path`."""
    for record in records:
        value = record.get(name)
        if type(value) not in (int, float) or not abs(value) < 1e300:  # NaN is not
            raise ValueError(f"{path}, step {record['step']} has no number {name!r}")
    return [record[name] for record in records]


def plot_run(folder: Path) -> Path:
    """Draw loss (with a running mean), held-out value, learning rate and gradient norm into
    loss.png."""
    from matplotlib.figure import Figure  # and not pyplot, whose state is the caller's

    folder = Path(folder)
    log, eval_log = folder / "metrics.jsonl", folder / "eval.jsonl"
    metrics, evals = read_log(log), read_log(eval_log)
    steps, losses = [r["step"] for r in metrics], column(log, metrics, "loss")
    figure = Figure(figsize=(10, 4))
    margins = {"left": 0.07, "right": 0.93, "bottom": 0.12, "top": 0.92, "wspace": 0.25}
    left, right = figure.subplots(1, 2, gridspec_kw=margins)
    left.plot(steps, losses, color="0.8", lw=1, label="loss of the step")
    # A step's loss depends on the mask rates it drew: the mean over 5 % of the run is readable.
    left.plot(steps, running_mean(losses, max(len(losses) // 20, 5)), lw=2, label="running mean")
    if evals:
        nelbo = column(eval_log, evals, "nelbo")
        left.plot([r["step"] for r in evals], nelbo, "o-", label="held out")
    left.set(xlabel="step", ylabel="nats per token", ylim=(0, None))
    left.set_title(folder.name, parse_math=False)
    left.legend()
    right.plot(steps, column(log, metrics, "lr"), color="tab:green")
    right.set(xlabel="step", ylim=(0, None))
    right.set_ylabel("learning rate", color="tab:green")
    norm_axis = right.twinx()
    norms = column(log, metrics, "grad_norm")
    norm_axis.plot(steps, norms, color="tab:red", lw=0.8, alpha=0.6)
    norm_axis.set_ylabel("gradient norm", color="tab:red")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    write_atomic(folder / "loss.png", drawn.getvalue())
    return folder / "loss.png"


def running_mean(values: list[float], width: int) -> list[float]:
    """Mean of the last `width` values at every place."""
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - width] if i >= width else 0.0)
        out.append(total / min(i + 1, width))
    return out
