"""Drafts of published geometry with random weights, for replays on the targets of `verify_cost`.

A pass costs what a trained draft's costs. What it proposes is put aside.
"""

from __future__ import annotations

import mlx.core as mx

from ..drafts.base import Draft
from ..drafts.checkpoint import DraftConfig
from ..drafts.dflash import DFlashDraft

_COMMON = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 262144,
    "block_size": 16,
}
# As the published drafts' configs have them: layers, taps, mask token.
_DRAFTS = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "vocab_size": 151936,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    },
    "qwen3.5-9b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 6,
        "vocab_size": 248320,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 4096,
        "dflash_config": {"mask_token_id": 248077, "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29]},
    },
    "qwen3.5-tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "dflash_config": {"mask_token_id": 999, "target_layer_ids": [0, 2]},
    },
}


def random_draft(shape: str) -> Draft:
    """A bf16 draft for the target of that shape."""
    mx.random.seed(1)
    draft = DFlashDraft(DraftConfig.from_json(_COMMON | _DRAFTS[shape]))
    draft.set_dtype(mx.bfloat16)
    mx.eval(draft.parameters())
    return draft
