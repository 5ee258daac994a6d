"""Tiny random models and drafters with a known behaviour, for tests that need a whole loop in milliseconds."""

from __future__ import annotations

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


def config(family: str, **changes: object) -> dict:
    return {"model_type": family, **_COMMON, **(FAMILIES | HYBRIDS)[family], **changes}


def model(family: str, seed: int = 0, **changes: object) -> nn.Module:
    """An mlx-lm model with random fp32 weights, scaled so that its greedy output does not fall into a loop."""
    settings = config(family, **changes)
    model_class, args_class = _get_classes(settings)
    mx.random.seed(seed)
    built = model_class(args_class.from_dict(settings))
    built.apply(lambda a: a * 2.5 if a.ndim > 1 else a + 0.1 * mx.random.normal(a.shape))
    mx.eval(built.parameters())
    return built


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
