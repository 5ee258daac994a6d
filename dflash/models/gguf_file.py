"""The GGUF container: metadata, the table of tensors, and where the bytes of each one lie.

Everything is checked against the size of the file, so that a damaged file is an error here rather than a
crash where its bytes are used. What metadata and tensors mean is left to the other `gguf` modules.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import BadCheckpoint, UnsupportedModel

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 had 32-bit counts and left use in 2023
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# Tensor types by number: name, elements in a block, bytes of a block. None: known by name only.
_TYPES: dict[int, tuple[str, int, int | None]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, None),
    7: ("Q5_1", 32, None),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, None),
    10: ("Q2_K", 256, None),
    11: ("Q3_K", 256, None),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, None),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, None),
    17: ("IQ2_XS", 256, None),
    18: ("IQ3_XXS", 256, None),
    19: ("IQ1_S", 256, None),
    20: ("IQ4_NL", 32, None),
    21: ("IQ3_S", 256, None),
    22: ("IQ2_S", 256, None),
    23: ("IQ4_XS", 256, None),
    29: ("IQ1_M", 256, None),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, None),
}
READABLE = tuple(name for name, _, size in _TYPES.values() if size is not None)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the table. `shape` in row-major order, `offset` from the start of the file, in bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A file whose header was read and found consistent with its size."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def bytes_of(self, tensor: TensorEntry) -> np.ndarray:
        """The stored bytes of `tensor`, uint8, mapped from the file."""
        return np.memmap(self.path, np.uint8, "r", tensor.offset, (tensor.nbytes,))


def read(path: Path) -> GGUFFile:
    """Read the header of a GGUF file.

    Raises:
        BadCheckpoint: not a GGUF file, cut off or damaged.
        UnsupportedModel: a container version or tensor type that this build does not read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _parse(path, _Reader(file, size))
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (EOFError, UnicodeDecodeError, RecursionError) as error:
        raise BadCheckpoint(
            f"{path} is damaged: its GGUF header does not end within its {size} bytes", found_bytes=size
        ) from error


def _parse(path: Path, reader: _Reader) -> GGUFFile:
    if reader.take(4) != _MAGIC:
        raise BadCheckpoint(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
    version = reader.number("I")
    if version not in _VERSIONS:
        raise UnsupportedModel(f"{path} is GGUF version {version}; this build reads versions 2 and 3")
    tensor_count, entry_count = reader.number("Q"), reader.number("Q")
    metadata = {reader.text(): reader.value(reader.number("I")) for _ in range(entry_count)}
    table = [_table_entry(path, reader) for _ in range(tensor_count)]

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise BadCheckpoint(f"{path} is damaged: its alignment is {alignment}")
    data_start = math.ceil(reader.position / alignment) * alignment
    tensors = {}
    for name, kind, shape, offset in table:
        tensors[name] = TensorEntry(
            name, kind, shape, data_start + offset, _byte_size(path, name, kind, shape)
        )
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if end > reader.size:
        raise BadCheckpoint(
            f"{path} is cut off: its tensors end at byte {end}, the file has {reader.size}",
            expected_bytes=end,
            found_bytes=reader.size,
        )
    return GGUFFile(path, metadata, tensors)


def _table_entry(path: Path, reader: _Reader) -> tuple[str, str, tuple[int, ...], int]:
    name = reader.text()
    dimensions = reader.number("I")
    if dimensions > _MOST_DIMENSIONS:
        raise BadCheckpoint(f"{path} is damaged: tensor {name} has {dimensions} dimensions")
    shape = tuple(reversed([reader.number("Q") for _ in range(dimensions)]))  # stored innermost first
    number = reader.number("I")
    kind, _, block_bytes = _TYPES.get(number, (f"number {number}", 1, None))
    if block_bytes is None:
        raise UnsupportedModel(
            f"{path} stores {name} as type {kind}; this build reads {', '.join(READABLE)}",
            "take a file in one of these types, such as Q4_K_M, Q8_0 or BF16",
        )
    return name, kind, shape, reader.number("Q")


def _byte_size(path: Path, name: str, kind: str, shape: tuple[int, ...]) -> int:
    block, block_bytes = next((n, size) for known, n, size in _TYPES.values() if known == kind)
    if not shape or shape[-1] % block:
        raise BadCheckpoint(
            f"{path} is damaged: {name} has shape {shape}, not rows of {kind} blocks of {block}"
        )
    return math.prod(shape) // block * block_bytes


class _Reader:
    """Little-endian values from a file, in order. Raises EOFError rather than reading past the end."""

    def __init__(self, file: BinaryIO, size: int):
        self._file = file
        self.size = size
        self.position = 0

    def take(self, count: int) -> bytes:
        self.position += count
        if self.position > self.size:
            raise EOFError
        return self._file.read(count)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return value

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        """A metadata value; arrays come as lists."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item, count = self.number("I"), self.number("Q")
            if item in _NUMBERS:
                width = struct.calcsize(f"<{_NUMBERS[item]}")
                return list(struct.unpack(f"<{count}{_NUMBERS[item]}", self.take(width * count)))
            return [self.value(item) for _ in range(count)]
        if kind not in _NUMBERS:
            raise EOFError  # no such type: what was read is not a header any more
        return self.number(_NUMBERS[kind])
