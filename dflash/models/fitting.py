"""Before weights are read: does the pair fit this machine, and in which width do its weights run.

On a CPU fp32 is the fast dtype, so weights are widened to it where the memory allows, and run as stored where it
does not; last of all the draft is packed. What fits in no way is refused here, with both numbers, before anything
is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .. import plan
from ..config import DraftBits
from ..errors import DoesNotFit
from ..events import Notice
from . import headers
from .draft_bits import Step, ladder, reason, weight_bytes

# Room for a short conversation. Longer ones are the request's affair: the context limit is checked there.
LEAST_CONTEXT = 1024


@dataclass(frozen=True)
class Fit:
    """How the pair runs, and what the reader of a result should know of it.

    Attributes:
        widen: turn weights into fp32; else they run as stored.
        draft_bits: pack the draft's linear layers to so many bits; None: they are not packed.
        draft_reason: why the draft runs in this width; empty without one.
    """

    widen: bool
    notice: Notice | None = None
    draft_bits: int | None = None
    draft_reason: str = ""


def fit(
    target: Path,
    draft: Path | None,
    *,
    context: int | None = None,
    machine: plan.Machine | None = None,
    draft_bits: DraftBits = "auto",
) -> Fit:
    """Decide how the models in two folders run at `context` tokens (by default room for a short conversation).

    Raises:
        DoesNotFit: the pair needs more memory than there is; the message names need and limit in bytes.
    """
    machine = machine or plan.this_machine()
    settings = None if draft is None else headers.load_config(draft)
    tried = []
    for step in ladder(machine, draft_bits, settings):
        made = _plan(target, draft, step, context or LEAST_CONTEXT)
        tried.append(made)
        if made.fits:
            why = reason(step, draft_bits, settings, tried[0]) if settings else ""
            widen = step.machine.run_dtype is not None
            return Fit(widen, _notice(step, machine, draft_bits, tried[0]), step.bits, why)
    raise DoesNotFit(
        f"the pair {made.reason}",
        _hint(made),
        needed_bytes=made.needed_bytes,
        usable_bytes=made.usable_bytes,
        largest_context=made.largest_context,
    )


def _notice(step: Step, machine: plan.Machine, asked: DraftBits, best: plan.MemoryPlan) -> Notice | None:
    """What was given up to fit, if anything was."""
    if step.bits and step.bits != asked:
        return Notice("draft_packed", f"the draft runs in {step.bits} bits: otherwise the pair {best.reason}")
    if step.machine != machine:
        return Notice("runs_as_stored", f"weights run as they are stored: as fp32 the pair {best.reason}")
    return None


def _plan(target: Path, draft: Path | None, step: Step, tokens: int) -> plan.MemoryPlan:
    ours = None if draft is None else _weights(draft, step.machine, step.bits)
    return plan.plan(_weights(target, step.machine), ours, step.machine, tokens)


def _weights(folder: Path, machine: plan.Machine, bits: int | None = None) -> plan.Weights:
    config, tensors = headers.load_config(folder), headers.tensors(folder)
    running = weight_bytes(tensors, config.get("quantization"), machine.run_dtype, bits)
    return plan.Weights(config, running, sum(info.nbytes for info in tensors.values()))


def _hint(found: plan.MemoryPlan) -> str:
    if found.largest_context:
        return f"pass --max-ctx {found.largest_context}, or use a smaller or more strongly quantised model"
    return "use a smaller or more strongly quantised model"
