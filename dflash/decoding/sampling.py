"""From logits to what is drawn: penalties, warpers, and noise that belongs to positions.

The order is mlx-lm's: logit bias, repetition, presence and frequency penalty; then, on log-probabilities, top_p,
min_p and top_k; temperature last. Drawing is by the Gumbel-max trick: the token with the largest score + noise is a
draw from softmax(scores). The noise of a position depends on the seed and the position alone, so that a text does
not depend on how its positions were grouped into blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Protocol

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..config import SamplingParams

# Colder than this, scores would overflow; it is far below where the likeliest token always wins.
_COLDEST = 1e-6


class Purpose(IntEnum):
    """What random numbers are for; each purpose has a stream of its own."""

    CHOICE = 0
    DRAFT = 1
    ACCEPT = 2
    REJECT = 3


class Noise:
    """Random numbers by (seed, purpose, position). Nothing is remembered between calls."""

    def __init__(self, seed: int, purpose: Purpose):
        # Splitting hashes the seed, so that stepping the key by the position cannot meet another seed's keys.
        self._key = mx.random.split(mx.random.key(seed), len(Purpose))[purpose]

    def _keys(self, start: int, count: int) -> mx.array:
        """A key (count, 2) for each of the positions from `start`."""
        positions = mx.arange(start, start + count, dtype=mx.uint32)
        return self._key + mx.stack([mx.zeros_like(positions), positions], axis=1)

    def gumbel(self, start: int, count: int, size: int) -> mx.array:
        """Standard Gumbel noise (count, size) for positions start .. start + count - 1."""
        return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(self._keys(start, count))

    def uniform(self, start: int, count: int) -> mx.array:
        """Uniform numbers (count,) from [0, 1), likewise."""
        return mx.vmap(lambda key: mx.random.uniform(key=key))(self._keys(start, count))


class Adjust(Protocol):
    """Changes logits by what stands before them.

    Attributes:
        reach: tokens before a block's first that it looks at.
    """

    reach: int

    def __call__(self, logits: mx.array, block: mx.array, before: Sequence[int]) -> mx.array:
        """Logits (W, V) after each row of `block` (1, W), which follows `before` (its last `reach` tokens)."""
        ...


class Unadjusted:
    reach = 0

    def __call__(self, logits: mx.array, block: mx.array, before: Sequence[int]) -> mx.array:
        return logits


class Penalties:
    """Logit bias and penalties as mlx-lm's processors define them, for every row of a block at once."""

    def __init__(self, params: SamplingParams, vocab: int):
        self.reach = params.penalty_context - 1  # the row's own token is the window's last
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        bias = [0.0] * vocab
        for token, value in params.logit_bias.items():
            bias[token] = value
        self._bias = mx.array(bias)

    def __call__(self, logits: mx.array, block: mx.array, before: Sequence[int]) -> mx.array:
        logits = logits + self._bias
        counts = window_counts(block[0], before, self.reach + 1, logits.shape[-1])
        seen = counts > 0
        scaled = mx.where(logits < 0, logits * self._repetition, logits / self._repetition)
        return mx.where(seen, scaled - self._presence, logits) - counts * self._frequency


def window_counts(block: mx.array, before: Sequence[int], window: int, vocab: int) -> mx.array:
    """How often each id is among the `window` tokens that end with each row of `block`: (W, V).

    Args:
        block: ids (W,). before: the tokens in front of them, at most window - 1.

    A running sum over rows (few: a block's) of "came in" less "dropped out", as a product with a triangle of ones.
    Scattering repeated ids into a block's counts in one go, or mx.cumsum over a single row, ends the process in
    mlx 0.31.1.
    """
    block = block.astype(mx.int32)
    first = Counter(before)
    base = mx.zeros((vocab,))
    if first:
        base[mx.array(list(first))] = mx.array([float(times) for times in first.values()])
    # Nothing (-1) drops out of the first row, nor while the window is not full.
    line = mx.array([-1] * (window - len(before)) + list(before), dtype=mx.int32)
    leaving = mx.concatenate([line, block])[: len(block)]
    ids = mx.arange(vocab, dtype=mx.int32)
    came_in, dropped_out = ((line[:, None] == ids).astype(mx.float32) for line in (block, leaving))
    return base + mx.tri(len(block)) @ (came_in - dropped_out)


Warp = Callable[[mx.array], mx.array]


class Warpers:
    """top_p, min_p, top_k and temperature: scores (..., V) whose softmax is drawn from; -inf for what is out."""

    def __init__(self, params: SamplingParams):
        self._temperature = max(params.temperature, _COLDEST)
        self._filters: list[Warp] = []
        if params.top_p < 1:
            self._filters.append(partial(_top_p, top_p=params.top_p))
        if params.min_p > 0:
            self._filters.append(partial(apply_min_p, min_p=params.min_p))
        if params.top_k > 0:
            self._filters.append(partial(_top_k, top_k=params.top_k))

    def __call__(self, logits: mx.array) -> mx.array:
        scores = logits.reshape(-1, logits.shape[-1]).astype(mx.float32)  # mlx-lm's filters take (n, V)
        for keep in self._filters:
            scores = keep(scores)
        # From the best one down: no temperature can then make a finite score overflow upwards.
        scores = (scores - scores.max(axis=-1, keepdims=True)) / self._temperature
        return scores.reshape(logits.shape)


def _top_p(scores: mx.array, top_p: float) -> mx.array:
    """Over the whole distribution: the first of the filters, and the only one that needs true probabilities."""
    return apply_top_p(scores - mx.logsumexp(scores, axis=-1, keepdims=True), top_p)


def _top_k(scores: mx.array, top_k: int) -> mx.array:
    return apply_top_k(scores, top_k) if top_k < scores.shape[-1] else scores


@dataclass(frozen=True)
class Distribution:
    """The target's distribution after each row of a block, as unnormalised log-probabilities."""

    adjust: Adjust
    warp: Warp

    def scores(self, logits: mx.array, block: mx.array, before: Sequence[int]) -> mx.array:
        """(1, W, V) logits after `block` (1, W) -> (W, V) in fp32."""
        return self.warp(self.adjust(logits[0].astype(mx.float32), block, before))


def adjustment(params: SamplingParams, vocab: int) -> Adjust:
    """What `params` (see `SamplingParams.effective`) change in logits by context."""
    changes = (
        params.logit_bias,
        params.repetition_penalty != 1,
        params.presence_penalty,
        params.frequency_penalty,
    )
    return Penalties(params, vocab) if any(changes) else Unadjusted()
