"""How many tokens a cycle verifies. Policies hold numbers, never tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..events import Cycle


class WidthPolicy(Protocol):
    def next_width(self) -> int:
        """Tokens to verify in the next cycle, anchor included (at least 1)."""
        ...

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        ...


@dataclass(frozen=True)
class FixedWidth:
    """The same width for every cycle."""

    width: int

    def next_width(self) -> int:
        return self.width

    def observe(self, cycle: Cycle) -> None:
        pass
