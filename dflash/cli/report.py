"""How a run ended, as an envelope; and the places it is written to: stdout, stderr, `--output FILE`."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from ..contract import Stdout, encoded, failure, success, to_line
from ..errors import BadValue, Cancelled, DFlashError, DiskFull, DoesNotFit
from .console import Console, Outcome, say

# What MLX says, in a plain RuntimeError, when Metal, CUDA or the CPU has no memory left.
_NO_MEMORY = ("malloc]", "unable to allocate", "insufficient memory", "out of memory")


@dataclass(frozen=True)
class Ending:
    """How a run ended: the envelope as a line, and what it was made from (one of `outcome` and `error`)."""

    status: int
    line: str
    outcome: Outcome | None = None
    error: DFlashError | None = None


def succeeded(outcome: Outcome, console: Console, started: float) -> Ending:
    """Raises ValueError or TypeError for a result that is not JSON."""
    line = to_line(success(outcome.schema, outcome.result, console.warnings, started))
    return Ending(outcome.exit_status, line, outcome=outcome)


def failed(error: DFlashError, started: float) -> Ending:
    try:
        line = to_line(failure(error, started))
    except (TypeError, ValueError):  # details that are not JSON must not cost the rest of the error
        error.details = {}
        line = to_line(failure(error, started))
    return Ending(error.exit_status, line, error=error)


def as_error(caught: BaseException) -> DFlashError:
    """The published error for whatever was raised; `internal_error` for what nobody foresaw."""
    said = " ".join(str(caught).split())
    if isinstance(caught, DFlashError):
        return caught
    if isinstance(caught, KeyboardInterrupt):
        number = signal.Signals(getattr(caught, "signal_number", signal.SIGINT))
        return Cancelled(f"{number.name} arrived before there was a result", int(number))
    no_memory = isinstance(caught, RuntimeError) and any(words in said.lower() for words in _NO_MEMORY)
    if no_memory or isinstance(caught, MemoryError):
        return DoesNotFit(f"the memory ran out: {said or type(caught).__name__}")
    if isinstance(caught, OSError) and caught.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"the disk is full: {said}")
    return DFlashError(f"{type(caught).__name__}: {said}")


def report(ending: Ending, console: Console, stdout: Stdout) -> int:
    """Print how the run ended, in the console's format. Returns the exit status."""
    if console.format != "text":
        return write(stdout, ending.line + "\n", ending.status)
    text = ending.outcome.text if ending.outcome else ""
    ends_line = text.endswith("\n") if text else not console.line_is_open
    status = write(stdout, text if ends_line else text + "\n", ending.status)
    if ending.error is not None:
        say(f"error: {ending.error.message}\nhint: {ending.error.hint}")
    elif ending.outcome.summary:
        console.note(ending.outcome.summary)
    return status


def write(stdout: Stdout, text: str, status: int) -> int:
    """Write to stdout; returns `status`, or that of the failure to write (a full disk behind `> file`)."""
    try:
        stdout.write(text)
    except OSError as caught:
        error = as_error(caught)
        say(f"error: cannot write to stdout: {error.message}\nhint: {error.hint}")
        return error.exit_status
    return status


def writable(output: Path) -> Path:
    """Where `--output` writes, links resolved. Raises `BadValue` now rather than after minutes of work."""
    target = Path(os.path.realpath(output))
    try:
        if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
            raise BadValue(f"--output takes a file that can be written, not {target}")
        _beside(target).touch()
        _beside(target).unlink()
    except OSError as caught:
        reason = f"--output {target} cannot be written: {caught.strerror}"
        raise BadValue(reason, "name a file in a folder that exists and can be written") from caught
    return target


def save(output: Path | None, ending: Ending) -> None:
    """Write the envelope to `--output`, whole or not at all. The error for a failure carries the result."""
    if output is None:
        return
    temporary = _beside(output)
    try:
        temporary.write_bytes(encoded(ending.line + "\n"))
        os.replace(temporary, output)
    except OSError as caught:
        with contextlib.suppress(OSError):
            temporary.unlink()
        error = as_error(caught)
        kept = {"result": ending.outcome.result} if ending.outcome else {}
        raise type(error)(f"--output {output}: {error.message}", **kept) from caught


def _beside(target: Path) -> Path:
    """A temporary file in the same folder, so that moving it into place is one step."""
    return target.with_name(f".dflash-{os.getpid()}.tmp")
