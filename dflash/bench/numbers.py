"""Figures from measurements: medians, spreads, acceptance by position, widths along an answer. Numbers, no MLX."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..events import Cycle, Source

_BINS = 32  # points of a curve along an answer: a plot shows no more


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, most and the values themselves."""
    rounded = [round(value, 4) for value in values]
    middle = round(statistics.median(values), 4)
    return {"median": middle, "min": min(rounded), "max": max(rounded), "values": rounded}


def centre(values: Sequence[float]) -> dict[str, Any]:
    """Mean, median, least and number of `values`, of which there is at least one."""
    return {
        "mean": round(statistics.fmean(values), 4),
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "count": len(values),
    }


def by_position(cycles: Iterable[Cycle], source: Source) -> list[dict[str, Any]]:
    """For each slot after the anchor: cycles that got there, and in how many of them its proposal stood."""
    reached: Counter[int] = Counter()
    stood: Counter[int] = Counter()
    for cycle in cycles:
        if cycle.source == source:
            reached.update(range(1, min(cycle.accepted + 1, cycle.drafted) + 1))
            stood.update(range(1, cycle.accepted + 1))
    return [
        {
            "position": slot,
            "reached": reached[slot],
            "stood": stood[slot],
            "share": share(stood[slot], reached[slot]),
        }
        for slot in sorted(reached)
    ]


def along(cycles: Sequence[Cycle]) -> list[dict[str, Any]]:
    """Mean width and tokens per cycle over the answer, in at most 32 stretches of equal length in tokens."""
    total = sum(len(cycle.tokens) for cycle in cycles)
    stretch = max(1, -(-total // _BINS))
    bins: dict[int, list[Cycle]] = {}
    done = 0
    for cycle in cycles:
        bins.setdefault(done // stretch, []).append(cycle)
        done += len(cycle.tokens)
    return [
        {
            "token": index * stretch,
            "width": round(statistics.fmean(cycle.width for cycle in found), 3),
            "tokens_per_cycle": round(statistics.fmean(len(cycle.tokens) for cycle in found), 3),
        }
        for index, found in sorted(bins.items())
    ]


def widths(cycles: Iterable[Cycle]) -> dict[str, int]:
    """Passes by the number of tokens that they verified."""
    return {str(width): count for width, count in sorted(Counter(cycle.width for cycle in cycles).items())}


def share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
