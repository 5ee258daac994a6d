"""From a loaded model to its adapter, by what its caches are, not by its name.

Families nobody listed are covered when they are built like the listed ones, and every refusal has one author.
The choice is confirmed at load time by `models/loading.py`, which compares the adapter with the model.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from .attention import AttentionTarget, Parts
from .base import TargetAdapter
from .gated_delta import GatedDeltaTarget, is_gated_delta
from .opaque import OpaqueTarget

SUPPORTED = (
    "models with a plain key-value cache per layer (llama, mistral, qwen2, qwen3, qwen3_moe, ...), "
    "and hybrids with gated-delta layers (qwen3_next, qwen3_5, qwen3_5_moe)"
)


def choose(model: nn.Module, config: dict[str, Any]) -> TargetAdapter:
    """The adapter for `model`. Models without one get an `OpaqueTarget`, whose `why` names the reason."""
    facts = {
        "vocab_size": text_config(config)["vocab_size"],
        "max_context": text_config(config).get("max_position_embeddings"),
    }
    parts = Parts.of(model)
    caches = make_prompt_cache(model)
    if parts is None:
        why = (
            f"{config['model_type']} is not built as embedding, layers, norm and head; supported: {SUPPORTED}"
        )
        return OpaqueTarget(model, **facts, why=why)
    if len(caches) == len(parts.layers):
        linear = [is_gated_delta(layer) for layer in parts.layers]
        if all(is_linear or type(cache) is KVCache for is_linear, cache in zip(linear, caches, strict=True)):
            return (GatedDeltaTarget if any(linear) else AttentionTarget)(parts, **facts)
    kinds = sorted({type(cache).__name__ for cache in caches})
    why = f"{config['model_type']} keeps {', '.join(kinds)} caches; supported: {SUPPORTED}"
    return OpaqueTarget(model, **facts, why=why)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's own settings: nested in checkpoints that also see images."""
    return {**config, **config.get("text_config", {})}
