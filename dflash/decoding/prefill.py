"""The prompt goes into the caches, in chunks, and the first token comes out."""

from __future__ import annotations

import time
from collections.abc import Iterator

import mlx.core as mx

from ..events import Prefilled, Prefilling
from .state import DecodeState


def prefill(state: DecodeState, chunk: int) -> Iterator[Prefilling | Prefilled]:
    """Run `state.prompt` through the target, `chunk` tokens a pass, feeding the draft's context on the way.

    Caches are evaluated after every chunk, so that only one chunk's tapped states are alive at a time.
    """
    started = time.perf_counter()
    prompt = mx.array(state.prompt)[None]  # (1, P)
    total = prompt.shape[1]
    for begin in range(0, total, chunk):
        features = state.session.forward(prompt[:, begin : begin + chunk])
        if state.drafter is not None:
            state.drafter.observe(features.taps)
        done = min(begin + chunk, total)
        if done < total:
            mx.eval(state.session.arrays(), state.drafter.arrays() if state.drafter else [])
            mx.clear_cache()
            yield Prefilling(done, total)
    logits = state.target.logits(features.hidden[:, -1:])
    token = state.open_round(total - 1, 1).choices(logits, prompt[:, -1:]).tokens.item()
    state.commit([token])
    yield Prefilled(total, token, time.perf_counter() - started)
