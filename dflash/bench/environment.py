"""Where a measurement was made: everything that may explain why another one differs. No secrets, no host names."""

from __future__ import annotations

import os
import platform
from collections import Counter
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import blas, plan
from ..version import __version__

_PACKAGES = ("mlx", "mlx-lm", "transformers", "numpy")


def describe(model: nn.Module) -> dict[str, Any]:
    """The environment of a measurement of `model`, as JSON values. `load_average` is that of the last minute."""
    found = blas.preload()
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    return {
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": plan.system_memory(),
        "device": "gpu" if on_gpu else "cpu",
        "gpu": gpu_name() if on_gpu else None,
        "blas": Path(found.library).name if found.library else found.note,
        "load_average": load_average(),
        "python": platform.python_version(),
        "versions": {"dflash": __version__} | {name: _version(name) for name in _PACKAGES},
        **weights(model),
    }


def weights(model: nn.Module) -> dict[str, Any]:
    """The dtype that most floating values of a model have, whether weights are packed, and their bytes."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    sizes: Counter[str] = Counter()
    for array in arrays:
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[str(array.dtype).rpartition(".")[2]] += array.size
    packed = any(array.dtype == mx.uint32 for array in arrays)
    return {
        "dtype": sizes.most_common(1)[0][0] if sizes else "unknown",
        "quantised": packed,
        "weight_bytes": sum(array.nbytes for array in arrays),
    }


def load_average() -> float | None:
    """Of the last minute; None where the system does not tell."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def gpu_name() -> str:
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or "unknown")


def processor() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
