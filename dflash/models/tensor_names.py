"""Tensor names of checkpoints that hold more than the language model, or hold it under another prefix.

mlx-lm's families each rename and leave out what their authors met. What is missing there is done here, before they
see the names: parts that the loaded model does not have (vision, audio, heads that predict several tokens) are left
on the disk, and the prefix that transformers has used since its version 4.52 becomes the one that mlx-lm writes.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from ..plan import NOT_LOADED

_PREFIXES = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}


def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """mlx-lm's classes for `config`, the model's own renaming preceded by `for_model`."""
    model_class, args_class = _get_classes(config)

    class Model(model_class):
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights = for_model(self, weights)
            rename = getattr(super(), "sanitize", None)
            return rename(weights) if rename else weights

    return Model, args_class


def for_model(model: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The weights that `model` may have a place for, under names that its `sanitize` knows.

    Leaving heads out here matters: mlx-lm 0.31 takes their presence for a sign of the original, unconverted
    weights, and shifts the norms of a converted checkpoint a second time.
    """
    own = {part for name, _ in tree_flatten(model.parameters()) for part in name.split(".")}
    unknown = NOT_LOADED - own
    kept = {name: array for name, array in weights.items() if not unknown & set(name.split("."))}
    if "language_model" not in own or not any(name.startswith("model.language_model.") for name in kept):
        return kept
    return {_renamed(name): array for name, array in kept.items()}


def _renamed(name: str) -> str:
    for prefix, ours in _PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name
