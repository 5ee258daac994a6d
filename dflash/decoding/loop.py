"""From a prompt to the end of the answer, as events."""

from __future__ import annotations

from collections.abc import Iterator

from ..events import Cycle, Event, Finished, Notice
from .cycle import Block, plain_steps, propose, verify
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
    block = None
    while not state.ended and state.remaining:
        if state.drafter is not None and state.reach < 2:
            yield Notice(
                "draft_context_limit",
                f"the draft was made for {state.draft_limit} positions; from there on decoding went without it",
            )
            state.drafter = None
        if state.drafter is None and not state.proposing.copies:
            return
        block = block or _next_block(state, policy)
        if block is None:
            for cycle in plain_steps(state, _plain_run(state, policy)):
                _observe(cycle, state, policy)
                yield cycle
            continue
        cycle = verify(state, block)
        _observe(cycle, state, policy)
        block = _next_block(state, policy)  # its draft runs while whoever takes the cycle makes text of it
        yield cycle


def _next_block(state: DecodeState, policy: WidthPolicy) -> Block | None:
    """What to verify next; None where plain steps come next, or nothing does."""
    if state.ended or not state.remaining or state.recheck:
        return None
    drafted = 1
    if state.drafter is not None:
        if state.reach < 2:
            return None
        drafted = min(policy.next_width(), state.remaining, state.reach)
    turn = state.proposing.next_turn(drafted, state.remaining)
    return propose(state, turn) if turn.width > 1 else None


def _plain_run(state: DecodeState, policy: WidthPolicy) -> int:
    """Plain steps to take before the draft is asked again; without one, all there are."""
    if state.recheck:
        return 1
    return state.remaining if state.drafter is None else min(policy.plain_run(), state.reach - 1)


def _observe(cycle: Cycle, state: DecodeState, policy: WidthPolicy) -> None:
    state.proposing.observe(cycle)
    if cycle.source == "dflash":
        policy.observe(cycle)
