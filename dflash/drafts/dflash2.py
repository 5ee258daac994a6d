"""DFlash 2: the first generation's block pass, with short convolutions inside it and a walk through candidates.

Two additions. Every sublayer works between two grouped dynamic causal convolutions over the block's rows, which
let neighbouring slots agree. And proposals are no longer chosen slot by slot: each slot keeps its top candidates,
a low-rank table scores each candidate given the token before it, and a walk from the anchor picks a path: the best
at each slot, or a draw where noise was added to the scores. The walk stays on the device: all pairwise scores are
computed (and weighed) at once, only look-ups are sequential.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from .base import Proposal, Weigh, as_scored
from .checkpoint import DraftConfig
from .context import ContextRows
from .dflash import DFlashDraft, Layer

_PREPARE, _FINISH = 0, 1  # the two convolutions of a sublayer, as stored on axis 0 of `base_kernel`


class DynamicConv(nn.Module):
    """A causal convolution over block rows whose coefficients depend on the sublayer's input.

    coefficient[row, tap, channel] = base_kernel[side, tap, channel] + projected[row, side, tap, group(channel)]
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self._taps = config.conv_kernel
        self._group = config.conv_group
        groups = config.hidden_size // config.conv_group
        self.base_kernel = mx.zeros((2, config.conv_kernel, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * config.conv_kernel * groups, bias=False)

    def coefficients(self, u: mx.array) -> mx.array:
        """Of both sides, from the normalised sublayer input (1, n, D): (1, n, 2, K, D)."""
        dynamic = self.kernel_projection(u).reshape(*u.shape[:2], 2, self._taps, -1)
        return self.base_kernel + mx.repeat(dynamic, self._group, axis=-1)

    def __call__(self, z: mx.array, coefficients: mx.array, side: int) -> mx.array:
        """Convolve rows (1, n, D). Row 0, the anchor, has nothing before it."""
        out = coefficients[:, :, side, 0] * z
        for tap in range(1, self._taps):
            shifted = mx.pad(z, [(0, 0), (tap, 0), (0, 0)])[:, : z.shape[1]]  # row i holds z[i - tap]
            out = out + coefficients[:, :, side, tap] * shifted
        return out


class ConvLayer(Layer):
    """A draft layer with a convolution before and after each sublayer."""

    def __init__(self, config: DraftConfig, index: int):
        super().__init__(config, index)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

    def __call__(self, x: mx.array, context: mx.array | None, rows: ContextRows) -> mx.array:
        u = self.input_layernorm(x)
        by_row = self.attention_conv.coefficients(u)
        mixed = self.self_attn(self.attention_conv(u, by_row, _PREPARE), context, rows)
        x = x + self.attention_conv(mixed, by_row, _FINISH)
        u = self.post_attention_layernorm(x)
        by_row = self.mlp_conv.coefficients(u)
        return x + self.mlp_conv(self.mlp(self.mlp_conv(u, by_row, _PREPARE)), by_row, _FINISH)


class CandidateSelector(nn.Module):
    """Scores a slot's candidates by what stands before them.

    score(c | w) = logit(c) + sum over rank of predecessor[w] * projected hidden * successor[c], in fp32:
    rounding to bf16 changes which candidate wins.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.predecessor_codebook = mx.zeros((config.vocab_size, config.selector_rank))
        self.successor_codebook = mx.zeros((config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def pairs(self, before: mx.array, hidden: mx.array, after: mx.array) -> mx.array:
        """Bilinear terms (m, J, K) of m slots, for predecessors (m, J) and candidates (m, K)."""
        gate = self.hidden_projection(hidden)[0].astype(mx.float32)  # (m, r)
        left = self.predecessor_codebook[before].astype(mx.float32) * gate[:, None]  # (m, J, r)
        right = self.successor_codebook[after].astype(mx.float32)  # (m, K, r)
        return left @ right.swapaxes(-1, -2)


class DFlash2Draft(DFlashDraft):
    """A loaded second-generation draft (see `drafts.base.Draft`)."""

    make_layer: ClassVar[type[Layer]] = ConvLayer

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def select(
        self, anchor: mx.array, hidden: mx.array, logits: mx.array, weigh: Weigh = as_scored
    ) -> Proposal:
        """The walk: at each slot the candidate that weighs most after the one chosen before it."""
        config = self.config
        logits = logits[0].astype(mx.float32)  # (m, V)
        if config.selector_vocab < logits.shape[-1]:
            logits = logits[:, : config.selector_vocab]
        top = config.selector_top_k
        candidates = mx.argpartition(logits, kth=-top, axis=-1)[:, -top:]  # (m, K)
        lattice = weigh(self._lattice(anchor, hidden, logits, candidates), candidates)
        chosen, picks, rows = 0, [], []
        for step in range(len(candidates)):
            rows.append(lattice[step][chosen])  # (K,)
            chosen = mx.argmax(rows[-1])
            picks.append(chosen)
        tokens = mx.take_along_axis(candidates, mx.stack(picks)[:, None], axis=-1).T  # (1, m)
        return Proposal(tokens, mx.stack(rows), candidates)

    def _lattice(
        self, anchor: mx.array, hidden: mx.array, logits: mx.array, candidates: mx.array
    ) -> mx.array:
        """Scores (m, K, K) of each slot's candidates, last axis, after each candidate of the slot before. The
        first slot has only the anchor before it, so all its rows are alike."""
        scores = mx.take_along_axis(logits, candidates, axis=-1)
        first = self.candidate_selector.pairs(anchor, hidden[:, :1], candidates[:1])  # (1, 1, K)
        pairs = mx.broadcast_to(first, (1, candidates.shape[1], candidates.shape[1]))
        if len(candidates) > 1:
            later = self.candidate_selector.pairs(candidates[:-1], hidden[:, 1:], candidates[1:])
            pairs = mx.concatenate([pairs, later])
        return scores[:, None] + pairs
