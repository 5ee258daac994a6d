"""`resolve_draft`: which draft a model has, why, whether both fit, and what to run next.

Looks at names, configs, headers and sizes; loads no weights. What the hub does not tell becomes a warning,
because the registry's answer stands without it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import contract, plan
from ..cli import Console, Outcome
from ..config import DraftBits, at_least
from ..contract import COUNT, TEXT, nullable, object_of
from ..errors import DraftNotFound, HubUnreachable, ModelIsDraft, UsageError
from ..models import registry
from ..models.registry import KnownDraft, Match
from ..models.store import cache_root

if TYPE_CHECKING:
    from ..models.survey import Survey

DEFAULT_CONTEXT = 4096  # a long question with a long answer, and about what drafts were trained on
Warn = Callable[[str, str], None]


def resolve_draft(
    console: Console,
    *,
    model: str | None = None,
    list: bool = False,
    draft: str | None = None,
    draft_bits: Literal["auto", "none", 8, 4] = "auto",
    context: int = DEFAULT_CONTEXT,
    offline: bool = False,
    cache_dir: Path | None = None,
) -> Outcome:
    """Say which draft belongs to a model, whether both fit in memory, and the command to run next.

    Examples:
      resolve_draft.py mlx-community/Qwen3-4B-4bit
      resolve_draft.py ./my-model --draft ./my-draft --context 16384
      resolve_draft.py --list

    Args:
      model: hub name, folder, .gguf file, or the embedded pair
      list: show every model that the registry knows
      draft: check this draft in place of the registry's
      draft_bits: plan with a packed draft (auto: if memory is short)
      context: tokens to plan memory for, prompt and answer together
      offline: use only what is on this machine
      cache_dir: where downloads and conversions are kept
    """
    if list and (model is not None or draft is not None):
        raise UsageError("--list shows everything: it takes neither a model nor --draft")
    if list:
        return listing()
    if model is None:
        raise UsageError("no model was named", "name one, or pass --list to see the known ones")
    at_least("context", context, 1)

    from ..models.survey import survey  # imports the hub's client: not needed for --list or a wrong call

    look = partial(survey, cache_dir=cache_dir)
    machine = plan.this_machine()
    how = {"draft_bits": draft_bits, "offline": offline, "cache_dir": cache_dir}
    result = answer(model, draft, context, look, machine, console.warn, **how)
    return Outcome(schema="dflash.resolve/1", result=result, text=render(result))


def listing() -> Outcome:
    """Every target of the registry with its drafts, compact."""
    rows = []
    for target in registry.entries():
        best = next(iter(target.runnable), None)
        row = {
            "target": target.alias[0] if target.alias else target.name,
            "kind": target.kind,
            "draft": best.repo if best else None,
            "generation": best.generation if best else None,
            "alternatives": [draft.repo for draft in target.runnable[1:]],
            "refused": [draft.repo for draft in target.refused],
        }
        rows.append(row)
    lines = [f"{row['target']:40} {row['draft'] or 'none that runs here'}" for row in rows]
    return Outcome(schema="dflash.registry/1", result={"targets": rows}, text="\n".join(lines))


def answer(
    model: str,
    draft: str | None,
    context: int,
    look: Callable[..., Survey],
    machine: plan.Machine,
    warn: Warn,
    *,
    draft_bits: DraftBits = "auto",
    offline: bool = False,
    cache_dir: Path | None = None,
) -> dict[str, Any]:
    """The result of `dflash.resolve/1`.

    Args:
        look: `survey`, or something with its signature.
        warn: takes (code, message) of what the reader should know.

    Raises:
        DraftNotFound: none is known, and none was given.
        ModelIsDraft: `model` is a draft.
        ModelNotFound, BadCheckpoint: a path that was named is missing or damaged.
    """
    match, target = _target(model, draft, look, offline)
    name = draft or match.draft
    unreachable = isinstance(target.problem, HubUnreachable)
    ours = look(name, "draft", offline=offline or unreachable)
    known = _known(name, match, warn)
    for problem in (target.problem, None if unreachable else ours.problem):
        if problem is not None:
            warn(problem.code, problem.message)
    memory = _memory(target, ours, machine, context, draft_bits, warn)
    pair = _pair(target, ours, known, warn)
    flags = ["--model", _as_named(target, target.name)]
    flags += ["--draft", _as_named(ours, draft)] if draft else []
    flags += ["--draft-bits", str(draft_bits)] * (draft_bits != "auto")
    flags += ["--offline"] * offline + (["--cache-dir", str(cache_root(cache_dir))] if cache_dir else [])
    return {
        "model": model,
        "draft": name,
        "reason": f"{name} was given with --draft" if draft else match.reason,
        "kind": _kind(target, match),
        **pair,
        **_from_registry(name, match, known),
        "notes": _notes(model, target, match, known),
        "local": {"model": _text(target.path), "draft": _text(ours.path)},
        "download": _download(target, ours),
        "memory": memory,
        "command": None if pair["compatible"] is False else command(flags, memory),
    }


def _target(
    model: str, draft: str | None, look: Callable[..., Survey], offline: bool
) -> tuple[Match | None, Survey]:
    """The registry's match, and what is known of the model itself."""
    from ..models import embedded
    from ..models.pairing import is_draft
    from ..models.sources import is_path

    match, miss = None, None
    try:
        match = registry.lookup(model)
    except DraftNotFound as error:
        miss = error
    if miss is not None and draft is None and not is_path(model):
        raise miss
    # A bare word is no hub name: what can be fetched is the original.
    bare = match is not None and "/" not in model and not is_path(model) and embedded.find(model) is None
    target = look(match.target if bare else model, "model", offline=offline)
    if target.config is not None and is_draft(target.config):
        raise ModelIsDraft(f"{model} is a draft, not a model that answers by itself", model=model)
    if miss is not None and draft is None:
        raise miss
    return match, target


def _known(name: str, match: Match | None, warn: Warn) -> KnownDraft | None:
    """The registry's entry for the draft `name`, its target's own entries first."""
    own = tuple(entry for entry in registry.entries() if match and entry.name == match.target)
    found = registry.find_draft(name, own) or registry.find_draft(name)
    if found is None:
        return None
    target, known = found
    if match and target.name != match.target:
        warn("draft_for_other_target", f"{name} is known as a draft for {target.name}, not {match.target}")
    return known


def _pair(target: Survey, draft: Survey, known: KnownDraft | None, warn: Warn) -> dict[str, Any]:
    """Whether the two belong together: by the registry's word, else by both configs if they are at hand."""
    from ..models.pairing import check_pair

    facts = {"generation": known.generation if known else None, "compatible": None, "checks": []}
    if known and known.obstacle:
        warn("unsupported_draft", f"{draft.name} is not run: {known.obstacle}")
        return facts | {"compatible": False, "checks": [known.obstacle]}
    if target.config is None or draft.config is None:
        return facts
    verdict = check_pair(target.config, draft.config)
    if verdict.code is not None:
        warn(verdict.code, verdict.reasons[0])
    if verdict.generation is not None:
        facts["generation"] = verdict.generation
    return facts | {"compatible": verdict.compatible, "checks": [*verdict.reasons]}


def _kind(target: Survey, match: Match | None) -> str:
    told = plan.kind(target.config) if target.config else "unknown"
    return match.kind if told == "unknown" and match else told


def _from_registry(name: str, match: Match | None, known: KnownDraft | None) -> dict[str, Any]:
    """What the registry says of the target's drafts and of the chosen one."""
    others = [draft for draft in match.alternatives if draft.repo != name] if match else []
    never = match.refused if match else ()
    return {
        "target": match.target if match else None,
        "layout": known.layout if known else None,
        "licence": known.licence if known else None,
        "gated": {"target": match.target_gated if match else None, "draft": known.gated if known else None},
        "mirrors": list(known.mirrors) if known else [],
        "alternatives": [
            {"draft": d.repo, "generation": d.generation, "official": d.official} for d in others
        ],
        "refused": [{"draft": d.repo, "reason": d.obstacle} for d in never],
    }


def _notes(model: str, target: Survey, match: Match | None, known: KnownDraft | None) -> list[str]:
    notes = []
    if target.name != model:
        notes.append(f"{model} names no owner: the command takes the original, {target.name}")
    if match and known and known.repo == match.draft:
        return [*notes, *match.notes]
    return [*notes, *(known.notes if known else ())]


def _download(target: Survey, draft: Survey) -> dict[str, int] | None:
    if target.download_bytes is None or draft.download_bytes is None:
        return None
    total = target.download_bytes + draft.download_bytes
    return {
        "model_bytes": target.download_bytes,
        "draft_bytes": draft.download_bytes,
        "total_bytes": total,
    }


def _memory(
    target: Survey, draft: Survey, machine: plan.Machine, context: int, bits: DraftBits, warn: Warn
) -> dict[str, Any] | None:
    """The memory plan, in the first of the ways in which loading would run the pair that fits."""
    from ..models.draft_bits import ladder

    if None in (target.config, target.stored_bytes, draft.config, draft.stored_bytes):
        if not (target.problem or draft.problem):  # those said why already
            warn("memory_unknown", f"no memory plan before {target.name} is fetched or converted")
        return None
    tried = []
    for step in ladder(machine, bits, draft.config):
        width = step.machine.run_dtype
        ours = _weights(draft, width, step.bits)
        tried.append(made := plan.plan(_weights(target, width), ours, step.machine, context))
        if made.fits:
            break
    if not made.fits:
        warn("does_not_fit", made.reason)
    elif step.bits and step.bits != bits:
        warn("draft_packed", f"the draft runs in {step.bits} bits: otherwise the pair {tried[0].reason}")
    elif step.machine != machine:
        warn("runs_as_stored", f"weights run as they are stored: as fp32 the pair {tried[0].reason}")
    facts = {
        "device": machine.device,
        "run_dtype": step.machine.run_dtype or "stored",
        "draft_bits": step.bits,
    }
    return facts | asdict(made) | {"gaps": [*made.gaps]}


def _weights(side: Survey, run_dtype: str | None, bits: int | None = None) -> plan.Weights:
    from ..models import draft_bits

    if side.tensors is not None:
        size = draft_bits.weight_bytes(side.tensors, side.config.get("quantization"), run_dtype, bits)
    else:
        size = draft_bits.estimated_weight_bytes(side.stored_bytes, side.config, run_dtype, bits)
    return plan.Weights(side.config, size, side.stored_bytes)


def command(flags: list[str], memory: dict[str, Any] | None) -> str:
    """The call that generates with these flags, in a context that fits if the planned one does not."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "generate.py"
    start = ["uv", "run", str(script)] if script.is_file() else ["dflash", "generate"]
    if memory and not memory["fits"] and memory["largest_context"]:
        flags = [*flags, "--max-ctx", str(memory["largest_context"])]
    return shlex.join([*start, *flags, "--prompt", "Hello"])


def _as_named(side: Survey, name: str) -> str:
    """`name`, as an absolute path if it is one: the command then works from any folder."""
    return str(side.path) if side.path and Path(name).expanduser().exists() else name


def render(result: dict[str, Any]) -> str:
    """The result for people."""
    size, memory = result["download"], result["memory"]
    generation = f" (generation {result['generation']})" if result["generation"] else ""
    sides = ", ".join(f"{side} {path or 'no'}" for side, path in result["local"].items())
    fields = {
        "draft": f"{result['draft']}{generation}",
        "why": result["reason"],
        "kind": result["kind"],
        "compatible": {True: "yes", False: "no", None: "not known yet"}[result["compatible"]],
        "on this disk": sides,
        "download": plan.gigabytes(size["total_bytes"]) if size else "not known",
        "memory": memory["reason"] if memory else "not known",
        "alternatives": ", ".join(other["draft"] for other in result["alternatives"]),
        "notes": "; ".join(result["notes"]),
        "next": result["command"],
    }
    lines = [f"  {name:13} {value}" for name, value in fields.items() if value]
    return "\n".join([result["model"], *lines])


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _list_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


_FLAG = {"type": "boolean"}
_KIND = {"enum": ["attention", "sliding", "hybrid", "unknown"]}
_GENERATION = {"enum": [1, 2]}
_MEMORY = object_of(
    {
        "device": {"enum": ["cpu", "gpu"]},
        "run_dtype": {"enum": ["float32", "stored"]},
        "draft_bits": nullable({"enum": [8, 4]}),
        "context": COUNT,
        "target_bytes": COUNT,
        "draft_bytes": COUNT,
        "cache_bytes": COUNT,
        "cache_bytes_per_token": COUNT,
        "transient_bytes": COUNT,
        "loading_bytes": COUNT,
        "needed_bytes": COUNT,
        "memory_bytes": COUNT,
        "usable_bytes": COUNT,
        "fits": _FLAG,
        "largest_context": COUNT,
        "reason": TEXT,
        "gaps": _list_of(TEXT),
    }
)
_RESOLVE = object_of(
    {
        "model": TEXT,
        "target": nullable(TEXT),
        "draft": TEXT,
        "reason": TEXT,
        "generation": nullable(_GENERATION),
        "layout": nullable({"enum": ["z-lab", "speculators", "other"]}),
        "kind": _KIND,
        "compatible": nullable(_FLAG),
        "checks": _list_of(TEXT),
        "mirrors": _list_of(TEXT),
        "alternatives": _list_of(object_of({"draft": TEXT, "generation": _GENERATION, "official": _FLAG})),
        "refused": _list_of(object_of({"draft": TEXT, "reason": TEXT})),
        "notes": _list_of(TEXT),
        "licence": nullable(TEXT),
        "gated": object_of({"target": nullable(_FLAG), "draft": nullable(_FLAG)}),
        "local": object_of({"model": nullable(TEXT), "draft": nullable(TEXT)}),
        "download": nullable(object_of({"model_bytes": COUNT, "draft_bytes": COUNT, "total_bytes": COUNT})),
        "memory": nullable(_MEMORY),
        "command": nullable(TEXT),
    }
)
_REGISTRY = object_of(
    {
        "targets": _list_of(
            object_of(
                {
                    "target": TEXT,
                    "kind": _KIND,
                    "draft": nullable(TEXT),
                    "generation": nullable(_GENERATION),
                    "alternatives": _list_of(TEXT),
                    "refused": _list_of(TEXT),
                }
            )
        )
    }
)
contract.register("dflash.resolve/1", _RESOLVE)
contract.register("dflash.registry/1", _REGISTRY)
