"""From token ids to text, piece by piece, such that the pieces joined are the decoded whole.

mlx-lm's streaming classes drop a genuine leading space and map U+0000 to another character (seen in 0.32.2), so
pieces come from the tokenizer's own `decode` here: a piece is what a short window of ids decodes to beyond what
its beginning decodes to. Incomplete characters are held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what `decode` shows for bytes that are no character (yet)


class TextStream:
    """One answer's text.

    Args:
        decode: ids -> text, without any clean-up; `tokenizer.decode` bound to its options.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []  # the window: ids whose text may still depend on what follows
        self._shown = 0  # ids at the window's beginning whose text has been given out
        self._shown_text = ""

    def push(self, token: int) -> str:
        """Take one id; returns the text that is now certain, often empty for parts of a character."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(text) <= len(self._shown_text) or text.endswith(REPLACEMENT):
            return ""
        piece = text[len(self._shown_text) :]
        # Keep the ids just shown as the left neighbour: decoders treat the first id of a text specially.
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        self._shown_text = self._decode(self._ids)
        return piece

    def finish(self) -> str:
        """What is still held back, incomplete characters included; the stream starts over."""
        piece = self._decode(self._ids)[len(self._shown_text) :] if self._ids else ""
        self._ids, self._shown, self._shown_text = [], 0, ""
        return piece
