"""Settings: frozen, checked where they are built, every default in one place with its reason."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import BadValue

Mode = Literal["dflash", "lookup", "baseline"]
DraftBits = Literal["auto", "none", 8, 4]
Acceptance = Literal["matching", "residual"]
Proposals = Literal["likeliest", "coupled"]

# Answers of a chat model are mostly shorter; long enough not to cut one off by surprise.
DEFAULT_MAX_TOKENS = 512
# mlx-lm's own prefill step is 2048; smaller chunks bound the taps held at once (width x taps x hidden).
DEFAULT_PREFILL_CHUNK = 512
# mlx-lm's context for repetition, presence and frequency penalties.
DEFAULT_PENALTY_CONTEXT = 20


@dataclass(frozen=True)
class DFlashConfig:
    """How an engine runs; independent of any request.

    Attributes:
        draft_block_size: tokens verified in every cycle, anchor included (1 to the draft's trained block).
            None: the width follows what passes cost on this machine and what the draft gets right. Copies of earlier
            text are not wider either; None lets them be up to 32.
        exact: run tokens that another width might choose otherwise (near-ties of low-precision arithmetic) in a
            pass of their own, as plain decoding does.
        max_ctx: most tokens, prompt and answer together. None: the target's own limit.
        mode: "dflash"; "lookup" for proposals copied from earlier text, without a draft; "baseline" for plain
            decoding.
        lookup: whether mode "dflash" also copies, where that promises more than its draft.
        draft_bits: 8 or 4 packs the draft's linear layers on loading, "none" never does, "auto" only where the
            pair would not fit otherwise.
        save_draft: folder to make and write the packed draft to; loading that one later is quicker.
        prefill_chunk: prompt tokens that go through the target in one pass.
        acceptance: which proposals stand when sampling (see `decoding.acceptance`): "matching" those that equal
            the target's own draw, "residual" by rejection sampling. Either has the target's distribution.
        proposals: what the draft proposes when sampling with "matching": its "likeliest" tokens, or draws
            "coupled" with the target's by the same noise.
        cache_dir: where downloads and conversions are kept. None: the user's cache folder.
        revision: hub revision (branch, tag or commit) of the target; `draft_revision` of the draft.
        offline: never ask the network.
    """

    draft_block_size: int | None = None
    exact: bool = False
    max_ctx: int | None = None
    mode: Mode = "dflash"
    lookup: bool = True
    draft_bits: DraftBits = "auto"
    save_draft: Path | None = None
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    acceptance: Acceptance = "matching"
    proposals: Proposals = "coupled"
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
        one_of("acceptance", self.acceptance, get_args(Acceptance))
        one_of("proposals", self.proposals, get_args(Proposals))


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. A sampling setting left at None was not asked for; `effective` fills it in.

    Attributes:
        max_tokens: most tokens of the answer, the end token included.
        stop: texts that end the answer and are not part of it.
        ignore_eos: go on after the model's end tokens, up to `max_tokens`.
        temperature: 0 takes the likeliest token every time (greedy), also where penalties or a bias apply.
        top_p: keep the likeliest tokens that together have this probability; 1 keeps all.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        min_p: keep tokens with at least this share of the likeliest one's probability; 0 keeps all.
        repetition_penalty: logits of recent tokens are divided by it (multiplied when negative); 1 is none.
        presence_penalty: subtracted from the logits of recent tokens; 0 is none.
        frequency_penalty: subtracted once for each recent occurrence; 0 is none.
        penalty_context: how many of the last tokens, of prompt and answer, are recent.
        logit_bias: token id to a number added to its logit.
        seed: of the random numbers. With the same seed, settings and machine the text is the same
            (with the "residual" rule, at a fixed `draft_block_size`).
        model_defaults: settings not asked for come from the model's generation_config.json, where it has them.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_context: int = DEFAULT_PENALTY_CONTEXT
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    model_defaults: bool = False

    def __post_init__(self) -> None:
        at_least("max_tokens", self.max_tokens, 1)
        if isinstance(self.stop, str):
            raise BadValue("stop is a list of texts, not one text", "write stop=['...']")
        object.__setattr__(self, "stop", tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise BadValue(f"a stop text must be non-empty text, not {text!r}")
        between("temperature", self.temperature, 0, 100)
        between("top_p", self.top_p, 0, 1, "1 keeps all tokens", above=True)
        at_least("top_k", self.top_k, 0)
        between("min_p", self.min_p, 0, 1)
        between("repetition_penalty", self.repetition_penalty, 0, 100, "1 is no penalty", above=True)
        between("presence_penalty", self.presence_penalty, -100, 100)
        between("frequency_penalty", self.frequency_penalty, -100, 100)
        at_least("penalty_context", self.penalty_context, 1)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        at_least("seed", self.seed, 0)
        if self.seed is not None and self.seed >= 1 << 63:
            raise BadValue(f"seed must be below 2 to the 63rd, not {self.seed}")

    def effective(self, model: Mapping[str, Any] | None = None) -> SamplingParams:
        """These settings with none left open: what was asked for wins, also a temperature of 0; then, if
        `model_defaults`, the model's generation config `model`; else greedy and no penalty. Where tokens are
        drawn and no seed was given, one is drawn too."""
        offered = _offered(model or {}) if self.model_defaults else {}
        asked = {name: value for name in NEUTRAL if (value := getattr(self, name)) is not None}
        settled: dict[str, Any] = NEUTRAL | offered | asked
        if settled["temperature"] and self.seed is None:
            settled["seed"] = secrets.randbits(32)
        return replace(self, **settled)


# Settings that change nothing.
NEUTRAL: dict[str, float | int] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def _offered(model: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings of a generation config. Without `do_sample` it asks for greedy decoding, as it does
    where the file comes from."""
    present = {name: model[name] for name in NEUTRAL if model.get(name) is not None}
    return present | {"temperature": present.get("temperature", 1.0) if model.get("do_sample") else 0.0}


def _checked_bias(bias: Any) -> dict[int, float]:
    """A logit bias with ids as whole numbers; JSON has them as text. Raises `BadValue`."""
    if not isinstance(bias, Mapping):
        raise BadValue(f"logit_bias must map token ids to numbers, not {bias!r}")
    checked = {}
    for token, value in bias.items():
        try:
            index = int(token) if isinstance(token, str) else token
        except ValueError:
            index = None
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise BadValue(f"logit_bias has {token!r}, which is not a token id")
        between(f"logit_bias of token {index}", value, -1e9, 1e9)
        checked[index] = float(value)
    return checked


def between(
    name: str, value: Any, least: float, most: float, hint: str | None = None, *, above: bool = False
) -> None:
    """Raise `BadValue` unless `value` is None or a number from `least` (or only above it) to `most`."""
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= value <= most or (above and value == least):
        start = f"above {least}" if above else f"from {least}"
        raise BadValue(f"{name} must be a number {start} to {most}, not {value!r}", hint)


def at_least(name: str, value: Any, least: int) -> None:
    """Raise `BadValue` unless `value` is None or a whole number of at least `least`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadValue(f"{name} must be a whole number of at least {least}, not {value!r}")


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise BadValue(f"{name} is one of {', '.join(map(str, allowed))}, not {value!r}")
