"""How many tokens a cycle yields when tokens are drawn: by temperature, width, rule and kind of proposal.

    python -m dflash.bench.acceptance tests/fixtures/smollm2-prompts.json

Takes a JSON list of {prompt, ...} and the embedded pair (or --model, --draft). Prints one JSON line per setting:
accepted length (tokens per cycle, the target's own included) and acceptance rate over all prompts and seeds. These
are counts, not times: the machine may be busy.
"""

from __future__ import annotations

import json
from pathlib import Path

import fire

from ..config import DFlashConfig
from ..models.embedded import EMBEDDED
from ..runtime import DFlashRuntime

# Every way there is to draw with a draft: (acceptance, proposals).
WAYS = (("matching", "likeliest"), ("matching", "coupled"), ("residual", "coupled"))


def main(
    prompts: str,
    count: int = 6,
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0),
    widths: tuple[int, ...] = (4, 16),
    seeds: int = 2,
    max_tokens: int = 100,
    model: str = EMBEDDED,
    draft: str | None = None,
    **settings: float,
) -> None:
    """Measure and print; see the module's docstring. Further flags are sampling settings (--top_p 0.9)."""
    base = DFlashRuntime.from_pretrained(model, draft)
    texts = [case["prompt"] for case in json.loads(Path(prompts).read_text())[:count]]
    for temperature in temperatures:
        for acceptance, proposals in WAYS if temperature else WAYS[:1]:
            for width in widths:
                config = DFlashConfig(draft_block_size=width, acceptance=acceptance, proposals=proposals)
                engine = DFlashRuntime(base.target, base.draft, config)
                asked = {"max_tokens": max_tokens, "temperature": temperature, **settings}
                results = [
                    engine.generate(text, seed=seed, **asked)
                    for text in texts
                    for seed in range(seeds if temperature else 1)
                ]
                cycles = sum(result.cycles for result in results)
                tokens = sum(len(result.tokens) for result in results)
                row = {
                    "temperature": temperature,
                    "acceptance": acceptance if temperature else "greedy",
                    "proposals": proposals,
                    "width": width,
                    "accepted_length": round((tokens - len(results)) / cycles, 3),
                    "acceptance_rate": round(sum(r.accepted_tokens for r in results) / tokens, 3),
                    "tokens": tokens,
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
