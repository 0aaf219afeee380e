"""The kernels folder as a Hugging Face kernel project, as far as that can be tested offline."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bwsft_kernels
import pytest

PROJECT = Path(__file__).resolve().parents[2] / "kernels"
PACKAGE = PROJECT / "torch-ext/bwsft_kernels"


def test_build_file():
    """Fields of edition 5; the builder refuses a file with any other."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML parser")
    build = tomllib.loads((PROJECT / "build.toml").read_text(encoding="utf-8"))
    assert set(build) == {"general", "torch-noarch"} and build["torch-noarch"] == {}
    general = build["general"]
    assert set(general) == {"name", "version", "edition", "license", "backends"}
    assert re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", general["name"])
    assert (PROJECT / "torch-ext" / general["name"].replace("-", "_")) == PACKAGE
    assert type(general["version"]) is int and general["edition"] == 5
    assert set(general["backends"]) <= {"cpu", "cuda"}
    card = (PROJECT / "CARD.md").read_text(encoding="utf-8")
    assert card.startswith("---\n") and f"license: {general['license']}\n" in card
    assert not re.search(r"\{[{%#]", card)  # the builder fills in such places
    assert (PROJECT / "flake.nix").exists() and PACKAGE.joinpath("__init__.py").exists()


def refusals(text, package=PACKAGE.name):
    """What the loader or the builder would refuse in a file: imports of the package by its name,
    which break under a unique one, and operators outside the build's own namespace."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] == package]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [node.module] if node.module.split(".")[0] == package else []
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops":
            found += [] if node.attr == "aten" else [ast.unparse(node)]
        elif isinstance(node, ast.Call):
            called, named = ast.unparse(node.func).split(".")[-1], ast.unparse(node)
            literal = any(isinstance(a, ast.Constant | ast.JoinedStr) for a in node.args[:1])
            if called in ("custom_op", "triton_op"):
                prefixed = ast.unparse(node.args[0]).startswith("add_op_namespace_prefix(")
                found += [] if prefixed else [named]
            elif called == "Library" or (called.startswith("register_") and literal):
                found.append(named)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_what_the_loader_and_the_builder_refuse(path):
    assert path.stem != PACKAGE.name
    assert refusals(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("text", [
    "import bwsft_kernels.philox", "from bwsft_kernels import swiglu",
    "torch.ops.bwsft_kernels.a(x)",
    "@torch.library.custom_op('bwsft_kernels::a', mutates_args=())\ndef a(x): 0",
    "triton_op(f'{NAMESPACE}::a')", "torch.library.register_fake('bwsft_kernels::a')",
    "Library('bwsft_kernels', 'FRAGMENT')",
])  # fmt: skip
def test_a_planted_refusal_is_found(text):
    assert len(refusals(text)) == 1
    own = "@custom_op(add_op_namespace_prefix('a'))\ndef a(x): 0\na.register_fake(f)"
    assert refusals(own) == []


def test_public_names():
    """A name is a function or a module, never both: which of them an import finds would depend on
    what was imported before."""
    assert set(bwsft_kernels.__all__) == {
        "GumbelKey", "LinearArgmax", "MaskSpec", "MaskedBatch", "OnePassRows", "RangePlan",
        "Stream", "block_mask", "cache_plan", "layers", "linear_argmax", "linear_cross_entropy",
        "patch", "philox_uniform", "range_attention", "range_plan", "rms_norm", "rotary", "swiglu",
        "unpatch",
    }
    for name in set(bwsft_kernels.__all__) - {"layers"}:
        assert callable(getattr(bwsft_kernels, name))
        assert importlib.util.find_spec(f"bwsft_kernels.{name}") is None


def test_importing_costs_little():
    """Compiler, Triton and transformers come with the first use that needs them."""
    code = ("import sys, torch; old = set(sys.modules); import bwsft_kernels; "
            "print(*set(sys.modules) - old)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "bwsft_kernels.layers" in run.stdout.split()
    roots = {name.split(".")[0] for name in run.stdout.split()}
    assert not roots & {"triton", "transformers", "peft", "numpy", "bwsft"}
    assert "torch._dynamo" not in run.stdout.split()


LOAD = """
import importlib.util, sys
sys.modules["bwsft_kernels"] = None  # importing it by that name would fail now
spec = importlib.util.spec_from_file_location("loaded_1f2e", sys.argv[1] + "/__init__.py")
module = sys.modules["loaded_1f2e"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

import torch
x, head = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8)
target, tables = torch.tensor([1, -100, 3, 4, -100, 6]), torch.rand(2, 6, 1, 4)
results = []
for impl in ("torch", "triton"):
    loss = module.linear_cross_entropy(x, head, target, impl=impl)
    grad, = torch.autograd.grad(loss, x)
    tokens = module.linear_argmax(x.detach(), head, impl=impl).token
    spec = module.MaskSpec(block_size=4, mask_id=49)
    masked = module.block_mask(target.clamp(min=0)[None], [1], [5], spec, impl=impl)
    normed, total = module.rms_norm(x, torch.ones(8), 1e-5, x, impl=impl)
    rotated, _ = module.rotary(x[:, None], None, *tables, impl=impl)
    small = [t.detach() for t in (normed, total, rotated, module.swiglu(x, x, impl=impl))]
    plan, _ = module.range_plan(torch.tensor([2]), torch.tensor([2]), 2)
    seen = module.range_attention(*[x.detach()[:, None]] * 3, plan, impl=impl)
    results.append([loss.detach(), grad, tokens, masked.noisy_ids, seen, *small])
for one, other in zip(*results):
    torch.testing.assert_close(one, other)
print("loaded")
"""


def test_loads_from_any_path_under_another_name(tmp_path):
    """As the Hub's loader does it; with Triton, whose files must import each other relatively."""
    pytest.importorskip("triton", reason="exists for Linux alone")
    folder = tmp_path / "torch-cuda"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {"TRITON_INTERPRET": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-I", "-c", LOAD, str(folder)],
        env=environment, capture_output=True, text=True, cwd=tmp_path,
    )
    assert run.stdout == "loaded\n", run.stderr
