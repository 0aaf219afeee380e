"""Files are written whole, and nothing stays of writers that were killed."""

import os
import subprocess
import sys

import pytest

from bwsft.utils import files

WRITE = """
import sys, bwsft.utils.files as f
def write(path):
    print("ok", flush=True)
    sys.stdin.read()
if sys.argv[2] == "folder":
    with f.folder_atomic(sys.argv[1]) as path:
        (path / "half").touch()
        write(path)
else:
    with f.file_atomic(f.Path(sys.argv[1])):
        write(None)
"""


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_a_killed_writer_left_goes_and_a_living_one_is_left_alone(tmp_path, kind):
    """By the next one that makes a folder there, whatever its name."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path / "big"), kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ok\n"
        (left,) = os.listdir(tmp_path)
        with files.folder_atomic(tmp_path / "a"):
            files.sweep(tmp_path, alone=True)  # its own neither
        assert sorted(os.listdir(tmp_path)) == sorted([left, "a"])
    finally:
        process.kill()
        process.communicate()
    with files.folder_atomic(tmp_path / "b"):
        assert left not in os.listdir(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_sweep_takes_what_has_a_name_of_ours_only(tmp_path):
    """And no symlink, which would not be ours."""
    mine = [".a.json.12.tmp", ".x.tmp", "b.tmp", ".lock", ".c", ".a.1234567g.bwsft.tmp"]
    for name in (*mine, ".a.json.1234abcd.bwsft.tmp"):
        (tmp_path / name).touch()
    (tmp_path / ".step-3.1234abcd.bwsft.tmp" / "deep").mkdir(parents=True)
    (tmp_path / ".link.1234abcd.bwsft.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    files.sweep(tmp_path)
    kept = [*mine, "elsewhere", ".link.1234abcd.bwsft.tmp"]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    files.sweep(tmp_path / "gone")


def test_a_kill_amid_a_removal_leaves_no_half_folder(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / "step-3").mkdir(exist_ok=True)
        (tmp_path / "step-3" / name).touch()
    with monkeypatch.context() as patched:

        def killed(path):
            (path / "a").unlink()
            raise KeyboardInterrupt

        patched.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            files.remove_folder(tmp_path / "step-3")
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".step-3.") and left.endswith(".tmp")
    files.sweep(tmp_path)
    assert not os.listdir(tmp_path)


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"Is a directory: '.*/folder'$"):
        files.write_atomic(tmp_path / "folder", "x")
    with pytest.raises(OSError, match=r"No such file or directory: '.*/gone/file'$"):
        files.write_atomic(tmp_path / "gone" / "file", "x")
    assert os.listdir(tmp_path) == ["folder"]
