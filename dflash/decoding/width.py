"""How many tokens a cycle verifies. Policies hold numbers, never tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..events import Cycle
from .costs import CostCurve


class WidthPolicy(Protocol):
    def next_width(self) -> int:
        """Tokens to verify in the next cycle, anchor included; 1 for a run of plain steps."""
        ...

    def plain_run(self) -> int:
        """Plain steps to take before asking again, when the width is 1."""
        ...

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle or plain step."""
        ...


_NO_END = 1 << 30


@dataclass(frozen=True)
class FixedWidth:
    """The same width for every cycle."""

    width: int

    def next_width(self) -> int:
        return self.width

    def plain_run(self) -> int:
        return _NO_END

    def observe(self, cycle: Cycle) -> None:
        pass


# A cycle's weight after n more cycles is _MEMORY ** n: about the last twenty count. Text changes, and a longer memory
# follows too late; with a shorter one, chance alone switches the draft off.
_MEMORY = 0.95
# What is assumed of a slot before anything was seen, as this many observations. Published drafts stand at 0.6 to 0.9.
_PRIOR, _PRIOR_WEIGHT = 0.7, 1.5
# The draft rests only when it is clearly behind: estimates are noisy, and a rest learns nothing.
_CLEARLY = 0.97
# Plain steps between two trials of a draft that does not pay, and the cycles of a trial.
_FIRST_REST, _LONGEST_REST = 8, 64
_TRIAL = 3
# Weight of the newest timing in what a cycle is thought to cost beside the measured curve.
_DRIFT = 0.1


class AdaptiveWidth:
    """The width with the best expected tokens per second, from measured costs and observed acceptance.

    A slot's acceptance is the share of cycles in which it stood, of those in which all slots before it stood: the
    expected tokens of a cycle of width w are 1 + p1 + p1 p2 + ... over w - 1 slots. Slots that were not verified
    lately are taken to be as good as the one before them, so that a good stretch of text widens the cycle by itself.
    Where plain steps are clearly better than any width, the draft rests and is tried again after growing pauses.

    Costs come from `curve`; what cycles and plain steps really take (a longer context, a busy machine) corrects it.
    """

    def __init__(self, curve: CostCurve, block: int):
        self._curve = curve
        self._block = block
        self._reached = [0.0] * block  # by slot, from 1: decayed counts of cycles that came so far
        self._stood = [0.0] * block
        self._rest = _FIRST_REST
        self._trials = _TRIAL
        self._plain_drift = self._cycle_drift = 1.0

    def next_width(self) -> int:
        rates = self.rates()
        best = max(range(2, self._block + 1), key=lambda width: rates[width - 1])
        if rates[best - 1] > _CLEARLY * rates[0]:
            self._rest = _FIRST_REST
            self._trials = 0
            return best
        if self._trials:
            self._trials -= 1
            return best
        return 1

    def plain_run(self) -> int:
        self._trials = _TRIAL
        rest, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        return rest

    def observe(self, cycle: Cycle) -> None:
        if cycle.width == 1:
            self._plain_drift = _drifted(self._plain_drift, cycle.seconds / self._curve.plain_s)
            return
        self._cycle_drift = _drifted(self._cycle_drift, cycle.seconds / self._curve.cycle_s(cycle.width))
        for slot in range(1, self._block):
            self._reached[slot] *= _MEMORY
            self._stood[slot] *= _MEMORY
        for slot in range(1, min(cycle.accepted + 1, cycle.width - 1) + 1):
            self._reached[slot] += 1
            self._stood[slot] += slot <= cycle.accepted

    def acceptance(self) -> list[float]:
        """By slot, from the first: the estimated share of cycles in which it stands when those before it stand."""
        estimates, before = [], _PRIOR
        for slot in range(1, self._block):
            known = self._reached[slot] + _PRIOR_WEIGHT
            before = (self._stood[slot] + _PRIOR_WEIGHT * before) / known
            estimates.append(before)
        return estimates

    def rates(self) -> list[float]:
        """Expected tokens per second by width, from 1."""
        rates = [1 / (self._curve.plain_s * self._plain_drift)]
        expected = alive = 1.0
        for width, acceptance in enumerate(self.acceptance(), start=2):
            alive *= acceptance
            expected += alive
            rates.append(expected / (self._curve.cycle_s(width) * self._cycle_drift))
        return rates


def _drifted(drift: float, observed: float) -> float:
    """A moving average. One outlier (a page fault, a busy second) counts for at most twice what it should be."""
    return drift + _DRIFT * (min(observed, 2 * drift) - drift)
