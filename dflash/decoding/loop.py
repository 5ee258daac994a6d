"""From a prompt to the end of the answer, as events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
    """Cycles with proposals, for as long as there is someone to make them."""
    while not state.ended and state.remaining:
        reach = state.draft_limit - state.session.offset
        if state.drafter is not None and reach < 2:
            yield Notice(
                "draft_context_limit",
                f"the draft was made for {state.draft_limit} positions; from there on decoding went without it",
            )
            state.drafter = None
        if state.drafter is None and not state.proposing.copies:
            return
        for cycle in _next_cycles(state, policy, reach):
            state.proposing.observe(cycle)
            if cycle.source == "dflash":
                policy.observe(cycle)
            yield cycle


def _next_cycles(state: DecodeState, policy: WidthPolicy, reach: int) -> Iterable[Cycle]:
    """One verified block, or a run of plain steps."""
    if state.recheck:
        return plain_steps(state, 1)
    drafted = 1 if state.drafter is None else min(policy.next_width(), state.remaining, reach)
    turn = state.proposing.next_turn(drafted, state.remaining)
    if turn.width > 1:
        return [draft_and_verify(state, turn)]
    return plain_steps(state, _plain_run(state, policy, reach))


def _plain_run(state: DecodeState, policy: WidthPolicy, reach: int) -> int:
    """Plain steps to take before the draft is asked again; without one, all there are."""
    return state.remaining if state.drafter is None else min(policy.plain_run(), reach - 1)
