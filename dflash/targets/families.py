"""What single families do around and between their layers: scales, caps, shared keys, inputs per layer.

Most do nothing and need no entry. An entry is named after the file of mlx-lm that holds the decoder, so that
checkpoints wrapped for vision share the entry of their text model. The entries say only what cannot be read off
the modules; `models/loading.py` compares the result with the model's own forward and does not trust them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Mask = mx.array | str | None
Change = Callable[[nn.Module, mx.array], mx.array]
Layer = Callable[..., Any]
Walk = Callable[[nn.Module, list[Layer], mx.array, mx.array, list[Mask], list[Any]], list[mx.array]]


def _as_it_is(module: nn.Module, x: mx.array) -> mx.array:
    return x


def _one_by_one(
    inner: nn.Module,
    layers: list[Layer],
    tokens: mx.array,
    hidden: mx.array,
    masks: list[Mask],
    caches: list[Any],
) -> list[mx.array]:
    outputs = []
    for layer, mask, cache in zip(layers, masks, caches, strict=True):
        hidden = layer(hidden, mask, cache)
        outputs.append(hidden)
    return outputs


@dataclass(frozen=True)
class Family:
    """A family's ways. `inner` is the module with the layers, `owner` the one with the head.

    Attributes:
        enter: (inner, table rows (1, n, D)) -> what the first layer reads.
        share: (inner, table rows) -> what a draft embeds its block with; differs from `enter` where drafts take
            the table's rows as they are.
        leave: (owner, projected (1, n, V)) -> logits.
        walk: (inner, layers, tokens, hidden, a mask a cache, caches) -> the output of every layer.
        array_masks: attention that takes a mask as an array only.
        shares_caches: later layers read the keys of earlier ones, so that there are fewer caches than layers.
    """

    enter: Change = _as_it_is
    share: Change = _as_it_is
    leave: Change = _as_it_is
    walk: Walk = _one_by_one
    array_masks: bool = False
    shares_caches: bool = False

    @property
    def usual_layers(self) -> bool:
        """Whether a layer is called as layer(hidden, mask, cache), with any mask, and returns hidden alone."""
        return self.walk is _one_by_one and not self.array_masks


def _scaled(scale: Callable[[nn.Module], float], **other: Any) -> Family:
    """A family whose embeddings are multiplied by a number."""

    def enter(inner: nn.Module, rows: mx.array) -> mx.array:
        return rows * scale(inner)

    return Family(enter=enter, share=enter, **other)


def _root_of_width(inner: nn.Module) -> float:
    return inner.norm.weight.shape[-1] ** 0.5


def _gemma3_enter(inner: nn.Module, rows: mx.array) -> mx.array:
    """The scale was rounded to bf16 in training, whatever the weights' dtype."""
    return rows * mx.array(_root_of_width(inner), mx.bfloat16).astype(rows.dtype)


@partial(mx.compile, shapeless=True)
def _soft_cap(logits: mx.array, cap: float) -> mx.array:
    return mx.tanh(logits / cap) * cap


def _capped(owner: nn.Module, projected: mx.array) -> mx.array:
    cap = owner.final_logit_softcapping
    return projected if cap is None else _soft_cap(projected, cap)


def _muse_enter(inner: nn.Module, rows: mx.array) -> mx.array:
    return mx.fast.rms_norm(rows, None, inner.embed_eps)


def _muse_leave(owner: nn.Module, projected: mx.array) -> mx.array:
    return _soft_cap(projected * owner.args.output_multiplier, owner.args.final_logit_softcapping)


def _gemma4_walk(
    inner: nn.Module,
    layers: list[Layer],
    tokens: mx.array,
    hidden: mx.array,
    masks: list[Mask],
    caches: list[Any],
) -> list[mx.array]:
    """Layers return (hidden, keys and values, offset); the last ones read the keys and values of earlier ones."""
    count = len(layers)
    extra = [None] * count
    if inner.hidden_size_per_layer_input:  # (1, n, layers, size)
        each = inner._project_per_layer_inputs(hidden, inner._get_per_layer_inputs(tokens))
        extra = [each[:, :, i] for i in range(count)]
    caches = [*caches, *[None] * (count - len(caches))]
    kept: list[tuple[Any, Any]] = []
    outputs = []
    for i, layer in enumerate(layers):
        source = inner.previous_kvs[i]  # its own number where it has keys of its own
        shared, offset = kept[source] if source < i else (None, None)
        hidden, shared, offset = layer(
            hidden, masks[source], caches[i], per_layer_input=extra[i], shared_kv=shared, offset=offset
        )
        kept.append((shared, offset))
        outputs.append(hidden)
    return outputs


def _scaled_queries_walk(
    inner: nn.Module,
    layers: list[Layer],
    tokens: mx.array,
    hidden: mx.array,
    masks: list[Mask],
    caches: list[Any],
) -> list[mx.array]:
    """Queries grow with the position, by the rule of Llama 4: 1 + beta log(1 + floor(p / trained length))."""
    rope = inner.args.rope_parameters
    positions = mx.arange(tokens.shape[1]) + caches[0].offset
    lengths = mx.floor(positions / rope["original_max_position_embeddings"])
    scale = (1 + rope["llama_4_scaling_beta"] * mx.log(1 + lengths))[:, None].astype(hidden.dtype)
    outputs = []
    for layer, mask, cache in zip(layers, masks, caches, strict=True):
        hidden = layer(hidden, scale, mask, cache)
        outputs.append(hidden)
    return outputs


PLAIN = Family()

FAMILIES: dict[str, Family] = {
    "afmoe": _scaled(lambda inner: _root_of_width(inner) if inner.mup_enabled else 1.0),
    "cohere": Family(leave=lambda owner, projected: projected * owner.model.args.logit_scale),
    "cohere2": Family(leave=lambda owner, projected: projected * owner.model.args.logit_scale),
    "deepseek_v3": Family(array_masks=True),
    "deepseek_v32": Family(array_masks=True),
    "gemma": _scaled(_root_of_width),
    "gemma2": _scaled(_root_of_width, leave=_capped, array_masks=True),
    "gemma3_text": Family(enter=_gemma3_enter, share=_gemma3_enter),
    "gemma4_text": _scaled(
        lambda inner: inner.embed_scale, leave=_capped, walk=_gemma4_walk, shares_caches=True
    ),
    "glm4_moe_lite": Family(array_masks=True),
    "granite": _scaled(
        lambda inner: inner.embedding_multiplier,
        leave=lambda owner, projected: projected / owner.logits_scaling,
    ),
    "ministral3": Family(walk=_scaled_queries_walk),
    "mistral4": Family(walk=_scaled_queries_walk),
    "muse_glimmer": Family(enter=_muse_enter, leave=_muse_leave),
}


def family_of(inner: nn.Module) -> Family:
    """The entry of the file of mlx-lm that `inner` comes from."""
    return FAMILIES.get(type(inner).__module__.rpartition(".")[2], PLAIN)
