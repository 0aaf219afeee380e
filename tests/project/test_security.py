"""Nothing that is read can run: no pickle, no eval, no shell, no remote code, no unsafe YAML."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for place in ("bwsft", "kernels", "benchmarks", "examples", "tests")
    for path in (ROOT / place).rglob("*.py")
    if "build" not in path.relative_to(ROOT).parts
}
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
# By their full name: model.eval() and re.compile() are something else.
CALLS = {"os.system", "os.popen", "torch.save", "yaml.load", "yaml.unsafe_load", "eval", "exec",
         "compile", "__import__", "np.load", "numpy.load", "torch.hub.load"}  # fmt: skip

OWN_CODE = {
    "tests/project/test_docs.py": {"compile", "exec"},  # runs the examples in our own pages
    "tests/project/test_face.py": {"compile", "exec"},  # and those of help(bwsft)
    "tests/official_code/open_folders.py": {"trust_remote_code"},  # of the files beside it
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_literal(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def dangers(text: str) -> list[str]:
    """Line and name of everything in a source file that may run what it reads."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
        else:
            names = set()
        found += [(node.lineno, name) for name in names & PICKLES]
        if not isinstance(node, ast.Call):
            continue
        name, options = dotted(node.func), {k.arg: k.value for k in node.keywords}
        if name in CALLS:
            found.append((node.lineno, name))
        if name == "torch.load" and not is_literal(options.get("weights_only"), True):
            found.append((node.lineno, name))
        for option in ("shell", "trust_remote_code", "allow_pickle"):
            if option in options and not is_literal(options[option], False):
                found.append((node.lineno, option))
    return [f"line {line}: {name}" for line, name in sorted(found)]


def test_no_source_runs_what_it_reads():
    assert {"bwsft/models/lora.py", "tests/kills.py", "benchmarks/lib/harness.py",
            "kernels/torch-ext/bwsft_kernels/_block_mask.py"} <= SOURCES.keys()  # fmt: skip
    found = [(name, line) for name, text in SOURCES.items() for line in dangers(text)]
    found = [(n, line) for n, line in found if line.split(": ")[1] not in OWN_CODE.get(n, ())]
    assert found == []


# Written with an @ in the middle, which goes: a search for these words should not end here.
BAD = {
    "import pickle": "pickle",
    "from dill import loads": "dill",
    "def f():\n    import joblib.numpy_pickle": "joblib",
    "import torch\ntorch.@load(path)": "torch.load",
    "torch.@load(path, weights_only=False)": "torch.load",
    "torch.@load(path, weights_only=flag)": "torch.load",
    "torch.@save(x, path)": "torch.save",
    "eval(text)": "eval",
    "exec(compile(text, '', 'exec'))": "compile",
    "os.system('ls')": "os.system",
    "subprocess.run(line, shell=@True)": "shell",
    "run(line, shell=flag)": "shell",
    "yaml.load(text)": "yaml.load",
    "AutoModel.from_pretrained(name, trust_remote_code=@True)": "trust_remote_code",
    "load(name, trust_remote_code=options.trust)": "trust_remote_code",
    "np.load(path)": "np.load",
    "f(path, allow_pickle=True)": "allow_pickle",
    "__import__(name)": "__import__",
}


@pytest.mark.parametrize("text", BAD)
def test_each_danger_would_be_found(text):
    found = dangers(text.replace("@", ""))
    assert any(line.endswith(f": {BAD[text]}") for line in found)


@pytest.mark.parametrize(
    "text",
    ["torch.load(p, weights_only=True)", "model.eval()", "re.compile(p)", "f(shell=False)",
     "torch.compile(f)", "'eval(x) in a text'", "yaml.safe_load(text)", "picklefork.load()"],
)  # fmt: skip
def test_harmless_code_is_left_alone(text):
    assert dangers(text) == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], [], ["nonsense"], ["train", "--help"],
                  ["train", "debug", "--help"]],
)  # fmt: skip
def test_help_imports_nothing_heavy(arguments):
    """Which is what keeps it under a second: torch alone takes two."""
    code = f"""
import contextlib, sys
from bwsft.cli import main
with contextlib.suppress(SystemExit):
    main({arguments!r})
print(sorted({{"torch", "transformers", "datasets", "peft", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
