"""Targets whose layers all keep a plain key-value cache: llama, mistral, qwen2, qwen3, qwen3_moe and alike.

Hidden states come from running the model's own layers one after the other; nothing in the model is replaced.
Whether a model may be run this way is not assumed from its name: `choose.py` reads its parts and
`models/loading.py` compares the result with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from .base import Features
from .long_context import LongContext


@dataclass(frozen=True)
class Parts:
    """The pieces of a decoder, as the model itself holds them."""

    embed: nn.Module
    layers: list[nn.Module]
    norm: nn.Module
    head: Callable[[mx.array], mx.array]

    @classmethod
    def of(cls, model: nn.Module) -> Parts | None:
        """Find the pieces in an mlx-lm model, text-only or wrapped; None if it is built otherwise."""
        owner = getattr(model, "language_model", model)
        inner = getattr(owner, "model", None)
        embed, norm = getattr(inner, "embed_tokens", None), getattr(inner, "norm", None)
        if embed is None or norm is None or not hasattr(inner, "layers"):
            return None
        head = getattr(owner, "lm_head", None) or embed.as_linear
        return cls(embed, list(inner.layers), norm, head)

    def features(self, outputs: list[mx.array], taps: tuple[int, ...]) -> Features:
        """From the outputs of all layers, each (1, n, D): the normed last one and the tapped ones."""
        tapped = mx.concatenate([outputs[i] for i in taps], axis=-1) if taps else None
        return Features(self.norm(outputs[-1]), tapped)


class AttentionTarget:
    """A `TargetAdapter` over plain key-value caches."""

    kind = "attention"
    max_block: int | None = None

    def __init__(self, parts: Parts, *, vocab_size: int, max_context: int | None):
        self._parts = parts
        self.num_layers = len(parts.layers)
        self.hidden_size = parts.norm.weight.shape[-1]
        self.vocab_size = vocab_size
        self.max_context = max_context
        self._long_context = LongContext(parts.layers)

    def start(self, taps: tuple[int, ...] = ()) -> AttentionSession:
        return AttentionSession(self._parts, taps, self._long_context)

    def embed(self, tokens: mx.array) -> mx.array:
        return self._parts.embed(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        return self._parts.head(hidden)

    project = logits


class AttentionSession:
    """One request's key-value caches."""

    def __init__(self, parts: Parts, taps: tuple[int, ...], long_context: LongContext):
        self._parts = parts
        self._taps = taps
        self._long_context = long_context
        self._caches = [KVCache() for _ in parts.layers]
        self._last_width = 0

    @property
    def offset(self) -> int:
        return self._caches[0].offset

    def forward(self, tokens: mx.array) -> Features:
        hidden = self._parts.embed(tokens)  # (1, n) -> (1, n, D)
        mask = create_attention_mask(hidden, self._caches[0])
        ours = self._long_context.wanted(tokens.shape[1], self._caches)
        outputs = []
        for index, (layer, cache) in enumerate(zip(self._parts.layers, self._caches, strict=True)):
            run = self._long_context.layer(index) if ours else layer
            hidden = run(hidden, mask, cache)
            outputs.append(hidden)
        self._last_width = tokens.shape[1]
        return self._parts.features(outputs, self._taps)

    def rollback(self, keep: int) -> None:
        excess = self._last_width - keep
        if excess:
            for cache in self._caches:
                cache.trim(excess)
        self._last_width = keep

    def arrays(self) -> list[mx.array]:
        return [array for cache in self._caches for array in (cache.keys, cache.values)]
