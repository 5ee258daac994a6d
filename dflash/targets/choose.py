"""From a loaded model to its adapter, by what its caches are, not by its name.

Families nobody listed are covered when they are built like the listed ones, and every refusal has one author.
The choice is confirmed at load time by `models/loading.py`, which compares the adapter with the model.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from .attention import AttentionTarget
from .base import TargetAdapter
from .gated_delta import GatedDeltaTarget, is_gated_delta
from .opaque import OpaqueTarget
from .parts import Parts
from .sliding import SlidingTarget, can_roll_back, is_window, with_rollback

SUPPORTED = (
    "models that keep every token in each layer (llama, mistral, qwen2, qwen3, glm4, minimax, deepseek_v3, ...), "
    "models with windowed layers between them (gemma3, gemma4, gpt_oss, cohere2, olmo3, ...), "
    "and hybrids with gated-delta layers (qwen3_next, qwen3_5, qwen3_5_moe)"
)


def choose(model: nn.Module, config: dict[str, Any]) -> TargetAdapter:
    """The adapter for `model`. Models without one get an `OpaqueTarget`, whose `why` names the reason."""
    parts = Parts.of(model)
    text = text_config(config)
    # The table tells where the config leaves the size to the family's default, as Gemma's do.
    facts = {
        "vocab_size": parts.vocab_size if parts else text.get("vocab_size") or model.args.vocab_size,
        "max_context": text.get("max_position_embeddings"),
    }
    if parts is None:
        why = (
            f"{config['model_type']} is not built as embedding, layers, norm and head; supported: {SUPPORTED}"
        )
        return OpaqueTarget(model, **facts, why=why)
    # A wrapper for vision may not pass on how its text model makes caches; its windowed layers need windows.
    maker = parts.owner if hasattr(parts.owner, "make_cache") else model
    caches = make_prompt_cache(maker)
    if len(caches) == len(parts.layers) or parts.family.shares_caches:
        if all(can_roll_back(cache) for cache in caches):
            kind = SlidingTarget if any(is_window(cache) for cache in caches) else AttentionTarget
            return kind(parts, **facts, caches=lambda: with_rollback(make_prompt_cache(maker)))
        linear = [is_gated_delta(layer) for layer in parts.layers]
        if all(is_linear or type(cache) is KVCache for is_linear, cache in zip(linear, caches, strict=True)):
            return GatedDeltaTarget(parts, **facts)
    kinds = sorted({type(cache).__name__ for cache in caches})
    why = f"{config['model_type']} keeps {', '.join(kinds)} caches; supported: {SUPPORTED}"
    return OpaqueTarget(model, **facts, why=why)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's own settings: nested in checkpoints that also see images."""
    return {**config, **config.get("text_config", {})}
