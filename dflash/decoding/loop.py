"""From a prompt to the end of the answer, as events."""

from __future__ import annotations

from collections.abc import Iterator

from ..events import Cycle, Event, Finished, Notice
from .cycle import draft_and_verify, plain_steps
from .prefill import prefill
from .state import DecodeState
from .width import WidthPolicy


def decode(state: DecodeState, policy: WidthPolicy, prefill_chunk: int) -> Iterator[Event]:
    """Prefill, then cycles until an end token or the budget; the last event is `Finished`."""
    yield from prefill(state, prefill_chunk)
    yield from _speculate(state, policy)
    if not state.ended and state.remaining:
        yield from plain_steps(state, state.remaining)
    yield Finished("stop" if state.ended else "length")


def _speculate(state: DecodeState, policy: WidthPolicy) -> Iterator[Cycle | Notice]:
    """Cycles with the draft, for as long as there is one and the context is within its reach."""
    while state.drafter is not None and not state.ended and state.remaining:
        reach = state.draft_limit - state.session.offset
        if reach < 2:
            yield Notice(
                "draft_context_limit",
                f"the draft was made for {state.draft_limit} positions; from there on decoding is plain",
            )
            state.drafter = None
            return
        width = min(policy.next_width(), state.remaining, reach)
        if width > 1:
            cycles = iter([draft_and_verify(state, width)])
        else:
            cycles = plain_steps(state, min(policy.plain_run(), reach - 1))
        for cycle in cycles:
            policy.observe(cycle)
            yield cycle
