"""A draft in less memory: when it is quantised, which of its layers are, what that takes, how it is kept.

Only the large linear layers are packed. Norms, convolutions, the selector and its codebooks stay: they are small
or only looked up, and their coefficients multiply. MLX's own quantisation, in groups of 64, as published drafts
have it. The accepted length may fall (reports range from not at all to a third at 4 bits), the answer never
changes.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import plan
from ..config import DraftBits
from ..errors import BadValue
from . import headers, store
from .headers import TensorInfo

GROUP_SIZE = 64
_LADDER = (8, 4)  # what is tried where memory is short, in this order: 8 bits cost next to no acceptance
_LINEAR = re.compile(r"(?:.+\.)?(?:fc|self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)")
_NOT_WEIGHTS = {".safetensors", ".json"}  # written anew; whatever else lies in a draft's folder is copied


@dataclass(frozen=True)
class Step:
    """One way to run a pair: on `machine` (which widens to its `run_dtype`), the draft packed to `bits`."""

    machine: plan.Machine
    bits: int | None


def ladder(machine: plan.Machine, asked: DraftBits, draft: dict[str, Any] | None) -> Iterator[Step]:
    """The ways to run a pair, best first. What was asked for is kept; "auto" packs only where nothing else fits.

    A draft is never packed for speed: on a CPU fp32 is fastest, on a GPU a draft pass is a small share.

    Args:
        machine: as it would run models: with a `run_dtype` it widens them, and does not where that is too much.
        draft: its `config.json`; None without a draft.
    """
    widths = [machine] if machine.run_dtype is None else [machine, replace(machine, run_dtype=None)]
    packed = draft is None or bool(draft.get("quantization"))
    if isinstance(asked, int) and not (draft or {}).get("quantization"):
        yield from (Step(width, asked) for width in widths)
        return
    yield from (Step(width, None) for width in widths)
    if asked == "auto" and not packed:
        yield from (Step(widths[-1], bits) for bits in _LADDER)


def reason(step: Step, asked: DraftBits, draft: dict[str, Any], best: plan.MemoryPlan) -> str:
    """Why the draft runs as it does: a sentence for the result. `best` is the plan of the first step."""
    if stored := draft.get("quantization"):
        widened = step.machine.run_dtype is not None and not isinstance(asked, int)
        return f"stored in {stored['bits']} bits" + (", run as fp32" if widened else "")
    if step.bits:
        return (
            f"asked for {step.bits} bits"
            if step.bits == asked
            else f"packed to fit: else the pair {best.reason}"
        )
    if step.machine.run_dtype:
        return "fp32 is the fast width on a CPU"
    return "as stored, asked for" if asked == "none" else "as stored: the pair fits"


def weight_bytes(
    tensors: Mapping[str, TensorInfo],
    quantization: dict[str, Any] | None,
    run_dtype: str | None,
    bits: int | None,
) -> int:
    """`plan.weight_bytes` of a draft whose linear layers are packed to `bits` (None: they are not)."""
    if bits is None:
        return plan.weight_bytes(tensors, quantization, run_dtype)
    packed = {name: info for name, info in tensors.items() if _is_packable(name, info)}
    total = plan.weight_bytes({n: i for n, i in tensors.items() if n not in packed}, quantization, run_dtype)
    for info in packed.values():
        elements = math.prod(info.shape)
        element = 4 if run_dtype else info.nbytes // elements
        total += elements * bits // 8 + 2 * elements // GROUP_SIZE * element  # and a scale and a bias a group
    return total


def estimated_weight_bytes(
    stored_bytes: int, config: dict[str, Any], run_dtype: str | None, bits: int | None
) -> int:
    """`weight_bytes` from the size of the files alone: nearly all of a draft are its linear layers."""
    if bits is None:
        return plan.estimated_weight_bytes(stored_bytes, config, run_dtype)
    element = plan.element_bytes(config, None)
    return int(stored_bytes / element * (bits / 8 + 2 * element / GROUP_SIZE))


def quantise(draft: nn.Module, bits: int) -> None:
    """Pack the linear layers of a loaded draft to `bits`, in place.

    Raises:
        BadValue: it is stored quantised already, in another number of bits.
    """
    stored = draft.config.quantization
    if stored is None:
        nn.quantize(draft, group_size=GROUP_SIZE, bits=bits, class_predicate=_is_linear)
        draft.config = replace(draft.config, quantization={"group_size": GROUP_SIZE, "bits": bits})
    elif stored["bits"] != bits:
        raise BadValue(
            f"the draft is stored in {stored['bits']} bits and cannot be packed to {bits}",
            "leave out --draft-bits, or pass the draft as it was published",
        )


def running_bits(draft: nn.Module) -> int:
    """Bits of one weight of a loaded draft's linear layers."""
    packed = (module.bits for module in draft.modules() if isinstance(module, nn.QuantizedLinear))
    return next(packed, 8 * draft.dtype.size)


def check_place(folder: Path) -> None:
    """Raise `BadValue` if something lies at `folder`, where a draft is to be saved: before minutes of work."""
    if folder.exists():
        raise BadValue(f"--save-draft makes a folder, and {folder.absolute()} exists", "name another folder")


def save(draft: nn.Module, source: Path, folder: Path) -> None:
    """Write a loaded draft to the new `folder` in the public format, with what else lies in `source`.

    Raises:
        BadValue: something of that name exists.
        DiskFull, NotFound: there is no room, or the place cannot be written.
    """
    check_place(folder)
    config = headers.load_config(source)
    if draft.config.quantization:
        config["quantization"] = draft.config.quantization

    def build(work: Path) -> None:
        for file in source.iterdir():
            if file.is_file() and file.suffix not in _NOT_WEIGHTS:
                shutil.copy(file, work / file.name)
        mx.save_safetensors(str(work / "model.safetensors"), dict(tree_flatten(draft.parameters())))
        (work / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    store.build_once(folder.absolute(), build)


def _is_linear(path: str, module: nn.Module) -> bool:
    return bool(_LINEAR.fullmatch(path)) and module.weight.shape[-1] % GROUP_SIZE == 0


def _is_packable(name: str, info: TensorInfo) -> bool:
    stem = name.removeprefix("model.").removesuffix(".weight")
    return name.endswith(".weight") and bool(_LINEAR.fullmatch(stem)) and info.shape[-1] % GROUP_SIZE == 0
