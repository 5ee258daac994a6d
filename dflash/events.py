"""What happens during a generation, as frozen values.

The loop yields these; text, server-sent events, JSON results and benchmarks are made from them
elsewhere. Times are seconds of wall clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config import SamplingParams

Source = Literal["dflash", "lookup"]
FinishReason = Literal["stop", "length", "stop_string", "cancelled"]


@dataclass(frozen=True, slots=True)
class Started:
    """A request is about to run, with these settings: none is left open."""

    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A chunk of the prompt went through the target."""

    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The whole prompt is in the caches and the first token is known."""

    prompt_tokens: int
    token: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cycle:
    """One verification: `width` tokens went through the target, `tokens` came out.

    `drafted` is the number of proposals, `width - 1` of them were verified; `accepted` of those were
    right. `len(tokens)` is `accepted + 1`, less what an end of the answer cut off. A plain step
    has `width` 1 and `drafted` 0. `source` is who made the proposals, if there are any. `near_ties` is the number
    of its choices that another width might have made otherwise; in exact mode `tokens` ends before the first.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    width: int
    seconds: float
    source: Source = "dflash"
    near_ties: int = 0


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the reader of the result should know: a fallback, a limit reached. Becomes a warning."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer. The pieces of a run joined are its whole text."""

    piece: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing follows."""

    reason: FinishReason


Event = Started | Prefilling | Prefilled | Cycle | Notice | Text | Finished
