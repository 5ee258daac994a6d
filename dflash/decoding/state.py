"""Everything one request owns while it is decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..drafts.base import Drafter
from ..targets.base import TargetAdapter, TargetSession
from .acceptance import AcceptanceRule, Greedy, Place, Round
from .proposing import DraftOnly, Proposing


@dataclass
class DecodeState:
    """One request.

    Attributes:
        target: shared weights; `session` the request's caches in them.
        drafter: the request's context in the draft, or None when decoding is plain.
        prompt: ids that go through the target before the first token.
        budget: most tokens to emit.
        end_tokens: ids that end the answer (empty when they are to be ignored).
        draft_limit: positions the draft was made for.
        proposing: who proposes in which cycle.
        rule: how tokens are chosen and which proposals stand.
        tie_margin: a choice that leads the next best token by less counts as a near-tie.
        exact: leave near-ties of a block to a pass of their own, as plain decoding would run it.
        recheck: the next pass must be a plain step, because its token was such a near-tie.
        emitted: tokens of the answer so far. The last one is the anchor: emitted, not yet run.
    """

    target: TargetAdapter
    session: TargetSession
    drafter: Drafter | None
    prompt: list[int]
    budget: int
    end_tokens: frozenset[int]
    draft_limit: int = 0
    proposing: Proposing = field(default_factory=DraftOnly)
    rule: AcceptanceRule = field(default_factory=Greedy)
    tie_margin: float = 0.0
    exact: bool = False
    recheck: bool = False
    emitted: list[int] = field(default_factory=list)

    @property
    def anchor(self) -> int:
        return self.emitted[-1]

    @property
    def remaining(self) -> int:
        return self.budget - len(self.emitted)

    @property
    def reach(self) -> int:
        """Positions left to the draft."""
        return self.draft_limit - self.session.offset

    @property
    def ended(self) -> bool:
        """Whether an end token was emitted; nothing comes after it."""
        return bool(self.emitted) and self.emitted[-1] in self.end_tokens

    def open_round(self, start: int, width: int) -> Round:
        """The rule applied to a block of `width` tokens whose first one has position `start`."""
        begin, answer = max(0, start - self.rule.reach), len(self.prompt)
        before = self.prompt[begin:start] + self.emitted[max(0, begin - answer) : max(0, start - answer)]
        return self.rule.open(Place(start, width, before))

    def commit(self, tokens: list[int]) -> tuple[int, ...]:
        """Append `tokens` up to the end of the answer; returns those that were appended."""
        kept = tokens[: self.remaining]
        for index, token in enumerate(kept):
            if token in self.end_tokens:
                kept = kept[: index + 1]
                break
        self.emitted.extend(kept)
        self.proposing.extend(kept)
        return tuple(kept)
