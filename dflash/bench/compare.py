"""Two saved results of `dflash.benchmark/1` side by side: how the speed ratio changed, and what else did. No MLX."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import BadValue, NotFound, UsageError

_SCHEMA = "dflash.benchmark/1"
_MOMENTARY = {
    "time_utc",
    "load_average",
    "load_average_after",
}  # never the same: a load is compared by its size
_BUSY = 0.25  # of the cores: a difference in load that slows one of the two


def load(file: Path) -> dict[str, Any]:
    """The result in a file that `--output` wrote.

    Raises:
        NotFound: it cannot be read.
        BadValue: it holds something else.
    """
    try:
        envelope = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFound(f"cannot read {file.absolute()}: {error.strerror}") from error
    except ValueError as error:
        raise BadValue(f"{file} is not JSON: {error}") from error
    if not isinstance(envelope, dict) or envelope.get("schema") != _SCHEMA or not envelope.get("ok"):
        raise BadValue(f"{file} is not a benchmark's result ({_SCHEMA})", "write one with --output FILE")
    return envelope["result"]


def compare(file_a: Path, file_b: Path) -> dict[str, Any]:
    """The result of `dflash.benchmark-comparison/1`.

    Ratios are those of DFlash over its own baseline, so that a slower machine alone changes nothing. Only runs that
    both files have (prompt and length) are compared.
    """
    a, b = load(file_a), load(file_b)
    runs_a, runs_b = _by_name(a), _by_name(b)
    shared = [name for name in runs_a if name in runs_b]
    if not shared:
        raise UsageError("the two results have no run in common", "measure the same --kinds and --lengths")
    pairs = [(runs_a[name], runs_b[name]) for name in shared]
    return {
        "a": str(file_a.absolute()),
        "b": str(file_b.absolute()),
        "ratio": _change(pairs),
        "by_kind": _grouped(pairs, "kind"),
        "by_length": _grouped(pairs, "length"),
        "by_run": [
            {"id": one["id"], "length": one["length"], **_change([(one, other)])} for one, other in pairs
        ],
        "only_in_a": [_label(name) for name in runs_a if name not in runs_b],
        "only_in_b": [_label(name) for name in runs_b if name not in runs_a],
        "differences": list(_differences(a, b)),
    }


def _by_name(result: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(run["id"], run["length"]): run for run in result["runs"]}


def _label(name: tuple[str, int]) -> str:
    return f"{name[0]} at {name[1]} tokens"


Pairs = Sequence[tuple[dict[str, Any], dict[str, Any]]]


def _change(pairs: Pairs) -> dict[str, float]:
    """Mean ratios of both, and the geometric mean of b's over a's."""
    a, b = [one["ratio"]["median"] for one, _ in pairs], [other["ratio"]["median"] for _, other in pairs]
    change = statistics.geometric_mean(y / x for x, y in zip(a, b, strict=True))
    return {
        "ratio_of_ratios": round(change, 4),
        "a": round(statistics.fmean(a), 4),
        "b": round(statistics.fmean(b), 4),
    }


def _grouped(pairs: Pairs, name: str) -> dict[str, dict[str, float]]:
    groups = dict.fromkeys(one[name] for one, _ in pairs)
    return {str(group): _change([pair for pair in pairs if pair[0][name] == group]) for group in groups}


def _differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What besides the speeds differs: what ran, how, and where. Loads count when one machine was busier."""
    for name in ("model", "draft", "baseline", "replay"):
        yield from _difference(name, a[name], b[name])
    for part in ("settings", "environment"):
        for name in sorted((a[part].keys() | b[part].keys()) - _MOMENTARY):
            yield from _difference(f"{part}.{name}", a[part].get(name), b[part].get(name))
    busy = [result["environment"].get("load_average") or 0.0 for result in (a, b)]
    if abs(busy[0] - busy[1]) > _BUSY * (a["environment"].get("cores") or 1):
        yield {"what": "environment.load_average", "a": busy[0], "b": busy[1]}


def _difference(what: str, a: Any, b: Any) -> Iterator[dict[str, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted(a.keys() | b.keys()):
            yield from _difference(f"{what}.{name}", a.get(name), b.get(name))
    elif a != b:
        yield {"what": what, "a": a, "b": b}
