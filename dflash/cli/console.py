"""What a command sees of the outside: a `Console` to talk to while it runs, an `Outcome` to end with."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal

from ..contract import Stdout

Format = Literal["json", "text", "ndjson"]


class Console:
    """What a command talks to while it runs.

    Attributes:
        format: "json" (one envelope at the end), "text" (for people) or "ndjson" (events, then the envelope).
        quiet: no notes, warnings or progress on stderr; warnings stay in the envelope.
        warnings: what `warn` was told, in the envelope's shape.
        line_is_open: the text written so far does not end its line.
    """

    def __init__(self, stdout: Stdout, format: Format, quiet: bool = False):
        self.format = format
        self.quiet = quiet
        self.warnings: list[dict[str, str]] = []
        self.line_is_open = False
        self._stdout = stdout

    @property
    def progress(self) -> bool:
        """Whether progress bars are welcome: not quiet, and stderr is a terminal."""
        return not self.quiet and os.isatty(2)

    def piece(self, text: str) -> None:
        """A piece of the answer: written to stdout at once in the text format, nothing in others."""
        if self.format == "text" and text:
            self._stdout.write(text)
            self.line_is_open = not text.endswith("\n")

    def event(self, name: str, /, **fields: Any) -> None:
        """Something that happened: a line `{"event": name, ...}` in the ndjson format, nothing in others."""
        if self.format == "ndjson":
            self._stdout.write_line({"event": name, **fields})

    def warn(self, code: str, message: str) -> None:
        """A doubt that belongs into the result: kept for the envelope, and said on stderr unless quiet."""
        self.warnings.append({"code": code, "message": message})
        self.note(f"warning: {message}")

    def note(self, message: str) -> None:
        """A line on stderr unless quiet."""
        if not self.quiet:
            say(message)


@dataclass(frozen=True)
class Outcome:
    """What a command returns.

    Attributes:
        schema: the name under which the shape of `result` is published, as "dflash.generate/1".
        result: JSON values.
        summary: one line for people, on stderr in the text format.
        text: what the text format prints on stdout at the end; empty for commands that wrote pieces.
        exit_status: 130 or 143 when an interrupted command returns what it has.
    """

    schema: str
    result: dict[str, Any]
    summary: str = ""
    text: str = ""
    exit_status: int = 0


def say(text: str) -> None:
    """A line on stderr, if anyone still listens there."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
