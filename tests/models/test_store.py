"""Folders that are whole or absent, and the check for room."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.errors import DiskFull, NotFound
from dflash.models import store

# A process that builds a folder slowly and says when it is inside.
BUILDER = """
import sys, time
from pathlib import Path
from dflash.models import store

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    (folder / "half").write_text("x")
    print("building", flush=True)
    sys.stdin.readline()
    (folder / "rest").write_text("y")

store.build_once(Path(sys.argv[1]), build)
"""


def start(folder: Path, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(folder), str(log)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=Path(store.__file__).parents[2], **pipes)


def test_a_folder_is_built_once_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    for content in ("first", "second"):
        store.build_once(folder, lambda work, content=content: (work / "file").write_text(content))
    assert (folder / "file").read_text() == "first"
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["folder"]


def test_a_build_that_fails_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def broken(work: Path) -> None:
        (work / "half").write_text("x")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        store.build_once(tmp_path / "folder", broken)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert store.build_once(tmp_path / "folder", lambda work: None).is_dir()


def test_a_disk_that_fills_up_while_building_is_called_so(tmp_path: Path) -> None:
    def full(work: Path) -> None:
        raise RuntimeError("cannot write") from OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFull, match="filled up"):
        store.build_once(tmp_path / "folder", full)


def test_of_two_processes_one_builds_and_the_other_waits_for_it(tmp_path: Path) -> None:
    folder, log = tmp_path / "folder", tmp_path / "log"
    with start(folder, log) as first:
        assert first.stdout.readline() == "building\n"
        with start(folder, log) as second:
            assert "another process is preparing folder" in second.stderr.readline()
            assert not folder.exists()
            first.communicate("\n")
            out, _ = second.communicate("\n")
    assert (first.returncode, second.returncode, out) == (0, 0, "")
    assert log.read_text() == "built\n"
    assert sorted(path.name for path in folder.iterdir()) == ["half", "rest"]


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    folder, log = tmp_path / "folder", tmp_path / "log"
    with start(folder, log) as killed:
        assert killed.stdout.readline() == "building\n"
        killed.kill()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    store.build_once(folder, lambda work: (work / "file").write_text("x"))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["folder"]
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_place_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFound, match="file/cache cannot be written") as caught:
        store.build_once(tmp_path / "file" / "cache" / "folder", lambda work: None)
    assert "--cache-dir" in caught.value.hint


def test_room_is_checked_for_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    store.check_room(tmp_path / "a" / "b", 1, "a test")
    with pytest.raises(DiskFull, match="a test needs 1,000,000,000,000,000,000 bytes") as caught:
        store.check_room(tmp_path / "a" / "b", 10**18, "a test")
    assert caught.value.details["needed_bytes"] == 10**18
    assert not (tmp_path / "a").exists()


def test_the_cache_lies_where_the_user_says_or_where_the_system_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    mac = tmp_path / "Library" / "Caches" / "dflash"
    assert store.cache_root() == (mac if sys.platform == "darwin" else tmp_path / "xdg" / "dflash")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert store.cache_root() == (mac if sys.platform == "darwin" else tmp_path / ".cache" / "dflash")
    assert store.cache_root(Path("~/mine")) == tmp_path / "mine"
