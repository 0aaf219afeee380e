"""A path has one writer at a time, and nobody's content is overwritten."""

import os
import subprocess
import sys

import pytest

from bwsft.utils import claims, files

HOLD = "import sys, bwsft.utils.claims as c; l = c.lock_folder(sys.argv[1]); "
HOLD += "print('ok', flush=True); "
CLAIM = "import sys, bwsft.utils.claims as c; h = c.claimed(sys.argv[1]); h.__enter__(); "
CLAIM += "print('ok', flush=True); sys.stdin.read()"


@pytest.fixture
def start(tmp_path):
    """start(code, path) -> a process that has run the code and waits for its input to be closed."""
    started = []

    def run(code, path):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "ok\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_until_the_first_is_gone(start, tmp_path):
    holder = start(HOLD + "sys.stdin.read()", tmp_path)
    message = f"{tmp_path} is being written by process {holder.pid}: wait until it has ended"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            claims.lock_folder(tmp_path)
        assert claims.locked(tmp_path)  # which takes nothing
    holder.kill()  # SIGKILL: nothing in it gets to tidy up
    holder.wait()
    with claims.lock_folder(tmp_path):
        with pytest.raises(ValueError, match=f"by process {os.getpid()}"):
            claims.lock_folder(tmp_path)  # not even from the same process
    claims.lock_folder(tmp_path).close()
    assert os.listdir(tmp_path) == [claims.LOCK]
    assert claims.locked(tmp_path) is False and claims.locked(tmp_path / "gone") is False


def test_a_child_does_not_inherit_the_lock(tmp_path):
    with claims.lock_folder(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        claims.lock_folder(tmp_path).close()
    finally:
        child.communicate(b"\n")


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """A folder's lock is said to be none; a file is whoever's made it; what a killed writer left
    goes from a folder of our own alone."""

    def none(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", none)
    with pytest.warns(UserWarning, match="can't lock .*start no second run"):
        claims.lock_folder(tmp_path).close()
    assert claims.locked(tmp_path) is None
    with claims.claimed(tmp_path / "a") as file:
        with (
            pytest.raises(ValueError, match="a exists: name another"),
            claims.claimed(tmp_path / "a"),
        ):
            pass
        file.write(b"x")
    left = tmp_path / ".a.12345678.bwsft.tmp"
    left.touch()
    files.sweep(tmp_path)
    assert left.exists()
    files.sweep(tmp_path, alone=True)
    assert not left.exists()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="gone"):
        claims.lock_folder(tmp_path / "gone")


def test_a_lock_takes_nothing_from_what_is_there(tmp_path):
    """Neither through a symlink nor from a file of somebody's that happens to have its name."""
    mine = tmp_path / "thesis.tex"
    mine.write_text("years")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").symlink_to(mine)
    with pytest.raises(ValueError, match=r"\.lock is a symlink"):
        claims.lock_folder(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".lock").write_text("mine too")
    claims.lock_folder(tmp_path / "b").close()
    assert (mine.read_text(), (tmp_path / "b" / ".lock").read_text()) == ("years", "mine too")


def test_a_claim_holds_a_new_or_empty_file_and_leaves_no_empty_one(start, tmp_path):
    path = tmp_path / "sub" / "out"
    holder = start(CLAIM, path)
    with (
        pytest.raises(ValueError, match="out is being written by another process"),
        claims.claimed(path),
    ):
        pass
    holder.kill()  # and an empty file is left
    holder.wait()
    with pytest.raises(KeyboardInterrupt), claims.claimed(path) as file:
        file.write(b"ours 1\n")
        raise KeyboardInterrupt
    with claims.claimed(path, lambda head: head.startswith(b"ours")) as file:
        file.write(b"2")
        files.write_atomic(path, path.read_bytes() + b"3")  # another file of the same name
    assert path.read_bytes() == b"ours 1\n23"
    with pytest.raises(RuntimeError), claims.claimed(tmp_path / "new"):
        raise RuntimeError
    assert sorted(os.listdir(tmp_path)) == ["sub"] and os.listdir(tmp_path / "sub") == ["out"]


def test_what_is_not_to_be_claimed(tmp_path):
    (tmp_path / "mine").write_text("x")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "mine": "mine is somebody's", "link": "link is a symlink", "folder": "folder is a folder",
        "pipe": "pipe is not a file",
    }.items():  # fmt: skip
        with (
            pytest.raises(ValueError, match=message),
            claims.claimed(tmp_path / name, lambda head: b"y" in head, "is somebody's"),
        ):
            pass
    assert (tmp_path / "mine").read_text() == "x" and len(os.listdir(tmp_path)) == 5


def test_a_new_folder_has_one_owner_and_goes_if_nothing_came_of_it(tmp_path):
    run = tmp_path / "runs" / "run"
    with claims.new_folder(run):
        with pytest.raises(ValueError, match="run is being written by"), claims.new_folder(run):
            pass
    assert not run.exists()
    with claims.new_folder(run):
        (run / "config.json").touch()
    with pytest.raises(ValueError, match="run exists: another process"), claims.new_folder(run):
        pass
    assert sorted(os.listdir(run)) == [".lock", "config.json"]
