"""What verifying costs on this device, for big models without their weights.

    python -m dflash.bench.verify_cost --shape qwen3.5-9b --contexts 512,4096,16384 --widths 1,2,4,8,16

Builds a target of a published shape with random bf16 weights and prints one JSON line per context: milliseconds of
a forward with head and argmax by width, here and in mlx-lm's own forward, of a rollback, and the tape's bytes. Random
weights cost what real ones do (except for how mixtures of experts route), so these are costs, not speeds of answers.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import fire
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3, qwen3_5
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..targets.base import TargetAdapter, TargetSession
from ..targets.choose import choose

_QWEN3_5 = {
    "model_type": "qwen3_5",
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
SHAPES = {
    "qwen3.5-9b": _QWEN3_5
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "vocab_size": 248320,
    },
    "qwen3.5-tiny": _QWEN3_5
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "vocab_size": 1000,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
}
_CHUNK = 512


def build(shape: str) -> tuple[nn.Module, TargetAdapter]:
    """A bf16 model of a shape with random weights, and its adapter."""
    config = SHAPES[shape]
    module = {"qwen3": qwen3, "qwen3_5": qwen3_5}[config["model_type"]]
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    model.eval()
    mx.eval(model.parameters())
    return model, choose(model, config)


def median_ms(action: Callable[[], None], repeats: int) -> float:
    """Median wall time of `action`, which evaluates what it makes, after three warm-up calls."""
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1000, 3)


def ours(adapter: TargetAdapter, context: int, width: int, repeats: int) -> tuple[float, float]:
    """Milliseconds of a forward of `width` tokens, and of rolling back all but the first."""
    session = _filled(adapter, context)
    tokens = mx.zeros((1, width), dtype=mx.int32)
    rollbacks = []

    def step() -> None:
        mx.eval(mx.argmax(adapter.logits(session.forward(tokens).hidden), axis=-1))
        began = time.perf_counter()
        session.rollback(1)  # the context stays about the same over the repeats
        mx.eval(session.arrays())
        rollbacks.append(time.perf_counter() - began)

    whole = median_ms(step, repeats)
    rollback = statistics.median(rollbacks[3:]) * 1000
    return round(whole - rollback, 3), round(rollback, 3)


def stock(model: nn.Module, context: int, width: int, repeats: int) -> float:
    """Milliseconds of mlx-lm's own forward of `width` tokens."""
    cache = make_prompt_cache(model)
    model(mx.zeros((1, 1), dtype=mx.int32), cache=cache)
    for c in cache:
        if isinstance(c, KVCache):  # what a pass costs does not depend on what the keys and values are
            shape = (*c.keys.shape[:2], context, c.keys.shape[3])
            c.keys, c.values, c.offset = mx.zeros(shape, c.keys.dtype), mx.zeros(shape, c.keys.dtype), context
        mx.eval(c.state)
    tokens = mx.zeros((1, width), dtype=mx.int32)
    return median_ms(lambda: mx.eval(mx.argmax(model(tokens, cache=cache), axis=-1)), repeats)


def tape_bytes(adapter: TargetAdapter, width: int) -> int:
    """Memory that the tapes of one block hold beside the model's own caches."""
    session = adapter.start()
    session.forward(mx.zeros((1, width), dtype=mx.int32))
    blocks = [getattr(memory, "_block", None) for memory in getattr(session, "_memories", [])]
    kept = [block for block in blocks if block is not None]
    arrays = [a for b in kept for a in (b.tape.innovation, b.tape.k, b.tape.g, b.conv_input)]
    return sum(array.nbytes for array in arrays)


def _filled(adapter: TargetAdapter, context: int) -> TargetSession:
    session = adapter.start()
    for begin in range(0, context, _CHUNK):
        session.forward(mx.zeros((1, min(_CHUNK, context - begin)), dtype=mx.int32))
        mx.eval(session.arrays())
    return session


def main(
    shape: str = "qwen3.5-9b",
    contexts: str | int | tuple[int, ...] = (512, 4096, 16384),
    widths: str | int | tuple[int, ...] = (1, 2, 4, 8, 16),
    repeats: int = 20,
    compare: bool = True,
) -> None:
    """Measure and print; see the module's docstring."""
    model, adapter = build(shape)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    for context in [contexts] if isinstance(contexts, int) else contexts:
        line = {"shape": shape, "context": context, "weight_bytes": weights, "ms": {}, "rollback_ms": {}}
        line["stock_ms"], line["tape_bytes"] = {}, {}
        for width in [widths] if isinstance(widths, int) else widths:
            line["ms"][width], line["rollback_ms"][width] = ours(adapter, context, width, repeats)
            line["tape_bytes"][width] = tape_bytes(adapter, width)
            if compare:
                line["stock_ms"][width] = stock(model, context, width, max(3, repeats // 2))
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
