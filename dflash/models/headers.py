"""What a checkpoint says about itself: `config.json` and safetensors headers, without reading a weight.

Planning, the doctor and the first check of a folder need names, shapes and sizes; this file reads them from
the first kilobytes of each file, and notices files that were cut off or overwritten. It loads nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadCheckpoint, ModelNotFound

INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8  # little-endian length of the JSON header that follows
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit; beyond it the length is garbage


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. `dtype` as safetensors spells it ("F32", "BF16", "U32", ...)."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def load_config(folder: Path) -> dict[str, Any]:
    """The checked content of `folder/config.json`.

    Raises:
        ModelNotFound: there is no such file.
        BadCheckpoint: it is not a JSON object, or names neither a model type nor an architecture.
    """
    path = folder / "config.json"
    config = _read_json(path)
    if not config.get("model_type") and not config.get("architectures"):
        raise BadCheckpoint(f"{path} names neither a model_type nor architectures: it describes no model")
    return config


def generation_defaults(folder: Path) -> dict[str, Any]:
    """The content of `folder/generation_config.json`, {} without one. Raises `BadCheckpoint` if it is damaged."""
    path = folder / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint: those its index names, else those that are there.

    Without an index, `model*.safetensors` wins over other names: some folders carry the same weights twice.

    Raises:
        BadCheckpoint: the index is damaged, or a shard that it names is missing.
    """
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    files = [folder / name for name in shard_names(index)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise BadCheckpoint(
            f"{folder} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing[:4])}",
            missing=missing,
        )
    return files


def shard_names(index: Path) -> list[str]:
    """The weight files that an index names, sorted. Raises `BadCheckpoint` if the index is damaged."""
    weight_map = _read_json(index).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    # A name is joined to a folder later, so it must be a plain one.
    if not names or not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
        raise BadCheckpoint(f"{index} has no weight_map from tensors to files of its folder")
    return sorted(names)


def tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint in `folder`, by name.

    Raises:
        BadCheckpoint: there are no weight files, or one is missing, cut off or damaged.
    """
    files = weight_files(folder)
    if not files:
        raise BadCheckpoint(f"{folder} has no .safetensors file: the weights are missing", folder=str(folder))
    return {name: info for file in files for name, info in read_header(file).items()}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, checked against the size of the file.

    Raises:
        BadCheckpoint: not a safetensors file, or shorter or longer than its header says.
    """
    try:
        found = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            text = file.read(length) if length <= _MOST_HEADER_BYTES else b""
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        parsed = {name: _tensor(entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path} has no readable safetensors header ({found} bytes in all)") from error
    expected = _LENGTH_BYTES + length + max((end for _, end in parsed.values()), default=0)
    if found != expected:
        raise BadCheckpoint(
            f"{path} is damaged: its header describes {expected} bytes, the file has {found}",
            file=str(path),
            expected_bytes=expected,
            found_bytes=found,
        )
    return {name: info for name, (info, _) in parsed.items()}


def _tensor(entry: dict[str, Any]) -> tuple[TensorInfo, int]:
    """One header entry and the offset at which its data end."""
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"data_offsets {begin}, {end}")
    return TensorInfo(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), end - begin), end


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path.parent} has no {path.name}, so it is not a model folder") from error
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value
