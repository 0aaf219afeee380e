"""What a run writes down: metrics.jsonl, eval.jsonl and the loss curve."""

from __future__ import annotations

import json
from pathlib import Path

from bwsft.files import write_atomic


class JsonLog:
    """An append-only JSONL file whose lines carry a `step`.

    Opening it for a resumed run drops the lines behind the checkpoint, and a torn last line: the
    steps they tell of are run again.
    """

    def __init__(self, path: Path, last_step: int | None):
        self.path = Path(path)
        kept = [r for r in read_log(self.path) if last_step is not None and r["step"] <= last_step]
        write_atomic(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self._handle = open(self.path, "a", encoding="utf-8")

    def append(self, record: dict) -> None:
        self._handle.write(json.dumps(record) + "\n")
        self._handle.flush()

    def close(self) -> None:
        self._handle.close()


def read_log(path: Path) -> list[dict]:
    """Records of a JSONL log; a last line without its end (a killed writer) is left out."""
    if not Path(path).exists():
        return []
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def plot_run(folder: Path) -> Path:
    """Draw loss (with a running mean), held-out NELBO and learning rate into loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = Path(folder)
    metrics, evals = read_log(folder / "metrics.jsonl"), read_log(folder / "eval.jsonl")
    steps, losses = [r["step"] for r in metrics], [r["loss"] for r in metrics]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    left.plot(steps, losses, color="0.8", lw=1, label="loss of the step")
    # A step's loss depends on the mask rates it drew: the mean over 5 % of the run is readable.
    left.plot(steps, running_mean(losses, max(len(losses) // 20, 1)), lw=2, label="running mean")
    if evals:
        left.plot(
            [r["step"] for r in evals], [r["nelbo"] for r in evals], "o-", label="held-out NELBO"
        )
    left.set(xlabel="step", ylabel="nats per token", ylim=(0, None), title=folder.name)
    left.legend()
    right.plot(steps, [r["lr"] for r in metrics], color="tab:green")
    right.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    twin = right.twinx()
    twin.plot(steps, [r["grad_norm"] for r in metrics], color="tab:red", lw=0.8, alpha=0.6)
    twin.set_ylabel("gradient norm")
    path, temporary = folder / "loss.png", folder / ".loss.tmp.png"
    figure.savefig(temporary, dpi=120)
    plt.close(figure)
    temporary.replace(path)
    return path


def running_mean(values: list[float], width: int) -> list[float]:
    """Mean of the last `width` values at every place."""
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - width] if i >= width else 0.0)
        out.append(total / min(i + 1, width))
    return out
