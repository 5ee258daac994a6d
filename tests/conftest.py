"""Shared by all tests. `dflash` comes first, so that OpenBLAS is in place before MLX is imported."""

import dflash  # noqa: F401  (must precede mlx)
