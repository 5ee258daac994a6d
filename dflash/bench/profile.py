"""Where a cycle's time goes: the draft, its head, the target, its head, and what is left for the host.

    python -m dflash.bench.profile --widths 2,4,8,16 --context 256

Takes the embedded pair (or --model, --draft). Each part is run and waited for by itself, many times; a whole cycle
is timed as the engine runs it, on the same context. Prints one JSON line per width: milliseconds of each part, and the
cycle over the sum of its passes (1 would be an engine that costs nothing beside them).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import fire
import mlx.core as mx

from ..decoding.cycle import propose, verify
from ..decoding.proposing import Turn
from ..decoding.state import DecodeState
from ..models.embedded import EMBEDDED
from ..runtime import DFlashRuntime


class Parts:
    """The parts of a cycle on one pair, each as an action that waits for its own result."""

    def __init__(self, runtime: DFlashRuntime, context: int):
        self._target = target = runtime.target.adapter
        self._session = target.start(runtime.draft.taps)
        self._drafter = runtime.draft.start(target)
        prompt = (mx.arange(context)[None] * 37 + 11) % target.vocab_size
        self._taps = self._session.forward(prompt).taps
        self._drafter.observe(self._taps)
        mx.eval(self._session.arrays(), self._drafter.arrays())
        self._anchor = mx.zeros((1, 1), mx.int32)
        self._state = DecodeState(
            target=target,
            session=self._session,
            drafter=self._drafter,
            prompt=prompt[0].tolist(),
            budget=1 << 30,
            end_tokens=frozenset(),
            emitted=[0],
        )

    def cycle(self, width: int) -> None:
        """As the engine runs it; the few tokens it adds are nothing beside the context."""
        verify(self._state, propose(self._state, Turn(width)))

    def draft(self, width: int) -> None:
        self._drafter.observe(self._taps[:, :2])  # as much context as a cycle leaves behind
        mx.eval(self._drafter.propose(self._anchor, width - 1).tokens)

    def draft_head(self, width: int) -> None:
        mx.eval(mx.argmax(self._target.project(self._rows(width - 1)), axis=-1))

    def verify(self, width: int) -> None:
        features = self._session.forward(mx.zeros((1, width), mx.int32))
        mx.eval(mx.argmax(self._target.logits(features.hidden), axis=-1), features.taps)
        self._session.rollback(0)

    def verify_head(self, width: int) -> None:
        mx.eval(mx.argmax(self._target.logits(self._rows(width)), axis=-1))

    def _rows(self, count: int) -> mx.array:
        dtype = self._taps.dtype
        return mx.ones((1, count, self._target.hidden_size), dtype)


def median_ms(action: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        action()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times[2:])


def profile(parts: Parts, width: int, repeats: int) -> dict[str, float]:
    """Milliseconds by part of a cycle of `width`, and its efficiency."""
    names = ("draft", "draft_head", "verify", "verify_head", "cycle")
    ms = {name: median_ms(lambda n=name: getattr(parts, n)(width), repeats) for name in names}
    line = {name: round(value, 3) for name, value in ms.items()}
    line["rest"] = round(ms["cycle"] - ms["draft"] - ms["verify"], 3)
    line["cycle_over_passes"] = round(ms["cycle"] / (ms["draft"] + ms["verify"]), 3)
    return line


def main(
    model: str = EMBEDDED,
    draft: str | None = None,
    widths: int | tuple[int, ...] = (2, 4, 8, 16),
    context: int = 256,
    repeats: int = 15,
) -> None:
    """Measure and print; see the module's docstring."""
    runtime = DFlashRuntime.from_pretrained(model, draft)
    for width in (widths,) if isinstance(widths, int) else widths:
        line = {"width": width, "context": context, **profile(Parts(runtime, context), width, repeats)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
