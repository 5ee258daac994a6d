"""Whether a draft belongs to a target, from their two `config.json` files alone.

The same checks as when the pair is loaded, before anything is downloaded or loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..drafts.checkpoint import DraftConfig, is_draft
from ..errors import DFlashError, UnsupportedDraft
from ..plan import text_config

__all__ = ["Verdict", "check_pair", "is_draft"]


@dataclass(frozen=True)
class Verdict:
    """`compatible` is None where the configs do not tell; `reasons` are sentences, `code` an error's."""

    compatible: bool | None
    reasons: tuple[str, ...]
    generation: int | None = None
    code: str | None = None


def check_pair(target: dict[str, Any], draft: dict[str, Any]) -> Verdict:
    """Compare hidden size, number of target layers and vocabulary of two configs. Raises nothing."""
    try:
        ours = DraftConfig.from_json(draft)
    except UnsupportedDraft as error:
        return Verdict(False, (error.message,), code=error.code)
    except DFlashError as error:
        return Verdict(None, (error.message,), code=error.code)
    text = text_config(target)
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    if missing := [name for name in names if not isinstance(text.get(name), int)]:
        reason = f"the target's config.json does not state {', '.join(missing)}"
        return Verdict(None, (reason,), ours.generation)
    hidden, layers, vocab = (text[name] for name in names)
    try:
        ours.check_target(hidden_size=hidden, num_layers=layers, vocab_size=vocab)
    except DFlashError as error:
        return Verdict(False, (error.message,), ours.generation, error.code)
    reasons = (
        f"hidden size {hidden} on both sides",
        f"taps {len(ours.taps)} of the target's {layers} layers, the deepest is {max(ours.taps)}",
        f"vocabulary {ours.vocab_size}, the target has {vocab}",
    )
    return Verdict(True, reasons, ours.generation)
