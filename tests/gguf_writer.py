"""Writes small GGUF (version 3) files for tests: header, metadata, tensor table, aligned data.

Tensors come as the bytes of their ggml type; `f32`, `q4_0` and `q8_0` make those bytes from numbers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 32
F32, F16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 2, 3, 6, 8, 12, 14, 30


HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
LETTERS = "abcdefghijklmnopqrstuvwxyzĠ"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@dataclass(frozen=True)
class Tensor:
    """`shape` in row-major order, as numpy has it; the file stores it reversed."""

    shape: tuple[int, ...]
    kind: int
    data: bytes


def f32(values: np.ndarray) -> Tensor:
    return Tensor(values.shape, F32, values.astype("<f4").tobytes())


def q4_0(values: np.ndarray) -> Tensor:
    """Blocks of 32: a half-precision scale, then 16 bytes with the quants 0-15 low and 16-31 high."""
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1) / 7).astype("<f2")
    quants = np.clip(np.round(blocks / scales[:, None].astype(np.float32)) + 8, 0, 15).astype(np.uint8)
    packed = quants[:, :16] | quants[:, 16:] << 4
    return Tensor(
        values.shape, Q4_0, b"".join(s.tobytes() + p.tobytes() for s, p in zip(scales, packed, strict=True))
    )


def q8_0(values: np.ndarray) -> Tensor:
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1) / 127).astype("<f2")
    quants = np.round(blocks / scales[:, None].astype(np.float32)).astype(np.int8)
    return Tensor(
        values.shape, Q8_0, b"".join(s.tobytes() + q.tobytes() for s, q in zip(scales, quants, strict=True))
    )


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    table, data = b"", b""
    for name, tensor in tensors.items():
        data += bytes(-len(data) % ALIGNMENT)
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        table += _text(name) + shape + struct.pack("<IQ", tensor.kind, len(data))
        data += tensor.data
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items()) + table
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
    return path


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    """The type number and the bytes. Whole numbers are u32, in lists i32, as converters write them."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    head = struct.pack("<I", 9)
    if isinstance(value[0], str):
        return head + struct.pack("<IQ", 8, len(value)) + b"".join(map(_text, value))
    kind, code = (5, "i") if isinstance(value[0], int) else (6, "f")
    return head + struct.pack(f"<IQ{len(value)}{code}", kind, len(value), *value)


def geometry(**changes: Any) -> dict[str, Any]:
    facts = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
        "rope.dimension_count": HEAD_DIM,
    }
    facts |= changes
    return {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in facts.items()}


def byte_level_vocabulary() -> dict[str, Any]:
    tokens = ["<|end|>", "<|im_start|>", "<|im_end|>", *LETTERS, "he", "Ġt", "Ġthe", "10", "<tool>"]
    types = [3, 3, 3] + [1] * (len(tokens) - 4) + [4]
    tokens += [str(digit) for digit in range(10)]
    types += [1] * 10
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "Ġ t", "Ġt he", "1 0"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def tiny(path: Path, seed: int = 0) -> Path:
    """A whole model of random numbers."""
    random = np.random.default_rng(seed)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (queries, HIDDEN),
        "attn_k": (keys, HIDDEN),
        "attn_v": (keys, HIDDEN),
        "attn_output": (HIDDEN, queries),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    vocabulary = byte_level_vocabulary()
    shapes = {f"blk.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in layer.items()}
    shapes["token_embd.weight"] = (len(vocabulary["tokenizer.ggml.tokens"]), HIDDEN)
    shapes["output_norm.weight"] = (HIDDEN,)
    tensors = {name: f32(random.normal(0, 0.1, shape)) for name, shape in shapes.items()}
    return write(path, geometry() | vocabulary, tensors)
