"""One command for a GPU that is at hand for minutes: what needs one, most valuable first.

python benchmarks/gpu_suite.py --fetch WHEELS      # before, on a machine with a package registry
python benchmarks/gpu_suite.py [--wheels WHEELS] [--dry] [--minutes 8] [--out FOLDER]

Each part is a process of its own with a time limit, and none can stop another, however it ends;
what it printed and its last line, if that is JSON, are written after every part, so that nothing is
lost when the time is up. The benchmarks leave their own result files in FOLDER (default
benchmarks/results), named by date and GPU. The peers that bench_loss.py compares with are unpacked
from WHEELS for this run alone; one that is missing is named in the results. --dry does on a CPU
what can be done: the 8B model with weights that have shapes and no values, its FLOPs counted, and
small sizes for real. Needs torch, triton, transformers, peft, accelerate, safetensors and numpy;
pytest for the kernel tests.
"""

import argparse
import datetime
import importlib.util
import json
import os
import re
import signal
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
# Without their dependencies: torch and triton must stay as they are.
PEERS = ("liger-kernel==0.8.5", "cut-cross-entropy==25.1.1")
NO_PYTEST = "pytest is not installed"
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
    Part("attention", "bench_attention.py", "--quick", 45,
         ("--count-only", "--heads 2 --key-heads 1 --width 16 --prompt 16 --response 32 --block 8 "
          "--rounds 1 --no-memory")),
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
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
        return [sys.executable, *tests, *arguments.split(), str(ROOT / "tests/gpu/test_gpu.py")]
    words = [sys.executable, str(HERE / part.file), *arguments.split()]
    if file is None:
        return words
    return [*words, "--out" if part.name == "tiles" else "--json", str(file)]


def run_part(part: Part, words: list[str], limit: float, peers: Path) -> dict:
    """What became of one part; a part that runs over its limit keeps what it printed."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels/torch-ext", peers)))
    environment = {**os.environ, "PYTHONPATH": path}
    began = time.monotonic()
    # Files and not pipes: a child of the part that outlives it can't hold up the suite.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=out, stderr=err, start_new_session=True)
        try:
            status = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its children too: they would hold the GPU
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


def fetch(folder: Path) -> int:
    """Download the peers' wheels, one by one: what one registry lacks must not cost the others."""
    return max(_pip("download", "-d", str(folder), "--only-binary", ":all:", peer)[0]
               for peer in PEERS)


def unpack(wheels: Path | None, target: Path) -> list[dict]:
    """Install the wheels of `wheels` into `target` alone; what became of each, as of a part."""
    if wheels is None:
        return []
    found = []
    for peer in PEERS:
        began = time.monotonic()
        status, errors = _pip("install", "--no-index", "--find-links", str(wheels), "--target",
                              str(target), peer)
        found.append({"part": peer, "status": status, "stderr": errors if status else "",
                      "seconds": round(time.monotonic() - began, 1)})
    return found


def _pip(command: str, *words: str) -> tuple[int, str]:
    """(exit status, end of what it complained about)."""
    pip = [sys.executable, "-m", "pip", command, "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *words], capture_output=True, text=True)
    print(f"pip {command} {words[-1]}: {done.returncode}", flush=True)
    return done.returncode, done.stderr[-TAIL:].replace(f"{ROOT}/", "")


def jobs(dry: bool, folder: Path, stem: str) -> list[tuple[Part, list[str]]]:
    if not dry:
        return [(p, command(p, p.arguments, folder / f"{stem}_{p.name}.json")) for p in PARTS]
    return [(p, command(p, arguments, None)) for p in PARTS for arguments in p.dry]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fetch", type=Path, metavar="WHEELS", help="only download the peers")
    parser.add_argument("--wheels", type=Path, help="folder of the peers' wheels")
    parser.add_argument("--dry", action="store_true", help="what a CPU can do of the parts")
    parser.add_argument("--minutes", type=float, default=MOST / 60, help="the whole suite, at most")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    args = parser.parse_args(argv)
    if args.fetch is not None:
        return fetch(args.fetch)
    import torch

    gpu = torch.cuda.is_available()
    if not gpu and not args.dry:
        print("no CUDA device is available: --dry tries the parts on the CPU", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if gpu else "cpu"
    head = {"bench": "gpu_suite", "device": device, "dry": args.dry, "torch": torch.__version__,
            "date": str(datetime.date.today())}
    stem = f"{datetime.date.today()}_{re.sub(r'[^a-z0-9]+', '_', device.lower())}"
    args.out.mkdir(parents=True, exist_ok=True)
    suite = args.out / f"{stem}_suite{'_dry' * args.dry}.json"
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as peers:
        results = unpack(args.wheels, Path(peers))
        for part, words in jobs(args.dry, args.out, stem):
            left = deadline - time.monotonic()
            limit = left if args.dry else min(part.seconds, left)
            results.append(outcome(part, words, limit, Path(peers)))
            print(f"{part.name}: {results[-1]['status']} in {results[-1]['seconds']} s", flush=True)
            content = json.dumps({**head, "parts": results}, indent=1)
            suite.write_text(content + "\n", encoding="utf-8")
    # --dry only collects tests: 5 is pytest's word for none that ran.
    fine = (0, 5, NO_PYTEST) if args.dry else (0,)
    failed = [r["part"] for r in results if r["status"] not in fine]
    print(json.dumps({"bench": "gpu_suite", "device": device, "failed": failed,
                      "out": suite.name}))
    return 1 if failed else 0


def outcome(part: Part, words: list[str], limit: float, peers: Path) -> dict:
    """run_part, or why it isn't tried; never an exception."""
    if limit < 5:
        return {"part": part.name, "status": "no time left", "seconds": 0}
    if part.file == "pytest" and importlib.util.find_spec("pytest") is None:
        return {"part": part.name, "status": NO_PYTEST, "seconds": 0}
    try:
        return run_part(part, words, limit, peers)
    except OSError as error:  # a file that is gone, no memory for a process
        return {"part": part.name, "status": f"{type(error).__name__}: {error}", "seconds": 0}


if __name__ == "__main__":
    sys.exit(main())
