"""What a pair needs in memory at a context, against what this machine has.

Arithmetic over `config.json` dicts and tensor sizes: nothing is downloaded, loaded or allocated. The figures
are estimates of the peak while generating; they are meant to be a little high. Only `this_machine` looks at
the world, and it asks MLX only for a GPU's memory.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .config import DEFAULT_PREFILL_CHUNK
from .models.headers import TensorInfo

Config = dict[str, Any]
Kind = Literal["attention", "sliding", "hybrid", "unknown"]
Layer = Literal["full", "sliding", "recurrent"]

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "float32": 4, "float16": 2, "bfloat16": 2}
_CACHE_STEP = 256  # mlx-lm's key-value caches grow by so many rows
_STATE_BYTES = 4  # recurrent states are fp32 whatever the weights are
_LOGIT_BYTES = 4
# Of what the system shows as memory, the share a model can have: the rest is other programs, page tables, and
# the temporary copies that these estimates leave out.
_USABLE_SHARE = 0.9
_MOST_CONTEXT = 1 << 20  # for models that state no limit of their own

# Parts of a checkpoint that are left on the disk, unless the model has them: vision, audio, heads that predict
# several tokens.
NOT_LOADED = {
    "visual",
    "vision_tower",
    "vision_model",
    "audio_tower",
    "multi_modal_projector",
    "mm_projector",
}
NOT_LOADED |= {"embed_vision", "embed_audio", "vision_embedder", "vision_adapter", "vision_projection", "mtp"}

# Families whose sliding layers keep only their window in mlx-lm; others mask a full cache.
_ROTATING = {"afmoe", "cohere2", "exaone4", "exaone_moe", "gemma3", "gemma3n", "gemma4", "gemma4_unified"}
_ROTATING |= {"gpt_oss", "laguna", "llama", "mellum", "mimo_v2_flash", "ministral3", "mistral"}
_ROTATING |= {"muse_glimmer", "muse_spark", "olmo3", "plamo3", "spark2_5", "step3p5"}
# Every how many layers one is full, where the config leaves it to the family.
_PATTERN = {"cohere2": 4, "gemma3": 6, "gemma4": 5, "gpt_oss": 2}
# Families with recurrent layers that no key of theirs lays out in a common way.
_RECURRENT = {"bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "gear", "jamba"}
_RECURRENT |= {"kimi_linear", "mamba", "mamba2", "plamo2", "recurrent_gemma", "rwkv7", "nemotron_h"}
# Multi-head latent attention that mlx-lm caches expanded; the others keep the latent.
_EXPANDED = {"deepseek_v2", "minicpm3", "youtu_llm"}


@dataclass(frozen=True)
class Machine:
    """Where a model would run. `run_dtype` is what weights are widened to; None: they run as stored."""

    device: Literal["cpu", "gpu"]
    memory_bytes: int
    usable_bytes: int
    run_dtype: str | None


@dataclass(frozen=True)
class Cache:
    """What a model keeps of its context, in bytes.

    Attributes:
        per_token: of all layers that keep every token.
        windowed: (bytes per token, window in tokens) of each layer that keeps only its window.
        constant: states that do not grow.
        gaps: what could not be counted, as sentences.
    """

    per_token: int
    windowed: tuple[tuple[int, int], ...] = ()
    constant: int = 0
    gaps: tuple[str, ...] = ()

    def at(self, context: int, chunk: int = 0) -> int:
        """Bytes at `context` tokens; a window holds up to `chunk` tokens more while a prompt is read."""
        rows = -(-context // _CACHE_STEP) * _CACHE_STEP
        bounded = sum(size * min(rows, window + chunk) for size, window in self.windowed)
        return self.per_token * rows + bounded + self.constant


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a pair needs at `context` tokens, prompt and answer together.

    Attributes:
        target_bytes, draft_bytes: weights as they run, which on a CPU is wider than as they are stored.
        cache_bytes: both models' caches and states; each further token adds `cache_bytes_per_token`.
        transient_bytes: the largest temporary arrays: activations, taps, logits.
        loading_bytes: what exists beside the weights while they are loaded, before any cache does.
        needed_bytes: the peak, loading or generating.
        largest_context: tokens that would fit, 0 if not even the weights do.
        reason: a sentence with the need and the limit. `gaps`: what is not counted.
    """

    context: int
    target_bytes: int
    draft_bytes: int
    cache_bytes: int
    cache_bytes_per_token: int
    transient_bytes: int
    loading_bytes: int
    needed_bytes: int
    memory_bytes: int
    usable_bytes: int
    fits: bool
    largest_context: int
    reason: str
    gaps: tuple[str, ...]


@dataclass(frozen=True)
class Weights:
    """One model of the pair: its `config.json`, and the bytes of its weights, running and stored."""

    config: Config
    nbytes: int
    stored_bytes: int


def plan(
    target: Weights,
    draft: Weights | None,
    machine: Machine,
    context: int,
    chunk: int = DEFAULT_PREFILL_CHUNK,
) -> MemoryPlan:
    """What the pair needs on `machine` at `context` tokens, the prompt read `chunk` tokens at a time."""
    weights = target.nbytes + (draft.nbytes if draft else 0)
    caches = [cache(target.config, element_bytes(target.config, machine.run_dtype))]
    if draft:
        size = element_bytes(draft.config, machine.run_dtype)
        caches.append(cache(draft.config, size, rotating=True))

    def kept(tokens: int) -> int:
        return sum(c.at(tokens, min(chunk, tokens)) for c in caches)

    def passing(tokens: int) -> int:
        return transient(target.config, draft and draft.config, machine, tokens, min(chunk, tokens))

    # Weights that are widened exist in both widths until the last of them is.
    loading = target.stored_bytes if machine.run_dtype else 0

    def needed(tokens: int) -> int:
        return weights + max(loading, kept(tokens) + passing(tokens))

    limit = text_config(target.config).get("max_position_embeddings") or _MOST_CONTEXT
    steps = range(0, limit + 1, _CACHE_STEP)
    fitting = bisect_right(steps, machine.usable_bytes, key=needed)
    largest = steps[fitting - 1] if fitting else 0
    fits = needed(context) <= machine.usable_bytes
    return MemoryPlan(
        context=context,
        target_bytes=target.nbytes,
        draft_bytes=draft.nbytes if draft else 0,
        cache_bytes=kept(context),
        cache_bytes_per_token=sum(c.per_token for c in caches),
        transient_bytes=passing(context),
        loading_bytes=loading,
        needed_bytes=needed(context),
        memory_bytes=machine.memory_bytes,
        usable_bytes=machine.usable_bytes,
        fits=fits,
        largest_context=largest,
        reason=_reason(needed(context), machine, context, largest, fits),
        gaps=tuple(gap for c in caches for gap in c.gaps),
    )


def weight_bytes(
    tensors: Mapping[str, TensorInfo], quantization: Config | None = None, run_dtype: str | None = None
) -> int:
    """Bytes of a checkpoint's weights as they run.

    Args:
        tensors: names, dtypes and shapes from the safetensors headers.
        quantization: the config's own entry of that name: bits, and settings of single modules.
        run_dtype: what floating and packed weights are widened to; None counts them as stored.
    """
    loaded = {name: info for name, info in tensors.items() if not NOT_LOADED & set(name.split("."))}
    if run_dtype is None:
        return sum(info.nbytes for info in loaded.values())
    total = 0
    for name, info in loaded.items():
        module, _, part = name.rpartition(".")
        packed = loaded.get(f"{module}.weight")
        if info.dtype == "U32":
            total += math.prod(info.shape) * 32 // _bits(quantization, module) * _BYTES[run_dtype]
        elif part in ("scales", "biases") and packed is not None and packed.dtype == "U32":
            continue  # used up when the weight is unpacked
        elif info.dtype in _BYTES:
            total += math.prod(info.shape) * _BYTES[run_dtype]
        else:
            total += info.nbytes
    return total


def estimated_weight_bytes(stored_bytes: int, config: Config, run_dtype: str | None = None) -> int:
    """`weight_bytes` from the size of the files alone, for a model that is not on this disk."""
    if run_dtype is None:
        return stored_bytes
    quantization = config.get("quantization")
    if quantization:
        # Affine groups carry a scale and a bias of two bytes each.
        bits = _bits(quantization, "") + 32 / quantization.get("group_size", 64)
    else:
        bits = 8 * _BYTES.get(_stored_dtype(config), 2)
    return int(stored_bytes * 8 / bits) * _BYTES[run_dtype]


def kind(config: Config) -> Kind:
    """What the layers of the model that `config` describes keep of their context."""
    layers = layer_kinds(config)
    if layers is None:
        return "hybrid" if _family(text_config(config)) in _RECURRENT else "unknown"
    if "recurrent" in layers:
        return "hybrid"
    return "sliding" if "sliding" in layers else "attention"


def layer_kinds(config: Config, *, rotating: bool | None = None) -> tuple[Layer, ...] | None:
    """The kind of each layer that has a cache of its own; None where the config does not tell.

    `rotating`: whether sliding layers keep only their window, as a draft's always do; None leaves it to the
    model's family.
    """
    text = text_config(config)
    family, count = _family(text), text.get("num_hidden_layers")
    if not isinstance(count, int) or family in _RECURRENT:
        return None
    bounded = family in _ROTATING if rotating is None else rotating
    sliding: Layer = "sliding" if bounded else "full"
    names: dict[str, Layer] = {"full_attention": "full", "attention": "full"}
    names |= {"sliding_attention": sliding, "chunked_attention": "full"}
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, str):  # exaone 4: L for a local layer, G for a global one
        layers = [sliding if pattern[i % len(pattern)] == "L" else "full" for i in range(count)]
    elif kinds := text.get("layer_types"):
        layers = [names.get(name, "recurrent") for name in kinds[:count]]
    elif interval := text.get("full_attention_interval"):
        layers = ["full" if (i + 1) % interval == 0 else "recurrent" for i in range(count)]
    elif family in _PATTERN:
        every = pattern or _PATTERN[family]
        layers = ["full" if (i + 1) % every == 0 else sliding for i in range(count)]
    else:
        layers = ["full"] * count
    return tuple(layers[: count - (text.get("num_kv_shared_layers") or 0)])


def cache(config: Config, element_bytes: int, *, rotating: bool | None = None) -> Cache:
    """What the model that `config` describes keeps, its keys and values stored in `element_bytes` each.

    `rotating` as for `layer_kinds`.
    """
    text = text_config(config)
    layers = layer_kinds(config, rotating=rotating)
    if layers is None:
        return Cache(0, gaps=(f"the context of a {text.get('model_type', 'nameless')} model is not counted",))
    window = text.get("sliding_window")
    per_token, windowed, constant, gaps = 0, [], 0, []
    for layer in layers:
        if layer == "recurrent":
            state = _delta_state(text, element_bytes)
            constant += state or 0
            gaps += [] if state else ["the states of its recurrent layers are not counted"]
            continue
        size = _row_elements(text, layer) * element_bytes
        if layer == "sliding" and window:
            windowed.append((size, window))
        else:
            per_token += size
    return Cache(per_token, tuple(windowed), constant, tuple(dict.fromkeys(gaps)))


def transient(target: Config, draft: Config | None, machine: Machine, context: int, chunk: int) -> int:
    """The largest temporary arrays, in bytes: one chunk of the prompt, or one verified block.

    On a CPU attention is not fused: its scores exist twice, before and after the softmax.
    """
    text = text_config(target)
    size = element_bytes(target, machine.run_dtype)
    hidden, heads = text.get("hidden_size", 0), text.get("num_attention_heads", 0)
    inner = max(text.get("intermediate_size") or 0, _expert_width(text))
    rows = chunk * (4 * hidden + 3 * inner) * size  # residual, normed, mixed and added; gate, up and product
    if machine.device == "cpu":
        rows += 2 * heads * chunk * context * size
    logits = text.get("vocab_size", 0) * _LOGIT_BYTES
    if draft is None:
        return rows + logits
    nested = draft.get("dflash_config") or {}
    taps = nested.get("target_layer_ids") or draft.get("target_layer_ids")
    taps = taps or draft.get("aux_hidden_state_layer_ids")
    taps = len(taps) if taps else text_config(draft).get("num_hidden_layers", 0)
    block = nested.get("block_size") or draft.get("block_size") or 1
    return rows + chunk * (taps + 1) * hidden * size + 2 * block * logits


def this_machine() -> Machine:
    """This machine, as MLX would use it now."""
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        total = system_memory()
        return Machine("cpu", total, int(total * _USABLE_SHARE), "float32")
    info = mx.device_info()
    total = int(info.get("memory_size") or info.get("total_memory") or system_memory())
    usable = info.get("max_recommended_working_set_size") or total * _USABLE_SHARE
    return Machine("gpu", total, int(usable), None)


def system_memory() -> int:
    """Bytes of memory that this process may have: the machine's, or its container's if that is less."""
    if sys.platform == "darwin":
        told = subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, text=True, check=True)
        return int(told.stdout)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _container_limit(Path("/sys/fs/cgroup")) or total)


def _container_limit(root: Path) -> int | None:
    """The control group's limit, by its version 2 or 1; None without one ("max")."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return int((root / name).read_text())
        except (OSError, ValueError):
            continue
    return None


def text_config(config: Config) -> Config:
    """The part that describes the language model; wrappers and drafts of the speculators layout nest it."""
    for name in ("text_config", "llm_config", "transformer_layer_config"):
        if isinstance(config.get(name), dict):
            return config[name]
    return config


def element_bytes(config: Config, run_dtype: str | None) -> int:
    """Bytes of one activation: keys, values and hidden states have the dtype that the weights run in."""
    return _BYTES.get(run_dtype or _stored_dtype(config), 2)


def _stored_dtype(config: Config) -> str:
    text = text_config(config)
    told = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return str(told or "bfloat16").removeprefix("torch.")


def _family(text: Config) -> str:
    return str(text.get("model_type", "")).removesuffix("_text")


def _bits(quantization: Config | None, module: str) -> int:
    """Bits of a packed weight; single modules may have their own."""
    settings = quantization or {}
    own = settings.get(module)
    return int((own if isinstance(own, dict) else settings).get("bits", 4))


def _row_elements(text: Config, layer: Layer) -> int:
    """Elements that one token adds to one attention layer's cache."""
    if text.get("kv_lora_rank") and _family(text) not in _EXPANDED:
        # The index of DeepSeek 3.2 and GLM 5 is a cache of its own, stored as keys and as values.
        index = 2 * text.get("index_head_dim", 0)
        return text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0) + index
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads", 0)
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // (text.get("num_attention_heads") or 1)
    if layer == "full" and text.get("global_head_dim"):  # gemma 4: full layers have a shape of their own
        head_dim = text["global_head_dim"]
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
            heads = text["num_global_key_value_heads"]
    return 2 * heads * head_dim


def _delta_state(text: Config, element_bytes: int) -> int | None:
    """Bytes of one gated-delta layer: the last rows before its convolution, and its state.

    None for recurrent layers of another make.
    """
    try:
        key_heads, value_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
        key_dim, value_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
        rows = text["linear_conv_kernel_dim"] - 1
    except KeyError:
        return None
    convolved = 2 * key_heads * key_dim + value_heads * value_dim
    return rows * convolved * element_bytes + value_heads * value_dim * key_dim * _STATE_BYTES


def _expert_width(text: Config) -> int:
    """Inner elements of the experts that one token goes through."""
    chosen = text.get("num_experts_per_tok") or 0
    return chosen * (text.get("moe_intermediate_size") or text.get("intermediate_size") or 0)


def _reason(needed: int, machine: Machine, context: int, largest: int, fits: bool) -> str:
    facts = f"{gigabytes(needed)} at {context} tokens, {gigabytes(machine.usable_bytes)} usable"
    if fits:
        return f"fits: needs {facts}"
    if largest:
        return f"does not fit: needs {facts}; {largest} tokens would fit"
    return f"does not fit at any context: needs {facts}"


def gigabytes(count: int) -> str:
    """Bytes for people: "3.1 GB" (10^9)."""
    return f"{count / 1e9:.1f} GB"
