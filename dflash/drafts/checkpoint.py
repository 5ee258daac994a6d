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
from . import speculators

ARCHITECTURES = {"DFlashDraftModel": 1, "DFlash2DraftModel": 2}
DEFAULT_BLOCK_SIZE = 16  # the format's own fallback where neither place names one

# Signs of a relative, with what it is. Each changes what the slots or the weights mean.
_RELATIVES = {
    "markov_rank": "a DSpark or Markov hybrid: its anchor slot predicts too, and a Markov head follows",
    "eagle_aux_hidden_state_layer_ids": "a Laguna draft: normalised taps and gated attention",
}
_ARCHITECTURES_OF_RELATIVES = {
    "DSpark": "a DSpark draft or a baseline of its makers: own tables, and the anchor slot predicts too",
    "Assistant": "a Meta assistant draft: other tensor names",
}
_FOREIGN_TENSORS = {
    "encoder.fc.weight": "a Meta assistant draft: other tensor names",
    "mask_embedding": "a draft with a learned mask embedding",
    "attention_sink_bias": "a draft with attention sinks",
    "markov": "a DSpark or Markov hybrid",
    "confidence_head": "a DSpark draft",
    "fc_layernorm": "a draft with normalised taps",
    "aux_hidden_norms": "a Laguna draft: normalised taps and gated attention",
}
# Copies of the target's own tables, and heads that another training left behind: they take no part.
_IGNORED_TENSORS = ("embed_tokens.", "lm_head.", "rotary_emb.", "mtp.", "verifier_lm_head.", "verifier_norm.")
_OWN_VOCABULARY_TENSORS = ("lm_head.", "d2t")


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
    rope_traditional: bool = False  # pairs of neighbours instead of halves
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
    own_vocab: int = 0  # ids of the draft's own head; 0: it proposes from the target's vocabulary

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> DraftConfig:
        """Read a draft's `config.json`, in the format's own layout or in the speculators one.

        Raises:
            UnsupportedDraft: not a DFlash draft, or one whose conventions differ.
            BadCheckpoint: a required key is missing or contradicts another.
        """
        generation = draft_generation(config)
        own_vocab = 0
        if speculators.SIGN in config:
            config = speculators.restated(config)
            own_vocab = speculators.own_vocabulary(config)
            if own_vocab and generation == 2:
                raise UnsupportedDraft("a DFlash 2 draft with a vocabulary of its own (draft_vocab_size)")
        nested = config.get("dflash_config") or {}

        def setting(key: str, default: Any = None) -> Any:
            """Nested wins over top level; both places occur in published drafts. Null is like absent."""
            told = (place.get(key) for place in (nested, config))
            return next((value for value in told if value is not None), default)

        def required(key: str) -> Any:
            if (value := setting(key)) is None:
                raise BadCheckpoint(f"the draft's config.json has no {key}")
            return value

        layers = required("num_hidden_layers")
        windows = _windows(config, setting("swa_window_size"), layers)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = setting("rope_theta", rope.get("rope_theta"))
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
            rope_traditional=not setting("is_neox_style", setting("rope_is_neox_style", True)),
            attention_bias=bool(config.get("attention_bias", False)),
            embedding_scale=setting("input_embedding_scale", 1.0),
            output_multiplier=setting("output_multiplier", 1.0),
            soft_cap=soft_cap if soft_cap and soft_cap > 0 else None,
            quantization=_quantization(config),
            own_vocab=own_vocab,
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
    architectures = config.get("architectures") or ()
    return (
        bool(ARCHITECTURES.keys() & set(architectures))
        or any(sign in name for sign in _ARCHITECTURES_OF_RELATIVES for name in architectures)
        or "dflash_config" in config
        or speculators.SIGN in config
        or any(sign in config for sign in _RELATIVES)
    )


def draft_generation(config: dict[str, Any]) -> int:
    """1 or 2; raises `UnsupportedDraft` naming what the checkpoint is instead."""
    nested = config.get("dflash_config") or {}
    architectures = config.get("architectures") or []
    for sign, what in _ARCHITECTURES_OF_RELATIVES.items():
        if found := [name for name in architectures if sign in name]:
            raise UnsupportedDraft(f"this draft is {what} (architecture {found[0]})")
    for sign, what in _RELATIVES.items():
        if config.get(sign) is not None or nested.get(sign) is not None:
            raise UnsupportedDraft(f"this draft is {what} (config key {sign})")
    if config.get("sample_from_anchor") or nested.get("sample_from_anchor"):
        raise UnsupportedDraft(
            "this draft predicts from the anchor slot (sample_from_anchor), DFlash does not"
        )
    if speculators.SIGN in config:
        architectures = speculators.restated(config)["architectures"]
    for name in architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(architectures) or "none"
    raise UnsupportedDraft(
        f"not a DFlash draft: architectures {found}, expected {' or '.join(ARCHITECTURES)}"
    )


def clean_names(weights: dict[str, mx.array], *, own_vocabulary: bool = False) -> dict[str, mx.array]:
    """Tensors under the format's own names; an optional leading `model.` is dropped.

    Copies of the target's tables are left out: the target's own are the ones that count. With `own_vocabulary`
    the draft's head and its table of ids are kept.

    Raises:
        UnsupportedDraft: a tensor that changes what the draft computes and is not part of the format.
    """
    cleaned = {speculators.renamed(name.removeprefix("model.")): array for name, array in weights.items()}
    for name in cleaned:
        for sign, what in _FOREIGN_TENSORS.items():
            if sign in name:
                raise UnsupportedDraft(f"this is {what} (tensor {name})")
    ignored = tuple(n for n in _IGNORED_TENSORS if not (own_vocabulary and n in _OWN_VOCABULARY_TENSORS))
    if "d2t" in cleaned and not own_vocabulary:
        _check_whole(cleaned.pop("d2t"))
    return {name: array for name, array in cleaned.items() if name != "t2d" and not name.startswith(ignored)}


def _check_whole(offsets: mx.array) -> None:
    """A table of ids beside a vocabulary that is said to be the target's must change nothing."""
    if mx.any(offsets != 0).item():
        raise UnsupportedDraft(
            "this is a draft with a vocabulary of its own (tensor d2t) that it does not size"
        )


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


def _quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """MLX's own entry; weights packed in another tool's way are refused before they are read as numbers."""
    if ours := config.get("quantization"):
        return ours
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        raise UnsupportedDraft(
            f"this draft is quantised by {method}; MLX's own quantisation is read, or none"
        )
    return None


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
