"""Lay out build/ as the Hub's kernel-builder does, without nix, for `kernels.get_local_kernel`:

    python kernels/local_build.py [--out FOLDER]
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

PROJECT = Path(__file__).resolve().parent
# What the builder writes over _ops.py: an operator namespace that no other build has.
OPS = '''import torch

_NAMESPACE = "{namespace}"
ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{{_NAMESPACE}}::{{op_name}}"
'''


def lay_out(project: Path, out: Path) -> None:
    """A folder torch-BACKEND in `out` for each backend of the project's build.toml."""
    import tomllib  # Python 3.11

    general = tomllib.loads((project / "build.toml").read_text(encoding="utf-8"))["general"]
    package = general["name"].replace("-", "_")
    sources = sorted((project / "torch-ext" / package).rglob("*.py"))
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    for backend in general["backends"]:
        unique, folder = f"_{package}_{backend}_{content[:7]}", out / f"torch-{backend}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(
            project / "torch-ext" / package, folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "_ops.py").write_text(OPS.format(namespace=unique), encoding="utf-8")
        fields = {name: general[name] for name in ("name", "version", "license")}
        metadata = {"id": unique, **fields, "python-depends": [], "backend": {"type": backend}}
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, default=PROJECT / "build")
    lay_out(PROJECT, parser.parse_args().out)


if __name__ == "__main__":
    main()
