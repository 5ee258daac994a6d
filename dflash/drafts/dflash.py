"""DFlash, first generation: a block of masks becomes a block of tokens in one pass.

Each layer attends from the block (anchor and masks) to the context and to the block itself. The context is all
the draft knows of the target: per committed position one vector fused from tapped layers, which every layer
projects with the same key and value weights it uses for the block. See the DFlash paper (arXiv 2602.06036).
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from ..errors import BadCheckpoint
from .base import Proposal, SharedTables, Weigh, as_scored
from .checkpoint import DraftConfig, clean_names
from .context import ContextRows, block_mask


class Attention(nn.Module):
    def __init__(self, config: DraftConfig, layer: int):
        super().__init__()
        dim, heads, kv_heads, head_dim = (
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        bias = config.attention_bias
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.norm_eps)
        self._head_dim = head_dim
        self._causal = config.causal[layer]
        self._rope = initialize_rope(
            head_dim, config.rope_theta, config.rope_traditional, config.rope_scaling, config.max_context
        )

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self._head_dim)  # (1, n, H*d) -> (1, n, H, d)

    def keys_values(self, rows: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """(1, n, D) at positions position.. -> keys and values (1, H, n, d)."""
        keys = self.k_norm(self._heads(self.k_proj(rows))).transpose(0, 2, 1, 3)
        return self._rope(keys, offset=position), self._heads(self.v_proj(rows)).transpose(0, 2, 1, 3)

    def __call__(self, block: mx.array, context: mx.array | None, rows: ContextRows) -> mx.array:
        """`block` (1, n, D) attends to the kept rows, the new `context` (1, m, D) and itself."""
        new = 0 if context is None else context.shape[1]
        position = rows.end + new  # of the anchor
        queries = self.q_norm(self._heads(self.q_proj(block))).transpose(0, 2, 1, 3)
        queries = self._rope(queries, offset=position)
        # New context rows and block rows are neighbours in position: one projection serves both.
        source = block if context is None else mx.concatenate([context, block], axis=1)
        keys, values = rows.write(*self.keys_values(source, rows.end), commit=new)
        width = block.shape[1]
        mask = block_mask(keys.shape[2] - width, width, rows.window, self._causal)
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._head_dim**-0.5, mask=mask
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*block.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config: DraftConfig, index: int):
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def __call__(self, x: mx.array, context: mx.array | None, rows: ContextRows) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), context, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraft(nn.Module):
    """A loaded first-generation draft (see `drafts.base.Draft`)."""

    make_layer: ClassVar[type[Layer]] = Layer

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.layers = [self.make_layer(config, i) for i in range(config.num_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        if config.own_vocab:
            self.lm_head = nn.Linear(config.hidden_size, config.own_vocab, bias=False)
            self.d2t = mx.zeros((config.own_vocab,), mx.int32)  # what to add to an id to get the target's

    @property
    def dtype(self) -> mx.Dtype:
        """Of the activations. Never fp16: these drafts overflow in it and then accept nothing."""
        return self.hidden_norm.weight.dtype

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def max_context(self) -> int:
        return self.config.max_context

    def load(self, weights: dict[str, mx.array]) -> None:
        """Fill in a checkpoint's tensors. Layers that carry scales are quantised, the others are not.

        Raises:
            BadCheckpoint: tensors are missing, unknown or of another shape; all of them are named.
        """
        weights = clean_names(weights, own_vocabulary=self.config.own_vocab > 0)
        if self.config.quantization:
            nn.quantize(
                self,
                group_size=self.config.quantization["group_size"],
                bits=self.config.quantization["bits"],
                class_predicate=lambda path, _: f"{path}.scales" in weights,
            )
        expected = {name: array.shape for name, array in tree_flatten(self.parameters())}
        faults = [f"{name} is missing" for name in sorted(expected.keys() - weights.keys())]
        faults += [f"{name} is unknown" for name in sorted(weights.keys() - expected.keys())]
        faults += [
            f"{name} is {weights[name].shape}, expected {shape}"
            for name, shape in sorted(expected.items())
            if name in weights and weights[name].shape != shape
        ]
        if faults:
            shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
            raise BadCheckpoint(f"the draft's tensors do not fit its config.json: {shown}")
        self.load_weights(list(weights.items()))

    def fuse(self, taps: mx.array) -> mx.array:
        """Tapped states (1, n, T*D) -> context vectors (1, n, D)."""
        return self.hidden_norm(self.fc(taps))

    def select(
        self, anchor: mx.array, hidden: mx.array, logits: mx.array, weigh: Weigh = as_scored
    ) -> Proposal:
        """The proposal for m slots, from their hidden states (1, m, D) and logits (1, m, V)."""
        ids = None
        if self.config.own_vocab:
            ids = mx.broadcast_to(self.target_ids(mx.arange(logits.shape[-1])), logits.shape[1:])
        scores = weigh(logits[0], ids)
        return Proposal(self.target_ids(mx.argmax(scores, axis=-1)[None]), scores, ids)

    def project(self, tables: SharedTables, hidden: mx.array, dtype: mx.Dtype) -> mx.array:
        """Bare logits (1, n, V) of hidden states: by the target's head, or over the draft's own vocabulary."""
        return self.lm_head(hidden) if self.config.own_vocab else tables.project(hidden.astype(dtype))

    def target_ids(self, tokens: mx.array) -> mx.array:
        """The target's ids for `tokens` of the draft's own vocabulary, if it has one."""
        return (tokens + self.d2t[tokens]).astype(mx.int32) if self.config.own_vocab else tokens

    def start(self, tables: SharedTables) -> DFlashDrafter:
        return DFlashDrafter(self, tables)


class DFlashDrafter:
    """One request's context in the draft (see `drafts.base.Drafter`)."""

    def __init__(self, draft: DFlashDraft, tables: SharedTables):
        self._draft = draft
        self._tables = tables
        self._rows = [ContextRows(window) for window in draft.config.windows]
        self._pending: mx.array | None = None  # fused vectors that have no keys and values yet
        masks = mx.full((1, draft.block_size - 1), draft.config.mask_token, dtype=mx.int32)
        self._table_dtype = tables.embed(masks).dtype
        self._masks = self._embed(masks)

    def _embed(self, tokens: mx.array) -> mx.array:
        return (self._tables.embed(tokens) * self._draft.config.embedding_scale).astype(self._draft.dtype)

    def observe(self, taps: mx.array) -> None:
        fused = self._draft.fuse(taps.astype(self._draft.dtype))
        if self._pending is not None:
            fused = mx.concatenate([self._pending, fused], axis=1)
        self._pending = fused
        if fused.shape[1] > self._draft.block_size:  # a prompt chunk: more than a cycle can leave
            self._absorb()

    def _absorb(self) -> None:
        """Give the pending rows their keys and values now, without a block behind them."""
        pending, self._pending = self._pending, None
        for layer, rows in zip(self._draft.layers, self._rows, strict=True):
            visible = pending
            if rows.window is not None and pending.shape[1] >= rows.window:
                visible = pending[:, -(rows.window - 1) :]
                rows.skip_to(rows.end + pending.shape[1] - visible.shape[1])
            rows.write(*layer.self_attn.keys_values(visible, rows.end), commit=visible.shape[1])

    def hidden(self, block: mx.array) -> mx.array:
        """Embedded block (1, n, D) -> output after the final norm (1, n, D); takes in what is pending."""
        context, self._pending = self._pending, None
        for layer, rows in zip(self._draft.layers, self._rows, strict=True):
            block = layer(block, context, rows)
        return self._draft.norm(block)

    def logits(self, hidden: mx.array) -> mx.array:
        """(1, n, D) -> (1, n, V), with the draft's multiplier and soft cap."""
        config = self._draft.config
        logits = self._draft.project(self._tables, hidden, self._table_dtype)
        if config.output_multiplier != 1.0:
            logits = logits * config.output_multiplier
        if config.soft_cap is not None:
            logits = mx.tanh(logits / config.soft_cap) * config.soft_cap
        return logits

    def propose(self, anchor: mx.array, count: int, weigh: Weigh = as_scored) -> Proposal:
        """A token for each of the first `count` slots after the anchor.

        The block always runs at its trained length: the slots see each other, and a narrowed block
        proposes worse. Only the slots asked for go through the head.
        """
        block = mx.concatenate([self._embed(anchor), self._masks], axis=1)
        hidden = self.hidden(block)[:, 1 : count + 1]
        return self._draft.select(anchor, hidden, self.logits(hidden), weigh)

    def arrays(self) -> list[mx.array]:
        buffers = [buffer for rows in self._rows for buffer in (rows.keys, rows.values) if buffer is not None]
        return buffers if self._pending is None else [*buffers, self._pending]
