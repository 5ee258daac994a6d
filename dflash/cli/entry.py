"""The two ways in, `run` for a script and `main` for the `dflash` command: one path, one envelope."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contract import Stdout
from ..errors import DFlashError, UsageError
from ..version import __version__
from .console import Console, Outcome, say
from .flags import HELP, OWN, VERSION, Command, flags_of, help_text, nearest, read, table
from .report import Ending, as_error, failed, report, save, succeeded, writable, write
from .signals import Signals

# What `dflash NAME` runs: the module, a line for the overview, the parameter that needs no flag.
COMMANDS = {
    "generate": ("dflash.commands.generate", "answer a prompt", "prompt"),
    "benchmark": ("dflash.commands.benchmark", "how much faster than mlx-lm, measured here", "compare"),
    "resolve-draft": ("dflash.commands.resolve_draft", "which draft a model has; do both fit", "model"),
}


def run(
    command: Command, argv: list[str] | None = None, *, positional: str | None = None, prog: str | None = None
) -> int:
    """Run `command` with the words of `argv` (the process's own by default) and report; never raises.

    `positional` names the parameter that a word without a flag goes to; `prog` is the name shown in help.
    Returns the exit status.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    name = prog or Path(sys.argv[0]).name
    return _run(lambda: _prepare(command, words, positional, name), words)


def main(argv: list[str] | None = None) -> int:
    """The `dflash` command: its first word names one of `COMMANDS`. Returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    return _run(lambda: _select(words), words)


@dataclass(frozen=True)
class Call:
    """A command and its checked arguments. Nothing has run yet."""

    command: Command
    values: dict[str, Any]
    output: Path | None
    prog: str

    def perform(self, console: Console) -> Outcome:
        """Run the command through Fire, which is given no words to interpret and no value to print."""
        import fire

        outcomes: list[Outcome] = []
        fire.Fire(lambda: outcomes.append(self.command(console, **self.values)), command=[], name=self.prog)
        return outcomes[0]


def _prepare(command: Command, words: list[str], positional: str | None, prog: str) -> Call | str:
    """The call that the words ask for, or the text of --help or --version."""
    flags = flags_of(command)
    if _asks(words, HELP):
        return help_text(command, positional, prog)
    if _asks(words, VERSION):
        return f"dflash {__version__}\n"
    values = read(words, flags).values(flags, positional)
    output = values.pop("output", None)
    for name in ("format", "quiet"):  # the console has them already
        values.pop(name, None)
    return Call(command, values, None if output is None else writable(output), prog)


def _select(words: list[str]) -> Call | str:
    """The same for the `dflash` command, whose first word names what to run."""
    first = words[0] if words else ""
    name = first.replace("_", "-")
    if name in COMMANDS:
        module, _, positional = COMMANDS[name]
        command = getattr(importlib.import_module(module), name.replace("-", "_"))
        return _prepare(command, words[1:], positional, f"dflash {name}")
    if _asks(words, HELP):
        rows = [(f"dflash {name} ...", about) for name, (_, about, _) in COMMANDS.items()]
        rows.append(("dflash NAME --help", "the flags of one of them"))
        return f"Language models on MLX, faster, with the same answers.\n\n{table(rows)}\n"
    if _asks(words, VERSION):
        return f"dflash {__version__}\n"
    hint = nearest(first, list(COMMANDS)) or f"the commands are {', '.join(COMMANDS)}: see dflash --help"
    raise UsageError(f"unknown command {first!r}" if first else "no command was given", hint)


def _asks(words: list[str], spellings: tuple[str, ...]) -> bool:
    """Whether any word before `--` is one of the spellings: help is never taken for a value."""
    before = words[: words.index("--")] if "--" in words else words
    return any(word in spellings for word in before)


def _run(prepare: Callable[[], Call | str], words: list[str]) -> int:
    """Make the call, run it, report it, whatever happens. Returns the exit status."""
    started = time.perf_counter()
    with Stdout.guarded() as stdout:
        console = _console(stdout, words)
        signals = Signals()
        try:
            ending = _attempt(prepare, console, signals, started)
            if isinstance(ending, str):
                return write(stdout, ending, status=0)
            return report(ending, console, stdout)
        finally:
            signals.restore()
            atexit.register(_leave_stdout_alone)


def _console(stdout: Stdout, words: list[str]) -> Console:
    """A console for these words, right or wrong: a refusal too has the format that was asked for."""
    flags = {flag.name: flag for flag in OWN}
    texts = read(words, flags).texts
    chosen = {"format": "text" if stdout.terminal else "json", "quiet": False}
    for name in chosen.keys() & texts.keys():
        with contextlib.suppress(UsageError):
            chosen[name] = flags[name].value(texts[name])
    return Console(stdout, **chosen)


def _attempt(
    prepare: Callable[[], Call | str], console: Console, signals: Signals, started: float
) -> Ending | str:
    """What the call came to; never raises. A text is that of --help or --version."""
    call = None
    try:
        try:
            signals.install()
            call = prepare()
            if isinstance(call, str):
                return call
            outcome = call.perform(console)
        finally:
            signals.held = True  # first thing of all: from here on nothing may cost the report
        ending = succeeded(outcome, console, started)
        save(call.output, ending)
        return ending
    except BaseException as caught:
        signals.held = True  # again, for a signal that came just before the line above
        error = as_error(caught)
        if error.code == DFlashError.code:
            say("".join(traceback.format_exception(caught)).rstrip())
        ending = failed(error, started)
        if isinstance(call, Call):
            with contextlib.suppress(DFlashError):
                save(call.output, ending)
        return ending


def _leave_stdout_alone() -> None:
    """What prints while the process ends (exit handlers, C buffers) must not follow the envelope."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        os.dup2(2, 1)
