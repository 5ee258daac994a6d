"""The pieces of a loaded decoder, and how its layers are run one after the other.

The pieces are the model's own modules, never copies. What a family does around its layers stands in `families.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from .base import Features
from .families import PLAIN, Family, Layer, Mask, family_of


@dataclass(frozen=True)
class Parts:
    """A decoder taken apart.

    Attributes:
        owner: the module with the head; `inner` the one with embedding, layers and final norm.
        head: (1, n, D) -> (1, n, V), the bare projection.
        family: what happens around the layers.
    """

    owner: nn.Module
    inner: nn.Module
    layers: list[nn.Module]
    norm: nn.Module
    head: Callable[[mx.array], mx.array]
    family: Family = PLAIN

    @classmethod
    def of(cls, model: nn.Module) -> Parts | None:
        """Find the pieces in an mlx-lm model, text-only or wrapped; None if it is built otherwise."""
        owner = getattr(model, "language_model", model)
        inner = getattr(owner, "model", None)
        table, norm = getattr(inner, "embed_tokens", None), getattr(inner, "norm", None)
        if table is None or norm is None or not hasattr(inner, "layers"):
            return None
        head = getattr(owner, "lm_head", None) or table.as_linear
        return cls(owner, inner, list(inner.layers), norm, head, family_of(inner))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.inner.embed_tokens.weight.shape[0]

    def embed(self, tokens: mx.array) -> mx.array:
        """What the first layer reads: (1, n) -> (1, n, D)."""
        return self.family.enter(self.inner, self.inner.embed_tokens(tokens))

    def shared_rows(self, tokens: mx.array) -> mx.array:
        """The table's rows as a draft shares them: (1, n) -> (1, n, D)."""
        return self.family.share(self.inner, self.inner.embed_tokens(tokens))

    def logits(self, hidden: mx.array) -> mx.array:
        """The model's logits from the normed last output: (1, n, D) -> (1, n, V)."""
        return self.family.leave(self.owner, self.head(hidden))

    def run(self, tokens: mx.array, layers: list[Layer], caches: list[Any]) -> list[mx.array]:
        """Append `tokens` (1, n) to `caches`; returns the output of every layer, each (1, n, D).

        `layers`: the model's own, or stand-ins that are called the same way.
        """
        hidden = self.embed(tokens)
        masks = layer_masks(caches, tokens.shape[1], as_array=self.family.array_masks)
        return self.family.walk(self.inner, layers, tokens, hidden, masks, caches)

    def features(self, outputs: list[mx.array], taps: tuple[int, ...]) -> Features:
        """From the outputs of all layers, each (1, n, D): the normed last one and the tapped ones."""
        tapped = mx.concatenate([outputs[i] for i in taps], axis=-1) if taps else None
        return Features(self.norm(outputs[-1]), tapped)


def layer_masks(caches: list[Any], rows: int, *, as_array: bool = False) -> list[Mask]:
    """The mask of each cache for `rows` more tokens. Caches that keep the same rows share one."""
    made: dict[int | None, Mask] = {}
    masks = []
    for cache in caches:
        plain = cache[0] if isinstance(cache, CacheList) else cache
        window = getattr(plain, "window", None)
        if window not in made:
            made[window] = plain.make_mask(rows, return_array=as_array, window_size=window)
        masks.append(made[window])
    return masks
