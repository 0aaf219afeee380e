"""One command for a GPU that is at hand for minutes: what needs one, most valuable first.

python benchmarks/gpu_suite.py [--dry] [--minutes 8] [--out FOLDER]

Each part is a process of its own with a time limit; what it printed and its last line, if that is
JSON, are written after every part, so that nothing is lost when the time is up. The benchmarks
leave their own result files in FOLDER (default benchmarks/results), named by date and GPU. --dry
does on a CPU what can be done: the 8B model with weights that have shapes and no values, its FLOPs
counted, and small sizes for real. Needs torch, triton, transformers, peft, accelerate, safetensors
and numpy; pytest for the kernel tests.
"""

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TAIL = 4_000  # characters kept of what a part printed
MOST = 480  # seconds of the whole suite
TINY = "--size tiny --prompt 16 --block 8 --gen 32 --quick --no-memory"


@dataclass(frozen=True)
class Part:
    """A benchmark file with arguments, or pytest; what --dry runs instead."""

    name: str
    file: str
    arguments: str
    seconds: int  # at most
    dry: tuple[str, ...]


PARTS = [
    Part("kernel_tests", "pytest", "", 120, ("--collect-only",)),
    Part("loss", "bench_loss.py", "--quick", 75,
         ("--batch 2 --hidden 64 --vocab 4096 --rows 32 --rounds 1 --no-memory",)),
    Part("step", "bench_step.py", "--size 8b --quick", 120,
         ("--size 8b --quick --count-only", TINY)),
    Part("generate", "bench_generate.py", "--size 8b --quick", 90,
         ("--size 8b --quick --count-only", TINY)),
    Part("tiles", "gates/tile_search.py", "--seconds 50", 70, ("--dry",)),
    Part("operators", "bench_operators.py", "--quick", 45, ("--count-only",)),
    Part("mask", "bench_mask.py", "--quick", 40,
         ("--sequences 4 --lengths 64 --rounds 2 --no-memory",)),
    Part("loss_sweep", "bench_loss.py", "--quick --sweep --variants naive fused", 90, ()),
    Part("loss_trainable", "bench_loss.py", "--quick --head trainable", 60,
         ("--batch 2 --hidden 64 --vocab 4096 --rows 32 --rounds 1 --no-memory --head trainable",)),
    Part("generate_long", "bench_generate.py",
         "--size 8b --quick --gen 512 --batch 8 --variants naive exact cached", 90, ()),
]  # fmt: skip


def command(part: Part, arguments: str, file: Path | None) -> list[str]:
    if part.file == "pytest":
        tests = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib"]
        return [sys.executable, *tests, *arguments.split(), str(ROOT / "tests/gpu/test_gpu.py")]
    words = [sys.executable, str(HERE / part.file), *arguments.split()]
    if file is None:
        return words
    return [*words, "--out" if part.name == "tiles" else "--json", str(file)]


def run_part(part: Part, words: list[str], limit: float) -> dict:
    """What became of one part; a part that runs over its limit keeps what it printed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels/torch-ext'}"}
    began = time.monotonic()
    # Files and not pipes: a child of the part that outlives it can't hold up the suite.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=err)
        try:
            status = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            status = f"over its limit of {limit:.0f} s"
        output, errors = (text_of(file) for file in (out, err))
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):
        result = None
    return {
        "part": part.name,
        "command": ["python", *(w.replace(f"{ROOT}/", "") for w in words[1:])],
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "result": result,
        "stdout": "" if result else output[-TAIL:],
        "stderr": errors[-TAIL:] if status else "",
    }


def text_of(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").replace(f"{ROOT}/", "")


def jobs(dry: bool, folder: Path, stem: str) -> list[tuple[Part, list[str]]]:
    if not dry:
        return [(p, command(p, p.arguments, folder / f"{stem}_{p.name}.json")) for p in PARTS]
    return [(p, command(p, arguments, None)) for p in PARTS for arguments in p.dry]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="what a CPU can do of the parts")
    parser.add_argument("--minutes", type=float, default=MOST / 60, help="the whole suite, at most")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    args = parser.parse_args(argv)
    import torch

    gpu = torch.cuda.is_available()
    if not gpu and not args.dry:
        print("no CUDA device is available: --dry tries the parts on the CPU", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if gpu else "cpu"
    stem = f"{datetime.date.today()}_{re.sub(r'[^a-z0-9]+', '_', device.lower())}"
    args.out.mkdir(parents=True, exist_ok=True)
    suite = args.out / f"{stem}_suite{'_dry' * args.dry}.json"
    deadline, results = time.monotonic() + 60 * args.minutes, []
    for part, words in jobs(args.dry, args.out, stem):
        left = deadline - time.monotonic()
        if part.file == "pytest" and importlib.util.find_spec("pytest") is None:
            results.append({"part": part.name, "status": "pytest is not installed", "seconds": 0})
        elif left < 5:
            results.append({"part": part.name, "status": "no time left", "seconds": 0})
        else:
            limit = left if args.dry else min(part.seconds, left)
            results.append(run_part(part, words, limit))
        print(f"{part.name}: {results[-1]['status']} in {results[-1]['seconds']} s", flush=True)
        report = {"bench": "gpu_suite", "device": device, "dry": args.dry, "torch":
                  torch.__version__, "date": str(datetime.date.today()), "parts": results}
        suite.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    # --dry only collects tests: 5 is pytest's word for none that ran.
    fine = (0, 5, "pytest is not installed") if args.dry else (0,)
    failed = [r["part"] for r in results if r["status"] not in fine]
    print(json.dumps({"bench": "gpu_suite", "device": device, "failed": failed,
                      "out": suite.name}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
