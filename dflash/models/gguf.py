"""A GGUF file of a llama model as a folder that mlx-lm loads: config, weights, tokenizer.

All geometry comes from the file's metadata. Quantised tensors stay quantised (`gguf_tensors` says which are
exact). Rows of the query and key projections are put back into the order of the original checkpoint: GGUF has
the two halves of a rotary pair side by side, mlx-lm's llama half a head apart.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import BadCheckpoint, UnsupportedModel
from . import gguf_file, gguf_tensors, store
from .gguf_file import GGUFFile
from .gguf_tensors import GROUP_SIZE, Weight
from .gguf_tokenizer import end_tokens, special_ids, write_tokenizer

ARCHITECTURE = "llama"
_ROPE_FACTORS = "rope_freqs.weight"
# The tensors of a layer: GGUF's name and the module's path in mlx-lm.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama 3.1 and 3.2 differ only in `factor`; a GGUF file keeps the resulting factors and not the rule.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes, the shape it must have, and the heads whose rows are reordered (0: none)."""

    path: str
    shape: tuple[int, ...]
    heads: int = 0


def convert(gguf_file_path: Path, folder: Path, *, progress: bool = True) -> None:
    """Make `folder` from a GGUF file, whole or not at all; a folder that exists is kept.

    Raises:
        UnsupportedModel: another architecture, tensor type or tokenizer than this build reads.
        BadCheckpoint: the file is cut off or damaged.
        DiskFull: the folder does not fit.
    """
    store.build_once(folder, lambda work: write(gguf_file_path, work), progress=progress)


def write(gguf_file_path: Path, folder: Path) -> None:
    """Convert into an existing, empty folder. `convert` is this with the guarantees."""
    source = gguf_file.read(gguf_file_path)
    metadata = source.metadata
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedModel(
            f"{gguf_file_path} holds a {architecture} model; as GGUF this build reads {ARCHITECTURE} models",
            "give the model in safetensors format: a folder or a hub name",
        )
    config = _config(source)
    places = _places(config)
    _check_tensors(source, places)
    store.check_room(folder.parent, _bytes_to_write(source), f"converting {gguf_file_path.name}")
    write_tokenizer(metadata, folder)
    arrays, bits = _weights(source, places)
    _write_json(folder / "config.json", config | _quantization(bits))
    _write_json(folder / "generation_config.json", _generation_config(metadata))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})


def _config(source: GGUFFile) -> dict[str, Any]:
    """mlx-lm's config.json for this file."""
    metadata = source.metadata

    def setting(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{ARCHITECTURE}.{key}", default)
        if value is None:
            raise BadCheckpoint(f"{source.path} has no {ARCHITECTURE}.{key}")
        if isinstance(value, list):
            raise UnsupportedModel(f"{source.path} is a {ARCHITECTURE} model whose layers differ in {key}")
        if not isinstance(value, (int, float)) or value <= 0:
            raise BadCheckpoint(f"{source.path} is damaged: its {ARCHITECTURE}.{key} is {value!r}")
        return value

    hidden, heads = setting("embedding_length"), setting("attention.head_count")
    head_dim = setting("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if setting(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{source.path} has heads of size {head_dim}, but {key} {setting(key)}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": setting("block_count"),
        "intermediate_size": setting("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": setting("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": setting("attention.layer_norm_rms_epsilon"),
        "vocab_size": _rows(source, "token_embd.weight"),
        "max_position_embeddings": setting("context_length"),
        "rope_theta": setting("rope.freq_base", 10000.0),
        "rope_traditional": False,
        "rope_scaling": _rope_scaling(source, head_dim, setting("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in source.tensors,
    } | {f"{role}_token_id": token for role, token in special_ids(metadata).items() if role != "unk"}


def _rope_scaling(source: GGUFFile, head_dim: int, base: float) -> dict[str, Any] | None:
    """The rule behind the file's rotary scaling; refused where it is not one that is known here."""
    metadata = source.metadata
    kind = metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    factors = source.tensors.get(_ROPE_FACTORS)
    if kind == "linear" and factors is None:
        return {"type": "linear", "factor": metadata.get(f"{ARCHITECTURE}.rope.scaling.factor", 1.0)}
    if kind != "none":
        raise UnsupportedModel(f"{source.path} scales rotary positions by the rule {kind}")
    if factors is None:
        return None
    stored = _decode(source, _ROPE_FACTORS).weight.tolist()
    rule = {"type": "llama3", "factor": max(stored), **_LLAMA3_ROPE}
    expected = _llama3_factors(rule, head_dim, base)
    if len(stored) != len(expected) or any(
        abs(a - b) > 1e-3 * b for a, b in zip(stored, expected, strict=True)
    ):
        raise UnsupportedModel(f"{source.path} has rotary factors ({_ROPE_FACTORS}) of no rule known here")
    return rule


def _llama3_factors(rule: dict[str, Any], head_dim: int, base: float) -> list[float]:
    """By how much Llama 3.1 stretches each rotary wavelength: 1 for short ones, `factor` for long ones."""
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        turns = rule["original_max_position_embeddings"] / (2 * math.pi * base ** (index / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rule["factor"] + smooth))
    return factors


def _places(config: dict[str, Any]) -> dict[str, _Place]:
    """Every tensor that a model of this geometry has, by its name in the file."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    queries, keys = heads * config["head_dim"], kv_heads * config["head_dim"]
    shapes = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    rotated = {"attn_q": heads, "attn_k": kv_heads}
    table = (config["vocab_size"], hidden)
    places = {
        "token_embd.weight": _Place("model.embed_tokens", table),
        "output_norm.weight": _Place("model.norm", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        places["output.weight"] = _Place("lm_head", table)
    for layer in range(config["num_hidden_layers"]):
        for name, path in _LAYER.items():
            place = _Place(f"model.layers.{layer}.{path}", shapes[name], rotated.get(name, 0))
            places[f"blk.{layer}.{name}.weight"] = place
    return places


def _check_tensors(source: GGUFFile, places: dict[str, _Place]) -> None:
    if missing := sorted(places.keys() - source.tensors.keys()):
        raise BadCheckpoint(f"{source.path} lacks {len(missing)} tensors: {', '.join(missing[:4])}")
    if extra := sorted(source.tensors.keys() - places.keys() - {_ROPE_FACTORS}):
        raise UnsupportedModel(
            f"{source.path} has {len(extra)} tensors that a plain {ARCHITECTURE} model does not have: "
            f"{', '.join(extra[:4])}"
        )
    for name, place in places.items():
        if (found := source.tensors[name].shape) != place.shape:
            raise BadCheckpoint(f"{source.path}: {name} has shape {found}, expected {place.shape}")


def _weights(source: GGUFFile, places: dict[str, _Place]) -> tuple[dict[str, mx.array], dict[str, int]]:
    """The checkpoint's arrays by name, and the bits of each quantised module by path."""
    arrays: dict[str, mx.array] = {}
    bits: dict[str, int] = {}
    for name, place in places.items():
        weight = _decode(source, name)
        if place.heads:
            weight = weight.map(lambda rows, heads=place.heads: _halves_apart(rows, heads))
        if weight.bits is not None:
            bits[place.path] = weight.bits
        arrays |= weight.named(place.path)
    return _narrowed(arrays), bits


def _decode(source: GGUFFile, name: str) -> Weight:
    entry = source.tensors[name]
    return gguf_tensors.decode(entry.kind, source.bytes_of(entry), entry.shape)


def _halves_apart(rows: mx.array, heads: int) -> mx.array:
    """Rows (heads * (D/2, 2), ...) with pairs side by side -> (heads * (2, D/2), ...) with halves apart."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _narrowed(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """fp32 arrays in 16 bits where that loses nothing.

    Files keep norms in fp32 that the original had in 16 bits; one such array makes the whole model compute in
    fp32. The 16-bit type is the one that the other arrays have.
    """
    half = mx.float16 if any(a.dtype == mx.float16 for a in arrays.values()) else mx.bfloat16

    def narrow(array: mx.array) -> mx.array:
        if array.dtype != mx.float32:
            return array
        narrower = array.astype(half)
        return narrower if mx.array_equal(narrower.astype(mx.float32), array).item() else array

    return {name: narrow(array) for name, array in arrays.items()}


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """The config entry that tells mlx-lm the bits of each module: the most common, and the others by path."""
    if not bits:
        return {}
    usual, _ = Counter(bits.values()).most_common(1)[0]
    others = {
        path: {"group_size": GROUP_SIZE, "bits": count} for path, count in bits.items() if count != usual
    }
    return {"quantization": {"group_size": GROUP_SIZE, "bits": usual, **others}}


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    ids = {
        f"{role}_token_id": token for role, token in special_ids(metadata).items() if role in ("bos", "pad")
    }
    return {"eos_token_id": end_tokens(metadata), **ids}


def _bytes_to_write(source: GGUFFile) -> int:
    return sum(gguf_tensors.decoded_bytes(entry.kind, entry.shape) for entry in source.tensors.values())


def _rows(source: GGUFFile, name: str) -> int:
    if name not in source.tensors:
        raise BadCheckpoint(f"{source.path} lacks the tensor {name}")
    return source.tensors[name].shape[0]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
