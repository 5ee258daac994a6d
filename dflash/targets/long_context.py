"""Verify blocks against long contexts: attention layers run with our kernel where it is measured to win.

mlx-lm's attention modules call the stock attention themselves, so a layer whose attention is to be ours is run by its
parts: projections, norms and rotation are the module's own, only the attention between them is replaced. Whether that
gives the layer's own output, whether the kernel is as exact as the stock attention and whether it is faster is
found out on this machine, with this model, the first time a width and a context of some size occur; the answers are
kept with the model. No other device's figures are taken on trust.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ..kernels import verify_attention as kernel

LEAST_CONTEXT = 1024  # below, attention is too small a share of a pass to be worth a measurement
_REPEATS = 7
_MARGIN = 0.95  # ours must be faster by more than the noise of a measurement
_PROBE_ROWS = 4

Attend = Callable[..., mx.array]


class LongContext:
    """Which of a model's verify passes run our attention. Shared by all sessions of a target.

    Args:
        layers: the model's decoder layers.
        attend: the attention to use, `kernels.verify_attention`'s.
        clock: seconds, for measuring.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        attend: Attend = kernel.verify_attention,
        clock: Callable[[], float] = time.perf_counter,
    ):
        attention = [index for index, layer in enumerate(layers) if hasattr(layer, "self_attn")]
        found = {index: parts_of(layers[index]) for index in attention}
        # All attention layers of a model are built alike; a model with an exception among them runs as it is.
        self._parts = found if all(found.values()) else {}
        self._attend = attend
        self._clock = clock
        self._verdicts: dict[tuple[int, int], bool] = {}
        self._faithful: bool | None = None

    def wanted(self, width: int, caches: list[object]) -> bool:
        """Whether a pass of `width` tokens after what `caches` hold should run here."""
        if width < 2 or not self._parts:
            return False
        first, parts = next(iter(self._parts.items()))
        cache = caches[first]
        if type(cache) is not KVCache or cache.offset < LEAST_CONTEXT:
            return False
        if not kernel.supports(parts.head_dim, width, cache.keys.dtype):
            return False
        size = (width, cache.offset.bit_length())  # contexts of one power of two share a verdict
        if size not in self._verdicts:
            self._verdicts[size] = self._is_faithful(parts) and self._pays(parts, width, cache)
        return self._verdicts[size]

    def layer(self, index: int) -> Callable[[mx.array, object, KVCache], mx.array]:
        """Layer `index` with our attention; called as the layer itself is: x (1, n, D), mask, cache."""
        parts = self._parts[index]
        return lambda x, mask, cache: parts.forward(x, cache, self._attend)

    def _is_faithful(self, parts: AttentionParts) -> bool:
        """Whether the layer by its parts, with stock attention, is the layer."""
        if self._faithful is None:
            layer, dtype = parts.layer, parts.dtype
            x = mx.random.normal((1, _PROBE_ROWS, parts.hidden_size), key=mx.random.key(0)).astype(dtype)
            expected = layer(x, "causal", KVCache()).astype(mx.float32)
            got = parts.forward(x, KVCache(), kernel.reference).astype(mx.float32)
            worst = mx.max(mx.abs(got - expected)).item()
            self._faithful = worst <= 1e-2 * mx.max(mx.abs(expected)).item()
        return self._faithful

    def _pays(self, parts: AttentionParts, width: int, cache: KVCache) -> bool:
        """Run both attentions over the cache as it is: ours must be as exact, and faster."""
        total = cache.offset
        shape = (cache.keys.shape[0], parts.heads, width, parts.head_dim)
        queries = mx.random.normal(shape, key=mx.random.key(0)).astype(cache.keys.dtype)
        arrays = (queries, cache.keys, cache.values)

        def run(attend: Attend) -> mx.array:
            return attend(*arrays, scale=parts.scale, total=total)

        whole = (
            x.astype(mx.float32) for x in (queries, cache.keys[..., :total, :], cache.values[..., :total, :])
        )
        exact = kernel.reference(*whole, scale=parts.scale, total=total)
        ours, stock = (_worst(run(attend), exact) for attend in (self._attend, kernel.reference))
        if ours > 2 * stock + _unit(queries.dtype) * mx.max(mx.abs(exact)).item():
            return False
        times: dict[Attend, list[float]] = {self._attend: [], kernel.reference: []}
        for _ in range(_REPEATS):
            for attend, measured in times.items():
                began = self._clock()
                mx.eval([run(attend) for _ in range(4)])
                measured.append(self._clock() - began)
        ours, stock = (statistics.median(measured[1:]) for measured in times.values())
        return ours < _MARGIN * stock


@dataclass(frozen=True)
class AttentionParts:
    """A pre-norm decoder layer whose attention has the usual pieces.

    Attributes:
        layer: the decoder layer; `net` its attention module.
        heads, kv_heads, head_dim: of the attention.
        gated: the query projection also makes an output gate (Qwen3-Next and later).
    """

    layer: nn.Module
    net: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool

    @property
    def scale(self) -> float:
        return self.net.scale

    @property
    def hidden_size(self) -> int:
        return self.layer.input_layernorm.weight.shape[-1]

    @property
    def dtype(self) -> mx.Dtype:
        return self.layer.input_layernorm.weight.dtype

    def forward(self, x: mx.array, cache: KVCache, attend: Attend) -> mx.array:
        """The layer on x (1, n, D), its attention done by `attend`."""
        h = x + self._attention(self.layer.input_layernorm(x), cache, attend)
        return h + self.layer.mlp(self.layer.post_attention_layernorm(h))

    def _attention(self, x: mx.array, cache: KVCache, attend: Attend) -> mx.array:
        net, rows = self.net, x.shape[:2]
        queries, gate = net.q_proj(x).reshape(*rows, self.heads, -1), None
        if self.gated:
            queries, gate = mx.split(queries, 2, axis=-1)
        keys = net.k_proj(x).reshape(*rows, self.kv_heads, -1)
        values = net.v_proj(x).reshape(*rows, self.kv_heads, -1).transpose(0, 2, 1, 3)
        if hasattr(net, "q_norm"):
            queries, keys = net.q_norm(queries), net.k_norm(keys)
        queries, keys = (net.rope(t.transpose(0, 2, 1, 3), offset=cache.offset) for t in (queries, keys))
        cache.update_and_fetch(keys, values)
        out = attend(queries, cache.keys, cache.values, scale=self.scale, total=cache.offset)
        out = out.transpose(0, 2, 1, 3).reshape(*rows, -1)
        return net.o_proj(out if gate is None else out * mx.sigmoid(gate.reshape(*rows, -1)))


def parts_of(layer: nn.Module) -> AttentionParts | None:
    """A layer's attention by its pieces, or None when it is built otherwise."""
    net = getattr(layer, "self_attn", None)
    pieces = ("q_proj", "k_proj", "v_proj", "o_proj", "rope", "scale")
    around = ("input_layernorm", "post_attention_layernorm", "mlp")
    if net is None or not all(hasattr(net, name) for name in pieces):
        return None
    if not all(hasattr(layer, name) for name in around) or hasattr(net, "sinks"):
        return None
    heads = _first(net, "num_attention_heads", "n_heads")
    kv_heads = _first(net, "num_key_value_heads", "n_kv_heads")
    if heads is None or kv_heads is None:
        return None
    head_dim = net.k_proj.weight.shape[0] // kv_heads
    gated = net.q_proj.weight.shape[0] == 2 * heads * head_dim
    return AttentionParts(layer, net, heads, kv_heads, head_dim, gated)


def _first(module: nn.Module, *names: str) -> int | None:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _worst(got: mx.array, exact: mx.array) -> float:
    return mx.max(mx.abs(got.astype(mx.float32) - exact)).item()


def _unit(dtype: mx.Dtype) -> float:
    return {mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
