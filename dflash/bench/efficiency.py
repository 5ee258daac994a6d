"""What a cycle costs beyond its two passes: measured cycles over a draft pass and a verify pass timed alone.

The passes are timed as the width policy's cost curve times them (`decoding.costs`): evaluated one by one, medians, but
at the context and width that the measured cycles had.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..drafts.base import Draft
from ..targets.base import TargetAdapter
from .race import Race

_CHUNK = 512
_REPEATS = 7


def cycle_efficiency(
    target: TargetAdapter, draft: Draft | None, races: Sequence[Race], waited_s: float = 0.0
) -> dict[str, Any] | None:
    """Of the width that most cycles had; None without cycles that drafted.

    `cycle_s` is the median time from one cycle's end to the next one's, text and all; `ratio` puts it over `verify_s` +
    `draft_s`. Without a `draft` (replays), `draft_s` is what its proposals waited, `waited_s`.
    """
    found = [
        (cycle.width, gap, len(race.task.ids) + len(timed.tokens) // 2)
        for race in races
        for timed in race.dflash
        for cycle, gap in zip(timed.cycles, timed.gaps_s, strict=True)
        if cycle.drafted and cycle.source == "dflash"
    ]
    if not found:
        return None
    width = Counter(width for width, _, _ in found).most_common(1)[0][0]
    gaps = [gap for one, gap, _ in found if one == width]
    context = int(statistics.median(context for one, _, context in found if one == width))
    verify_s, draft_s = passes_alone(target, draft, context, width)
    draft_s = draft_s if draft is not None else waited_s
    cycle_s = statistics.median(gaps)
    return {
        "width": width,
        "context": context,
        "cycles": len(gaps),
        "cycle_s": round(cycle_s, 6),
        "verify_s": round(verify_s, 6),
        "draft_s": round(draft_s, 6),
        "ratio": round(cycle_s / (verify_s + draft_s), 4),
    }


def passes_alone(target: TargetAdapter, draft: Draft | None, context: int, width: int) -> tuple[float, float]:
    """Seconds of a verify pass over `width` tokens behind `context` of them, and of a draft pass for it."""
    session = target.start(draft.taps if draft is not None else ())
    drafter = draft.start(target) if draft is not None else None
    for begin in range(0, context, _CHUNK):
        features = session.forward(mx.zeros((1, min(_CHUNK, context - begin)), mx.int32))
        if drafter is not None:
            drafter.observe(features.taps)
            mx.eval(drafter.arrays())
        mx.eval(session.arrays())

    def verify() -> None:
        hidden = session.forward(mx.zeros((1, width), mx.int32)).hidden
        mx.eval(mx.argmax(target.logits(hidden), axis=-1))
        session.rollback(1)

    def propose() -> None:
        mx.eval(drafter.propose(mx.zeros((1, 1), mx.int32), width - 1).tokens)

    return _median_s(verify), _median_s(propose) if drafter is not None else 0.0


def _median_s(action: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS + 2):  # the first two warm up
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])
