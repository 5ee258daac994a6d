"""A draft layer's context: keys and values of the committed positions, computed once and kept.

Rows of the block being drafted are written behind the committed ones for the time of one pass and then
overwritten, so that attention reads one contiguous view and nothing is concatenated or copied per cycle.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

_STEP = 256  # rows the buffers grow by: rare enough to be free, small enough not to waste memory


class ContextRows:
    """Keys and values of one draft layer, by absolute position.

    With a `window`, a query at position q sees keys at positions > q - window. Rows that no later query can
    see are dropped when the buffer would have to grow.
    """

    def __init__(self, window: int | None = None):
        self.window = window
        self.keys: mx.array | None = None  # (1, H, capacity, d)
        self.values: mx.array | None = None
        self._first = 0  # absolute position of row 0
        self._rows = 0  # committed rows

    @property
    def end(self) -> int:
        """The position of the next committed row."""
        return self._first + self._rows

    def skip_to(self, position: int) -> None:
        """Start over at `position`: the rows before it are out of every later query's window."""
        self._first, self._rows = position, 0

    def write(self, keys: mx.array, values: mx.array, commit: int) -> tuple[mx.array, mx.array]:
        """Put rows (1, H, n, d) behind the committed ones and commit the first `commit` of them.

        Returns views over all rows that the uncommitted ones may see, themselves included.
        """
        self._reserve(keys, values)
        start, stop = self._rows, self._rows + keys.shape[2]
        self.keys[..., start:stop, :] = keys
        self.values[..., start:stop, :] = values
        self._rows += commit
        oldest = 0 if self.window is None else max(0, self._rows - (self.window - 1))
        return self.keys[..., oldest:stop, :], self.values[..., oldest:stop, :]

    def _reserve(self, keys: mx.array, values: mx.array) -> None:
        needed = self._rows + keys.shape[2]
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if needed <= capacity:
            return
        kept = self._rows if self.window is None else min(self._rows, self.window - 1)
        dropped = self._rows - kept
        size = -(-(kept + keys.shape[2]) // _STEP) * _STEP + _STEP
        self.keys = _moved(self.keys, dropped, kept, size, keys)
        self.values = _moved(self.values, dropped, kept, size, values)
        self._first += dropped
        self._rows = kept


def _moved(buffer: mx.array | None, start: int, count: int, size: int, like: mx.array) -> mx.array:
    """A buffer of `size` rows that begins with `count` rows of the old one."""
    shape = (*like.shape[:2], size - count, like.shape[3])
    fresh = mx.zeros(shape, like.dtype)
    if buffer is None or count == 0:
        return fresh
    return mx.concatenate([buffer[..., start : start + count, :], fresh], axis=2)


@lru_cache(maxsize=64)
def block_mask(context: int, block: int, window: int | None, causal: bool) -> mx.array | str | None:
    """Who sees whom: `block` queries over `context` committed keys followed by the block's own.

    Returns None where every key is visible, "causal" where mlx's own mask says it, else a boolean array
    (block, context + block). By distance in positions, never by place in a buffer.
    """
    if window is None or context + block <= window:
        return "causal" if causal else None
    query = mx.arange(context, context + block)[:, None]
    key = mx.arange(context + block)[None]
    # Inside the block the window does not apply: a block is never longer than what a layer was trained on.
    visible = (query - key < window) | (key >= context)
    return visible & (key <= query) if causal else visible
