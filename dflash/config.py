"""Settings: frozen, checked where they are built, every default in one place with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import BadValue

Mode = Literal["dflash", "lookup", "baseline"]
DraftBits = Literal["auto", "none", 8, 4]

# Answers of a chat model are mostly shorter; long enough not to cut one off by surprise.
DEFAULT_MAX_TOKENS = 512
# mlx-lm's own prefill step is 2048; smaller chunks bound the taps held at once (width x taps x hidden).
DEFAULT_PREFILL_CHUNK = 512


@dataclass(frozen=True)
class DFlashConfig:
    """How an engine runs; independent of any request.

    Attributes:
        draft_block_size: tokens verified in every cycle, anchor included (1 to the draft's trained block).
            None: the width follows what passes cost on this machine and what the draft gets right. Copies of earlier
            text are not wider either; None lets them be up to 32.
        max_ctx: most tokens, prompt and answer together. None: the target's own limit.
        mode: "dflash"; "lookup" for proposals copied from earlier text, without a draft; "baseline" for plain
            decoding.
        lookup: whether mode "dflash" also copies, where that promises more than its draft.
        draft_bits: 8 or 4 packs the draft's linear layers on loading, "none" never does, "auto" only where the
            pair would not fit otherwise.
        save_draft: folder to make and write the packed draft to; loading that one later is quicker.
        prefill_chunk: prompt tokens that go through the target in one pass.
        cache_dir: where downloads and conversions are kept. None: the user's cache folder.
        revision: hub revision (branch, tag or commit) of the target; `draft_revision` of the draft.
        offline: never ask the network.
    """

    draft_block_size: int | None = None
    max_ctx: int | None = None
    mode: Mode = "dflash"
    lookup: bool = True
    draft_bits: DraftBits = "auto"
    save_draft: Path | None = None
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    cache_dir: Path | None = None
    revision: str | None = None
    draft_revision: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        at_least("draft_block_size", self.draft_block_size, 1)
        at_least("max_ctx", self.max_ctx, 2)
        at_least("prefill_chunk", self.prefill_chunk, 1)
        one_of("mode", self.mode, get_args(Mode))
        one_of("draft_bits", self.draft_bits, get_args(DraftBits))
        if self.save_draft is not None and not isinstance(self.draft_bits, int):
            raise BadValue("save_draft writes a packed draft", "say how: --draft-bits 8 or 4")


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for.

    Attributes:
        max_tokens: most tokens of the answer, the end token included.
        stop: texts that end the answer and are not part of it.
        ignore_eos: go on after the model's end tokens, up to `max_tokens`.
        seed: recorded in the result; decoding is greedy, so it changes nothing yet.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        at_least("max_tokens", self.max_tokens, 1)
        if isinstance(self.stop, str):
            raise BadValue("stop is a list of texts, not one text", "write stop=['...']")
        object.__setattr__(self, "stop", tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise BadValue(f"a stop text must be non-empty text, not {text!r}")


def at_least(name: str, value: Any, least: int) -> None:
    """Raise `BadValue` unless `value` is None or a whole number of at least `least`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadValue(f"{name} must be a whole number of at least {least}, not {value!r}")


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise BadValue(f"{name} is one of {', '.join(map(str, allowed))}, not {value!r}")
