"""Tiny random models and drafters with a known behaviour, for tests that need a whole loop in milliseconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.utils import _get_classes

from dflash.decoding.state import DecodeState
from dflash.drafts.base import Proposal, SharedTables, Weigh, as_scored
from dflash.targets.base import TargetAdapter
from dflash.targets.choose import choose

VOCAB = 211

_COMMON = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_LINEAR = {
    "num_hidden_layers": 4,  # three linear layers, then one of attention
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 32,
}
HYBRIDS: dict[str, dict] = {
    "qwen3_next": _MOE | _LINEAR,
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _MOE | _LINEAR,
}
FAMILIES: dict[str, dict] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"model_type": "llama", "sliding_window": 64},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _MOE,
}


WINDOW = 8  # much less than any answer here: every ring of mlx-lm's wraps early
_WINDOWED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROWING_QUERIES = {
    "rope_theta": 10000.0,
    "rope_type": "default",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
}
_GROUPED_EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}


def _known(families: dict[str, dict]) -> dict[str, dict]:
    """Those that the installed mlx-lm has."""
    modules = {name: f"mlx_lm.models.{entry.get('model_type', name)}" for name, entry in families.items()}
    return {name: entry for name, entry in families.items() if importlib.util.find_spec(modules[name])}


# Windowed layers between full ones.
SLIDING: dict[str, dict] = _known(
    {
        "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
        "gemma4_text": _WINDOWED  # as the small ones: shared keys, inputs per layer
        | {
            "num_hidden_layers": 5,
            "layer_types": [*_WINDOWED["layer_types"], "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
        "gemma4_moe": _WINDOWED  # as the large ones: experts, values that are the keys
        | {
            "model_type": "gemma4_text",
            "num_kv_shared_layers": 0,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        "gpt_oss": _WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "llama_sliding": _WINDOWED | {"model_type": "llama"},
        "ministral3": _WINDOWED | {"rope_parameters": _GROWING_QUERIES},
        "cohere2": {
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "logit_scale": 0.25,
            "head_dim": 12,
            "layer_norm_eps": 1e-5,
        },
        "olmo3": _WINDOWED,
        "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LG", "rope_scaling": None},
        "muse_glimmer": _WINDOWED,
        "afmoe": _WINDOWED | _EXPERTS | {"num_dense_layers": 1, "mup_enabled": True, "route_scale": 0.2},
        "exaone_moe": _WINDOWED | _EXPERTS | {"num_shared_experts": 1, "is_moe_layer": [False, True, True]},
        "mellum": _WINDOWED
        | _EXPERTS
        | {
            "norm_topk_prob": True,
            "rope_parameters": {
                kind: {"rope_theta": 10000.0, "rope_type": "default"}
                for kind in ("sliding_attention", "full_attention")
            },
        },
        "laguna": _WINDOWED | _EXPERTS | {"shared_expert_intermediate_size": 32},
    }
)
# Plain caches, with a mask, latents or scales of their own.
OTHERS: dict[str, dict] = _known(
    {
        "gemma2": {"query_pre_attn_scalar": 16},
        "granite": {
            "head_dim": 12,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.5,
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
        },
        "minimax": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 0,
            "rotary_dim": 8,
        },
        "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
        "glm4_moe": _GROUPED_EXPERTS
        | {
            "rope_scaling": None,
            "use_qk_norm": True,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
        },
        "glm4_moe_lite": _LATENT | _GROUPED_EXPERTS,
        "deepseek_v3": _LATENT | _GROUPED_EXPERTS,
        "mistral4": _LATENT | _GROUPED_EXPERTS | {"rope_parameters": _GROWING_QUERIES},
        "glm_moe_dsa": _LATENT
        | _GROUPED_EXPERTS
        | {
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk": 24,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "attention_bias": False,
        },
    }
)
# Without an adapter.
OPAQUE: dict[str, dict] = {
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 48,
        "block_ff_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }
}
ALL = FAMILIES | HYBRIDS | SLIDING | OTHERS


def config(family: str, **changes: object) -> dict:
    return {"model_type": family, **_COMMON, **(ALL | OPAQUE)[family], **changes}


def model(family: str, seed: int = 0, **changes: object) -> nn.Module:
    """An mlx-lm model with random fp32 weights, scaled so that its greedy output does not fall into a loop."""
    settings = config(family, **changes)
    model_class, args_class = _get_classes(settings)
    mx.random.seed(seed)
    built = model_class(args_class.from_dict(settings))
    built.apply(_livened)
    mx.eval(built.parameters())
    return built


def _livened(array: mx.array) -> mx.array:
    """Weights that are made as zeros, routers for one, would leave nothing to tell tokens apart."""
    if array.ndim == 1:
        return array + 0.1 * mx.random.normal(array.shape)
    return array * 2.5 if mx.any(array).item() else 0.3 * mx.random.normal(array.shape)


def target(family: str, seed: int = 0, **changes: object) -> tuple[nn.Module, TargetAdapter]:
    built = model(family, seed, **changes)
    return built, choose(built, config(family, **changes))


def greedy(built: nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """What mlx-lm's own greedy decoding answers, `count` tokens."""
    steps = generate_step(mx.array(list(prompt)), built, max_tokens=count)
    return [int(token) for token, _ in steps]


class ScriptedDrafter:
    """Knows the right answer and proposes it up to a slot of its choosing, then something wrong.

    `patience` is asked before every cycle: how many of the proposals are to be right.
    """

    def __init__(self, answer: Sequence[int], prompt_tokens: int, patience: Iterator[int]):
        self._answer = answer
        self._prompt_tokens = prompt_tokens
        self._patience = patience
        self._committed = 0
        self.expected: list[int] = []

    def observe(self, taps: mx.array) -> None:
        self._committed += taps.shape[1]

    def propose(self, anchor: mx.array, count: int, weigh: Weigh = as_scored) -> Proposal:
        at = self._committed - self._prompt_tokens  # index of the anchor in the answer
        assert anchor.item() == self._answer[at]
        right = min(next(self._patience), count)
        self.expected.append(right)
        padded = [*self._answer[at + 1 : at + 1 + count], *[0] * count][:count]
        wrong = [(token + 1) % VOCAB for token in padded]
        return Proposal(mx.array([padded[:right] + wrong[right:]]))

    def arrays(self) -> list[mx.array]:
        return []


class ScriptedDraft:
    """A `Draft` whose drafters are scripted."""

    taps = (0, 2)
    block_size = 32
    max_context = 1 << 20

    def __init__(self, answer: Sequence[int], prompt_tokens: int, patience: Iterator[int]):
        self.drafter = ScriptedDrafter(answer, prompt_tokens, patience)

    def start(self, tables: SharedTables) -> ScriptedDrafter:
        return self.drafter


def state(
    adapter: TargetAdapter,
    prompt: Sequence[int],
    budget: int,
    drafter: ScriptedDrafter | None = None,
    end_tokens: Sequence[int] = (),
) -> DecodeState:
    return DecodeState(
        target=adapter,
        session=adapter.start(ScriptedDraft.taps if drafter else ()),
        drafter=drafter,
        prompt=list(prompt),
        budget=budget,
        end_tokens=frozenset(end_tokens),
        draft_limit=ScriptedDraft.max_context,
    )
