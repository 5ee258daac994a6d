"""Before weights are read: does the pair fit this machine, and in which width do its weights run.

On a CPU fp32 is the fast dtype, so weights are widened to it where the memory allows, and run as stored where it
does not. What fits neither way is refused here, with both numbers, before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .. import plan
from ..errors import DoesNotFit
from ..events import Notice
from . import headers

# Room for a short conversation. Longer ones are the request's affair: the context limit is checked there.
LEAST_CONTEXT = 1024


@dataclass(frozen=True)
class Fit:
    """How the pair runs: `widen` to fp32 or as stored, and what the reader of a result should know of it."""

    widen: bool
    notice: Notice | None = None


def fit(
    target: Path, draft: Path | None, *, context: int | None = None, machine: plan.Machine | None = None
) -> Fit:
    """Decide how the models in two folders run at `context` tokens (by default room for a short conversation).

    Raises:
        DoesNotFit: the pair needs more memory than there is; the message names need and limit in bytes.
    """
    machine = machine or plan.this_machine()
    tokens = context or LEAST_CONTEXT
    as_planned = _plan(target, draft, machine, tokens)
    if as_planned.fits:
        return Fit(widen=machine.run_dtype is not None)
    stored = replace(machine, run_dtype=None)
    as_stored = _plan(target, draft, stored, tokens)
    if not as_stored.fits:
        raise DoesNotFit(
            f"the pair {as_stored.reason}",
            _hint(as_stored),
            needed_bytes=as_stored.needed_bytes,
            usable_bytes=as_stored.usable_bytes,
            largest_context=as_stored.largest_context,
        )
    return Fit(
        False,
        Notice("runs_as_stored", f"weights run as they are stored: as fp32 the pair {as_planned.reason}"),
    )


def _plan(target: Path, draft: Path | None, machine: plan.Machine, tokens: int) -> plan.MemoryPlan:
    return plan.plan(
        _weights(target, machine), None if draft is None else _weights(draft, machine), machine, tokens
    )


def _weights(folder: Path, machine: plan.Machine) -> plan.Weights:
    config, tensors = headers.load_config(folder), headers.tensors(folder)
    running = plan.weight_bytes(tensors, config.get("quantization"), machine.run_dtype)
    return plan.Weights(config, running, sum(info.nbytes for info in tensors.values()))


def _hint(found: plan.MemoryPlan) -> str:
    if found.largest_context:
        return f"pass --max-ctx {found.largest_context}, or use a smaller or more strongly quantised model"
    return "use a smaller or more strongly quantised model"
