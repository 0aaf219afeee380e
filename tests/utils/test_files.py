"""A run folder has one writer at a time, and keeps nothing of those that were killed."""

import os
import subprocess
import sys

import pytest

from bwsft.utils import files

HOLD = "import sys, bwsft.utils.files as f; l = f.lock_folder(sys.argv[1]); "
HOLD += "print('ok', flush=True); "


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock until it is killed or its input is closed."""
    code = HOLD + "sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ok\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_until_the_first_is_gone(holder, tmp_path):
    message = f"{tmp_path} is being written by process {holder.pid}: wait until it has ended"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            files.lock_folder(tmp_path)
        assert files.locked(tmp_path)  # which takes nothing
    holder.kill()  # SIGKILL: nothing in it gets to tidy up
    holder.wait()
    with files.lock_folder(tmp_path):
        with pytest.raises(ValueError, match=f"by process {os.getpid()}"):
            files.lock_folder(tmp_path)  # not even from the same process
    files.lock_folder(tmp_path).close()
    assert os.listdir(tmp_path) == [files.LOCK]
    assert files.locked(tmp_path) is False and files.locked(tmp_path / "gone") is False


def test_the_lock_ends_with_its_process(holder, tmp_path):
    holder.communicate("")
    assert holder.returncode == 0
    files.lock_folder(tmp_path).close()


def test_a_child_does_not_inherit_the_lock(tmp_path):
    with files.lock_folder(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        files.lock_folder(tmp_path).close()
    finally:
        child.communicate(b"\n")


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def none(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", none)
    with pytest.warns(UserWarning, match="can't lock .*Function not implemented"):
        files.lock_folder(tmp_path).close()
    assert files.locked(tmp_path) is None


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="gone"):
        files.lock_folder(tmp_path / "gone")


def test_sweep_takes_temporary_files_and_folders_only(tmp_path):
    for name in (".a.json.12.tmp", "b.tmp", ".lock", ".c"):
        (tmp_path / name).touch()
    (tmp_path / ".step-3.12.tmp" / "deep").mkdir(parents=True)
    (tmp_path / ".link.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    files.sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".c", ".lock", "b.tmp", "elsewhere"]
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
