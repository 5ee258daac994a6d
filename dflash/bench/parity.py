"""Losslessness on the user's own pair: every loop, drafter, width and sampler against plain decoding.

A *cell* decodes one prompt in one way. Its tokens are compared with plain decoding: mlx-lm's greedy decoding where
that exists, our own plain loop for drawn and penalised text. A first difference is judged by how clear the choice was:
where the two best scores lie closer than what the width of a pass changes in this target's logits (`tie_margin`), both
are right, and the cell *differs at a near-tie*; else something is *broken*.

A matrix in which everything is fine proves something only if it would have noticed. So every run ends with a control:
the same comparison over a session whose rollback keeps one row too many. If that is not found broken, the run says
that it proves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import generate_step

from ..config import DFlashConfig, SamplingParams
from ..decoding.acceptance import AcceptanceRule, Place, rule_for
from ..decoding.loop import decode
from ..decoding.proposing import CPU_COSTS, WithLookup
from ..decoding.state import DecodeState
from ..decoding.width import AdaptiveWidth, FixedWidth, WidthPolicy
from ..drafts.base import Draft
from ..drafts.lookup import Lookup
from ..events import Cycle
from ..runtime import DFlashRuntime
from ..targets.base import Features, TargetSession
from .numbers import share
from .replay import ReplayDraft, Script

Verdict = Literal["identical", "near_tie", "broken"]

# Widths beside the draft's own block and the adaptive one; every accepted length of the smaller ones occurs.
WIDTHS = (2, 4, 7)
SAMPLERS = {
    "greedy": SamplingParams(temperature=0.0, seed=0),
    "penalised": SamplingParams(temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.1, seed=0),
    "drawn": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
}
# Accepted lengths of scripted drafts, cycle by cycle, the target's own token included. None: as many as fit.
_PATTERNS = {"always right": None, "always wrong": (1,), "right for k": (1, 2, 3, 4, 5, 6, 7, 8)}


@dataclass(frozen=True)
class Cell:
    """One way to decode: who proposes, how wide, which sampler."""

    drafter: str
    width: int | Literal["adaptive"]
    sampler: str


@dataclass(frozen=True)
class Found:
    """What a cell gave on all prompts.

    Attributes:
        equal_tokens: up to the first difference of each prompt; `tokens` would be all.
        prompt, position, expected, got, margin: of the first difference; None without one.
        accepted_lengths: how many tokens cycles gave, by number, so that one sees what was exercised.
    """

    cell: Cell
    verdict: Verdict
    tokens: int
    equal_tokens: int
    accepted_lengths: dict[int, int]
    prompt: int | None = None
    position: int | None = None
    expected: int | None = None
    got: int | None = None
    margin: float | None = None

    def as_json(self) -> dict[str, Any]:
        counts = {str(length): count for length, count in sorted(self.accepted_lengths.items())}
        return (
            asdict(self.cell)
            | {k: v for k, v in asdict(self).items() if k != "cell"}
            | {"accepted_lengths": counts}
        )


class Parity:
    """The matrix over one loaded pair.

    Args:
        prompts: ids of each prompt.
        max_tokens: of every answer; end tokens are ignored, so that all cells have as many.
    """

    def __init__(self, runtime: DFlashRuntime, prompts: Sequence[Sequence[int]], max_tokens: int):
        self._target = runtime.target
        self._adapter = runtime.target.adapter
        self._draft = runtime.draft
        self._chunk = runtime.config.prefill_chunk
        self._measured = runtime.measured
        self._prompts = [list(prompt) for prompt in prompts]
        self._max_tokens = max_tokens
        self._references: dict[tuple[str, int], list[int]] = {}
        self.tie_margin = runtime.measured.tie_margin

    def cells(self) -> Iterator[Cell]:
        """Every cell of the matrix that this pair can run."""
        limit = self._adapter.max_block
        block = self._draft.block_size if self._draft else 16
        widths = [w for w in sorted({*WIDTHS, block}) if limit is None or w <= limit]
        for sampler in SAMPLERS:
            yield Cell("none", 1, sampler)
            if limit == 1:
                continue
            for drafter, width in itertools.product(_PATTERNS, widths):
                yield Cell(drafter, width, sampler)
            yield Cell("lookup", "adaptive", sampler)
            if self._draft is not None:
                for width in (*(w for w in widths if w <= block), "adaptive"):
                    yield Cell("own", width, sampler)
                yield Cell("own and lookup", "adaptive", sampler)

    def run(self, cell: Cell, *, broken: bool = False) -> Found:
        """Decode all prompts as `cell` says, up to the first difference; `broken` spoils every rollback."""
        tokens = equal = 0
        lengths: dict[int, int] = {}
        for index, prompt in enumerate(self._prompts):
            expected = self._reference(cell.sampler, index)
            got, cycles = self._decoded(cell, prompt, expected, broken)
            for cycle in cycles:
                lengths[len(cycle.tokens)] = lengths.get(len(cycle.tokens), 0) + 1
            tokens += len(expected)
            at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
            if at is None and len(got) == len(expected):
                equal += len(expected)
                continue
            at = min(len(got), len(expected)) if at is None else at
            margin = self._margin(cell.sampler, [*prompt, *expected[:at]], len(prompt))
            near = len(got) == len(expected) and margin < self.tie_margin
            pair = (expected[at] if at < len(expected) else None, got[at] if at < len(got) else None)
            where = {"prompt": index, "position": at, "expected": pair[0], "got": pair[1], "margin": margin}
            return Found(cell, "near_tie" if near else "broken", tokens, equal + at, lengths, **where)
        return Found(cell, "identical", tokens, equal, lengths)

    def control(self) -> Found:
        """A cell whose rollbacks keep one row too many: must be found broken."""
        return self.run(Cell("right for k", 4, "greedy"), broken=True)

    def _reference(self, sampler: str, index: int) -> list[int]:
        """What plain decoding answers to a prompt."""
        key = (sampler, index)
        if key not in self._references:
            prompt = self._prompts[index]
            if sampler == "greedy":
                steps = generate_step(mx.array(prompt), self._target.model, max_tokens=self._max_tokens)
                self._references[key] = [int(token) for token, _ in steps]
            else:
                state = self._state(sampler, prompt, self._adapter.start(), None)
                list(decode(state, FixedWidth(1), self._chunk))
                self._references[key] = state.emitted
        return self._references[key]

    def _decoded(
        self, cell: Cell, prompt: list[int], expected: list[int], broken: bool
    ) -> tuple[list[int], list[Cycle]]:
        draft = self._proposer(cell, prompt, expected)
        session = self._adapter.start(draft.taps if draft else ())
        session = KeepsOneTooMany(session) if broken else session
        state = self._state(cell.sampler, prompt, session, draft)
        if "lookup" in cell.drafter:
            state.proposing = WithLookup(Lookup(prompt), CPU_COSTS, min(32, self._adapter.max_block or 32))
        events = decode(state, self._policy(cell), self._chunk)
        return state.emitted, [event for event in events if isinstance(event, Cycle)]

    def _proposer(self, cell: Cell, prompt: list[int], expected: list[int]) -> Draft | None:
        if cell.drafter in ("none", "lookup"):
            return None
        if cell.drafter.startswith("own"):
            return self._draft
        pattern = _PATTERNS[cell.drafter] or (cell.width,)
        return ReplayDraft(Script(expected, len(prompt)), pattern, cell.width)

    def _policy(self, cell: Cell) -> WidthPolicy:
        if cell.width == "adaptive" and self._draft is not None and cell.drafter != "lookup":
            return AdaptiveWidth(self._measured.curve, self._draft.block_size)
        return FixedWidth(1 if cell.width == "adaptive" else cell.width)

    def _state(
        self, sampler: str, prompt: list[int], session: TargetSession, draft: Draft | None
    ) -> DecodeState:
        return DecodeState(
            target=self._adapter,
            session=session,
            drafter=draft.start(self._adapter) if draft else None,
            prompt=prompt,
            budget=self._max_tokens,
            end_tokens=frozenset(),
            draft_limit=draft.max_context if draft else 0,
            rule=self._rule(sampler),
        )

    def _rule(self, sampler: str) -> AcceptanceRule:
        config = DFlashConfig()
        return rule_for(
            SAMPLERS[sampler].effective(), self._adapter.vocab_size, config.acceptance, config.proposals
        )

    def _margin(self, sampler: str, ids: list[int], prompt_tokens: int) -> float:
        """By how much the best score led after `ids`, in a pass of width 1."""
        session, rule = self._adapter.start(), self._rule(sampler)
        if len(ids) > prompt_tokens:
            session.forward(mx.array([ids[:prompt_tokens]]))
            for token in ids[prompt_tokens:-1]:
                mx.eval(session.forward(mx.array([[token]])).hidden)
            hidden = session.forward(mx.array([ids[-1:]])).hidden
        else:
            hidden = session.forward(mx.array([ids])).hidden[:, -1:]
        start = len(ids) - 1
        verdict = rule.open(Place(start, 1, ids[max(0, start - rule.reach) : start]))
        return verdict.choices(self._adapter.logits(hidden), mx.array([ids[-1:]])).margins.item()


class KeepsOneTooMany:
    """A session whose rollback is wrong by one row: what the control must find."""

    def __init__(self, session: TargetSession):
        self._session = session
        self._rows = 0

    @property
    def offset(self) -> int:
        return self._session.offset

    def forward(self, tokens: mx.array) -> Features:
        self._rows = tokens.shape[1]
        return self._session.forward(tokens)

    def rollback(self, keep: int) -> None:
        self._session.rollback(min(keep + 1, self._rows))

    def arrays(self) -> list[mx.array]:
        return self._session.arrays()


def overall(found: Sequence[Found], control: Found) -> str:
    """The word for a whole run: the worst of its cells, or that it proves nothing."""
    if control.verdict != "broken":
        return "proves_nothing"
    verdicts = {one.verdict for one in found}
    return next((word for word in ("broken", "near_tie") if word in verdicts), "identical")


def result(parity: Parity, found: Sequence[Found], control: Found, facts: dict[str, Any]) -> dict[str, Any]:
    """The `result` of `dflash.parity/1`."""
    tokens = sum(one.tokens for one in found)
    return {
        **facts,
        "verdict": overall(found, control),
        "tie_margin": parity.tie_margin,
        "tokens": tokens,
        "equal_share": share(sum(one.equal_tokens for one in found), tokens),
        "cells": [one.as_json() for one in found],
        "control": {"detected": control.verdict == "broken", **control.as_json()},
    }
