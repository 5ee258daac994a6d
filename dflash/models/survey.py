"""What can be said of a model or a draft without fetching it: by its copy on this disk, else by the hub.

Names mean what they mean to `sources.locate`; this file only looks. It fetches nothing but a config.json, and
what the hub will not tell is a finding, not an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import BadCheckpoint, DFlashError, HubUnreachable, ModelNotFound
from . import embedded, headers, hub, store
from .headers import TensorInfo
from .sources import cache_root, is_path


@dataclass(frozen=True)
class Survey:
    """What is known. None stands for what is not.

    Attributes:
        path: the complete copy on this disk, a folder or a GGUF file.
        config: its `config.json`.
        tensors: of a copy on this disk; `stored_bytes` is the size of the weights, wherever they are.
        download_bytes: what is still to be fetched.
        problem: why something is missing here.
    """

    name: str
    path: Path | None = None
    config: dict[str, Any] | None = None
    tensors: dict[str, TensorInfo] | None = None
    stored_bytes: int | None = None
    download_bytes: int | None = None
    problem: DFlashError | None = None


def survey(
    name: str,
    what: Literal["model", "draft"] = "model",
    *,
    cache_dir: Path | None = None,
    offline: bool = False,
    endpoint: str | None = None,
) -> Survey:
    """Look at the model or draft `name`.

    Raises:
        ModelNotFound: a path that does not exist, or a folder that is no model.
        BadCheckpoint: its config.json is damaged. Damaged weights are a `problem`.
    """
    root = cache_root(cache_dir)
    path = Path(name).expanduser()
    if path.is_file():
        return Survey(name, path.absolute(), stored_bytes=path.stat().st_size, download_bytes=0)
    if path.is_dir():
        return _folder(name, path.absolute())
    if is_path(name):
        raise ModelNotFound(f"there is no {path.absolute()}", path=str(path.absolute()))
    target = embedded.find(name)
    if pair := embedded.find_draft(name) or (target if what == "draft" else None):
        return _folder(pair.draft, pair.draft_folder)
    if target:
        kept = embedded.target_folder(target, root)
        return _folder(name, kept) if kept.is_dir() else Survey(name)
    if "/" not in name:
        raise ModelNotFound(
            f"there is no folder {path.absolute()}, and a model on the hub is called owner/name, not {name!r}"
        )
    hub_dir = store.hub_folder(cache_dir)
    if copy := hub.cached(name, cache_dir=hub_dir):
        return _folder(name, copy)
    return _on_hub(name, hub_dir, offline, endpoint)


def _folder(name: str, folder: Path) -> Survey:
    config = headers.load_config(folder)
    try:
        tensors = headers.tensors(folder)
    except BadCheckpoint as error:
        return Survey(name, folder, config, download_bytes=0, problem=error)
    stored = sum(info.nbytes for info in tensors.values())
    return Survey(name, folder, config, tensors, stored, 0)


def _on_hub(name: str, cache_dir: Path | None, offline: bool, endpoint: str | None) -> Survey:
    if offline:
        why = HubUnreachable(f"{name} is not on this disk, and the hub was not asked for its size")
        return Survey(name, problem=why)
    found = Survey(name)
    try:
        sizes = hub.file_sizes(name, endpoint=endpoint)
        stored = sum(size for file, size in sizes.items() if file.endswith(".safetensors"))
        found = Survey(name, stored_bytes=stored, download_bytes=sum(sizes.values()))
        file = hub.read_file(name, "config.json", cache_dir=cache_dir, endpoint=endpoint)
        return replace(found, config=headers.load_config(file.parent))
    except DFlashError as error:  # a gated repository, for one, lists its files and keeps them closed
        return replace(found, problem=error)
