"""The result of a generation: a fold over its events. Streamed and whole answers share this one path."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from .config import Mode, SamplingParams
from .events import Cycle, Event, Finished, FinishReason, Notice, Prefilled, Source, Started, Text


@dataclass(frozen=True)
class Proposals:
    """What one source proposed: tokens, in `cycles` cycles, and how many of them are part of the answer."""

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0

    def plus(self, cycle: Cycle) -> Proposals:
        stood = min(cycle.accepted, len(cycle.tokens))
        return Proposals(self.cycles + 1, self.drafted + cycle.drafted, self.accepted + stood)


@dataclass(frozen=True)
class GenerationResult:
    """What was generated, and what it took.

    Attributes:
        text: the answer, without its end token or stop text.
        tokens: ids of the answer, the end token included.
        finish_reason: "stop" (end token), "length", "stop_string" or "cancelled".
        mode: what ran: "dflash" if any cycle drafted, "lookup" if proposals were only copied, else "baseline".
        prompt_tokens: ids that went through the target before the first token.
        prefill_seconds, decode_seconds: until the first token, and from it to the last.
        cycles: verification passes after the first token (plain steps included).
        drafted_tokens: proposals verified.
        accepted_tokens: proposals that are part of the answer.
        proposals: of those two, what each source made and what of it stood.
        params: the settings that the request ran with, none of them left open.
        near_ties: choices of the answer that another width might have made otherwise.
        width_histogram: passes by the number of tokens they verified.
        notices: what the reader should know, as (code, message).
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    mode: Mode
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cycles: int
    drafted_tokens: int
    accepted_tokens: int
    near_ties: int
    width_histogram: dict[int, int]
    params: SamplingParams
    notices: tuple[Notice, ...] = ()
    proposals: dict[Source, Proposals] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first, over the time after the first."""
        return _ratio(max(len(self.tokens) - 1, 0), self.decode_seconds)

    @property
    def prompt_tokens_per_second(self) -> float:
        return _ratio(self.prompt_tokens, self.prefill_seconds)

    @property
    def acceptance_rate(self) -> float:
        """Emitted tokens that were drafted, over emitted tokens (0 to 1)."""
        return _ratio(self.accepted_tokens, len(self.tokens))

    @property
    def accepted_length(self) -> float:
        """Tokens emitted per pass, the target's own included (1 without a draft)."""
        return _ratio(max(len(self.tokens) - 1, 0), self.cycles)


# Published pairs accept 1 to 6 proposals a cycle, even on text they are bad at; a draft with wrong taps, mask or
# weights accepts next to none. Fewer cycles than these say little.
_ENOUGH_CYCLES = 24
_POOR_ACCEPTANCE = 0.2


@dataclass
class ResultFold:
    """Takes events as they come; `result` can be asked for at any time, also after an interruption."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    widths: Counter[int] = field(default_factory=Counter)
    notices: list[Notice] = field(default_factory=list)
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    near_ties: int = 0
    proposals: dict[Source, Proposals] = field(default_factory=dict)
    finish_reason: FinishReason = "cancelled"
    params: SamplingParams = field(default_factory=SamplingParams)
    _first_at: float | None = None
    _last_at: float = 0.0

    def push(self, event: Event) -> None:
        match event:
            case Started(params):
                self.params = params
            case Text(piece):
                self.text.append(piece)
            case Prefilled(prompt_tokens, token, seconds):
                self.prompt_tokens, self.prefill_seconds = prompt_tokens, seconds
                self.tokens.append(token)
                self._first_at = self._last_at = time.perf_counter()
            case Cycle(tokens, drafted, _, width, _, source):
                self.tokens.extend(tokens)
                self.widths[width] += 1
                self.near_ties += event.near_ties
                if drafted:
                    self.proposals[source] = self.proposals.get(source, Proposals()).plus(event)
                self._last_at = time.perf_counter()
            case Notice():
                self.notices.append(event)
            case Finished(reason):
                self.finish_reason = reason

    def remarks(self) -> Iterator[Notice]:
        """What the events together say, and no single one of them."""
        if low := self.low_acceptance():
            yield low
        elif "dflash" in self.proposals and not any(
            notice.code == "draft_context_limit" for notice in self.notices
        ):
            passes = sum(self.widths.values())
            if passes >= _ENOUGH_CYCLES and self.widths[1] > passes / 2:
                yield Notice(
                    "draft_rested",
                    f"on this text the draft did not pay for its time: {self.widths[1]} of {passes} passes were "
                    "plain steps",
                )

    def low_acceptance(self) -> Notice | None:
        """A remark when the draft hardly ever helped: a wrong draft loads, runs and answers like a right one."""
        draft = self.proposals.get("dflash", Proposals())
        if draft.cycles < _ENOUGH_CYCLES or draft.accepted >= _POOR_ACCEPTANCE * draft.cycles:
            return None
        return Notice(
            "low_acceptance",
            f"of {draft.drafted} proposed tokens {draft.accepted} were right; the draft may belong to another "
            "version of this target, or not suit this text",
        )

    def result(self) -> GenerationResult:
        """Everything so far. Without a `Finished` event the finish reason is "cancelled"."""
        return GenerationResult(
            text="".join(self.text),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            mode=next((source for source in ("dflash", "lookup") if source in self.proposals), "baseline"),
            prompt_tokens=self.prompt_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=0.0 if self._first_at is None else self._last_at - self._first_at,
            cycles=sum(self.widths.values()),
            drafted_tokens=sum(made.drafted for made in self.proposals.values()),
            accepted_tokens=sum(made.accepted for made in self.proposals.values()),
            near_ties=self.near_ties,
            width_histogram=dict(sorted(self.widths.items())),
            params=self.params,
            notices=(*self.notices, *self.remarks()),
            proposals=dict(self.proposals),
        )


def _ratio(count: float, total: float) -> float:
    return count / total if total else 0.0
