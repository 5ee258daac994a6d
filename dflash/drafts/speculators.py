"""The speculators layout: DFlash drafts in another packaging, restated in the format's own keys and names.

Differences, all of them here. The transformer's settings are nested. `aux_hidden_state_layer_ids` counts the
embedding as 0, so its ids are one above the layers whose outputs are meant. `sliding_window_non_causal` speaks
of sliding layers only; full ones always see the whole block. A draft may propose from a vocabulary of its own,
with its own head, and a table `d2t` of what to add to its ids to get the target's.

Configs that name an option of the trainer's which changes the computation are refused by that name.
"""

from __future__ import annotations

from typing import Any

from ..errors import BadCheckpoint, UnsupportedDraft

SIGN = "speculators_model_type"
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
# Whether sliding layers see the whole block where the config leaves it out: the trainer's own defaults.
_NON_CAUSAL = {"dflash": False, "dflash2": True}
# Options of the trainer, off by default; each changes what is computed or what the slots mean.
_OPTIONS = (
    "dflash_block_position_embedding",
    "dflash_context_residual",
    "dflash_gated_layer_fusion",
    "fc_norm",
    "norm_before_fc",
    "shift_label",
)
# Bare tensors of the format, which a trainer's embedding modules store as weights.
_RENAMED = {
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}


def restated(config: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` of this layout in the format's own keys.

    Raises:
        UnsupportedDraft: another kind of speculator, or one with options that DFlash does not have.
        BadCheckpoint: it lacks the nested settings or the layer ids.
    """
    kind = config[SIGN]
    if kind not in _ARCHITECTURES:
        raise UnsupportedDraft(f"this draft is a speculator of type {kind}, not DFlash (config key {SIGN})")
    if on := [option for option in _OPTIONS if config.get(option)]:
        raise UnsupportedDraft(f"this draft was trained with {', '.join(on)}, which DFlash does not have")
    if config.get("draft_ffn_type", "dense") != "dense":
        raise UnsupportedDraft(f"this draft has {config['draft_ffn_type']} feed-forward layers")
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise BadCheckpoint("the draft's config.json has no transformer_layer_config")
    if "hc_mult" in nested:
        raise UnsupportedDraft("this draft is made of hyper-connected layers (config key hc_mult)")
    if config.get("target_hidden_size") not in (None, nested.get("hidden_size")):
        raise UnsupportedDraft("this draft's hidden size differs from its target's (target_hidden_size)")
    stored = config.get("aux_hidden_state_layer_ids")
    if not stored:
        raise BadCheckpoint("the draft's config.json has no aux_hidden_state_layer_ids")
    own = {key: value for key, value in config.items() if value is not None}
    flat = {**nested, **own, "architectures": [_ARCHITECTURES[kind]]}
    flat["target_layer_ids"] = [layer - 1 for layer in stored]
    if config.get("sliding_window_non_causal", _NON_CAUSAL[kind]):
        flat["is_causal"] = False
    else:
        flat.pop("is_causal", None)  # then exactly the sliding layers are causal
    return {key: value for key, value in flat.items() if key not in (SIGN, "transformer_layer_config")}


def own_vocabulary(config: dict[str, Any]) -> int:
    """Rows of the draft's own head, from a restated config; 0 when it proposes from the target's whole one."""
    size = config.get("draft_vocab_size") or 0
    return size if size < config.get("vocab_size", 0) else 0


def renamed(name: str) -> str:
    """The format's own name of a tensor."""
    return _RENAMED.get(name, name)
