"""From the name that the user gave to a local folder: a folder, a GGUF file, an embedded model, the hub.

What lies on this disk wins over what lies elsewhere, and a name is asked for in one place only: a path never
goes to the hub, and a bare word never does either. The folder that comes out has been looked at: readable
config, whole weight files, no code of its own. Loading it is `loading.py`'s part.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import DraftNotFound, ModelNotFound, Unsupported
from . import embedded, headers, hub, store
from .embedded import EMBEDDED
from .store import cache_root

__all__ = ["EMBEDDED", "Source", "cache_root", "check_safetensors", "is_on_the_hub", "is_path", "locate"]

Kind = Literal["folder", "hub", "gguf", "embedded"]

# Endings of files that hold weights: such a name is a path. Hub names have dots too (Qwen3-0.6B).
_FILE_ENDINGS = {".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json"}


@dataclass(frozen=True)
class Source:
    """A model on this disk. `name` as the user gave it; `revision` is the hub's commit, None elsewhere."""

    folder: Path
    name: str
    kind: Kind
    revision: str | None


def locate(
    name: str,
    *,
    cache_dir: Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: bool = True,
    what: Literal["model", "draft"] = "model",
    endpoint: str | None = None,
) -> Source:
    """Find the model or draft called `name`, fetching or converting it where needed.

    As a draft, an embedded target's name means the draft that belongs to it.

    Raises:
        ModelNotFound (of a draft: DraftNotFound): it is nowhere; the message says where it was looked for.
        BadCheckpoint: it was found damaged or incomplete.
        Unsupported, UnsupportedModel: it needs code of its own, or is in a form that this build cannot read.
        GatedModel, HubUnreachable, HubFailed, IndexFailed, DiskFull: as its place of origin has them.
    """
    root = cache_root(cache_dir)
    downloads = store.hub_folder(cache_dir)
    try:
        source = _on_this_disk(name, root, progress)
        source = source or _embedded(name, what, root, offline, progress)
        source = source or _on_the_hub(name, revision, downloads, offline, progress, endpoint)
        _refuse_remote_code(source)
        check_safetensors(source.folder)
    except ModelNotFound as error:
        if what == "draft":
            raise DraftNotFound(error.message, error.hint, **error.details) from error
        raise
    return source


def is_on_the_hub(name: str) -> bool:
    """Whether `locate` would ask the hub for `name`: it is no path, no file here and no embedded model."""
    return not is_path(name) and "/" in name


def is_path(name: str) -> bool:
    """Whether `name` is a path on this disk, there or not, rather than a name to look up."""
    return not name.strip() or os.path.exists(os.path.expanduser(name)) or _looks_like_a_path(name)


def check_safetensors(folder: Path) -> None:
    """Raise `BadCheckpoint` unless every weight file of `folder` is there and as long as its header says."""
    headers.tensors(folder)


def _on_this_disk(name: str, root: Path, progress: bool) -> Source | None:
    """A folder or a GGUF file, existing or not; None for what is no path."""
    if not name.strip():
        raise ModelNotFound("the name of the model is empty")
    path = Path(os.path.expanduser(name)).absolute()
    if os.path.isdir(path):
        return Source(path, name, "folder", None)
    if os.path.isfile(path):
        return Source(_converted(path, root, progress), name, "gguf", None)
    if _looks_like_a_path(name):
        raise ModelNotFound(f"there is no {path}", path=str(path))
    return None


def _embedded(name: str, what: str, root: Path, offline: bool, progress: bool) -> Source | None:
    pair = embedded.find(name)
    if pair is not None and what == "model":
        folder = embedded.fetch_target(pair, root, offline=offline, progress=progress)
        return Source(folder, pair.name, "embedded", None)
    pair = pair or embedded.find_draft(name)
    return None if pair is None else Source(pair.draft_folder, pair.draft, "embedded", None)


def _on_the_hub(
    name: str,
    revision: str | None,
    downloads: Path | None,
    offline: bool,
    progress: bool,
    endpoint: str | None,
) -> Source:
    if "/" not in name:
        raise _unknown_word(name)
    folder = hub.snapshot(
        name,
        revision=revision,
        cache_dir=downloads,
        offline=offline,
        progress=progress,
        endpoint=endpoint,
    )
    return Source(folder, name, "hub", folder.name)


def _converted(file: Path, root: Path, progress: bool) -> Path:
    """The folder made from a GGUF file.

    Kept under the file's path, size and time of change: reading tens of gigabytes to recognise them by
    content would take longer than converting anew, and whoever replaces a file changes one of the three.
    """
    if file.suffix.lower() != ".gguf":
        raise ModelNotFound(
            f"{file} is a file, expected a folder with config.json or a .gguf file",
            f"give its folder: {file.parent}",
        )
    from . import gguf  # imports MLX, which no other kind of source needs

    resolved = file.resolve()
    state = resolved.stat()
    identity = f"{resolved}\n{state.st_size}\n{state.st_mtime_ns}\n{store.CONVERSION}"
    folder = root / "gguf" / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        store.say(progress, f"converting {file.name}; once, then it is kept")
    gguf.convert(resolved, folder, progress=progress)
    return folder


def _looks_like_a_path(name: str) -> bool:
    return (
        name.startswith(("/", ".", "~"))
        or name.endswith("/")
        or name.count("/") > 1
        or Path(name).suffix.lower() in _FILE_ENDINGS
    )


def _unknown_word(name: str) -> ModelNotFound:
    known = [*(n for pair in embedded.PAIRS for n in pair.names), *_local_models()]
    spelled = {word.lower(): word for word in known}
    near = [spelled[word] for word in difflib.get_close_matches(name.lower(), spelled, n=3, cutoff=0.5)]
    places = f"there is no folder {Path(name).absolute()} and no embedded model called {name}"
    return ModelNotFound(
        f"{places}; a model on the hub is called owner/name",
        f"did you mean {' or '.join(near)}?" if near else f"embedded: {EMBEDDED}",
        nearest=near,
    )


def _local_models() -> Iterator[str]:
    """Names in the working folder that could be given as a model."""
    for path in sorted(Path.cwd().iterdir()):
        if path.suffix.lower() == ".gguf" or (path / "config.json").is_file():
            yield path.name


def _refuse_remote_code(source: Source) -> None:
    """mlx-lm runs the file that `model_file` names. `auto_map` is transformers' way, and not used here."""
    config = headers.load_config(source.folder)
    if config.get("model_file"):
        raise Unsupported(
            f"{source.name} brings its own remote code ({config['model_file']}), which is never run",
            "use a model whose architecture mlx-lm has itself",
        )
