#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = [
#   "mlx>=0.31.1,<0.34; sys_platform == 'darwin'",
#   "mlx[cpu]>=0.31.1,<0.34; sys_platform == 'linux'",
#   "mlx-lm>=0.31.1,<0.34",
#   "huggingface-hub>=0.34,<3",
#   "fire==0.7.1",
#   "jinja2>=3.1,<4",
#   "tqdm>=4.66,<5",
#   "tomli>=2; python_version < '3.11'",
# ]
# ///
"""Measure the speed of this engine against mlx-lm's. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash.cli import run
from dflash.commands.benchmark import benchmark

if __name__ == "__main__":
    sys.exit(run(benchmark, positional="compare"))
