"""What passes cost on this machine: measured once per pair, in seconds, by width."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from ..drafts.base import Draft
from ..targets.base import TargetAdapter

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_CONTEXT = 128  # positions in the caches while measuring; what a longer context adds is corrected in use
_REPEATS = 3
_TIE_PROMPT, _TIE_ROWS = 16, 8


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a target pass by width, and of a draft pass by proposals; between them, straight lines.

    Attributes:
        verify_s: (width, seconds), widths rising from 1.
        draft_s: (proposals, seconds), rising; empty without a draft.
        tie_margin: logits; see `tie_margin`.
        pair: what was measured, for people.
    """

    verify_s: tuple[tuple[int, float], ...]
    draft_s: tuple[tuple[int, float], ...]
    tie_margin: float = 0.0
    pair: str = ""

    @property
    def plain_s(self) -> float:
        """Of a step without a draft."""
        return self.verify_s[0][1]

    def cycle_s(self, width: int) -> float:
        """Of a cycle that verifies `width` tokens, at least 2."""
        return _between(self.verify_s, width) + _between(self.draft_s, width - 1)

    def save(self, file: Path) -> None:
        """Write to `file`, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(json.dumps(asdict(self)))
        part.replace(file)

    @classmethod
    def load(cls, file: Path) -> CostCurve | None:
        """The curve in `file`; None when there is none that can be read."""
        try:
            saved = json.loads(file.read_text())
            points = (tuple((int(n), float(s)) for n, s in saved[name]) for name in ("verify_s", "draft_s"))
            curve = cls(*points, float(saved["tie_margin"]), str(saved.get("pair", "")))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return curve if curve._is_sound() else None

    def _is_sound(self) -> bool:
        points = (*self.verify_s, *self.draft_s)
        return bool(self.verify_s) and self.tie_margin >= 0 and all(n > 0 and s > 0 for n, s in points)


def measure(
    target: TargetAdapter,
    draft: Draft | None,
    widest: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:
    """Time passes of `target` up to `widest` tokens, and of `draft`; takes some 50 target passes."""
    session = target.start(draft.taps if draft else ())
    features = session.forward(mx.zeros((1, _CONTEXT), mx.int32))
    drafter = draft.start(target) if draft else None
    if drafter is not None:
        drafter.observe(features.taps)
        mx.eval(drafter.arrays())
    mx.eval(session.arrays())

    def verify(width: int) -> None:
        hidden = session.forward(mx.zeros((1, width), mx.int32)).hidden
        mx.eval(mx.argmax(target.logits(hidden), axis=-1))
        session.rollback(1)

    def propose(count: int) -> None:
        mx.eval(drafter.propose(mx.zeros((1, 1), mx.int32), count).tokens)

    widths = sorted({width for width in _WIDTHS if width <= widest} | {widest})
    longest = draft.block_size - 1 if draft else 0
    counts = sorted({count for count in (1, 3, 7, 15) if count <= longest} | ({longest} if draft else set()))
    return CostCurve(
        tuple((width, _median_s(lambda w=width: verify(w), clock)) for width in widths),
        tuple((count, _median_s(lambda c=count: propose(c), clock)) for count in counts),
        tie_margin(target),
    )


def tie_margin(target: TargetAdapter) -> float:
    """Twice what the width of a pass changes in this target's logits: a choice that leads by less may fall either way.

    Measured on a few tokens of the target's own, run one by one and as one block.
    """
    prompt = mx.arange(_TIE_PROMPT)[None] % target.vocab_size
    singly, session, token = [], target.start(), prompt
    for _ in range(_TIE_ROWS + 1):
        logits = target.logits(session.forward(token).hidden[:, -1:]).astype(mx.float32)
        singly.append(logits)
        token = mx.argmax(logits, axis=-1)
    expected = mx.concatenate(singly[1:], axis=1)  # (1, rows, V)
    tokens = mx.argmax(mx.concatenate(singly[:-1], axis=1), axis=-1)
    session = target.start()
    session.forward(prompt)
    together = target.logits(session.forward(tokens).hidden).astype(mx.float32)
    return 2 * mx.max(mx.abs(together - expected)).item()


def _median_s(action: Callable[[], None], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(_REPEATS + 1):  # the first one warms up
        began = clock()
        action()
        times.append(clock() - began)
    return statistics.median(times[1:])


def _between(points: tuple[tuple[int, float], ...], at: int) -> float:
    """The value at `at`, on the line between the points around it; the last one's beyond them."""
    before = points[0]
    for point in points:
        if point[0] >= at:
            span = point[0] - before[0]
            share = (at - before[0]) / span if span else 0.0
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]
