"""Measured cost curves, kept per machine, pair, dtype and MLX version, under the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from .decoding.costs import CostCurve, measure, tie_margin
from .drafts.base import Draft
from .targets.base import TargetAdapter


def file_for(root: Path, pair: dict[str, Any]) -> Path:
    """Where the curve of `pair` on this machine is kept: names, geometry and dtypes, whatever sets its cost."""
    text = json.dumps({"pair": pair, "machine": machine(), "mlx": mx.__version__}, sort_keys=True)
    return root / "curves" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def machine() -> dict[str, Any]:
    """What of this machine decides how long passes take."""
    facts = {"machine": platform.machine(), "processor": platform.processor(), "cores": os.cpu_count()}
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    return {**facts, "device": str(mx.default_device()), **({"gpu": str(mx.device_info())} if on_gpu else {})}


class Measurements:
    """What is measured of a pair on this machine: when first asked for, then kept in `file` if there is one.

    `tell` hears of it before it takes its seconds.
    """

    def __init__(
        self,
        target: TargetAdapter,
        draft: Draft | None,
        widest: int,
        file: Path | None = None,
        pair: str = "",
    ):
        self._target, self._draft, self._widest, self._file, self._pair = target, draft, widest, file, pair
        self.tell: Callable[[str], None] = lambda message: None
        self._curve: CostCurve | None = None
        self._tie_margin: float | None = None

    @property
    def curve(self) -> CostCurve:
        """What passes cost here; to measure that takes seconds, once."""
        if self._known() is None:
            self.tell("measuring what passes of this pair cost here; once, then it is kept")
            self._curve = replace(measure(self._target, self._draft, self._widest), pair=self._pair)
            if self._file is not None:
                with contextlib.suppress(OSError):  # a cache that cannot be written costs a measurement a run
                    self._curve.save(self._file)
        return self._curve

    @property
    def tie_margin(self) -> float:
        """See `decoding.costs.tie_margin`."""
        if known := self._known():
            return known.tie_margin
        if self._tie_margin is None:
            self._tie_margin = tie_margin(self._target)
        return self._tie_margin

    def _known(self) -> CostCurve | None:
        if self._curve is None and self._file is not None:
            self._curve = CostCurve.load(self._file)
        return self._curve


def saved(root: Path) -> Iterator[tuple[Path, CostCurve]]:
    """All curves that are kept."""
    for file in sorted((root / "curves").glob("*.json")):
        if curve := CostCurve.load(file):
            yield file, curve


def clear(root: Path) -> int:
    """Remove all of them; returns how many there were."""
    files = list((root / "curves").glob("*.json"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)
