"""One command for a GPU that is at hand for minutes: what needs one, most valuable first.

python benchmarks/gpu_suite.py [--dry] [--minutes 8] [--out benchmarks/results/FILE.json]

Each part is a process of its own with a time limit; what it printed and its last line, if that is
JSON, are written after every part, so that nothing is lost when the time is up. --dry runs small
CPU versions of the same commands. Needs torch, triton, transformers, peft, safetensors and numpy.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TAIL = 4_000  # characters kept of what a part printed


@dataclass(frozen=True)
class Part:
    name: str
    command: list[str]
    seconds: int  # at most
    dry: list[str] | None = None  # what --dry runs instead; None: nothing


def parts() -> list[Part]:
    python = sys.executable
    bench = [python, str(HERE / "bench_loss.py")]
    small = ["--batch", "2", "--hidden", "64", "--vocab", "4096", "--rows", "32", "--rounds", "1"]
    tests = [python, "-m", "pytest", "-q", "-x", "--import-mode=importlib"]
    return [
        Part("kernel tests", [*tests, str(ROOT / "tests/test_gpu.py")], 150,
             [*tests, "--collect-only", str(ROOT / "tests/test_gpu.py")]),
        Part("loss head, 512 rows", [*bench, "--quick"], 90, [*bench, *small]),
        Part("loss head, sweep over rows",
             [*bench, "--quick", "--rows", "64", "256", "1024", "--variants", "naive", "fused"],
             90),
        Part("loss head, trainable", [*bench, "--quick", "--head", "trainable"], 60,
             [*bench, *small, "--head", "trainable"]),
    ]  # fmt: skip


def run_part(part: Part, command: list[str], limit: float) -> dict:
    """What became of one part; a part that runs over its limit keeps what it printed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels/torch-ext'}"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit
        )
        status, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as stopped:
        status = f"over its limit of {limit:.0f} s"
        output, errors = (
            (b or b"").decode(errors="replace") for b in (stopped.stdout, stopped.stderr)
        )
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):
        result = None
    return {
        "part": part.name,
        "command": [Path(command[0]).name, *(c.replace(f"{ROOT}/", "") for c in command[1:])],
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "result": result,
        "stdout": "" if result else output[-TAIL:],
        "stderr": errors[-TAIL:] if status else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="small CPU versions of the parts")
    parser.add_argument("--minutes", type=float, default=8, help="stop starting parts after this")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    import torch

    gpu = torch.cuda.is_available()
    if not gpu and not args.dry:
        print("no CUDA device is available: --dry tries the parts on the CPU", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if gpu else "cpu"
    name = f"{datetime.date.today()}_gpu_suite_{device.replace(' ', '_')}.json"
    out = args.out or HERE / "results" / name
    deadline, results = time.monotonic() + 60 * args.minutes, []
    for part in parts():
        command = part.dry if args.dry else part.command
        left = deadline - time.monotonic()
        if command is None or left < 5:
            continue
        results.append(run_part(part, command, min(part.seconds, left)))
        print(f"{part.name}: {results[-1]['status']} in {results[-1]['seconds']} s", flush=True)
        report = {"bench": "gpu_suite", "device": device, "dry": args.dry, "parts": results}
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    failed = [r["part"] for r in results if r["status"] not in (0, 5)]
    print(json.dumps({"bench": "gpu_suite", "device": device, "failed": failed, "out": str(out)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
