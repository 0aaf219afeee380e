"""The house rules of tests/house_rules.py hold, and each would find a violation."""

import subprocess
import sys
from pathlib import Path

import pytest
from house_rules import (
    KERNELS,
    functions_fit_on_a_page,
    grid_formula_in_one_file,
    kernels_import_torch_and_triton,
    libraries_stay_at_home,
    lines_end_at_line_feeds,
    loops_reach_few_modules,
    names_are_defined_once,
    no_reexports,
    no_simple_namespace,
    objectives_rest_on_the_kernels,
    parameters_are_annotated,
    passes_beside_tpf,
    places_and_sizes,
    prints_through_say,
    room_order,
    words_of_the_field,
)

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("bwsft", "kernels", "benchmarks", "tests", "examples", "docs")
SUFFIXES = (".py", ".md")

LONG = "def f():\n" + "    x = 1\n" * 60
PLANTED = [  # rule, sources that break it, the violation
    (room_order, {"bwsft/data/a.py": "def f():\n    import bwsft.models.b"}, "bwsft/data/a.py:2"),
    (room_order, {"bwsft/data/a.py": "from bwsft import presets"}, "a.py:1: data may not"),
    (room_order, {"bwsft/models/a.py": "if TYPE_CHECKING:\n    from bwsft.cli import b"}, "a.py:2"),
    (room_order, {"bwsft/training/a.py": "import bwsft.decoding.b"}, "may not import"),
    (room_order, {"bwsft/decoding/a.py": "from bwsft.training import b"}, "may not import"),
    (room_order, {"bwsft/tools.py": ""}, "tools is no room"),
    (objectives_rest_on_the_kernels, {"bwsft/objectives/a.py": "import bwsft.utils.b"}, "a.py:1"),
    (objectives_rest_on_the_kernels, {"bwsft/objectives/a.py": "import numpy"}, "a.py:1"),
    (objectives_rest_on_the_kernels,
     {"bwsft/objectives/a.py": "from bwsft.data.packing import Batch"}, "a.py:1"),
    (kernels_import_torch_and_triton, {f"{KERNELS}a.py": "import triton"}, "a.py:1"),
    (kernels_import_torch_and_triton, {f"{KERNELS}a_triton.py": "import bwsft"}, "a_triton.py:1"),
    *((libraries_stay_at_home, {f"bwsft/{path}": f"\nimport {name}.b"}, f"{path}:2: may not import")
      for name, path in (("transformers", "data/dataset.py"), ("peft", "training/a.py"),
                         ("tyro", "config.py"), ("rich", "evaluation/a.py"),
                         ("datasets", "data/a.py"), ("triton", "models/a.py"))),
    (loops_reach_few_modules,
     {"bwsft/training/trainer.py": "import bwsft.a0",
      **{f"bwsft/a{i}.py": f"def f(): from bwsft import a{i + 1}" for i in range(20)}},
     "trainer.py:1: reaches 20 modules"),
    (no_reexports, {"bwsft/a.py": "x = 1", "bwsft/b.py": "from bwsft.a import x",
                    "tests/c.py": "from bwsft.b import x"}, "tests/c.py:1: bwsft/b.py"),
    (no_reexports, {"bwsft/a.py": "x = 1", "bwsft/b.py": "from bwsft.a import x",
                    "bwsft/c.py": "from bwsft import b as d\nd.x"}, "bwsft/c.py:2: bwsft/b.py"),
    (grid_formula_in_one_file, {"bwsft/a.py": "if s.block_origin == 'absolute': pass"}, "a.py:1"),
    (grid_formula_in_one_file, {"benchmarks/a.py": "prompts[0] % spec.block_size"}, "a.py:1"),
    (no_simple_namespace, {"benchmarks/a.py": "import types\ntypes.SimpleNamespace()"}, "a.py:2"),
    (names_are_defined_once, {"bwsft/a.py": "def f(): pass\ndef f(): pass"}, "a.py:2: f is"),
    (lines_end_at_line_feeds, {"bwsft/a.py": "import b\nb.read().splitlines()"}, "a.py:2"),
    (prints_through_say, {"bwsft/a.py": "import b\nprint(b.text)"}, "a.py:2: say"),
    (parameters_are_annotated, {"bwsft/decoding/a.py": "def f(a: int, *,\n b=1): pass"}, "a.py:2"),
    (parameters_are_annotated, {"bwsft/training/a.py": "class A:\n def f(self, *a): 0"}, "a.py:2"),
    (parameters_are_annotated, {f"{KERNELS}__init__.py": "from ._a import f",
                                f"{KERNELS}_a.py": "def f(x): pass"}, "_a.py:1: f's parameter x"),
    *((words_of_the_field, {"docs/a.md": f"Now\n{text}."}, "docs/a.md:2")
      for text in ("It is the\nlaw", "rows that bear loss", "def loss_rows()", "It meets the head",
                   "examined on", "a mended file", "for ever", "it lies here", "triton_twin",
                   "what is behind it", "tokens behind the block", "Normalised", "the optimiser")),
    (passes_beside_tpf, {"docs/a.md": "| rule | passes |"}, "docs/a.md:1: a table with passes"),
    (passes_beside_tpf, {"bwsft/a.py": 'heads = ("forward passes", "s")'}, "a.py:1: a table"),
    (places_and_sizes, {f"bwsft/a{i}.py": "" for i in range(17)}, "more than 16 entries"),
    (functions_fit_on_a_page, {"bwsft/training/trainer.py": LONG}, "trainer.py:1: f has 61 lines"),
    (places_and_sizes, {"README.md": "\n" * 200}, "README.md:200"),
    (places_and_sizes, {"kernels/__init__.py": ""}, "kernels/__init__.py:1"),
]  # fmt: skip
HARMLESS = {
    "bwsft/objectives/a.py": "if TYPE_CHECKING:\n    from bwsft.data.packing import Batch",
    "bwsft/cli.py": "from bwsft.commands import b\nimport tyro\nx = y.canvas == 'response'",
    "bwsft/training/hf_samples.py": "from bwsft.decoding import b",
    "bwsft/config.py": '"--tokeniser"  # old spelling',
    "bwsft/training/b.py": "import bwsft_kernels\ndef f(self, x: int) -> None: 'He believes.'",
}
RULES = list(dict.fromkeys(rule for rule, *_ in PLANTED))


@pytest.fixture(scope="module")
def sources():
    """Every file of the project, with the text of those in SUFFIXES."""
    files = [ROOT / "README.md", *(p for place in PLACES for p in (ROOT / place).rglob("*"))]
    return {
        str(path.relative_to(ROOT)): path.read_text("utf-8") if path.suffix in SUFFIXES else ""
        for path in files
        if path.is_file() and not {"__pycache__", "build", "results"} & set(path.parts)
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule, sources):
    found = sorted(set(rule(sources)))
    assert not found, f"{len(found)} violations:\n" + "\n".join(found)


@pytest.mark.parametrize("rule,planted,said", PLANTED)
def test_a_planted_violation_is_found(rule, planted, said):
    found = rule(planted)
    assert len(found) == 1 and said in found[0], found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_harmless_code_is_left_alone(rule):
    assert rule(HARMLESS) == []


def reentries(files: list[str]) -> list[str]:
    """Files that a stack enters again after it left them."""
    entered = [file for i, file in enumerate(files) if i == 0 or files[i - 1] != file]
    return sorted({file for file in entered if entered.count(file) > 1})


def test_reentries_are_found():
    assert reentries(["a", "a", "b", "c", "c"]) == [] and reentries(["a", "b", "b", "a"]) == ["a"]


@pytest.mark.parametrize("context", ["exact", "cached", "block_causal"])
def test_a_step_never_goes_back(context, tiny, make_run):
    """On the way from train_step to the mask and to the loss no file is entered twice."""
    from bwsft.training.trainer import train_step

    run, stacks = make_run(tiny(context=context)), {}
    ends = {"block_mask", "linear_cross_entropy"}

    def called(frame, event, _):
        code = frame.f_code
        if event != "call" or code.co_name not in ends or KERNELS not in code.co_filename:
            return
        stack = [frame]
        while stack[0].f_code.co_name != "train_step":
            stack.insert(0, stack[0].f_back)
        paths = [Path(f.f_code.co_filename) for f in stack]
        stacks[code.co_name] = [
            str(path.relative_to(ROOT)) for path in paths
            if path.is_relative_to(ROOT) and ".venv" not in path.parts
        ]

    sys.setprofile(called)
    try:
        train_step(run, 0)
    finally:
        sys.setprofile(None)
    assert stacks.keys() == ends
    for name, files in stacks.items():
        assert files[0] == "bwsft/training/trainer.py"
        assert reentries(files) == [], f"{context}, {name}: {' > '.join(files)}"


def test_kernels_folder_does_not_break_transformers_from_the_root():
    code = (
        "from transformers.utils import import_utils as u; u.is_kernels_available();"
        "import importlib.util as i; s = i.find_spec('kernels');"
        "print(s.origin if s else None)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert str(ROOT / "kernels") not in out.stdout


def test_help_of_every_command_needs_no_torch():
    """And importing bwsft does not. One process for all: what one command imports, all have."""
    code = """
import contextlib, io, sys
from bwsft.cli import COMMANDS, main
for words in ([], ["train"], ["train", "debug"], ["prepare"], *([name] for name in COMMANDS)):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    assert "usage: bwsft" in said.getvalue(), words
    found = {"torch", "transformers", "datasets", "matplotlib"} & set(sys.modules)
    assert not found, (words, found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
