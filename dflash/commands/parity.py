"""`benchmark --parity`: is every way of decoding on this pair the same as plain decoding?"""

from __future__ import annotations

from typing import Any

from ..bench.prompts import BenchPrompt
from ..cli import Console, Outcome
from ..config import DFlashConfig

_WORDS = {
    "identical": "every cell gave plain decoding's tokens",
    "near_tie": "cells part from plain decoding at near-ties only, where either token is right",
    "broken": "some cells part from plain decoding where the choice was clear: a fault",
    "proves_nothing": "the control, a rollback spoilt on purpose, went unnoticed: this run proves nothing",
}


def parity(
    console: Console, texts: list[BenchPrompt], length: int, model: str, draft: str | None, **places: Any
) -> Outcome:
    """Run the matrix of `bench.parity` with `length` tokens an answer. `places`: fields of `DFlashConfig`.

    The call succeeds whatever is found: the verdict is in the result.
    """
    from ..bench import parity as bench  # imports MLX: only once the call is known to be right
    from ..bench.race import tasks
    from ..runtime import DFlashRuntime

    config = DFlashConfig(**places)
    runtime = DFlashRuntime.from_pretrained(model, draft, config, progress=console.progress)
    todo, _ = tasks(runtime, texts, [length])
    matrix = bench.Parity(runtime, [task.ids for task in todo], length)
    found = []
    cells = list(matrix.cells())
    for number, cell in enumerate(cells, start=1):
        found.append(matrix.run(cell))
        console.event("cell", **found[-1].as_json())
        console.note(f"{number}/{len(cells)} {_name(cell)}: {found[-1].verdict}")
    facts = {"model": runtime.model, "draft": runtime.draft_name, "prompts": [task.id for task in todo]}
    result = bench.result(matrix, found, matrix.control(), facts)
    if result["verdict"] != "identical":
        console.warn(f"parity_{result['verdict']}", _WORDS[result["verdict"]])
    return Outcome("dflash.parity/1", result, summary=_WORDS[result["verdict"]], text=table(result))


def _name(cell: Any) -> str:
    return f"{cell.drafter}, width {cell.width}, {cell.sampler}"


def table(result: dict[str, Any]) -> str:
    """A line per cell, for people."""
    lines = [f"{'proposals':16} {'width':>8} {'sampler':10} verdict"]
    for cell in [*result["cells"], {**result["control"], "drafter": "(spoilt on purpose)"}]:
        line = f"{cell['drafter']:16} {cell['width']:>8} {cell['sampler']:10} {cell['verdict']}"
        if cell["position"] is not None:
            line += f" at token {cell['position']}, margin {cell['margin']:.3g} (near below {result['tie_margin']:.3g})"
        lines.append(line)
    return "\n".join(lines) + "\n"
