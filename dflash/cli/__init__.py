"""The wrapper in front of Fire: words from a shell become one checked call, and a call one envelope.

The scripts and the `dflash` command share it. A command is a function of a `Console` and keyword arguments
that returns an `Outcome`; its annotations are the types of its flags and its docstring is its help:

    Say what this does, in one line.

    Examples:
      name.py "a word" --count 3

    Args:
      count: one line for each flag, under the name of its parameter; this block comes last

Fire itself runs a function and only then looks at what it did not understand, and it takes text for Python
literals. So every word is read (`flags`) and every value converted first; Fire gets a call that needs nothing
more (`entry`). What a command does is none of this package's business (`dflash.commands`), nor the shape of
an envelope (`dflash.contract`). Nothing here imports MLX: `--help` and refusals answer at once.
"""

from .console import Console, Outcome
from .entry import COMMANDS, main, run
from .signals import Interrupted

__all__ = ["COMMANDS", "Console", "Interrupted", "Outcome", "main", "run"]
