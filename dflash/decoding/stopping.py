"""Texts that end an answer, found across piece borders. Pure: no tokens, no tensors."""

from __future__ import annotations


class StopTexts:
    """Passes text through until one of `stops` is complete; neither it nor what follows gets out.

    Text that may be the beginning of a stop is held back until more text decides.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._stops = stops
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """Take the next piece; returns what may be shown. After a hit, nothing more is."""
        if self.hit:
            return ""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was still held back when the answer ended without a stop."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning of a stop."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
