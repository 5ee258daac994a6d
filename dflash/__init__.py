"""DFlash on MLX: lossless block-diffusion speculative decoding. The public API and nothing else."""

from __future__ import annotations

import importlib
from typing import Any

from . import blas

# MLX binds its BLAS when it is first imported, so this comes before any module that imports it.
blas.preload()

_HOMES = {
    "DFlashConfig": "config",
    "DFlashError": "errors",
    "DFlashRuntime": "runtime",
    "GenerationResult": "runtime",
    "SamplingParams": "config",
    "__version__": "version",
}

__all__ = [
    "DFlashConfig",
    "DFlashError",
    "DFlashRuntime",
    "GenerationResult",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: `import dflash` costs no MLX import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
