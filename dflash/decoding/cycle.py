"""One cycle: draft, verify, accept, roll back. And one plain step, for when there is no draft."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from ..drafts.base import Proposal
from ..events import Cycle
from .acceptance import Round, accepted_prefix
from .proposing import Turn
from .state import DecodeState


@dataclass(frozen=True)
class Block:
    """What is to be verified: `tokens` (1, width), the anchor and its proposals, perhaps still being drafted."""

    turn: Turn
    tokens: mx.array
    verdict: Round
    proposal: Proposal | None
    started: float


def propose(state: DecodeState, turn: Turn) -> Block:
    """The next block. A draft pass is launched, not waited for: the host has other things to do meanwhile."""
    started = time.perf_counter()
    verdict = state.open_round(state.session.offset, turn.width)
    if turn.copied:
        tokens = mx.array([[state.anchor, *turn.copied]])
        return Block(turn, tokens, verdict, None, started)
    anchor = mx.array([[state.anchor]])
    proposal = state.drafter.propose(anchor, turn.width - 1, verdict.weigh)
    tokens = mx.concatenate([anchor, proposal.tokens], axis=1)
    mx.async_eval(tokens)
    return Block(turn, tokens, verdict, proposal, started)


def verify(state: DecodeState, block: Block) -> Cycle:
    """Run the block through the target, keep what stands. One host synchronisation.

    Afterwards the target's caches cover every emitted token but the last, and the draft's context the same
    positions.
    """
    features = state.session.forward(block.tokens)
    logits = state.target.logits(features.hidden)
    choices = block.verdict.choices(logits, block.tokens, block.proposal)

    rows = [
        block.tokens.astype(mx.int32),
        choices.tokens.astype(mx.int32),
        choices.near_ties(state.tie_margin),
    ]
    proposals, truth, ties = mx.concatenate(rows).tolist()  # the synchronisation
    accepted = accepted_prefix(proposals[1:], truth)
    ties = ties[: accepted + 1]
    state.recheck = state.exact and any(ties)
    keep = ties.index(1) if state.recheck else accepted + 1

    state.session.rollback(keep)
    copied, width = bool(block.turn.copied), block.turn.width
    if state.drafter is not None:
        state.drafter.observe(features.taps[:, :keep])
        if copied:  # no draft pass will ask for the context soon: it must not pile up unevaluated
            mx.async_eval(state.drafter.arrays())
    kept = state.commit(truth[:keep])
    seconds = time.perf_counter() - block.started
    return Cycle(kept, width - 1, accepted, width, seconds, "lookup" if copied else "dflash", sum(ties))


def plain_steps(state: DecodeState, limit: int) -> Iterator[Cycle]:
    """Token after token, up to `limit` of them, until the answer ends.

    The next step is under way while a token is handed out. The run ends early, after the step that is under way,
    where a copy promises more. A draft, where there is one, takes in what it would have to know to go on from here.
    """
    left = min(limit, state.remaining)
    state.recheck = False
    started = time.perf_counter()
    following = _step(state, mx.array([[state.anchor]]))
    while left and not state.ended:
        token = following
        left -= 1
        if left:
            following = _step(state, token)
        kept = state.commit([token.item()])
        if left and state.proposing.next_turn(1, state.remaining).copied:
            left = 1
        now = time.perf_counter()
        yield Cycle(kept, 0, 0, 1, now - started)
        started = now


def _step(state: DecodeState, token: mx.array) -> mx.array:
    """Launch the pass that turns `token` (1, 1) into the next one, and return that, unevaluated."""
    verdict = state.open_round(state.session.offset, 1)
    features = state.session.forward(token)
    following = verdict.choices(state.target.logits(features.hidden), token).tokens
    if state.drafter is not None:
        state.drafter.observe(features.taps)
    mx.async_eval(following, state.drafter.arrays() if state.drafter is not None else [])
    return following
