"""Measured cost curves, kept per machine, pair, dtype and MLX version, under the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from .decoding.costs import CostCurve


def file_for(root: Path, pair: dict[str, Any]) -> Path:
    """Where the curve of `pair` on this machine is kept: names, geometry and dtypes, whatever sets its cost."""
    text = json.dumps({"pair": pair, "machine": machine(), "mlx": mx.__version__}, sort_keys=True)
    return root / "curves" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def machine() -> dict[str, Any]:
    """What of this machine decides how long passes take."""
    facts = {"machine": platform.machine(), "processor": platform.processor(), "cores": os.cpu_count()}
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    return {**facts, "device": str(mx.default_device()), **({"gpu": str(mx.device_info())} if on_gpu else {})}


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
