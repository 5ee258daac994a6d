"""What the decoding loop needs of a target, and nothing about how a family provides it.

A `TargetAdapter` is a loaded model (shared, without request state). `start` opens a `TargetSession`, which
owns one request's caches. The loop says `forward` and `rollback`; it never asks what kind of cache there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx


@dataclass(frozen=True)
class Features:
    """What a forward pass leaves behind.

    Attributes:
        hidden: (1, n, D), after the final norm: the head's input.
        taps: (1, n, T * D), the outputs of the tapped layers side by side, or None without taps.
    """

    hidden: mx.array
    taps: mx.array | None


class TargetSession(Protocol):
    """One request's caches in the target."""

    @property
    def offset(self) -> int:
        """Positions in the caches; the position of the next token."""
        ...

    def forward(self, tokens: mx.array) -> Features:
        """Run `tokens` (1, n) at positions offset .. offset + n - 1 and append them to the caches."""
        ...

    def rollback(self, keep: int) -> None:
        """Forget all but the first `keep` rows of the last `forward` (0 <= keep <= its length)."""
        ...

    def arrays(self) -> list[mx.array]:
        """The cache arrays, to evaluate after a prefill chunk."""
        ...


class TargetAdapter(Protocol):
    """A loaded target.

    Attributes:
        kind: "attention", ... as `resolve_draft` reports it.
        hidden_size, num_layers, vocab_size: geometry a draft must match.
        max_context: positions the model was made for, or None when its config does not say.
        max_block: most tokens of a pass that can be rolled back in part (1: none can); None sets no limit.
    """

    kind: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_context: int | None
    max_block: int | None

    def start(self, taps: tuple[int, ...] = ()) -> TargetSession:
        """Open a session whose features carry the outputs of the layers `taps` (0-based)."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Token embeddings (1, n, D) as a draft shares them: the table's rows with the model's scale."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """The target's logits (1, n, V) from `Features.hidden`."""
        ...

    def project(self, hidden: mx.array) -> mx.array:
        """The bare output projection (1, n, V): what a draft shares. No soft cap, no scale."""
        ...
