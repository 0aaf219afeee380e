"""kernels/ builds the distribution bwsft-kernels, which needs torch alone."""

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import bwsft_kernels
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = ROOT / "kernels/torch-ext/bwsft_kernels"
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def copied(folder, *names):
    """A folder with these files and folders of the project, in which setuptools may write."""
    for name in names:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".wheel")
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)
    return folder


def wheel(project, out):
    """The open wheel of a project, built with this environment's setuptools."""
    pytest.importorskip("setuptools", minversion="77")
    subprocess.run([sys.executable, "-c", BUILD, out], cwd=project, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    project = copied(tmp_path_factory.mktemp("project"), "kernels") / "kernels"
    return wheel(project, tmp_path_factory.mktemp("wheel"))


def test_content_of_the_wheel(built):
    """Every module and nothing else; torch alone is required; one version, one license."""
    files = {name for name in built.namelist() if ".dist-info/" not in name}
    assert files == {f"bwsft_kernels/{path.name}" for path in MODULES.glob("*.py")}
    assert not [path for path in MODULES.rglob("*.py") if path.parent != MODULES]
    folder = f"bwsft_kernels-{bwsft_kernels.__version__}.dist-info"
    metadata = Parser().parsestr(built.read(f"{folder}/METADATA").decode())
    assert metadata["Name"] == "bwsft-kernels" and metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == bwsft_kernels.__version__
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.match("[a-z-]+", line)[0] for line in needed] == ["torch"]
    assert built.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_beside_bwsft(built, tmp_path):
    """bwsft has the same files, so whichever of the two is installed last changes nothing."""
    names = "pyproject.toml", "setup.py", "README.md", "LICENSE", "bwsft", "kernels"
    whole = wheel(copied(tmp_path / "project", *names), tmp_path)
    shared = [name for name in whole.namelist() if name.startswith("bwsft_kernels/")]
    assert shared == [name for name in built.namelist() if name.startswith("bwsft_kernels/")]
    for name in shared:
        assert whole.read(name) == built.read(name), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_bare_environment_runs_the_first_example(tmp_path):
    """pip install ./kernels brings torch and nothing of bwsft; docs/use_the_loss.md then runs."""
    project = copied(tmp_path / "project", "kernels") / "kernels"
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", project]
    subprocess.run(install, check=True)
    page = (ROOT / "docs/use_the_loss.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1]
    ends = "from importlib.util import find_spec\nassert not find_spec('bwsft')"
    subprocess.run([python, "-I", "-c", f"{example}\n{ends}"], check=True, cwd=tmp_path)
