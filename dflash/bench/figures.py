"""From races to the result: a record for each prompt and length, and a summary of them. Ratios first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..result import Proposals
from . import numbers
from .race import Race, Timed

# Logits of about 16 to 32 differ by 1/8 from their bf16 neighbours, and both of the two best may be off.
_NEAR_TIE = {"float32": 0.0, "float16": 0.06, "bfloat16": 0.5}
# ids of a text -> how far apart the two likeliest next tokens are, in logits
Margin = Callable[[list[int]], float]


def record(race: Race, margin: Margin) -> dict[str, Any]:
    """One entry of the result's `runs`."""
    task, ours = race.task, race.dflash[0]
    return {
        "id": task.id,
        "kind": task.kind,
        "length": task.length,
        "prompt_tokens": len(task.ids),
        "tokens": len(ours.tokens),
        "ended": race.ended,
        "ratio": numbers.spread(race.ratios),
        "dflash": _took(race.dflash),
        "baseline": _took(race.baseline),
        "mode": _mode(ours),
        "speculation": speculation(ours),
        "first_difference": _first_difference(race, margin),
    }


def _took(repeats: Sequence[Timed]) -> dict[str, Any]:
    return {
        "tokens_per_s": numbers.spread([one.tokens_per_s for one in repeats]),
        "decode_s": numbers.spread([one.decode_s for one in repeats]),
        "prefill_s": numbers.spread([one.prefill_s for one in repeats]),
        "peak_bytes": max(one.peak_bytes for one in repeats),
    }


def _mode(timed: Timed) -> str:
    """What ran, as `generate` names it."""
    sources = {cycle.source for cycle in timed.cycles if cycle.drafted}
    return next((source for source in ("dflash", "lookup") if source in sources), "baseline")


def speculation(timed: Timed) -> dict[str, Any]:
    """What was proposed and what stood, in one answer."""
    made = Proposals()
    for cycle in timed.cycles:
        if cycle.drafted:
            made = made.plus(cycle)
    return {
        "cycles": len(timed.cycles),
        "accepted_length": numbers.share(len(timed.tokens) - 1, len(timed.cycles)),
        "acceptance_rate": numbers.share(made.accepted, len(timed.tokens)),
        "drafted_tokens": made.drafted,
        "accepted_tokens": made.accepted,
        "near_ties": sum(cycle.near_ties for cycle in timed.cycles),
        "width_histogram": numbers.widths(timed.cycles),
        "by_position": {source: numbers.by_position(timed.cycles, source) for source in ("dflash", "lookup")},
        "along": numbers.along(timed.cycles),
    }


def _first_difference(race: Race, margin: Margin) -> dict[str, Any] | None:
    """Where the answers part, None if they are equal, and how near a tie the baseline's choice was there."""
    stock, ours = race.baseline[0].tokens, race.dflash[0].tokens
    if stock == ours:
        return None
    same = next(
        (i for i, (a, b) in enumerate(zip(stock, ours, strict=False)) if a != b), min(len(stock), len(ours))
    )
    return {
        "index": same,
        "baseline": stock[same] if same < len(stock) else None,
        "dflash": ours[same] if same < len(ours) else None,
        "margin": round(margin([*race.task.ids, *stock[:same]]), 5),
    }


def summary(runs: Sequence[dict[str, Any]], dtype: str, tie_margin: float = 0.0) -> dict[str, Any]:
    """Figures over all runs, of which there is at least one; `dtype` and `tie_margin` as for `agreement`."""
    ratios = [run["ratio"]["median"] for run in runs]
    return {
        **_group(runs),
        "below_one": sum(ratio < 1 for ratio in ratios),
        "by_kind": {kind: _group(found) for kind, found in _grouped(runs, "kind").items()},
        "by_length": {
            str(length): _group(found) for length, found in sorted(_grouped(runs, "length").items())
        },
        "tokens": agreement(runs, dtype, tie_margin),
    }


def _group(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "ratio": numbers.centre([run["ratio"]["median"] for run in runs]),
        "accepted_length": numbers.centre([run["speculation"]["accepted_length"] for run in runs]),
        "dflash_tokens_per_s": numbers.centre([run["dflash"]["tokens_per_s"]["median"] for run in runs]),
        "baseline_tokens_per_s": numbers.centre([run["baseline"]["tokens_per_s"]["median"] for run in runs]),
    }


def _grouped(runs: Sequence[dict[str, Any]], name: str) -> dict[Any, list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(run[name], []).append(run)
    return groups


def agreement(runs: Sequence[dict[str, Any]], dtype: str, tie_margin: float = 0.0) -> dict[str, Any]:
    """Whether both gave the same tokens. "near_ties": they parted only where rounding to `dtype` may decide.

    That is where the baseline's two likeliest tokens are nearer than the dtype's own error, or than `tie_margin`, the
    measured one of this target (`decoding.costs.tie_margin`). In fp32 nothing may part: any difference is "differs".
    """
    bound = max(_NEAR_TIE.get(dtype, 0.0), tie_margin) if dtype != "float32" else 0.0
    margins = [found["margin"] for run in runs if (found := run["first_difference"])]
    far = [margin for margin in margins if margin >= bound]
    return {
        "verdict": "differs" if far else "near_ties" if margins else "equal",
        "equal_runs": len(runs) - len(margins),
        "different_runs": len(margins),
        "near_tie_below": bound,
        "largest_margin": max(margins, default=None),
    }
