"""OpenBLAS in front of MLX's own BLAS: found once, missed with a remedy, and never too late in silence."""

import ctypes
import subprocess
import sys

import pytest

from dflash import blas

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux wheels bring the slow BLAS")
ANY_LIBRARY = {"linux": "libc.so.6", "darwin": "/usr/lib/libSystem.B.dylib"}[sys.platform]


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_preloading_again_gives_the_same_answer():
    assert blas.preload() is blas.preload()


def test_a_missing_library_is_named_with_its_remedy():
    found = blas.first_that_loads(["libnowhere.so.0", "/nowhere/libopenblas.so"])
    assert found.missing
    assert found.library is None
    assert blas.REMEDY in found.note


def test_the_first_library_that_loads_is_taken():
    found = blas.first_that_loads(["libnowhere.so.0", ANY_LIBRARY, "libnever.so.0"])
    assert not found.missing
    assert found.library == ANY_LIBRARY


def test_a_platform_with_its_own_blas_misses_nothing():
    assert not blas.Blas(None, "not needed", needed=False).missing


@linux
def test_mlx_imported_first_is_reported_as_too_late():
    state = python("import mlx.core; from dflash import blas; print(blas.preload())")
    assert "library=None" in state
    assert "too late" in state


@linux
def test_openblas_is_in_place_before_mlx_is_imported():
    try:
        ctypes.CDLL("libopenblas.so.0")
    except OSError:
        pytest.skip("OpenBLAS is not installed here")
    code = "import dflash; maps = open('/proc/self/maps').read(); print('openblas' in maps, 'libmlx' in maps)"
    assert python(code) == "True False"


def test_importing_dflash_imports_nothing_heavy():
    heavy = {"fire", "mlx", "mlx_lm", "numpy", "transformers"}
    assert python(f"import sys, dflash; print({heavy} & {{*sys.modules}})") == "set()"
