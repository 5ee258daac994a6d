"""Decode speed against mlx-lm's greedy decoding: same weights, same process, prompt by prompt, in alternating order.

    python -m dflash.bench.against_mlx_lm tests/fixtures/smollm2-prompts.json --widths 3,4,5,6,7,8

Takes a JSON list of {prompt, ...} and the embedded pair (or --model, --draft). Prints one JSON line per prompt and
one with the mean ratios. Tokens are compared on the way: a difference ends the run. Ratios are of tokens per second
after the first token.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import fire
import mlx.core as mx
from mlx_lm.generate import generate_step

from ..config import DFlashConfig
from ..models.embedded import EMBEDDED
from ..runtime import DFlashRuntime


def stock_speed(runtime: DFlashRuntime, ids: list[int], max_tokens: int) -> tuple[list[int], float]:
    """mlx-lm's greedy tokens and its tokens per second after the first."""
    tokens: list[int] = []
    began = 0.0
    for token, _ in generate_step(mx.array(ids), runtime.target.model, max_tokens=max_tokens):
        tokens.append(int(token))
        if len(tokens) == 1:
            began = time.perf_counter()
        if tokens[-1] in runtime.target.end_tokens:
            break
    return tokens, (len(tokens) - 1) / (time.perf_counter() - began)


def main(
    prompts: str,
    widths: int | tuple[int, ...] = (3, 4, 5, 6, 7, 8),
    max_tokens: int = 200,
    model: str = EMBEDDED,
    draft: str | None = None,
) -> None:
    """Measure and print; see the module's docstring."""
    base = DFlashRuntime.from_pretrained(model, draft)
    tried = (widths,) if isinstance(widths, int) else widths
    engines = {
        width: DFlashRuntime(base.target, base.draft, DFlashConfig(draft_block_size=width)) for width in tried
    }
    ratios: dict[int, list[float]] = {width: [] for width in tried}
    lengths: dict[int, list[float]] = {width: [] for width in tried}
    for index, case in enumerate(json.loads(Path(prompts).read_text())):
        prompt = case["prompt"]
        ids = base.encode(prompt)
        order = list(engines) if index % 2 else list(reversed(engines))
        expected, stock = stock_speed(base, ids, max_tokens)
        for width in order:
            result = engines[width].generate(prompt, max_tokens=max_tokens)
            if list(result.tokens) != expected:
                raise SystemExit(f"width {width} differs from mlx-lm on {prompt!r}")
            ratios[width].append(result.tokens_per_second / stock)
            lengths[width].append(result.accepted_length)
        row = {width: round(ratios[width][-1], 3) for width in tried}
        print(json.dumps({"prompt": prompt[:40], "mlx_lm_per_s": round(stock, 2), "ratio": row}), flush=True)
    means = {
        width: {
            "mean_ratio": round(statistics.mean(ratios[width]), 3),
            "median_ratio": round(statistics.median(ratios[width]), 3),
            "least_ratio": round(min(ratios[width]), 3),
            "accepted_length": round(statistics.mean(lengths[width]), 3),
        }
        for width in tried
    }
    print(json.dumps({"prompts": len(ratios[tried[0]]), "equal_tokens": True, "widths": means}))


if __name__ == "__main__":
    fire.Fire(main)
