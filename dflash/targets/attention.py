"""Targets whose layers all keep every token: llama, mistral, qwen2, qwen3, qwen3_moe, glm4, minimax and alike.

Latent attention (DeepSeek V3, Kimi K2, GLM 4.7 and 5) is of this kind too: its caches hold latents in place of keys
and values and are trimmed the same way. Hidden states come from running the model's own layers one after the other;
nothing in the model is replaced. Whether a model may be run this way is not assumed from its name: `choose.py` reads
its parts and `models/loading.py` compares the result with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache

from .base import Features
from .long_context import LongContext
from .parts import Parts


class AttentionTarget:
    """A `TargetAdapter` over plain key-value caches.

    `caches` makes one request's caches, in the order of the layers; a `KVCache` a layer where it is left out.
    """

    kind = "attention"
    max_block: int | None = None

    def __init__(
        self,
        parts: Parts,
        *,
        vocab_size: int,
        max_context: int | None,
        caches: Callable[[], list[Any]] | None = None,
    ):
        self._parts = parts
        self._caches = caches or (lambda: [KVCache() for _ in parts.layers])
        self.num_layers = len(parts.layers)
        self.hidden_size = parts.norm.weight.shape[-1]
        self.vocab_size = vocab_size
        self.max_context = max_context
        self._long_context = LongContext(self._usual_layers())

    def start(self, taps: tuple[int, ...] = ()) -> AttentionSession:
        return AttentionSession(self._parts, taps, self._caches(), self._long_context)

    def embed(self, tokens: mx.array) -> mx.array:
        return self._parts.shared_rows(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        return self._parts.logits(hidden)

    def project(self, hidden: mx.array) -> mx.array:
        return self._parts.head(hidden)

    def _usual_layers(self) -> list[nn.Module]:
        """The layers, if each is called as layer(hidden, mask, cache) and takes any mask and a `KVCache`."""
        return self._parts.layers if self._parts.family.usual_layers else []


class AttentionSession:
    """One request's caches, each of which can be trimmed by up to the rows of the last forward."""

    def __init__(self, parts: Parts, taps: tuple[int, ...], caches: list[Any], long_context: LongContext):
        self._parts = parts
        self._taps = taps
        self._caches = caches
        self._long_context = long_context
        self._last_width = 0
        self.offset = 0

    def forward(self, tokens: mx.array) -> Features:
        layers = self._parts.layers
        if self._long_context.wanted(tokens.shape[1], self._caches):
            layers = [self._long_context.layer(index) for index in range(len(layers))]
        outputs = self._parts.run(tokens, layers, self._caches)
        self._last_width = tokens.shape[1]
        self.offset += self._last_width
        return self._parts.features(outputs, self._taps)

    def rollback(self, keep: int) -> None:
        excess = self._last_width - keep
        if excess:
            for cache in self._caches:
                trim(cache, excess)
        self.offset -= excess
        self._last_width = keep

    def arrays(self) -> list[mx.array]:
        return [array for cache in self._caches for array in stored(cache)]


def trim(cache: Any, rows: int) -> None:
    """Take the newest `rows` rows out of `cache`; a cache that cannot is an error, never a wrong answer."""
    trimmed = cache.trim(rows)
    if trimmed != rows:
        raise RuntimeError(f"a {type(cache).__name__} gave back {trimmed} of {rows} rows")


def stored(cache: Any) -> list[mx.array]:
    """The arrays that `cache` holds."""
    if isinstance(cache, CacheList):
        return [array for part in cache.caches for array in stored(part)]
    return [array for array in (cache.keys, cache.values) if array is not None]
