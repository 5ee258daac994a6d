"""Hybrid targets: attention layers between recurrent gated-delta layers (Qwen3-Next, Qwen3.5, 3.6, 3.8; dense, MoE).

A recurrent state cannot be trimmed. Instead of copying it per token, each linear layer keeps a *tape* of the last
block: what it added to its state (innovation, key, decay) and what its convolution read. Rolling back replays the
kept steps from the state before the block: no projection runs again, and a block that stands costs nothing. Arrays
in MLX are immutable, so "the state before the block" is a reference, not a copy; and the replay is the first thing
the next block's kernel does, so rolling back itself launches nothing.

The layers run with the model's own weights and modules; nothing is replaced. Norms, gates, feed-forward (dense or
mixture of experts) and attention layers are called as they are; only the recurrence itself is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta as stock
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ..kernels.gated_delta import MAX_TAPE_STEPS, Gates, Sizes, Start, Tape, mix
from .attention import AttentionTarget, trim
from .base import Features
from .long_context import LongContext
from .parts import Parts


class GatedDeltaTarget(AttentionTarget):
    """A `TargetAdapter` for models that mix attention and gated-delta layers."""

    kind = "hybrid"
    max_block = MAX_TAPE_STEPS

    def start(self, taps: tuple[int, ...] = ()) -> GatedDeltaSession:
        return GatedDeltaSession(self._parts, taps, self._long_context)


def is_gated_delta(layer: nn.Module) -> bool:
    """Whether `layer` is a linear layer of a kind that `LinearMemory` runs."""
    net = getattr(layer, "linear_attn", None)
    return net is not None and hasattr(net, "conv1d") and (hasattr(net, "in_proj_qkv") or _is_fused(net))


class GatedDeltaSession:
    """One request's memories: a key-value cache per attention layer, a `LinearMemory` per linear one."""

    def __init__(self, parts: Parts, taps: tuple[int, ...], long_context: LongContext):
        self._parts = parts
        self._taps = taps
        self._long_context = long_context
        self._memories = [
            LinearMemory(layer.linear_attn) if is_gated_delta(layer) else KVCache() for layer in parts.layers
        ]
        self.offset = 0
        self._last_width = 0

    def forward(self, tokens: mx.array) -> Features:
        hidden = self._parts.embed(tokens)  # (1, n) -> (1, n, D)
        attention = next((m for m in self._memories if isinstance(m, KVCache)), None)
        mask = create_attention_mask(hidden, attention)
        ours = self._long_context.wanted(tokens.shape[1], self._memories)
        outputs = []
        for index, (layer, memory) in enumerate(zip(self._parts.layers, self._memories, strict=True)):
            if isinstance(memory, KVCache):
                run = self._long_context.layer(index) if ours else layer
                hidden = run(hidden, mask, memory)
            else:
                hidden = hidden + memory.forward(layer.input_layernorm(hidden))
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs.append(hidden)
        self._last_width = tokens.shape[1]
        self.offset += self._last_width
        return self._parts.features(outputs, self._taps)

    def rollback(self, keep: int) -> None:
        excess = self._last_width - keep
        if excess:
            for memory in self._memories:
                if isinstance(memory, KVCache):
                    trim(memory, excess)
                else:
                    memory.rollback(keep)
        self.offset -= excess
        self._last_width = keep

    def arrays(self) -> list[mx.array]:
        arrays = []
        for memory in self._memories:
            arrays += [memory.keys, memory.values] if isinstance(memory, KVCache) else memory.arrays()
        return arrays


@dataclass(frozen=True)
class _Block:
    """What a rollback of the last block needs.

    Attributes:
        state: (1, Hv, dv, dk), before the block.
        tape: of the block's steps.
        conv_input: (1, K - 1 + n, C), the window before the block and the block's own rows.
    """

    state: mx.array
    tape: Tape
    conv_input: mx.array


class LinearMemory:
    """One linear layer's convolution window and recurrent state, and the tape of the last block."""

    def __init__(self, net: nn.Module):
        self._net = net
        self._gates = Gates(net.A_log, net.dt_bias, _norm_eps(net.head_k_dim))
        self._sizes = Sizes(net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim)
        self._window: mx.array | None = None  # (1, K - 1, C), inputs of the convolution
        self._start: Start | None = None  # the recurrent state, or how to come to it
        self._block: _Block | None = None

    def forward(self, x: mx.array) -> mx.array:
        """The layer's mixing of normalised inputs (1, n, D) -> (1, n, D); remembers the block's tape."""
        net = self._net
        qkv, z, b, a = _project(net, x)
        self._begin(qkv)
        conv_input = mx.concatenate([self._window, qkv], axis=1)
        taped = x.shape[1] <= MAX_TAPE_STEPS
        convolved = nn.silu(net.conv1d(conv_input))
        done = mix(convolved, a, b, self._gates, self._sizes, self._start, taped=taped)
        self._start = Start(done.after)
        self._block = _Block(done.base, done.tape, conv_input) if taped else None
        self._window = conv_input[:, -self._window.shape[1] :]
        return net.out_proj(net.norm(done.y, z).reshape(*x.shape[:2], -1))

    def rollback(self, keep: int) -> None:
        """Go back to the first `keep` steps of the last block, which must have been short enough to tape."""
        block = self._block
        if block is None:
            raise RuntimeError(f"only blocks of up to {MAX_TAPE_STEPS} tokens can be rolled back")
        self._start = Start(block.state, block.tape, keep)
        self._window = block.conv_input[:, keep : keep + self._window.shape[1]]
        self._block = None

    def arrays(self) -> list[mx.array]:
        return [self._window, self._start.state]

    def _begin(self, qkv: mx.array) -> None:
        """Zeros before the first token, as the model's own forward has them."""
        if self._window is not None:
            return
        net, batch = self._net, qkv.shape[0]
        self._window = mx.zeros((batch, net.conv_kernel_size - 1, net.conv_dim), qkv.dtype)
        state = mx.zeros((batch, net.num_v_heads, net.head_v_dim, net.head_k_dim), mx.float32)
        self._start = Start(state)


def _is_fused(net: nn.Module) -> bool:
    """Qwen3-Next packs its projections in two; Qwen3.5 and later keep four."""
    return hasattr(net, "in_proj_qkvz") and hasattr(net, "fix_query_key_value_ordering")


def _project(net: nn.Module, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """(1, n, D) -> convolution input (1, n, C), output gate z (1, n, Hv, dv), and b, a (1, n, Hv)."""
    rows = x.shape[:2]
    if _is_fused(net):
        q, k, v, z, b, a = net.fix_query_key_value_ordering(net.in_proj_qkvz(x), net.in_proj_ba(x))
        return mx.concatenate([t.reshape(*rows, -1) for t in (q, k, v)], axis=-1), z, b, a
    z = net.in_proj_z(x).reshape(*rows, net.num_v_heads, net.head_v_dim)
    return net.in_proj_qkv(x), z, net.in_proj_b(x), net.in_proj_a(x)


def _norm_eps(dk: int) -> float:
    """What is added to the mean square of a query or key, by the installed mlx-lm's own rule.

    Up to 0.31 it was 1e-6; since then 1e-6 is added to the sum of squares. Verification must compute what plain
    decoding computes.
    """
    return 1e-6 / dk if hasattr(stock, "normalize_qk") else 1e-6
