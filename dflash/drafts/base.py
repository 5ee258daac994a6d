"""What the decoding loop needs of a draft.

A `Draft` is loaded weights (shared between requests). `start` opens a `Drafter`, one request's context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

# (n, ..., C) scores of n slots' candidates, and the candidates' ids (n, C), None for the whole vocabulary
# -> scores of that shape, of which a drafter takes the largest. Adding noise there makes the choice a draw.
Weigh = Callable[[mx.array, mx.array | None], mx.array]


def as_scored(scores: mx.array, ids: mx.array | None = None) -> mx.array:
    """The `Weigh` that changes nothing: a drafter then proposes what it finds likeliest."""
    return scores


@dataclass(frozen=True)
class Proposal:
    """Tokens to follow the anchor, and what they were chosen from.

    Attributes:
        tokens: (1, n) ids.
        scores: weighed scores (n, C) whose argmax each token is; None for a drafter that does not weigh.
        ids: the ids (n, C) that were scored, None for the whole vocabulary.
    """

    tokens: mx.array
    scores: mx.array | None = None
    ids: mx.array | None = None


class SharedTables(Protocol):
    """What a draft borrows from its target instead of storing it: both token tables."""

    def embed(self, tokens: mx.array) -> mx.array:
        """(1, n) ids -> (1, n, D), with the target's own embedding scale."""
        ...

    def project(self, hidden: mx.array) -> mx.array:
        """(1, n, D) -> (1, n, V), the bare output projection."""
        ...


class Drafter(Protocol):
    """Proposes what comes after the anchor."""

    def propose(self, anchor: mx.array, count: int, weigh: Weigh = as_scored) -> Proposal:
        """`count` tokens to follow `anchor` (1, 1). The committed context stays as it was."""
        ...

    def observe(self, taps: mx.array) -> None:
        """Take the tapped states (1, n, T * D) of the next n committed positions into the context."""
        ...

    def arrays(self) -> list[mx.array]:
        """The context's arrays, to evaluate after a prefill chunk."""
        ...


class Draft(Protocol):
    """A loaded draft.

    Attributes:
        taps: target layers (0-based) whose outputs it wants, in its order.
        block_size: tokens of a block it was trained for, anchor included.
        max_context: positions it was made for.
    """

    taps: tuple[int, ...]
    block_size: int
    max_context: int

    def start(self, tables: SharedTables) -> Drafter: ...
