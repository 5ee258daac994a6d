"""Any model mlx-lm can run, as a whole: for families that have no adapter yet.

No taps, hence no draft. Where all of its caches are plain it can be rolled back, so that proposals copied from
earlier text can be verified; elsewhere decoding is plain.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..errors import UnsupportedModel
from .base import Features


class OpaqueTarget:
    """A `TargetAdapter` without taps. `Features.hidden` holds finished logits here."""

    kind = "opaque"

    def __init__(self, model: nn.Module, *, vocab_size: int, max_context: int | None, why: str):
        self._model = model
        self.why = why
        self.num_layers = len(model.layers)
        self.hidden_size = 0  # no draft can match it
        self.vocab_size = vocab_size
        self.max_context = max_context
        plain = all(type(cache) is KVCache for cache in make_prompt_cache(model))
        self.max_block = None if plain else 1

    def start(self, taps: tuple[int, ...] = ()) -> OpaqueSession:
        if taps:
            raise UnsupportedModel(f"this target runs without a draft only: {self.why}")
        return OpaqueSession(self._model)

    def embed(self, tokens: mx.array) -> mx.array:
        raise UnsupportedModel(f"this target runs without a draft only: {self.why}")

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden

    project = embed


class OpaqueSession:
    """One request's caches, of whatever kind the model makes."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._cache = make_prompt_cache(model)
        self.offset = 0
        self._last_width = 0

    def forward(self, tokens: mx.array) -> Features:
        logits = self._model(tokens, cache=self._cache)
        self._last_width = tokens.shape[1]
        self.offset += self._last_width
        return Features(logits, None)

    def rollback(self, keep: int) -> None:
        excess = self._last_width - keep
        if excess and any(type(cache) is not KVCache for cache in self._cache):
            raise UnsupportedModel("this target's caches cannot be rolled back")
        for cache in self._cache:
            if excess:
                cache.trim(excess)
        self.offset -= excess
        self._last_width = keep

    def arrays(self) -> list[mx.array]:
        return [array for cache in self._cache for array in _leaves(cache.state)]


def _leaves(state: object) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, (list, tuple)):
        return [leaf for part in state for leaf in _leaves(part)]
    return []
