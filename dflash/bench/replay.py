"""Replay: the target's own tokens come as proposals, as many of them right as a pattern says. Never a speed of answers.

A draft's quality is taken out of the measurement: what is left is what the engine costs, on a target of any size, with
random weights too. First the target decodes plainly; that answer is the script. Then the same answer is decoded again
with a drafter that knows the script (`ReplayDraft`), and a rule that follows it (`ReplayRule`): in low precision a wide
pass may choose otherwise than a narrow one, and after one such token the script would no longer fit. The rule counts
how often the target would have chosen the script's token (`agreement`); all work of a real cycle is done.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..config import DEFAULT_PREFILL_CHUNK
from ..decoding.acceptance import Choices, Place, best
from ..decoding.costs import tie_margin
from ..decoding.loop import decode
from ..decoding.state import DecodeState
from ..decoding.width import FixedWidth
from ..drafts.base import Draft, Drafter, Proposal, SharedTables, Weigh, as_scored
from ..errors import BadValue
from ..targets.base import TargetAdapter, TargetSession
from .numbers import share
from .race import Task, Timed, collect

_LONGEST = 64  # wider than any block in use


def parse(pattern: str, width: int) -> tuple[int, ...]:
    """Accepted lengths, cycle by cycle and then again from the first: "6" or "8,2,5". Raises `BadValue`."""
    words = pattern.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() for word in words):
        raise BadValue(f"--replay takes accepted lengths, as 6 or 8,2,5, not {pattern!r}")
    lengths = tuple(int(word) for word in words)
    if not all(1 <= length <= width for length in lengths):
        raise BadValue(
            f"--replay {pattern}: a cycle of width {width} accepts 1 to {width} tokens",
            f"widen the block: --block-size {min(max(*lengths, 2), _LONGEST)}",
        )
    return lengths


@dataclass
class Script:
    """The answer to replay.

    Attributes:
        tokens: ids after a prompt of `prompt_tokens`.
        seen: what the target itself would have chosen, per pass: position of its first token, and ids (1, W).
    """

    tokens: Sequence[int]
    prompt_tokens: int
    seen: list[tuple[int, mx.array]] = field(default_factory=list)

    def after(self, position: int, count: int) -> list[int]:
        """The `count` tokens that follow `position`; beyond the end, the last one again."""
        begin = position + 1 - self.prompt_tokens
        found = list(self.tokens[begin : begin + count])
        return found + [self.tokens[-1]] * (count - len(found))

    def agreement(self) -> float:
        """The share of the answer's tokens that the target itself chose when they were replayed."""
        ends = [start for start, _ in self.seen[1:]] + [self.prompt_tokens - 1 + len(self.tokens)]
        equal = 0
        for (start, own), end in zip(self.seen, ends, strict=True):
            count = min(end - start, own.shape[1])
            equal += sum(a == b for a, b in zip(own[0].tolist(), self.after(start, count), strict=False))
        return share(equal, len(self.tokens))


class ReplayRule:
    """An acceptance rule that has the script stand, and waits for the target's choice all the same."""

    reach = 0

    def __init__(self, script: Script):
        self._script = script

    def open(self, place: Place) -> _ReplayRound:
        return _ReplayRound(self._script, place)


@dataclass(frozen=True)
class _ReplayRound:
    script: Script
    place: Place
    weigh = staticmethod(as_scored)

    def choices(self, logits: mx.array, block: mx.array, proposal: Proposal | None = None) -> Choices:
        own = best(logits)
        tokens = own.tokens.astype(mx.int32)  # (1, W)
        self.script.seen.append((self.place.start, tokens))
        told = mx.array([self.script.after(self.place.start, self.place.width)])
        # The minimum adds nothing, but cannot be known before the pass is done.
        return Choices(told + mx.minimum(tokens, 0), own.margins)


class ReplayDraft:
    """A `Draft` that proposes from a script.

    Args:
        pattern: accepted lengths, cycle by cycle, the target's own token included.
        block_size: most tokens of a cycle.
        inner: a real draft whose passes are made and paid for, and whose tokens are put aside.
        draft_s: without one, how long a proposal takes: the host waits so long.
    """

    def __init__(
        self,
        script: Script,
        pattern: Sequence[int],
        block_size: int,
        inner: Draft | None = None,
        draft_s: float = 0.0,
    ):
        self.taps = inner.taps if inner is not None else (0,)  # the loop counts positions by them
        self.block_size = block_size
        self.max_context = inner.max_context if inner is not None else 1 << 30
        self._make = (script, pattern, inner, draft_s)

    def start(self, tables: SharedTables) -> ReplayDrafter:
        script, pattern, inner, draft_s = self._make
        return ReplayDrafter(script, itertools.cycle(pattern), inner and inner.start(tables), draft_s)


class ReplayDrafter:
    """One replay (see `drafts.base.Drafter`)."""

    def __init__(self, script: Script, lengths: Iterator[int], inner: Drafter | None, draft_s: float):
        self._script = script
        self._lengths = lengths
        self._inner = inner
        self._draft_s = draft_s
        self._anchor = 0  # its position: as many as were committed

    def propose(self, anchor: mx.array, count: int, weigh: Weigh = as_scored) -> Proposal:
        right = min(next(self._lengths) - 1, count)
        told = self._script.after(self._anchor, count)
        wrong = [token - 1 if token else 1 for token in told]
        tokens = mx.array([told[:right] + wrong[right:]])
        if self._inner is not None:
            made = self._inner.propose(anchor, count, weigh).tokens.astype(mx.int32)
            tokens = tokens + mx.minimum(made, 0)  # nothing, but known only when the draft's pass is done
        elif self._draft_s:
            time.sleep(self._draft_s)
        return Proposal(tokens)

    def observe(self, taps: mx.array) -> None:
        self._anchor += taps.shape[1]
        if self._inner is not None:
            self._inner.observe(taps)

    def arrays(self) -> list[mx.array]:
        return self._inner.arrays() if self._inner is not None else []


class Replay:
    """The contender: the same answer as `plain` gives, decoded again with replayed proposals.

    Args:
        draft: whose passes are paid for; None: a proposal takes `draft_s` seconds.
        pattern: accepted lengths; `width` tokens are verified in every cycle.
    """

    def __init__(
        self,
        target: TargetAdapter,
        draft: Draft | None,
        pattern: Sequence[int],
        width: int,
        draft_s: float = 0.0,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
    ):
        self._target = target
        self._draft = (pattern, width, draft, draft_s)
        self._width = width
        self._chunk = prefill_chunk
        self.tie_margin = tie_margin(target)  # ties are counted, as in any answer
        self._answers: dict[tuple[str, int], Timed] = {}
        self.agreements: list[float] = []

    def forget(self) -> None:
        """Leave what came so far, a warm-up, out of the figures."""
        self._answers.clear()
        self.agreements.clear()

    def plain(self, task: Task) -> Timed:
        """The answer by plain decoding of this engine; decoded once."""
        key = (task.id, task.length)
        if key not in self._answers:
            state = self._state(task, self._target.start(), None)
            self._answers[key] = collect(decode(state, FixedWidth(1), self._chunk))
        return self._answers[key]

    def __call__(self, task: Task) -> Timed:
        script = Script(self.plain(task).tokens, len(task.ids))
        draft = ReplayDraft(script, *self._draft)
        state = self._state(task, self._target.start(draft.taps), draft.start(self._target))
        state.draft_limit, state.rule = draft.max_context, ReplayRule(script)
        timed = collect(decode(state, FixedWidth(self._width), self._chunk))
        self.agreements.append(script.agreement())
        return timed

    def _state(self, task: Task, session: TargetSession, drafter: Drafter | None) -> DecodeState:
        return DecodeState(
            target=self._target,
            session=session,
            drafter=drafter,
            prompt=task.ids,
            budget=task.length,
            tie_margin=self.tie_margin if drafter is not None else 0.0,
            end_tokens=frozenset(),  # a replay is no answer: it has the length that was asked for
        )
