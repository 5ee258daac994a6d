"""What attention costs in a verify pass, ours against the stock kernel, by context and width.

    python -m dflash.bench.attention_cost --heads 32 --kv_heads 8 --head_dim 128 --contexts 1024,4096,16384,32768

Random bf16 queries over a random cache. Prints one JSON line per context: microseconds of one attention call by
width, medians of alternating runs of many calls each.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import fire
import mlx.core as mx

from ..kernels import verify_attention as kernel

_CALLS = 40  # in one evaluation, as a model's layers are


def microseconds(runs: dict[str, Callable[[], mx.array]], repeats: int) -> dict[str, float]:
    """Median time of one call of each of `runs`, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            mx.eval([run() for _ in range(_CALLS)])
            times[name].append((time.perf_counter() - began) / _CALLS * 1e6)
    return {name: round(statistics.median(measured[2:]), 1) for name, measured in times.items()}


def main(
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    contexts: int | tuple[int, ...] = (1024, 4096, 16384, 32768),
    widths: int | tuple[int, ...] = (2, 4, 8, 16, 32),
    repeats: int = 15,
) -> None:
    """Measure and print; see the module's docstring."""
    for context in (contexts,) if isinstance(contexts, int) else contexts:
        keys, values = (mx.random.normal((1, kv_heads, context, head_dim)).astype(mx.bfloat16) for _ in "kv")
        mx.eval(keys, values)
        line = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "context": context, "us": {}}
        for width in (widths,) if isinstance(widths, int) else widths:
            queries = mx.random.normal((1, heads, width, head_dim)).astype(mx.bfloat16)
            arguments = {"scale": head_dim**-0.5, "total": context}
            runs = {"stock": partial(kernel.reference, queries, keys, values, **arguments)}
            if kernel.supports(head_dim, width, queries.dtype):
                runs["ours"] = partial(kernel.verify_attention, queries, keys, values, **arguments)
            line["us"][width] = microseconds(runs, repeats)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
