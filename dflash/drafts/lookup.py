"""Proposals without a model: text that comes again is copied from where it stood before.

`Lookup` follows one request's tokens, prompt and answer. While the text repeats something, it points at what came
next there; that is the proposal. When a copy departs from its source (one name changed), it waits for the two to
meet again a few tokens on. Host side, a few dictionary entries a token, nothing is ever scanned again.

The idea is prompt lookup decoding (Saxena 2023) with a longer memory; which proposals are worth their verification
is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable

# Lengths of remembered endings, longest first: 2 finds the way back early, 8 tells look-alikes apart.
_ENDINGS = (8, 4, 2)
_SHORTEST = _ENDINGS[-1]
# How far a copy may depart from its source, in tokens of either, before it counts as another text.
_DETOUR = 8


class Lookup:
    """Where the end of a growing text stood before.

    Attributes:
        length: tokens at the end of the text that are known to equal those before the place pointed at; 0 for a
            guess that a departed copy goes on where it left; None when there is nothing to propose.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self._tokens: list[int] = []
        self._after: dict[int, dict[int, int]] = {
            n: {} for n in _ENDINGS
        }  # hash of an ending -> what follows it
        self._at = 0  # index of the token that the text is expected to go on with
        self._lost: int | None = None  # where in the source the copy departed
        self._patience = 0
        self.length: int | None = None
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on with `tokens`."""
        for token in tokens:
            self._append(token)

    def continuation(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens expected next; none without a match. A repetition goes round as often as needed."""
        if self.length is None:
            return ()
        known, at = self._tokens, self._at
        period = len(known) - at
        return tuple(known[at + i % period] for i in range(count))

    def _append(self, token: int) -> None:
        expected = self.length is not None and self._tokens[self._at] == token
        departed = bool(self.length) and not expected
        self._tokens.append(token)
        length, at = self._longest_ending()
        if expected and self.length + 1 >= length:
            length, at = self.length + 1, self._at + 1
        else:
            if departed and self._lost is None:
                self._lost, self._patience = self._at, _DETOUR
            if length <= _SHORTEST and self._lost is not None:
                length, at = self._back_to_the_source(token) or (length, at)
        if length > _SHORTEST:
            self._lost = None
        self.length, self._at = (None, 0) if not at else (length, at)

    def _longest_ending(self) -> tuple[int, int]:
        """Length of the longest remembered ending that the text has now, and what followed it last time; (0, 0)
        without one. Remembers the present endings."""
        tokens, end = self._tokens, len(self._tokens)
        length = at = 0
        for n in _ENDINGS:
            if n > end:
                continue
            ending = tokens[-n:]
            key = hash(tuple(ending))
            before = self._after[n].get(key)
            self._after[n][key] = end
            if not length and before is not None and tokens[before - n : before] == ending:
                length, at = n, before
        return length, at

    def _back_to_the_source(self, token: int) -> tuple[int, int] | None:
        """On a detour: (1, place) behind the first `token` after the departure, if it is near; else (0, place)
        behind the departure, a guess. None once the detour has become too long."""
        if self._patience == 0:
            self._lost = None
            return None
        self._patience -= 1
        for index in range(self._lost, min(self._lost + 1 + _DETOUR, len(self._tokens) - 1)):
            if self._tokens[index] == token:
                return 1, index + 1
        return 0, self._lost + 1
