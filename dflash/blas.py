"""OpenBLAS in front of MLX's reference BLAS on Linux.

The `mlx[cpu]` wheel links a plain BLAS; a shared library loaded earlier with global symbols takes its
place. Measured: a 4096 x 1024 fp32 product over 16 rows took 59 ms without and 2.1 ms with OpenBLAS.
Must run before the first `import mlx.core`. Imports no MLX.
"""

from __future__ import annotations

import ctypes
import glob
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

REMEDY = "apt-get install -y libopenblas0-pthread"

# Where Debian, Fedora and Homebrew put it when the loader's own search does not find it.
_PLACES = (
    "/usr/lib/*/openblas-pthread/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/home/linuxbrew/.linuxbrew/opt/openblas/lib/libopenblas.so",
)


@dataclass(frozen=True)
class Blas:
    """What was found: `library` is the loaded file or None, `note` says why in a sentence."""

    library: str | None
    note: str
    needed: bool

    @property
    def missing(self) -> bool:
        return self.needed and self.library is None


_state: Blas | None = None


def preload() -> Blas:
    """Load OpenBLAS once, if this platform profits and the library exists. Never raises."""
    global _state
    if _state is None:
        _state = _load()
    return _state


def _load() -> Blas:
    if sys.platform != "linux":
        return Blas(None, "this platform brings its own BLAS", needed=False)
    if "mlx.core" in sys.modules:
        return Blas(None, "mlx was imported before dflash: too late to put OpenBLAS in front", needed=True)
    return first_that_loads(_candidates())


def first_that_loads(candidates: Iterable[str]) -> Blas:
    """Load the first of these libraries (sonames or paths) that exists, with its symbols in front."""
    for candidate in candidates:
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return Blas(candidate, "OpenBLAS is loaded in front of MLX", needed=True)
    note = f"OpenBLAS is not installed; with it a CPU is up to 20 times faster: {REMEDY}"
    return Blas(None, note, needed=True)


def _candidates() -> Iterator[str]:
    """The names that the loader knows where to find, then paths that it does not."""
    yield from ("libopenblas.so.0", "libopenblasp.so.0")
    for place in _PLACES:
        yield from sorted(glob.glob(place))
