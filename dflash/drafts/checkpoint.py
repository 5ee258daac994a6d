"""The public on-disk format of DFlash drafts: `config.json` keys and tensor names.

All geometry is read here and checked against the tensors; nothing is assumed from a name, because drafts are
re-uploaded in place with other layers, taps and mask ids. Packagings that look alike but mean something else
are refused by name: run as DFlash they would load, and accept almost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import BadCheckpoint, DraftMismatch, UnsupportedDraft

ARCHITECTURES = {"DFlashDraftModel": 1, "DFlash2DraftModel": 2}
DEFAULT_BLOCK_SIZE = 16  # the format's own fallback where neither place names one

# Signs of a relative, with what it is. Each changes what the slots or the weights mean.
_RELATIVES = {
    "markov_rank": "a DSpark or Markov hybrid: its anchor slot predicts too, and a Markov head follows",
    "speculators_model_type": "in the speculators layout: nested settings, layer ids one too high",
    "eagle_aux_hidden_state_layer_ids": "a Laguna draft: normalised taps and gated attention",
}
_FOREIGN_TENSORS = {
    "encoder.fc.weight": "a Meta assistant draft: other tensor names",
    "mask_embedding": "a draft with a learned mask embedding",
    "attention_sink_bias": "a draft with attention sinks",
    "d2t": "a draft with a vocabulary of its own",
}


@dataclass(frozen=True)
class DraftConfig:
    """Geometry and conventions of one draft. Sizes in elements, `taps` are 0-based target layers."""

    generation: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    max_context: int
    num_target_layers: int | None
    block_size: int
    mask_token: int
    taps: tuple[int, ...]
    windows: tuple[int | None, ...]  # per layer: None is full attention
    causal: tuple[bool, ...]  # per layer, inside the block
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    attention_bias: bool = False
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    soft_cap: float | None = None
    quantization: dict[str, Any] | None = None
    conv_kernel: int = 0  # second generation only, as are the next four
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    selector_vocab: int = 0

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> DraftConfig:
        """Read a draft's `config.json`.

        Raises:
            UnsupportedDraft: not a DFlash draft, or one whose conventions differ.
            BadCheckpoint: a required key is missing or contradicts another.
        """
        generation = draft_generation(config)
        nested = config.get("dflash_config", {})

        def setting(key: str, default: Any = None) -> Any:
            """Nested wins over top level; both places occur in published drafts."""
            return nested.get(key, config.get(key, default))

        def required(key: str) -> Any:
            if (value := setting(key)) is None:
                raise BadCheckpoint(f"the draft's config.json has no {key}")
            return value

        layers = required("num_hidden_layers")
        windows = _windows(config, setting("swa_window_size"), layers)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = config.get("rope_theta", rope.get("rope_theta"))
        if theta is None:
            raise BadCheckpoint("the draft's config.json has no rope_theta")
        soft_cap = setting("final_logit_softcapping")
        return cls(
            generation=generation,
            hidden_size=required("hidden_size"),
            num_layers=layers,
            num_heads=required("num_attention_heads"),
            num_kv_heads=required("num_key_value_heads"),
            head_dim=required("head_dim"),
            intermediate_size=required("intermediate_size"),
            vocab_size=required("vocab_size"),
            norm_eps=required("rms_norm_eps"),
            max_context=required("max_position_embeddings"),
            num_target_layers=setting("num_target_layers"),
            block_size=setting("block_size", DEFAULT_BLOCK_SIZE),
            mask_token=required("mask_token_id"),
            taps=_taps(setting("target_layer_ids"), setting("num_target_layers"), layers),
            windows=windows,
            causal=_causality(setting("is_causal", setting("causal")), windows),
            rope_theta=theta,
            rope_scaling=_rope_scaling(rope),
            attention_bias=bool(config.get("attention_bias", False)),
            embedding_scale=setting("input_embedding_scale", 1.0),
            output_multiplier=setting("output_multiplier", 1.0),
            soft_cap=soft_cap if soft_cap and soft_cap > 0 else None,
            quantization=config.get("quantization"),
            **(_second_generation(required, setting) if generation == 2 else {}),
        )

    def check_target(self, *, hidden_size: int, num_layers: int, vocab_size: int) -> None:
        """Raise `DraftMismatch` unless a target of this geometry can carry the draft.

        The vocabularies may differ by padding rows; the ids that the draft names must exist.
        """
        faults = []
        if self.hidden_size != hidden_size:
            faults.append(f"hidden size {self.hidden_size}, the target has {hidden_size}")
        if self.num_target_layers not in (None, num_layers):
            faults.append(f"made for a target of {self.num_target_layers} layers, this one has {num_layers}")
        if max(self.taps) >= num_layers:
            faults.append(f"taps layer {max(self.taps)}, the target's last is {num_layers - 1}")
        if self.mask_token >= vocab_size:
            faults.append(f"mask token {self.mask_token}, the target's vocabulary has {vocab_size}")
        if faults:
            raise DraftMismatch(f"the draft does not belong to this target: {'; '.join(faults)}")


def is_draft(config: dict[str, Any]) -> bool:
    """Whether a `config.json` describes a draft of any kind rather than a model that answers."""
    return (
        bool(ARCHITECTURES.keys() & set(config.get("architectures") or ()))
        or "dflash_config" in config
        or any(sign in config for sign in _RELATIVES)
    )


def draft_generation(config: dict[str, Any]) -> int:
    """1 or 2; raises `UnsupportedDraft` naming what the checkpoint is instead."""
    nested = config.get("dflash_config", {})
    for sign, what in _RELATIVES.items():
        if config.get(sign) is not None or nested.get(sign) is not None:
            raise UnsupportedDraft(f"this draft is {what} (config key {sign})")
    if config.get("sample_from_anchor") or nested.get("sample_from_anchor"):
        raise UnsupportedDraft(
            "this draft predicts from the anchor slot (sample_from_anchor), DFlash does not"
        )
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(architectures) or "none"
    raise UnsupportedDraft(
        f"not a DFlash draft: architectures {found}, expected {' or '.join(ARCHITECTURES)}"
    )


def clean_names(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Tensors under the format's own names; an optional leading `model.` is dropped.

    Raises:
        UnsupportedDraft: a tensor that changes what the draft computes and is not part of the format.
    """
    cleaned = {name.removeprefix("model."): array for name, array in weights.items()}
    for name in cleaned:
        for sign, what in _FOREIGN_TENSORS.items():
            if sign in name:
                raise UnsupportedDraft(f"this is {what} (tensor {name})")
    # Owned copies of the target's tables occur in the wild; the target's own are the ones that count.
    return {
        n: a for n, a in cleaned.items() if not n.startswith(("embed_tokens.", "lm_head.", "rotary_emb."))
    }


def _second_generation(required: Callable[[str], Any], setting: Callable[[str], Any]) -> dict[str, int]:
    """The sizes that only DFlash 2 has; channels per group must divide the hidden size."""
    sizes = {
        "conv_kernel": required("conv_kernel_size"),
        "conv_group": required("conv_group_size"),
        "selector_rank": required("selector_rank"),
        "selector_top_k": required("selector_top_k"),
        "selector_vocab": setting("selector_vocab_size") or required("vocab_size"),
    }
    if required("hidden_size") % sizes["conv_group"]:
        raise BadCheckpoint(
            f"conv_group_size {sizes['conv_group']} does not divide hidden_size {required('hidden_size')}"
        )
    return sizes


def _windows(config: dict[str, Any], swa_window: int | None, layers: int) -> tuple[int | None, ...]:
    kinds = config.get("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers:
        raise BadCheckpoint(
            f"the draft's layer_types names {len(kinds)} layers, num_hidden_layers is {layers}"
        )
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedDraft(f"the draft has layers of type {', '.join(sorted(unknown))}")
    window = config.get("sliding_window") or swa_window
    if "sliding_attention" in kinds and not window:
        raise BadCheckpoint("the draft has sliding layers but its config.json has no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causality(flag: bool | None, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """An explicit flag holds for all layers; without one, exactly the sliding layers are causal."""
    return tuple(window is not None if flag is None else bool(flag) for window in windows)


def _taps(listed: list[int] | None, target_layers: int | None, draft_layers: int) -> tuple[int, ...]:
    """The tapped layers, or the format's default rule: evenly spaced from 1 to N - 3, rounded."""
    if listed:
        if min(listed) < 0:
            raise UnsupportedDraft(
                f"the draft taps layer {min(listed)}: taps of the embedding are not DFlash"
            )
        return tuple(listed)
    if target_layers is None:
        raise BadCheckpoint("the draft's config.json has neither target_layer_ids nor num_target_layers")
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers))


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """What mlx-lm's rope builder takes, or None for plain rope.

    `partial_rotary_factor` is dropped: copied over from hybrid targets, it does not apply to drafts.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    return {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")} | {
        "type": kind
    }
