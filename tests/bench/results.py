"""Results of `dflash.benchmark/1` from hand-made races, for tests of what is made from results."""

from __future__ import annotations

from typing import Any

from dflash.bench import figures
from dflash.bench.race import Race, Task, Timed
from dflash.bench.settings import BenchSettings
from dflash.events import Cycle

ENVIRONMENT = {
    "time_utc": "2027-01-02T03:04:05+00:00",
    "machine": "x86_64",
    "system": "Linux 6",
    "processor": "A <fast> & small one",
    "cores": 2,
    "memory_bytes": 1 << 34,
    "device": "cpu",
    "gpu": None,
    "blas": "libopenblas.so.0",
    "load_average": 0.1,
    "load_average_after": 0.4,
    "python": "3.11.7",
    "versions": {"dflash": "0.1.0", "mlx": "0.32.4", "numpy": None},
    "dtype": "float32",
    "quantised": False,
    "weight_bytes": 1 << 29,
}


def race(kind: str, length: int, seconds: float) -> Race:
    """Cycles of width 8 that accept three proposals, then one copy; `seconds` against one of the baseline."""
    cycles = [Cycle((1, 2, 3, 4), 7, 3, 8, 0.1)] * ((length - 1) // 4) + [
        Cycle((5, 6, 7), 15, 2, 16, 0.1, "lookup")
    ]
    tokens = (0, *(token for cycle in cycles for token in cycle.tokens))
    ours = Timed(tokens, 0.1, seconds, 1 << 30, tuple(cycles), (0.1,) * len(cycles))
    return Race(Task(f"{kind}-1", kind, [1], length), (Timed(tokens, 0.1, 1.0, 1 << 29),), (ours,))


def result(seconds: float = 0.5, lengths: tuple[int, ...] = (16, 64), **changes: Any) -> dict[str, Any]:
    runs = [
        figures.record(race(kind, length, seconds), lambda ids: 0.0)
        for kind in ("chat", "code")
        for length in lengths
    ]
    whole = {
        "replay": None,
        "complete": True,
        "summary": figures.summary(runs, "float32"),
        "model": "target <&>",
        "draft": "draft",
        "baseline": "mlx_lm.stream_generate",
        "settings": BenchSettings(lengths=lengths).as_json(),
        "runs": runs,
        "left_out": [],
        "cycle_efficiency": None,
        "curve": {"verify_ms": {"1": 1.0, "8": 2.5}, "draft_ms": {"7": 0.5}, "tie_margin": 0.0},
        "environment": ENVIRONMENT,
        "measured_s": 3.5,
        "report": None,
    }
    return whole | changes
