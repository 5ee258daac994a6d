"""Who proposes in the next cycle, and how much: the draft, or a copy of earlier text. Numbers, never tensors.

A copy costs no draft pass and may be longer than the draft's block, but stands only where the text repeats itself.
Each cycle goes to whoever promises more tokens for its time: expected tokens from the acceptance seen so far, of the
draft and of copies by the length of their match, over the cost of verifying that many. Copies are judged in every
cycle, verified or not: what the text became tells whether they would have stood.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ..drafts.lookup import Lookup
from ..events import Cycle
from .costs import CostCurve

# The anchor and as many copied tokens as a gated-delta tape holds beside it.
LOOKUP_WIDTH = 32
_COUNTS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 19, 23, 27, 31)  # copied tokens to choose between
_FORGET = 0.9  # of what was seen, kept at each new observation: about the last ten count


@dataclass(frozen=True)
class Turn:
    """The next cycle: `width` tokens, of which `copied` follow the anchor; without any, the draft's proposals."""

    width: int
    copied: tuple[int, ...] = ()


@dataclass(frozen=True)
class Costs:
    """Times of a cycle's parts, in any unit.

    Attributes:
        verify: (width, cost) by rising width, from 1, at least two; linear in between and, rising, beyond.
        draft: of a draft pass.
    """

    verify: tuple[tuple[int, float], ...]
    draft: float

    @classmethod
    def measured(cls, curve: CostCurve) -> Costs:
        """Of this pair on this machine. A draft pass hardly depends on how many proposals are asked for."""
        draft = [seconds for _, seconds in curve.draft_s]
        return cls(curve.verify_s, statistics.fmean(draft) if draft else 0.0)

    def of(self, width: int, *, drafted: bool = False) -> float:
        """Of a cycle that verifies `width` tokens."""
        points = self.verify
        upper = min(max(bisect_left(points, (width, 0.0)), 1), len(points) - 1)
        (w0, c0), (w1, c1) = points[upper - 1], points[upper]
        slope = (c1 - c0) / (w1 - w0)
        if width > w1:
            slope = max(slope, 0.0)
        verify = c1 + slope * (width - w1)
        return verify + (self.draft if drafted else 0.0)


# Measured with SmolLM2-135M on two cores (fp32), and with an 8B target in bf16 on a data-centre GPU.
CPU_COSTS = Costs(((1, 1.0), (2, 1.2), (4, 1.33), (8, 1.47), (16, 1.88), (32, 2.9)), draft=0.45)
GPU_COSTS = Costs(((1, 1.0), (4, 1.15), (16, 1.8), (32, 2.4)), draft=0.3)


@dataclass
class Acceptance:
    """The chance that a proposed token stands when those before it do, from what was seen lately.

    Attributes:
        prior: what is believed before anything was seen; `weight` counts it as so many tokens.
    """

    prior: float
    weight: float = 2.0
    stood: float = 0.0
    fell: float = 0.0

    @property
    def rate(self) -> float:
        return (self.stood + self.weight * self.prior) / (self.stood + self.fell + self.weight)

    def observe(self, stood: int, fell: bool) -> None:
        """`stood` proposals stood, and then one fell, or none was left to be judged."""
        self.stood = self.stood * _FORGET + stood
        self.fell = self.fell * _FORGET + fell

    def tokens(self, count: int) -> float:
        """Expected tokens of a cycle with `count` proposals, the target's own included (1 to count + 1)."""
        return (1.0 - self.rate ** (count + 1)) / (1.0 - self.rate)


class Proposing(Protocol):
    """Decides who proposes, of one request."""

    @property
    def copies(self) -> bool:
        """Whether it may propose without a draft."""
        ...

    def next_turn(self, drafted: int, most: int) -> Turn:
        """The next cycle: as wide as `drafted` if the draft proposes (1: it does not), at most `most` wide."""
        ...

    def extend(self, tokens: Iterable[int]) -> None:
        """The answer goes on with `tokens`."""
        ...

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        ...


@dataclass(frozen=True)
class DraftOnly:
    """The draft always proposes."""

    copies = False

    def next_turn(self, drafted: int, most: int) -> Turn:
        return Turn(drafted)

    def extend(self, tokens: Iterable[int]) -> None:
        pass

    def observe(self, cycle: Cycle) -> None:
        pass


# Longest match of each class of copies, with the acceptance believed at first. 0 and 1 are copies that departed
# from their source a moment ago (see `Lookup`).
_CLASSES = ((0, 0.2), (1, 0.3), (2, 0.2), (4, 0.4), (8, 0.65), (16, 0.8), (1 << 30, 0.9))


@dataclass
class WithLookup:
    """Draft or copy, whichever promises more tokens for its time. Whether to draft at all is the width's affair.

    Attributes:
        lookup: over the prompt, and then the answer.
        costs: of this target and draft on this machine.
        widest: most tokens of a cycle with a copy, anchor included.
    """

    lookup: Lookup
    costs: Costs
    widest: int = LOOKUP_WIDTH
    copies = True
    _drafted: Acceptance = field(default_factory=lambda: Acceptance(0.6, weight=6.0))
    _copied: list[Acceptance] = field(default_factory=lambda: [Acceptance(prior) for _, prior in _CLASSES])

    def next_turn(self, drafted: int, most: int) -> Turn:
        best, promise = Turn(drafted), self._promise(self._drafted, drafted, drafted=drafted > 1)
        if (seen := self._class()) is None:
            return best
        for count in _COUNTS:
            if count >= min(most, self.widest):
                break
            if (offered := self._promise(seen, count + 1)) > promise:
                best, promise = Turn(count + 1, self.lookup.continuation(count)), offered
        return best

    def extend(self, tokens: Iterable[int]) -> None:
        tokens = tuple(tokens)
        if seen := self._class():
            guess = self.lookup.continuation(min(len(tokens), self.widest - 1))
            stood = next(
                (i for i, (a, b) in enumerate(zip(guess, tokens, strict=False)) if a != b), len(guess)
            )
            seen.observe(stood, stood < len(guess))
        self.lookup.extend(tokens)

    def observe(self, cycle: Cycle) -> None:
        if cycle.source == "dflash" and cycle.drafted:
            self._drafted.observe(cycle.accepted, cycle.accepted < cycle.drafted)

    def _promise(self, seen: Acceptance, width: int, *, drafted: bool = False) -> float:
        """Expected tokens per time of a cycle `width` wide."""
        return seen.tokens(width - 1) / self.costs.of(width, drafted=drafted)

    def _class(self) -> Acceptance | None:
        """What was seen of copies with a match like the present one."""
        length = self.lookup.length
        if length is None:
            return None
        return next(
            seen for seen, (longest, _) in zip(self._copied, _CLASSES, strict=True) if length <= longest
        )
