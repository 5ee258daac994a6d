"""GGUF tensor types as MLX arrays.

Types with blocks of 32 become MLX's affine layout (packed quants, a scale and a bias for each group of 32)
with the same numbers: nothing is rounded. K-quants have scales of scales: Q4_K becomes the same layout with
its scales rounded to half precision, Q6_K (groups of 16, which MLX lacks) becomes half-precision weights.

Decoded here rather than by `mx.load`, which in MLX releases that this project runs on misreads Q4_1 (0.31.1)
or Q4_K (0.32.4: odd groups get the scale of the even one before them), narrows BF16 to half precision, and
crashes on files that were cut off (0.31.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

GROUP_SIZE = 32


@dataclass(frozen=True)
class Weight:
    """A tensor as mlx-lm stores it: `scales` and `biases` and the bits of a quant, or a plain float `weight`.

    Quantised, of R rows and C columns: weight (R, C * bits / 32) uint32, scales and biases (R, C / 32).
    """

    weight: np.ndarray | mx.array
    scales: np.ndarray | None = None
    biases: np.ndarray | None = None
    bits: int | None = None

    def map(self, change: Callable[[mx.array], mx.array]) -> Weight:
        """`change` applied to each of the arrays, all of which have the tensor's rows."""
        scales, biases = (None if a is None else change(mx.array(a)) for a in (self.scales, self.biases))
        return Weight(change(mx.array(self.weight)), scales, biases, self.bits)

    def named(self, path: str) -> dict[str, mx.array]:
        """The arrays under the names that a checkpoint has for the module at `path`."""
        parts = {"weight": self.weight, "scales": self.scales, "biases": self.biases}
        return {f"{path}.{name}": mx.array(a) for name, a in parts.items() if a is not None}


def decode(kind: str, data: np.ndarray, shape: tuple[int, ...]) -> Weight:
    """The tensor of type `kind` whose bytes are `data` (uint8), as arrays with rows as in `shape`."""
    if kind == "BF16":
        return Weight(mx.array(data.view("<u2").reshape(shape)).view(mx.bfloat16))
    if kind in _FLOATS:
        return Weight(data.view(_FLOATS[kind]).reshape(shape))
    return _DECODERS[kind](data, shape)


_FLOATS = {"F32": "<f4", "F16": "<f2"}


def decoded_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of what `decode` gives, before anything is narrowed."""
    per_group = {"F32": 128, "F16": 64, "BF16": 64, "Q6_K": 64, "Q8_0": 36}
    return math.prod(shape) * per_group.get(kind, 20) // GROUP_SIZE


def _q4_0(data: np.ndarray, shape: tuple[int, ...]) -> Weight:
    blocks = data.reshape(-1, 18)
    scales = _half(blocks[:, :2])
    return _affine(_halves(blocks[:, 2:]), scales, -8 * scales, shape, bits=4)


def _q4_1(data: np.ndarray, shape: tuple[int, ...]) -> Weight:
    blocks = data.reshape(-1, 20)
    return _affine(_halves(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4]), shape, bits=4)


def _q8_0(data: np.ndarray, shape: tuple[int, ...]) -> Weight:
    blocks = data.reshape(-1, 34)
    scales = _half(blocks[:, :2])
    # Signed quants become unsigned ones by adding 128, which is flipping the top bit.
    return _affine(blocks[:, 2:] ^ 0x80, scales, -128 * scales, shape, bits=8)


def _q4_k(data: np.ndarray, shape: tuple[int, ...]) -> Weight:
    """Super-blocks of 8 groups of 32: two half-precision factors, 8 six-bit scales and minima, the quants."""
    blocks = data.reshape(-1, 144)
    factor, least = _half(blocks[:, :2]).astype(np.float32), _half(blocks[:, 2:4]).astype(np.float32)
    packed = blocks[
        :, 4:16
    ]  # 12 bytes: groups 0-3 in six low bits each, 4-7 in nibbles and the top bits left
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1)  # (blocks, 8)
    minima = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1)
    pairs = blocks[:, 16:].reshape(
        -1, 4, 32
    )  # low nibbles: an even group, high nibbles: the odd one after it
    quants = np.stack([pairs & 15, pairs >> 4], axis=2)  # (blocks, 4, 2, 32)
    scales, biases = (factor * scales).astype(np.float16), (-least * minima).astype(np.float16)
    return _affine(quants, scales, biases, shape, bits=4)


def _q6_k(data: np.ndarray, shape: tuple[int, ...]) -> Weight:
    """Super-blocks of 16 groups of 16: low nibbles, two high bits, signed scales, a half-precision factor."""
    blocks = data.reshape(-1, 210)
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    scales = blocks[:, 192:208].view(np.int8).reshape(-1, 16, 1).astype(np.float32)
    # Each half of 128 weights: 64 low nibbles, then 64 high ones; its quarters share 32 bytes of top bits.
    nibbles = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    top = high >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3  # (blocks, 2, 4, 32)
    quants = (nibbles | top << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    factor = _half(blocks[:, 208:]).astype(np.float32).reshape(-1, 1, 1)
    return Weight((factor * scales * quants).astype(np.float16).reshape(shape))


_DECODERS: dict[str, Callable[[np.ndarray, tuple[int, ...]], Weight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


def _half(two_bytes: np.ndarray) -> np.ndarray:
    """Half-precision numbers stored in (N, 2) bytes -> (N, 1)."""
    return np.ascontiguousarray(two_bytes).view("<f2")


def _halves(packed: np.ndarray) -> np.ndarray:
    """A block's 16 bytes -> its 32 quants: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _affine(
    quants: np.ndarray, scales: np.ndarray, biases: np.ndarray, shape: tuple[int, ...], bits: int
) -> Weight:
    """MLX packs the first of the quants of a word into its lowest bits."""
    rows = shape[:-1]
    if bits == 4:
        pairs = quants.reshape(-1, 2)
        quants = pairs[:, 0] | pairs[:, 1] << 4
    words = np.ascontiguousarray(quants, np.uint8).reshape(*rows, -1).view("<u4")
    return Weight(words, scales.reshape(*rows, -1), biases.reshape(*rows, -1), bits)
