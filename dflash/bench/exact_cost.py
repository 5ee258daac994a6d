"""What exact mode costs, by the margin below which a choice counts as a near-tie.

    python -m dflash.bench.exact_cost tests/fixtures/smollm2-prompts.json --margins 0.05,0.1,0.25,0.5 --count 8

In fp32 next to nothing is a near-tie; in bf16 the margin is some tenths of a logit (`runtime.measured.tie_margin` has
this machine's). Here margins are set by hand, so that the price can be seen on any machine: near-ties among the
verified choices, and the speed in exact mode over the speed without, same prompts, in turns.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import fire

from ..config import DFlashConfig
from ..curves import Measurements
from ..models.embedded import EMBEDDED
from ..runtime import DFlashRuntime


class Margin(Measurements):
    """The measurements of a runtime, but for a margin set by hand."""

    def __init__(self, measured: Measurements, margin: float):
        self._measured, self._margin = measured, margin

    @property
    def curve(self):
        return self._measured.curve

    @property
    def tie_margin(self) -> float:
        return self._margin


def main(
    prompts: str,
    margins: float | tuple[float, ...] = (0.05, 0.1, 0.25, 0.5),
    count: int = 8,
    max_tokens: int = 64,
    model: str = EMBEDDED,
    draft: str | None = None,
) -> None:
    """Measure and print a JSON line per margin; see the module's docstring."""
    base = DFlashRuntime.from_pretrained(model, draft)
    cases = json.loads(Path(prompts).read_text())[:count]
    for margin in (margins,) if isinstance(margins, float) else margins:
        engines = {}
        for exact in (False, True):
            engines[exact] = DFlashRuntime(base.target, base.draft, DFlashConfig(exact=exact))
            engines[exact].measured = Margin(base.measured, margin)
        ratios, ties, tokens = [], 0, 0
        for case in cases:
            results = {}
            for exact, engine in engines.items():
                results[exact] = engine.generate(case["prompt"], max_tokens=max_tokens)
            if results[True].tokens != results[False].tokens:
                raise SystemExit(f"exact mode changed the answer to {case['prompt']!r}")
            ratios.append(results[True].tokens_per_second / results[False].tokens_per_second)
            ties += results[False].near_ties
            tokens += len(results[False].tokens)
        line = {"margin": margin, "near_ties": ties, "tokens": tokens}
        print(json.dumps(line | {"mean_speed_ratio": round(statistics.mean(ratios), 3)}), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
