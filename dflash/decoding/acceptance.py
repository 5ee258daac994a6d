"""Which proposals stand: the rules, to be read beside the papers.

Every rule gives, for each row of a verified block, the token that the answer has there if everything before it
stands: `choices` c_0 .. c_n for proposals d_1 .. d_n. The longest prefix with d_(i+1) = c_i stands, and the choice
after it comes free; the emitted tokens are c_0 .. c_k. What differs is how a row chooses:

- `Greedy`: the target's likeliest token.
- `Matching`: the target's own draw, with the noise of that position (see `sampling`). Proposals decide only how far a
  cycle gets, so the text is the same with any draft, or none, at any width.
- `Residual`: the proposal x with probability min(1, p(x) / q(x)), else a draw from max(p - q, 0), normalised
  (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). A token drawn from the residual is never x, so
  the prefix rule above serves here too. The distribution is the target's; the text depends on draft and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..config import Acceptance, Proposals, SamplingParams
from ..drafts.base import Proposal, as_scored
from .sampling import Adjust, Distribution, Noise, Purpose, Unadjusted, Warpers, adjustment


def accepted_prefix(proposals: Sequence[int], choices: Sequence[int]) -> int:
    """The number of leading proposals equal to the target's choices (`choices` is one longer)."""
    for index, proposal in enumerate(proposals):
        if proposal != choices[index]:
            return index
    return len(proposals)


@dataclass(frozen=True)
class Place:
    """Where a block stands.

    Attributes:
        start: position of its first token, the anchor.
        width: its tokens. The choice after row i is the token at position start + 1 + i.
        before: the last tokens in front of it, as many as the rule's `reach`.
    """

    start: int
    width: int
    before: Sequence[int] = ()


@dataclass(frozen=True)
class Choices:
    """The token after each row of a block, and how clear each choice was.

    Attributes:
        tokens: (1, W) ids.
        margins: (1, W), fp32, by how much the score of each led the next best one; None for a rule that does not
            take the best of scores. Unread, it costs nothing.
    """

    tokens: mx.array
    margins: mx.array | None = None

    def near_ties(self, margin: float) -> mx.array:
        """(1, W), 1 where the choice led by less than `margin`, else 0."""
        if self.margins is None or not margin:
            return mx.zeros(self.tokens.shape, mx.int32)
        return (self.margins < margin).astype(mx.int32)


def best(scores: mx.array) -> Choices:
    """The largest of scores (1, W, V) in each row."""
    tokens = mx.argmax(scores, axis=-1)
    first = mx.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
    others = mx.where(mx.arange(scores.shape[-1]) == tokens[..., None], -mx.inf, scores)
    return Choices(tokens, (first - mx.max(others, axis=-1)).astype(mx.float32))


class Round(Protocol):
    """One block under one rule."""

    def weigh(self, scores: mx.array, ids: mx.array | None = None) -> mx.array:
        """What the draft takes the argmax of (see `drafts.base.Weigh`)."""
        ...

    def choices(self, logits: mx.array, block: mx.array, proposal: Proposal | None = None) -> Choices:
        """The token after each row, from the target's logits (1, W, V) for `block` (1, W)."""
        ...


class AcceptanceRule(Protocol):
    """Decides one request's tokens.

    Attributes:
        reach: tokens before a block that it must be told.
    """

    reach: int

    def open(self, place: Place) -> Round: ...


class Greedy:
    """The target's likeliest tokens; the draft's likeliest proposals. The same for every round."""

    reach = 0

    def open(self, place: Place) -> Greedy:
        return self

    weigh = staticmethod(as_scored)

    def choices(self, logits: mx.array, block: mx.array, proposal: Proposal | None = None) -> Choices:
        return best(logits)


@dataclass(frozen=True)
class AdjustedGreedy:
    """The likeliest tokens after penalties and bias."""

    adjust: Adjust

    @property
    def reach(self) -> int:
        return self.adjust.reach

    def open(self, place: Place) -> _AdjustedRound:
        return _AdjustedRound(self.adjust, place)


@dataclass(frozen=True)
class _AdjustedRound:
    adjust: Adjust
    place: Place
    weigh = staticmethod(as_scored)

    def choices(self, logits: mx.array, block: mx.array, proposal: Proposal | None = None) -> Choices:
        adjusted = self.adjust(logits[0].astype(mx.float32), block, self.place.before)
        return best(adjusted[None])


class Matching:
    """The target's own draws; a proposal stands if it is what the target drew."""

    def __init__(self, target: Distribution, seed: int, vocab: int, proposals: type[Likeliest | Coupled]):
        self.reach = target.adjust.reach
        self._target, self._vocab, self._proposals = target, vocab, proposals
        self._noise = Noise(seed, Purpose.CHOICE)

    def open(self, place: Place) -> _MatchingRound:
        noise = self._noise.gumbel(place.start + 1, place.width, self._vocab)
        return _MatchingRound(self._target, place, noise, self._proposals(self._target, noise))


class _MatchingRound:
    def __init__(self, target: Distribution, place: Place, noise: mx.array, proposals: Likeliest | Coupled):
        self._target, self._place, self._noise = target, place, noise
        self.weigh = proposals.weigh

    def choices(self, logits: mx.array, block: mx.array, proposal: Proposal | None = None) -> Choices:
        scores = self._target.scores(logits, block, self._place.before)
        return best((scores + self._noise)[None])


class Likeliest:
    """The draft proposes its likeliest tokens, whatever the target may draw."""

    def __init__(self, target: Distribution, noise: mx.array):
        pass

    weigh = staticmethod(as_scored)


class Coupled:
    """The draft draws from its own distribution with the noise that the target will draw with.

    The more alike the two distributions, the likelier the two draws are the same.
    """

    def __init__(self, target: Distribution, noise: mx.array):
        self._warp, self._noise = target.warp, noise

    def weigh(self, scores: mx.array, ids: mx.array | None = None) -> mx.array:
        return self._warp(scores) + noise_for(self._noise, scores, ids)


def noise_for(noise: mx.array, scores: mx.array, ids: mx.array | None) -> mx.array:
    """The noise (n, V) of the slots that `scores` (n, ..., C) score, shaped to be added to them."""
    noise = noise[: scores.shape[0]]
    if ids is not None:
        noise = mx.take_along_axis(noise, ids, axis=-1)
    return noise.reshape(scores.shape[0], *[1] * (scores.ndim - 2), scores.shape[-1])


class Residual:
    """Rejection sampling: a proposal stands with probability min(1, p / q); see the module's docstring."""

    def __init__(self, target: Distribution, seed: int, vocab: int):
        self.reach = target.adjust.reach
        self.target, self.vocab = target, vocab
        self.draft = Noise(seed, Purpose.DRAFT)
        self.accept = Noise(seed, Purpose.ACCEPT)
        self.reject = Noise(seed, Purpose.REJECT)

    def open(self, place: Place) -> _ResidualRound:
        return _ResidualRound(self, place)

    @staticmethod
    def leftover(p: mx.array, q: mx.array) -> mx.array:
        """What the target has more of than the draft, (n, V), not normalised. Where rounding leaves nothing,
        p itself: the two are the same there."""
        rest = mx.maximum(p - q, 0)
        return mx.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p)


class _ResidualRound:
    def __init__(self, rule: Residual, place: Place):
        self._rule, self._place = rule, place
        self._draft_noise = rule.draft.gumbel(place.start + 1, place.width, rule.vocab)

    def weigh(self, scores: mx.array, ids: mx.array | None = None) -> mx.array:
        return self._rule.target.warp(scores) + noise_for(self._draft_noise, scores, ids)

    def choices(self, logits: mx.array, block: mx.array, proposal: Proposal | None = None) -> Choices:
        rule, first, drafted = self._rule, self._place.start + 1, block.shape[1] - 1
        p = mx.softmax(rule.target.scores(logits, block, self._place.before), axis=-1)  # (W, V)
        noise = rule.reject.gumbel(first, drafted + 1, rule.vocab)
        own = mx.argmax(mx.log(p[drafted:]) + noise[drafted:], axis=-1)  # (1,) after the last row
        if not drafted:
            return Choices(own[None])
        tokens = block[0, 1:]  # (n,)
        q = self._proposed(proposal, tokens)  # (n, V)
        p_token, q_token = (mx.take_along_axis(x[:drafted], tokens[:, None], axis=-1)[:, 0] for x in (p, q))
        stands = rule.accept.uniform(first, drafted) * q_token < p_token
        rest = rule.leftover(p[:drafted], q)
        instead = mx.argmax(mx.log(rest) + noise[:drafted], axis=-1)
        chosen = mx.where(stands, tokens.astype(instead.dtype), instead)
        return Choices(mx.concatenate([chosen, own])[None])

    def _proposed(self, proposal: Proposal | None, tokens: mx.array) -> mx.array:
        """The distributions (n, V) that `tokens` (n,) were drawn from. A proposal without scores was certain."""
        ids, q = tokens[:, None], mx.ones((len(tokens), 1))
        if proposal is not None and proposal.scores is not None:
            noise = noise_for(self._draft_noise, proposal.scores, proposal.ids)
            ids, q = proposal.ids, mx.softmax(proposal.scores - noise, axis=-1)
        if ids is None:
            return q
        return mx.put_along_axis(mx.zeros((len(tokens), self._rule.vocab)), ids, q, axis=-1)


_PROPOSALS: dict[Proposals, type[Likeliest | Coupled]] = {"likeliest": Likeliest, "coupled": Coupled}


def rule_for(
    params: SamplingParams, vocab: int, acceptance: Acceptance, proposals: Proposals
) -> AcceptanceRule:
    """The rule that `params` ask for (their `effective` form), over `vocab` tokens."""
    adjust = adjustment(params, vocab)
    if not params.temperature:
        return Greedy() if isinstance(adjust, Unadjusted) else AdjustedGreedy(adjust)
    target = Distribution(adjust, Warpers(params))
    if acceptance == "residual":
        return Residual(target, params.seed, vocab)
    return Matching(target, params.seed, vocab, _PROPOSALS[proposals])
