"""A tiny pair on disk in the real formats: an mlx-lm target with a tokenizer, and a DFlash draft for it."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import tiny
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash.drafts.checkpoint import DraftConfig
from dflash.drafts.dflash import DFlashDraft

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2


def tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> int:
    """Write a byte-level tokenizer; returns the size of its vocabulary."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    built = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    built.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(words)


def target(folder: Path, family: str = "llama", seed: int = 0, **changes: object) -> Path:
    """A random target with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    template = changes.pop("chat_template", CHAT_TEMPLATE)
    changes = {"vocab_size": tokenizer(folder, template), "max_position_embeddings": 512, **changes}
    built = tiny.model(family, seed, **changes)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(built.parameters())))
    architectures = {"architectures": ["TinyForCausalLM"], "eos_token_id": END}
    (folder / "config.json").write_text(json.dumps(tiny.config(family, **changes) | architectures))
    return folder


def draft_config(**changes: object) -> dict:
    settings = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 259,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "block_size": 8,
        "num_target_layers": 3,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]},
    }
    return settings | changes


def draft(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A random draft; it proposes nonsense, which is all the tests need."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = draft_config(**changes)
    mx.random.seed(seed)
    built = DFlashDraft(DraftConfig.from_json(settings))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(built.parameters())))
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def speculators_config(draft_vocab_size: int = 259, **changes: object) -> dict:
    """`draft_config` as the speculators layout writes it: nested, layer ids one higher."""
    flat = draft_config()
    nested = flat.pop("dflash_config")
    block = flat.pop("block_size")
    del flat["num_target_layers"], flat["architectures"]
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "block_size": block,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in nested["target_layer_ids"]],
        "mask_token_id": nested["mask_token_id"],
        "draft_vocab_size": draft_vocab_size,
        "sample_from_anchor": False,
        "transformer_layer_config": flat,
    } | changes
