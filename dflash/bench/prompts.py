"""What the benchmark asks: prompts by kind of text, shipped (`prompts.toml`) or from a file of the user's. No MLX."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadValue, NotFound

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = ("chat", "code", "math", "edit", "tools")
_SHIPPED = Path(__file__).with_name("prompts.toml")
_OWN_KIND = "own"  # of prompts in a user's file that name none


@dataclass(frozen=True)
class BenchPrompt:
    """One user message. `id` names it in results, `kind` is the group that it is averaged in."""

    id: str
    kind: str
    text: str


def shipped() -> list[BenchPrompt]:
    """The package's own prompts, a few of each of `KINDS`."""
    entries = tomllib.loads(_SHIPPED.read_text(encoding="utf-8"))["prompt"]
    return [BenchPrompt(entry["id"], entry["kind"], entry["text"].strip()) for entry in entries]


def from_file(file: Path) -> list[BenchPrompt]:
    """The prompts of a JSON list whose items are texts or {prompt, kind?, id?}.

    Raises:
        NotFound: the file cannot be read.
        BadValue: it holds something else.
    """
    try:
        items = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFound(f"cannot read {file.absolute()}: {error.strerror}") from error
    except ValueError as error:  # of JSON and of UTF-8
        raise BadValue(f"{file} is not a JSON list of prompts: {error}") from error
    if not isinstance(items, list) or not items:
        raise BadValue(f"{file} must hold a JSON list of prompts that is not empty")
    prompts = [_from_item(item, number, file) for number, item in enumerate(items, start=1)]
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise BadValue(f"two prompts of {file} have the same id")
    return prompts


def chosen(prompts: list[BenchPrompt], kinds: str | None, per_kind: int | None) -> list[BenchPrompt]:
    """Those of the kinds named ("chat,code"; None: all), at most `per_kind` of each. Raises `BadValue`."""
    known = list(dict.fromkeys(prompt.kind for prompt in prompts))
    wanted = known if kinds is None else [kind.strip() for kind in kinds.split(",")]
    if unknown := [kind for kind in wanted if kind not in known]:
        raise BadValue(f"there are no prompts of kind {unknown[0]!r}", f"the kinds are {', '.join(known)}")
    groups = [[prompt for prompt in prompts if prompt.kind == kind] for kind in dict.fromkeys(wanted)]
    return [prompt for group in groups for prompt in group[:per_kind]]


def _from_item(item: Any, number: int, file: Path) -> BenchPrompt:
    fields = {"prompt": item} if isinstance(item, str) else item
    if not isinstance(fields, dict):
        raise BadValue(f"prompt {number} of {file} is neither a text nor an object")
    named = {"prompt": None, "kind": _OWN_KIND, "id": f"{file.stem}-{number}"} | fields
    texts = [named[name] for name in ("id", "kind", "prompt")]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadValue(f"prompt {number} of {file} has a `prompt`, `kind` or `id` that is not text")
    return BenchPrompt(*texts)
