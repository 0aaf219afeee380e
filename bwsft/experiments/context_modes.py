"""Context modes compared at equal CPU time, from the embedded base.

python -m bwsft.experiments.context_modes [--seconds 40] [--seeds 3] [--out runs/context-modes]

Each cell trains one mode with one seed for as many updates as fit into the CPU seconds (measured on
the first updates; the learning-rate schedule ends there), then takes held-out blockwise NELBO and
exact match on held-out problems, decoded in the mode's own way. Finished cells are not redone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from pathlib import Path

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import load_trained
from bwsft.commands.demo import TEST_SEED, solve
from bwsft.data import word_problems as wordproblems
from bwsft.experiments.cells import train_cell
from bwsft.experiments.statistics import mean_error
from bwsft.utils.files import write_atomic

MODES = {
    "exact": {},
    "cached, k = 1": {"context": "cached"},
    "cached, k = 2": {"context": "cached", "draws_per_context": 2},
    "cached, k = 4": {"context": "cached", "draws_per_context": 4},
    "block_causal": {"context": "block_causal"},
}
WARM = 12  # updates that measure the time of one; the first four warm up


def cell_config(mode: str, seed: int, steps: int) -> c.Config:
    return dataclasses.replace(
        presets.debug(),
        **MODES[mode],
        seed=seed,
        steps=steps,
        batch_size=32,
        micro_batch_size=32,
        save_every=steps,
        dataset=c.DataConfig(template="chat", holdout=128),
        optim=c.OptimConfig(lr=1e-3),
        eval=c.EvalConfig(every=steps, draws=8),
    )


def seconds_per_update(mode: str, out: Path) -> float:
    """CPU seconds of one update, the median of a few."""
    from bwsft.training.run_files import open_run
    from bwsft.training.setup import setup
    from bwsft.training.trainer import train_step

    config = dataclasses.replace(cell_config(mode, 0, WARM), out=str(out))
    run = setup(config, *open_run(config))
    times = []
    for step in range(WARM):
        began = time.process_time()
        train_step(run, step)
        times.append(time.process_time() - began)
    return statistics.median(times[4:])


def run_cell(mode: str, seed: int, steps: int, folder: Path) -> dict:
    """Train, evaluate and decode one cell; its result is written when all is done."""
    name = f"{mode.replace(', k = ', '-k')}-seed{seed}"
    result = folder / f"{name}.json"
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8"))
    out = folder / name
    config = cell_config(mode, seed, steps)
    began = time.process_time()
    trained = train_cell(out, config)
    trained_for = time.process_time() - began
    problems = wordproblems.generate(200, TEST_SEED, split="test")
    solved, generations = solve(load_trained(str(out)), problems, config, name)
    cell = {
        "mode": mode,
        "seed": seed,
        "steps": steps,
        "cpu_seconds": round(trained_for, 1),
        "supervised_tokens": trained["supervised_tokens"],
        "nelbo_before": trained["evals"][0][1],
        "nelbo": trained["evals"][-1][1],
        "solved": sum(solved) / len(solved),
        "passes": sum(g.passes for g in generations),
    }
    write_atomic(result, json.dumps(cell, indent=2) + "\n")
    return cell


def report(cells: list[dict], options, into: Path) -> str:
    """Markdown table of means and standard errors, and the plot beside it."""
    rows = []
    for mode in MODES:
        mine = [cell for cell in cells if cell["mode"] == mode]
        rows.append((mode, mine))
    lines = [
        "# Context modes at equal CPU time, from the embedded base",
        "",
        f"`python -m bwsft.experiments.context_modes --seconds {options.seconds} "
        f"--seeds {options.seeds}`, one thread, B 8 of 40 response tokens, 32 sequences an update, "
        "learning rate 1e-3. Mean ± standard error over seeds; each mode is scored and decoded in "
        "its own way, so `before` differs between modes.",
        "",
        "| mode | updates | supervised tokens | CPU s | NELBO before | NELBO after | exact match |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for mode, mine in rows:
        lines.append(
            f"| {mode} | {mine[0]['steps']:,} | {spread(mine, 'supervised_tokens', ',.0f')} | "
            f"{spread(mine, 'cpu_seconds', '.0f')} | {mine[0]['nelbo_before']:.3f} | "
            f"{spread(mine, 'nelbo', '.3f')} | {spread(mine, 'solved', '.1%')} |"
        )
    lines += ["", "![NELBO and exact match by mode](context_modes.png)", ""]
    plot(rows, into.with_suffix(".png"))
    return "\n".join(lines)


def spread(cells: list[dict], key: str, form: str) -> str:
    mean, error = mean_error([cell[key] for cell in cells])
    return format(mean, form) + ("" if math.isnan(error) else f" ± {format(error, form)}")


def plot(rows: list, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    panels = (("nelbo", "held-out NELBO, nats per token"), ("solved", "exact match"))
    for axis, (key, label) in zip(axes, panels, strict=True):
        for place, (_, cells) in enumerate(rows):
            values = [cell[key] for cell in cells]
            axis.plot([place] * len(values), values, "o", alpha=0.5, color="tab:blue")
            axis.plot([place - 0.2, place + 0.2], [statistics.mean(values)] * 2, color="black")
        axis.set_xticks(range(len(rows)), [mode for mode, _ in rows], rotation=15)
        axis.set(ylabel=label, ylim=(0, None))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40, help="CPU seconds of training a cell")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/context-modes"))
    parser.add_argument("--report", type=Path, default=Path("runs/context-modes/context_modes.md"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = options.out / "plan.json"
    if not plan.exists():
        times = {m: seconds_per_update(m, options.out / f"warm-{i}") for i, m in enumerate(MODES)}
        steps = {m: max(int(options.seconds / t), 1) for m, t in times.items()}
        write_atomic(plan, json.dumps({"seconds_per_update": times, "steps": steps}, indent=2))
    steps = json.loads(plan.read_text(encoding="utf-8"))["steps"]
    cells = []
    for seed in range(options.seeds):
        for mode in MODES:
            cells.append(run_cell(mode, seed, steps[mode], options.out))
    write_atomic(options.report, report(cells, options, options.report))
    print(f"report: {options.report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
