"""Which draft belongs to a model: public pairs, kept as data in `registry.toml`, looked up by base name.

The base name decides. Owner, storage format (4bit, GGUF, FP8, ...) and letter case say only where and how the
same weights are kept. Any other word makes another model: a draft learned one model's hidden states, and on
another one it is accepted rarely, without an error that would tell. So near misses are named, never taken.

Asks no network and knows no geometry: that is in each draft's own config.json.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import DFlashError, DraftNotFound, ModelIsDraft
from . import headers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = Literal["attention", "sliding", "hybrid", "unknown"]
Layout = Literal["z-lab", "speculators", "other"]
Origin = Literal["name", "path", "cache", "config"]

_FILE = Path(__file__).with_name("registry.toml")
_LOOKS_LIKE = 0.75  # difflib's ratio from which a name counts as a slip of the pen
_MOST_NEAREST = 3  # more would bury the likely one
# What drafts/checkpoint.py reads. Drafts in other layouts are known and named in answers, but not chosen:
# finding out only after gigabytes were fetched helps nobody.
LAYOUTS: frozenset[Layout] = frozenset({"z-lab", "speculators"})

# Endings that say how weights are stored, each after "-", "_" or ".".
_STORAGE = re.compile(
    r"""[-_.](?:
        \d+(?:\.\d+)?(?:-?bits?|bpw)              # 4bit, 4-bit, 3.5bit, 4.5bpw
      | b?f(?:p|loat)?(?:16|32)                   # bf16, fp16, f32, bfloat16
      | fp[48](?:-dynamic|-block)? | mxfp[48] | nvfp4(?:a16)? | int[48] | w\d+a\d+ | quantized
      | t?q\d(?:_[a-z0-9]+)* | iq\d(?:_[a-z0-9]+)* | oq\d+[a-z]* | ud | i1 | imatrix | \d{5}-of-\d{5}
      | gguf | ggml | mlx | safetensors | awq | gptq | hqq | exl[23] | bnb | unsloth | autoround
      | dwq(?:-?\d{4,8})?(?:-v\d)? | qat | unquantized | mixed(?:[-_]\d)*
      | g(?:s|roup|roup-?size-?)?\d+              # quantisation groups: g32, gs64, group-size-128
    )$""",
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True)
class KnownDraft:
    """One public draft. `refused` says why it is never run; `obstacle` also why this version does not."""

    repo: str
    generation: int
    layout: Layout
    official: bool = False
    mirrors: tuple[str, ...] = ()
    gated: bool | None = None
    licence: str | None = None
    notes: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def obstacle(self) -> str | None:
        if self.refused is None and self.layout not in LAYOUTS:
            return f"in the {self.layout} layout, which this version does not read"
        return self.refused


@dataclass(frozen=True)
class KnownTarget:
    """A model for which drafts exist, with all of them in the order in which they are preferred."""

    name: str
    kind: Kind
    drafts: tuple[KnownDraft, ...]
    also: tuple[str, ...] = ()
    alias: tuple[str, ...] = ()
    gated: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def runnable(self) -> tuple[KnownDraft, ...]:
        return tuple(draft for draft in self.drafts if draft.obstacle is None)

    @property
    def refused(self) -> tuple[KnownDraft, ...]:
        return tuple(draft for draft in self.drafts if draft.obstacle is not None)

    @property
    def keys(self) -> tuple[str, ...]:
        """What `key` makes of the names of this model; some uploaders write the owner into the name."""
        owner, _, base = self.name.partition("/")
        return (key(base), key(f"{owner}_{base}"), *map(key, self.also))


@dataclass(frozen=True)
class Match:
    """The draft for a model, and why.

    Attributes:
        name: the model as it was asked for; `target` is its original name.
        kind: of the target's layers.
        draft: hub name of the draft, or the embedded pair's name.
        reason: a sentence: why this target, why this draft.
        gated, licence: of the draft, as last recorded; None where unknown. `target_gated` likewise.
        alternatives: the target's other drafts that run; `refused`: those with an `obstacle`.
    """

    name: str
    target: str
    kind: Kind
    draft: str
    mirrors: tuple[str, ...]
    generation: int
    layout: Layout
    reason: str
    notes: tuple[str, ...]
    gated: bool | None
    licence: str | None
    target_gated: bool | None
    alternatives: tuple[KnownDraft, ...]
    refused: tuple[KnownDraft, ...]


def lookup(name: str, targets: tuple[KnownTarget, ...] | None = None) -> Match:
    """The draft for the model `name`: a hub name, a bare name, a local folder or a GGUF file.

    A folder goes by its own name, then by the origin that its config.json states.

    Raises:
        DraftNotFound: no draft is known; `details["nearest"]` names similar models and what differs.
        ModelIsDraft: `name` is itself a known draft.
    """
    targets = entries() if targets is None else targets
    readings = list(_readings(name))
    by_alias = {alias: target for target in targets for alias in target.alias}
    if readings == [(name, "name")] and name.lower() in by_alias:
        return _match(name, by_alias[name.lower()], f"{name} is the embedded pair")
    by_key = {k: target for target in targets for k in target.keys}
    for reading, read_from in readings:
        if target := by_key.get(key(reading)):
            return _match(name, target, _why(name, reading, read_from, target))
    for reading, _ in readings:
        if pair := find_draft(reading, targets):
            raise _is_draft(name, *pair)
    raise _not_found(name, readings[0][0], targets)


def find_draft(
    name: str, targets: tuple[KnownTarget, ...] | None = None
) -> tuple[KnownTarget, KnownDraft] | None:
    """The known draft `name`, with its target: the very repository, else one of that base name."""
    targets = entries() if targets is None else targets
    known = [(t, d, repo) for t in targets for d in t.drafts for repo in (d.repo, *d.mirrors)]
    for same in (str.lower, key):
        for target, draft, repo in known:
            if same(repo) == same(name):
                return target, draft
    return None


@lru_cache(maxsize=1)
def entries() -> tuple[KnownTarget, ...]:
    """Every target of the registry, in the file's order."""
    return parse(_FILE.read_text(encoding="utf-8"))


def parse(text: str) -> tuple[KnownTarget, ...]:
    """Targets from the registry's TOML. Raises `DFlashError` on any key or value that has no meaning."""
    document = tomllib.loads(text)
    if document.keys() != {"target"}:
        raise _malformed("the file", f"has {sorted(document)}, expected only target")
    targets = tuple(_target(table) for table in document["target"])
    names = [name for target in targets for name in (*target.keys, *target.alias)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise _malformed("the file", f"lists {', '.join(sorted(twice))} more than once")
    return targets


def base_name(name: str) -> str:
    """`name` without its owner and without the endings that say how its weights are stored."""
    base = name.rstrip("/").rpartition("/")[2]
    while (shorter := _STORAGE.sub("", base)) != base:
        base = shorter
    return base


def key(name: str) -> str:
    """What is equal for two names of the same model."""
    base = base_name(name).lower()
    return base.removeprefix("meta-") if base.startswith("meta-llama-") else base


def _readings(name: str) -> Iterator[tuple[str, Origin]]:
    """Names under which to look `name` up, each with what it was read from."""
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if not path.exists():
        yield name, "name"
        return
    for part in reversed(path.parts):
        if part.startswith("models--"):  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
            yield "/".join(part.split("--")[1:]), "cache"
            break
    yield path.name, "path"
    try:
        origin = headers.load_config(path).get("_name_or_path")
    except DFlashError:  # no config, or a broken one: loading says what is wrong with it
        return
    if isinstance(origin, str) and origin:
        yield origin, "config"


def _match(name: str, target: KnownTarget, why: str) -> Match:
    if not target.runnable:
        listed = "; ".join(f"{draft.repo}: {draft.obstacle}" for draft in target.refused)
        raise DraftNotFound(
            f"no draft that runs here is known for {target.name}. Not run: {listed}",
            _without_draft(),
            model=name,
            target=target.name,
            nearest=[],
            refused=[{"draft": draft.repo, "reason": draft.obstacle} for draft in target.refused],
        )
    best, *others = target.runnable
    return Match(
        name=name,
        target=target.name,
        kind=target.kind,
        draft=best.repo,
        mirrors=best.mirrors,
        generation=best.generation,
        layout=best.layout,
        reason=f"{why}; {_preference(best, others)}",
        notes=target.notes + best.notes,
        gated=best.gated,
        licence=best.licence,
        target_gated=target.gated,
        alternatives=tuple(others),
        refused=target.refused,
    )


def _why(name: str, reading: str, read_from: Origin, target: KnownTarget) -> str:
    if read_from == "config":
        return (
            f"the config.json in {name} states {reading} as its origin "
            "(if it was fine-tuned since, fewer proposals will be accepted)"
        )
    if read_from == "cache":
        return f"{name} is the hub cache's copy of {reading}, which is {target.name}"
    if reading == target.name:
        return f"{name} is in the registry"
    return f"{name} is {target.name}: owner, storage format and letter case aside, the names are equal"


def _preference(best: KnownDraft, others: list[KnownDraft]) -> str:
    whose = "the official draft" if best.official else "a draft of the community"
    rank = "the only one known to run"
    if others:
        rank = f"the first of {len(others) + 1} (official before others, newer before older)"
    return f"{best.repo} is {whose} for it, {rank}"


def _is_draft(name: str, target: KnownTarget, draft: KnownDraft) -> ModelIsDraft:
    command = f"--model {(*target.alias, target.name)[0]}"
    if draft.obstacle is None:
        command += f" --draft {name}"
    refusal = f" (and it is not run: {draft.obstacle})" if draft.obstacle else ""
    return ModelIsDraft(
        f"{name} is a draft for {target.name}, not a model that answers by itself{refusal}",
        f"pass the target as the model: generate.py {command}",
        model=name,
        target=target.name,
        draft=draft.repo,
    )


def _not_found(name: str, reading: str, targets: tuple[KnownTarget, ...]) -> DraftNotFound:
    nearest = [
        {"target": target.name, "difference": difference(reading, target.name)}
        for target in _nearest(reading, targets)
    ]
    message = f"no draft is known for {name}"
    if nearest:
        message += f"; nearest: {nearest[0]['target']}, but {nearest[0]['difference']}"
    return DraftNotFound(message, _without_draft(), model=name, nearest=nearest, refused=[])


def _without_draft() -> str:
    own = "pass --draft FOLDER_OR_HUB_NAME if you know or trained one"
    return f"{own}, or run without: --mode lookup or --mode baseline"


def _nearest(name: str, targets: tuple[KnownTarget, ...]) -> list[KnownTarget]:
    """Targets whose name is part of this one or the reverse, the longest first; then similar spellings."""
    asked = key(name)
    by_key = {k: target for target in targets for k in target.keys}
    related = [k for k in by_key if f"-{k}-" in f"-{asked}-" or f"-{asked}-" in f"-{k}-"]
    related.sort(key=lambda k: (-len(k), k))
    found = related + get_close_matches(asked, by_key, n=_MOST_NEAREST, cutoff=_LOOKS_LIKE)
    return list(dict.fromkeys(by_key[k] for k in found))[:_MOST_NEAREST]


def difference(name: str, target: str) -> str:
    """What makes the model `name` another one than `target`, as the end of a sentence."""
    ours, theirs = base_name(name).split("-"), base_name(target).split("-")
    extra, missing = _without(ours, theirs), _without(theirs, ours)
    if extra and missing:
        return f"'{extra}' in place of '{missing}' makes it another model"
    if missing:
        return f"without '{missing}' it is another model"
    return f"'{extra or base_name(name)}' makes it another model"


def _without(words: list[str], others: list[str]) -> str:
    """The words that have no counterpart among the others, in any case, joined again."""
    unmatched, rest = [other.lower() for other in others], []
    for word in words:
        if word.lower() in unmatched:
            unmatched.remove(word.lower())
        else:
            rest.append(word)
    return "-".join(rest)


def _target(table: dict[str, Any]) -> KnownTarget:
    drafts = [_checked(KnownDraft, draft) for draft in table.get("draft", [])]
    values = {name: value for name, value in table.items() if name != "draft"}
    target = _checked(KnownTarget, {**values, "drafts": tuple(sorted(drafts, key=_preferred_first))})
    if not drafts:
        raise _malformed(target.name, "has no draft")
    return target


def _preferred_first(draft: KnownDraft) -> tuple[bool, int, bool]:
    """Sort key: official, then newer, then in DFlash's own layout. The file's order breaks ties."""
    return not draft.official, -draft.generation, draft.layout != "z-lab"


_SHAPES: dict[str, Any] = {
    "repo": str,
    "name": str,
    "licence": str,
    "refused": str,
    "official": bool,
    "gated": bool,
    "generation": (1, 2),
    "layout": get_args(Layout),
    "kind": get_args(Kind),
}
_LISTS = {"mirrors", "notes", "also", "alias"}


def _checked(cls: type[Any], table: dict[str, Any]) -> Any:
    """A `cls` from a table of the file, every key and value checked."""
    known = {field.name: field for field in fields(cls)}
    where = table.get("name") or table.get("repo") or f"a {cls.__name__} without a name"
    if unknown := table.keys() - known.keys():
        raise _malformed(where, f"has unknown keys: {', '.join(sorted(unknown))}")
    values = {}
    for name, value in table.items():
        shape = _SHAPES.get(name)
        if name in _LISTS:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise _malformed(where, f"{name} must be a list of texts, not {value!r}")
            value = tuple(value)
        elif isinstance(shape, tuple) and value not in shape:
            raise _malformed(where, f"{name} is one of {', '.join(map(str, shape))}, not {value!r}")
        elif isinstance(shape, type) and type(value) is not shape:
            raise _malformed(where, f"{name} must be a {shape.__name__}, not {value!r}")
        values[name] = value
    try:
        return cls(**values)
    except TypeError as error:
        raise _malformed(where, f"lacks a key: {error}") from error


def _malformed(where: str, what: str) -> DFlashError:
    return DFlashError(f"registry.toml: {where} {what}")
