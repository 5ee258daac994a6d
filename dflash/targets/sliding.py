"""Targets some of whose layers see a window only: gemma 3 and 4, gpt-oss, cohere2, olmo3, exaone4, muse and alike.

mlx-lm keeps such a window in a ring that cannot be wound back once it has wrapped, because the rows that a block
pushed out are gone. The cache here keeps them for as long as the block can be rolled back.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from .attention import AttentionTarget

# Rows of room that a full window gets at a time. It is moved to the front when they are used up, so that a decoded
# token costs 1/64 of a copy of the window, for 64 rows more memory.
_ROOM = 64


class SlidingTarget(AttentionTarget):
    """A `TargetAdapter` for models that mix windowed and full attention."""

    kind = "sliding"

    def _usual_layers(self) -> list[nn.Module]:
        return []  # a windowed layer has no long context, and its cache is not a `KVCache`


class WindowCache:
    """The last `window` positions of one layer, in temporal order, and the last forward's rows on top.

    A position sees itself and the `window - 1` before it. Before a forward of n rows those before it are needed, so
    at most `window - 1 + max(n, 64)` rows are stored. `trim` takes back up to the n rows exactly: what lies before
    them is dropped by the next forward at the earliest.

    Attributes:
        window: positions that a position sees, itself included.
        offset: positions seen so far.
        keys, values: (1, H, rows, Dk), (1, H, rows, Dv), or None before the first forward. Rows past the end of
            the stored ones are unused.
    """

    def __init__(self, window: int):
        self.window = window
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._end = 0  # rows in use
        self._undoable = 0  # rows of the last forward

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (1, H, n, D) rows; returns them behind the up to `window - 1` rows before them."""
        rows = keys.shape[2]
        before = min(self.window - 1, self.offset)
        if not self._has_place(rows):
            self.keys = self._moved(self.keys, keys, before)
            self.values = self._moved(self.values, values, before)
            self._end = before
        start, end = self._end - before, self._end + rows
        self.keys[..., self._end : end, :] = keys
        self.values[..., self._end : end, :] = values
        self._end = end
        self.offset += rows
        self._undoable = rows
        return self.keys[..., start:end, :], self.values[..., start:end, :]

    def trim(self, rows: int) -> int:
        """Forget the newest `rows` rows; returns how many that were: no more than the last forward's."""
        rows = min(rows, self._undoable)
        self.offset -= rows
        self._end -= rows
        self._undoable -= rows
        return rows

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What the next `rows` positions see of what `update_and_fetch` will return.

        None: everything. "causal": everything up to themselves. Else booleans (rows, rows before + rows).
        """
        if window_size not in (None, self.window):
            raise ValueError(f"a window of {self.window} positions cannot be masked as one of {window_size}")
        if rows == 1:
            return None
        before = min(self.window - 1, self.offset)
        if before + rows <= self.window and not return_array:
            return "causal"
        return create_causal_mask(rows, before, window_size=self.window)

    def _has_place(self, rows: int) -> bool:
        """Whether the arrays have room for `rows` more, and no more room than a long prompt chunk left behind."""
        if self.keys is None:
            return False
        size = self.keys.shape[2]
        return self._end + rows <= size <= self.window - 1 + max(rows, _ROOM)

    def _moved(self, stored: mx.array | None, new: mx.array, before: int) -> mx.array:
        """The `before` newest stored rows at the front of an array with room for `new` and some more."""
        shape = (*new.shape[:2], max(new.shape[2], _ROOM), new.shape[3])
        room = mx.zeros(shape, new.dtype)
        if stored is None or not before:
            return room
        return mx.concatenate([stored[..., self._end - before : self._end, :], room], axis=2)


def can_roll_back(cache: Any) -> bool:
    """Whether `cache`, as mlx-lm made it, can be rolled back here or has a stand-in that can."""
    if isinstance(cache, CacheList):
        return all(type(part) is KVCache for part in cache.caches)
    return type(cache) is KVCache or is_window(cache)


def is_window(cache: Any) -> bool:
    """Whether `cache` keeps a window alone: without first tokens that stay (`keep`)."""
    return type(cache) is RotatingKVCache and cache.keep == 0


def with_rollback(caches: list[Any]) -> list[Any]:
    """`caches` as mlx-lm made them, empty, with a `WindowCache` in place of every ring."""
    return [WindowCache(cache.max_size) if is_window(cache) else cache for cache in caches]
