"""Reading config.json and safetensors headers, whole and damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash.errors import BadCheckpoint, ModelNotFound
from dflash.models import headers
from dflash.models.headers import TensorInfo

ARRAYS = {
    "a.weight": mx.zeros((3, 5), mx.bfloat16),
    "a.scales": mx.zeros((7,), mx.float32),
    "b": mx.zeros((2, 2, 2), mx.uint32),
}


def save(path: Path) -> Path:
    mx.save_safetensors(str(path), ARRAYS, metadata={"format": "mlx"})
    return path


def raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def index(folder: Path, weight_map: Any) -> None:
    (folder / headers.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_header_gives_type_shape_and_bytes_of_each_tensor(tmp_path: Path) -> None:
    assert headers.read_header(save(tmp_path / "model.safetensors")) == {
        "a.weight": TensorInfo("BF16", (3, 5), 30),
        "a.scales": TensorInfo("F32", (7,), 28),
        "b": TensorInfo("U32", (2, 2, 2), 32),
    }


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_shorter_or_longer_than_its_header_says_is_refused_with_both_sizes(
    tmp_path: Path, change: int
) -> None:
    file = save(tmp_path / "model.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:change] if change < 0 else content + b"x")
    with pytest.raises(BadCheckpoint) as caught:
        headers.read_header(file)
    assert caught.value.details == {
        "file": str(file),
        "expected_bytes": len(content),
        "found_bytes": len(content) + change,
    }
    assert str(len(content)) in caught.value.message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"\xff" * 64,
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 2) + b"[]",
        b"<html>" * 20,
    ],
)
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadCheckpoint, match="no readable safetensors header"):
        headers.read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "entry",
    [{}, {"dtype": "F32", "shape": [1]}, {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, 5, None],
)
def test_a_header_with_an_impossible_entry_is_refused(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(BadCheckpoint, match="no readable safetensors header"):
        headers.read_header(raw(tmp_path / "model.safetensors", {"t": entry}, b"1234"))


def test_only_the_files_that_the_index_names_are_read(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "stale.safetensors"):
        raw(tmp_path / name, {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})
    index(tmp_path, {"x": "model-1.safetensors", "y": "model-2.safetensors"})
    assert headers.tensors(tmp_path).keys() == {"model-1.safetensors", "model-2.safetensors"}


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_named(tmp_path: Path) -> None:
    save(tmp_path / "model-1.safetensors")
    index(tmp_path, {"x": "model-1.safetensors", "y": "model-2.safetensors"})
    with pytest.raises(BadCheckpoint, match=r"lacks 1 of 2 weight files: model-2\.safetensors"):
        headers.tensors(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"x": 3}, {"x": "../elsewhere.safetensors"}])
def test_an_index_without_a_map_to_files_of_its_folder_is_refused(tmp_path: Path, weight_map: Any) -> None:
    index(tmp_path, weight_map)
    with pytest.raises(BadCheckpoint, match="weight_map"):
        headers.weight_files(tmp_path)


def test_weights_in_the_usual_name_win_over_a_second_copy(tmp_path: Path) -> None:
    save(tmp_path / "consolidated.safetensors")
    assert [file.name for file in headers.weight_files(tmp_path)] == ["consolidated.safetensors"]
    save(tmp_path / "model.safetensors")
    assert [file.name for file in headers.weight_files(tmp_path)] == ["model.safetensors"]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="weights are missing"):
        headers.tensors(tmp_path)


def test_a_config_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "größe": 1}', encoding="utf-8")
    assert headers.load_config(tmp_path) == {"architectures": ["X"], "größe": 1}


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        headers.load_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "JSON list"),
        (b"{}", "neither a model_type"),
        (b'{"model_type": ""}', "neither a model_type"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=why):
        headers.load_config(tmp_path)
