"""What a benchmark was asked to do: frozen, checked on construction, and part of its result. No MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..config import at_least, between, one_of
from ..errors import BadValue, UsageError

# Two prompts of each kind, three times, 128 tokens: minutes on two cores, seconds on a GPU. The long answers
# are asked for by name.
DEFAULT_LENGTHS = "128"
DEFAULT_PER_KIND = 2
DEFAULT_REPEATS = 3
DEFAULT_CONTEXTS = "512"
# Those of `verify_cost` that `shapes` has a draft for.
SHAPES = ("qwen3-8b", "qwen3.5-9b", "qwen3.5-tiny")


@dataclass(frozen=True)
class BenchSettings:
    """How to measure.

    Attributes:
        mode: "dflash" or "lookup", against plain decoding.
        block_size: a fixed width; None follows measured cost.
        lookup: whether mode "dflash" also copies earlier text.
        exact: run near-ties again as plain decoding does.
        lengths: most tokens of an answer, one run for each.
        repeats: of each run; medians and spreads are over them.
        cooldown_s: rest before every answer.
        eos: whether an answer ends at the model's end token.
        replay: accepted lengths to replay, as "6" or "8,2,5"; None measures the real draft.
        replay_draft_ms: with `replay`, what a proposal costs in place of a real draft's pass; None makes the pass.
        shape: with `replay`, a published geometry with random weights in place of a model.
        contexts: with `shape`, prompt lengths.
    """

    mode: Literal["dflash", "lookup"] = "dflash"
    block_size: int | None = None
    lookup: bool = True
    exact: bool = False
    lengths: tuple[int, ...] = (128,)
    repeats: int = DEFAULT_REPEATS
    cooldown_s: float = 0.0
    eos: bool = True
    max_ctx: int | None = None
    replay: str | None = None
    replay_draft_ms: float | None = None
    shape: str | None = None
    contexts: tuple[int, ...] = (512,)

    def __post_init__(self) -> None:
        at_least("repeats", self.repeats, 1)
        between("cooldown_s", self.cooldown_s, 0, 3600)
        between("replay_draft_ms", self.replay_draft_ms, 0, 10_000)
        if min(self.lengths) < 2:
            raise BadValue(
                f"an answer of {min(self.lengths)} tokens has no decode speed", "ask for at least 2"
            )
        if self.shape is not None:
            one_of("shape", self.shape, SHAPES)
        if self.replay is None and (self.shape is not None or self.replay_draft_ms is not None):
            raise UsageError(
                "--shape and --replay-draft-ms belong to --replay",
                "add --replay 6: six tokens accepted per cycle",
            )
        if self.replay is not None and self.exact:
            raise UsageError("--replay has its tokens given, so it has no use for --exact")
        if self.replay is not None and self.mode != "dflash":
            raise UsageError("--replay replaces a draft's proposals, so it has no use in --mode lookup")

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"lengths": list(self.lengths), "contexts": list(self.contexts)}


def counts(flag: str, text: str) -> tuple[int, ...]:
    """Rising whole numbers, at least 1, from "128,256". Raises `BadValue`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise BadValue(f"{flag} takes whole numbers with commas between them, not {text!r}")
    return tuple(sorted({int(word) for word in words}))
