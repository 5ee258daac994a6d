"""Where downloads and conversions are kept on disk, and how they get there whole.

A folder in the store is either complete or absent: it is built beside its place under a lock and moved there
when it is done, so that an interrupted run, a full disk or a second process leaves nothing half-made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from ..errors import DiskFull, NotFound

# Part of the name of every converted folder. Raised when `gguf` makes other ones, so that old ones are left.
CONVERSION = 1


def cache_root(cache_dir: Path | None = None) -> Path:
    """The folder for everything that can be fetched or made again: `cache_dir`, or the user's own cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dflash"
    # The XDG convention: a relative value is to be ignored.
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "dflash"


def hub_folder(cache_dir: Path | None) -> Path | None:
    """Where files of the hub go: under `cache_dir`, or None for the user's own hub cache, shared with other tools."""
    return None if cache_dir is None else cache_root(cache_dir) / "hub"


def say(progress: bool, message: str) -> None:
    """A line of progress on stderr."""
    if progress:
        print(f"dflash: {message}", file=sys.stderr, flush=True)


def check_room(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Raise `DiskFull` unless the disk that holds (or will hold) `folder` has `needed_bytes` free."""
    existing = next(place for place in [folder, *folder.parents] if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise DiskFull(
            f"{purpose} needs {needed_bytes:,} bytes in {folder}, the disk has {free:,} free",
            needed_bytes=needed_bytes,
            free_bytes=free,
            folder=str(folder),
        )


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk is behind `error`, however libraries wrapped it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "no space left on device" in str(seen).lower():  # native code that reports by text
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def is_unwritable(error: BaseException) -> bool:
    """Whether a place that cannot be written, or cannot be a folder, is behind `error`."""
    refusals = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
    return isinstance(error, OSError) and error.errno in refusals


def cannot_write(place: Path) -> NotFound:
    return NotFound(
        f"{place} cannot be written", "pass --cache-dir with a folder that you own", path=str(place)
    )


def build_once(folder: Path, build: Callable[[Path], None], *, progress: bool = True) -> Path:
    """Make `folder` by calling `build(empty folder)`, unless it exists; return it.

    Of several processes one builds and the others wait for it. What an interrupted build left behind is
    removed by the next one.

    Raises:
        DiskFull: the disk filled up while building.
        NotFound: the folder's place cannot be written.
    """
    if folder.is_dir():
        return folder
    prefix = f".{folder.name}.part-"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("a")
    except OSError as error:
        full = is_disk_full(error)
        raise (DiskFull(f"no room to make {folder}") if full else cannot_write(folder.parent)) from error
    with lock, _held(lock, folder.name, progress):
        if folder.is_dir():
            return folder
        for leftover in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            build(work)
            work.chmod(0o755)  # mkdtemp's folders are the owner's alone; a cache may be shared
            work.rename(folder)
        except Exception as error:
            if is_disk_full(error) and not isinstance(error, DiskFull):
                raise DiskFull(f"the disk filled up while {folder} was being made") from error
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _held(lock: TextIO, what: str, progress: bool) -> Iterator[None]:
    """Hold an exclusive lock on an open file. The system drops it when the process ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(progress, f"another process is preparing {what}; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    yield
