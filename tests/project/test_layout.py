"""The house rules that a reader relies on: import arrows, cheap imports, budgets."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels/torch-ext/bwsft_kernels"
SOURCES = sorted([*(ROOT / "bwsft").rglob("*.py"), *KERNELS.rglob("*.py")])


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
            if node.module == "bwsft":
                found |= {f"bwsft.{a.name}" for a in node.names}
    return found


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path) if not name.startswith(".")}


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda p: p.name)
def test_kernels_import_torch_triton_and_themselves(path):
    allowed = set(sys.stdlib_module_names) | {"torch"}
    if path.name.endswith("_triton.py"):
        allowed.add("triton")
    assert roots(path) <= allowed


# Where a heavy library may be imported: whole rooms end in a slash.
HOMES = {
    "transformers": (
        "bwsft/models/", "bwsft/checkpoints/folders.py", "bwsft/data/tokenizer.py",
        "bwsft/training/hf_trainer.py",
    ),
    "peft": ("bwsft/models/",),
    "datasets": ("bwsft/data/records.py",),
    "triton": (),  # the kernels' own test is above
}


@pytest.mark.parametrize("path", sorted((ROOT / "bwsft").rglob("*.py")), ids=lambda p: p.name)
def test_third_party_stays_in_its_room(path):
    name = str(path.relative_to(ROOT))
    for library in roots(path) & HOMES.keys():
        # Experiments may import everything.
        assert name.startswith((*HOMES[library], "bwsft/experiments/")), f"{name}: {library}"


OBJECTIVES = sorted((ROOT / "bwsft/objectives").glob("*.py"))


@pytest.mark.parametrize("path", OBJECTIVES, ids=lambda p: p.name)
def test_objectives_rest_on_the_kernels_alone(path):
    """The reading order of a step never goes back: train, objective, kernels."""
    assert roots(path) <= set(sys.stdlib_module_names) | {"torch", "bwsft_kernels", "bwsft"}
    ours = {name for name in imports(path) if name.split(".")[0] == "bwsft"}
    assert all(name.startswith("bwsft.objectives") for name in ours), ours


def test_a_training_step_fits_on_a_page():
    tree = ast.parse((ROOT / "bwsft/training/trainer.py").read_text(encoding="utf-8"))
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    lines = {name: n.end_lineno - n.lineno + 1 for name, n in functions.items()}
    assert max(lines.values()) <= 60 and lines["train_step"] <= 60


def test_no_init_in_kernels_folder():
    """It would shadow the `kernels` package of the Hub for whoever runs from the root."""
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not (ROOT / "tests/__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()


def test_kernels_folder_does_not_break_transformers_from_the_root():
    code = (
        "from transformers.utils import import_utils as u; u.is_kernels_available();"
        "import importlib.util as i; s = i.find_spec('kernels');"
        "print(s.origin if s else None)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert str(ROOT) not in out.stdout


@pytest.mark.parametrize("module", ["bwsft", "bwsft.cli", "bwsft.config"])
def test_cheap_imports(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_readme_stays_short():
    """What it names is checked in test_docs.py."""
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") < 200
