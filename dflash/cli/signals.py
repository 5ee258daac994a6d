"""SIGINT and SIGTERM as an exception, with an end to it: the report of a run is not interrupted."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived. Raised in the main thread, wherever it stands."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.signal_number = signal_number


class Signals:
    """Raises `Interrupted` for both signals between `install` and `restore`, unless `held`.

    A command that catches it has `SAME_REQUEST_S` seconds in which further signals change nothing; one that
    comes later interrupts its cleanup too.
    """

    # uv hands on a signal that the process group has already had; the twin must not end the cleanup.
    SAME_REQUEST_S = 2.0

    def __init__(self) -> None:
        self.held = False  # nothing is left to interrupt: the report is being written
        self._deaf_until = 0.0
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Explicitly for both: a shell starts background jobs with SIGINT ignored."""
        with contextlib.suppress(ValueError):  # outside the main thread signals are someone else's
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if not self.held and now >= self._deaf_until:
            self._deaf_until = now + self.SAME_REQUEST_S
            raise Interrupted(number)
