"""From the words of a call to values, by the signature of a command; and from the signature to its help.

Pure functions of words and signatures: nothing is printed and nothing runs. Text stays text, `-` and `_` are
the same in names, `--no-x` or `--nox` turns a switch off, `--` ends the flags, and there are no short ones.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import re
import shlex
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import BadValue, UsageError
from .console import Format, Outcome

Command = Callable[..., Outcome]

EXIT_STATUSES = """\
Exit status: 0 success, 1 unforeseen, 2 the call is wrong, 3 not found, 4 unsupported,
  5 does not fit memory, disk or context, 6 network or hub, 130 interrupted, 143 terminated"""


@dataclass(frozen=True)
class Flag:
    """A parameter of a command, as a shell spells it.

    Attributes:
        name: the parameter's name.
        kind: str, int, float, bool, Path, or the tuple of values of a closed set.
        many: whether it may be repeated; its value is then a list.
        default: what the function has; `required` when it has none.
        help: what the docstring says about it.
    """

    name: str
    kind: Any
    many: bool = False
    default: Any = None
    required: bool = False
    help: str = ""

    @property
    def spelling(self) -> str:
        return "--" + self.name.replace("_", "-")

    def value(self, texts: list[str]) -> Any:
        """The value of this flag from the texts given for it, in order. Raises `UsageError`."""
        if self.many:
            return [self._converted(text) for text in texts]
        if len(texts) > 1:
            raise UsageError(f"{self.spelling} is given twice", f"give {self.spelling} once")
        return self._converted(texts[0])

    def _converted(self, text: str) -> Any:
        if isinstance(self.kind, tuple):
            for choice in self.kind:
                if text == str(choice):
                    return choice
            raise BadValue(f"{self.spelling} is one of {', '.join(map(str, self.kind))}, not {text!r}")
        takes, convert = _CONVERSIONS[self.kind]
        with contextlib.suppress(ValueError, RuntimeError):
            return convert(text)
        raise BadValue(f"{self.spelling} takes {takes}, not {text!r}")

    def row(self) -> tuple[str, str]:
        """Its line in the help: how it is written, and what it means."""
        if self.kind is bool:
            written = f"--[no-]{self.spelling[2:]}" if self.default else self.spelling
        elif isinstance(self.kind, tuple):
            written = f"{self.spelling} {'|'.join(map(str, self.kind))}"
        else:
            written = f"{self.spelling} {_METAVARS[self.kind]}"
        shown = not (self.default is None or self.default is False or self.default == "" or self.many)
        notes = [f"default {'on' if self.default is True else self.default}"] if shown else []
        notes += ["required"] if self.required else []
        notes += ["repeatable"] if self.many else []
        return written, f"{self.help} ({', '.join(notes)})".strip() if notes else self.help


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError
    return int(text)


def _finite(text: str) -> float:
    # float() alone also takes "nan", "inf", "1_0" and surrounding space.
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise ValueError
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


_SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError
    return _SWITCH[text.lower()]


def _path(text: str) -> Path:
    if not text:
        raise ValueError
    return Path(text).expanduser()


_CONVERSIONS: dict[type, tuple[str, Callable[[str], Any]]] = {
    str: ("text", str),
    int: ("a whole number", _whole),
    float: ("a finite number", _finite),
    bool: ("true or false", _switch),
    Path: ("a path", _path),
}
_METAVARS = {str: "TEXT", int: "N", float: "NUMBER", Path: "PATH"}

# Every command has these besides its own.
OWN = (
    Flag("format", typing.get_args(Format), help="default: text on a terminal, json elsewhere"),
    Flag("quiet", bool, default=False, help="nothing on stderr but errors"),
    Flag("output", Path, help="write the JSON object to this file as well"),
)
HELP, VERSION = ("-h", "--help"), ("--version",)


def flags_of(command: Command) -> dict[str, Flag]:
    """The flags of a command by parameter name, its own first. Raises TypeError for a signature that has
    parameters without a usable annotation: a fault of the command, not of its caller."""
    _, texts = _documentation(command)
    _, *parameters = inspect.signature(command, eval_str=True).parameters.values()
    flags = {}
    for parameter in parameters:
        kind, many = _kind(parameter)
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        flags[parameter.name] = Flag(
            parameter.name, kind, many, default, required, texts.get(parameter.name, "")
        )
    return flags | {flag.name: flag for flag in OWN}


def _kind(parameter: inspect.Parameter) -> tuple[Any, bool]:
    """What one value of the parameter is, and whether it takes several. `X | None` counts as X."""
    kind, many = parameter.annotation, False
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [one for one in typing.get_args(kind) if one is not types.NoneType]
        kind = kinds[0] if len(kinds) == 1 else None
    if typing.get_origin(kind) is list:
        (kind,), many = typing.get_args(kind), True
    if typing.get_origin(kind) is Literal:
        kind = typing.get_args(kind)
    usable = isinstance(kind, tuple) or kind in _CONVERSIONS
    if not usable or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        raise TypeError(f"parameter {parameter} cannot be a flag")
    if parameter.name in {flag.name for flag in OWN}:
        raise TypeError(f"--{parameter.name} belongs to the wrapper")
    return kind, many


# ---------------------------------------------------------------- reading words


@dataclass
class Reading:
    """The words of a call, sorted: texts by parameter, words without a flag, and what was wrong."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)
    problems: list[UsageError] = field(default_factory=list)

    def values(self, flags: dict[str, Flag], positional: str | None) -> dict[str, Any]:
        """Every value given, converted. Raises `UsageError` for the first thing that is wrong."""
        if self.problems:
            raise self.problems[0]
        texts = dict(self.texts)
        if self.rest:
            if positional is None or len(self.rest) > 1:
                hint = "quote text that has spaces; flags: see --help"
                raise UsageError(f"unexpected argument {self.rest[-1]!r}", hint)
            texts[positional] = [*texts.get(positional, []), *self.rest]
        values = {name: flags[name].value(given) for name, given in texts.items()}
        for flag in flags.values():
            if flag.required and flag.name not in values:
                raise UsageError(f"{flag.spelling} is required", f"add {flag.row()[0]}")
        return values


def read(words: Iterable[str], flags: dict[str, Flag]) -> Reading:
    """Sort the words of a call. Reads to the end whatever it meets, so that `--format` is always found."""
    reading, queue = Reading(), deque(words)
    while queue:
        word = queue.popleft()
        if word == "--":
            reading.rest.extend(queue)
            break
        if word.startswith("--"):
            try:
                name, text = _flag_and_text(word, queue, flags)
            except UsageError as problem:
                reading.problems.append(problem)
            else:
                reading.texts.setdefault(name, []).append(text)
        elif re.fullmatch(r"-[^\W\d_]\S*", word):
            hint = f"flags are spelled out: see --help; if it is text, write -- {shlex.quote(word)}"
            reading.problems.append(UsageError(f"unknown flag {word}", hint))
        else:
            reading.rest.append(word)
    return reading


def _flag_and_text(word: str, queue: deque[str], flags: dict[str, Flag]) -> tuple[str, str]:
    """The parameter that `--flag` or `--flag=text` names and its text, which may be the next word."""
    written, equals, text = word.partition("=")
    flag, negated = _look_up(written, flags)
    if flag.kind is bool:
        if negated and equals:
            raise UsageError(f"{written} takes no value", f"write {written}, or {flag.spelling}={text}")
        if not equals:
            follows = not negated and queue and queue[0].lower() in ("true", "false")
            text = queue.popleft() if follows else "false" if negated else "true"
    elif not equals:
        if not queue:
            raise UsageError(f"{written} needs a value", f"write {flag.row()[0]}")
        if queue[0].startswith("--"):
            hint = f"for text that begins with dashes, write {written}={shlex.quote(queue[0])}"
            raise UsageError(f"{written} needs a value", hint)
        text = queue.popleft()
    return flag.name, text


def _look_up(written: str, flags: dict[str, Flag]) -> tuple[Flag, bool]:
    """The flag that a spelling names, and whether it is negated (`--no-x` or `--nox`, for switches)."""
    name = written[2:].replace("-", "_")
    if name in flags:
        return flags[name], False
    for prefix in ("no_", "no"):
        switch = flags.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if switch is not None and switch.kind is bool:
            return switch, True
    spellings = [flag.spelling for flag in flags.values()]
    spellings += ["--no-" + flag.spelling[2:] for flag in flags.values() if flag.kind is bool]
    raise UsageError(f"unknown flag {written}", nearest(written, [*spellings, "--help", "--version"]))


def nearest(word: str, known: list[str]) -> str | None:
    """A hint that names the likeliest of the known words, if any is likely."""
    names = {one.lstrip("-"): one for one in known}  # dashes are alike in all and would count as likeness
    name = word.lower().replace("_", "-").lstrip("-")
    likely = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    likely += [other for other in names if len(name) > 1 and other.startswith(name)]
    return f"did you mean {names[likely[0]]}?" if likely else None


# ---------------------------------------------------------------- help


def help_text(command: Command, positional: str | None, prog: str) -> str:
    about, _ = _documentation(command)
    word = f" [{positional.upper()}]" if positional else ""
    rows = [flag.row() for flag in flags_of(command).values()]
    rows.append((", ".join((*HELP, *VERSION)), "print this, or the version"))
    return f"{about}\n\nUsage: {prog}{word} [--flag value ...]\n{table(rows)}\n\n{EXIT_STATUSES}\n"


def table(rows: list[tuple[str, str]]) -> str:
    width = max(len(left) for left, _ in rows) + 2
    return "\n".join(f"  {left:{width}}{right}".rstrip() for left, right in rows)


def _documentation(command: Command) -> tuple[str, dict[str, str]]:
    """A command's docstring: what stands before `Args:`, and the text for each parameter after it."""
    about, _, block = (inspect.getdoc(command) or "").partition("\n\nArgs:\n")
    texts = {}
    for name, text in re.findall(r"^\s*(\w+): *(.*)$", block, re.MULTILINE):
        texts[name] = text
    return about, texts
