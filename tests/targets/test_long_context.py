"""Attention layers run by their parts give the layers' own output; the kernel runs only where it is found to win."""

import itertools

import mlx.core as mx
import pytest
import tiny
from mlx_lm.models.cache import KVCache

from dflash.kernels import verify_attention as kernel
from dflash.targets.long_context import LEAST_CONTEXT, LongContext, parts_of


def attention_layers(family):
    _, adapter = tiny.target(family)
    return [layer for layer in adapter._parts.layers if hasattr(layer, "self_attn")]


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.HYBRIDS])
def test_a_layer_by_its_parts_is_the_layer(family):
    for layer in attention_layers(family):
        parts = parts_of(layer)
        assert parts is not None
        ours, own = KVCache(), KVCache()
        for rows in (7, 4):  # a prompt, then a block after it
            x = mx.random.normal((1, rows, parts.hidden_size))
            got = parts.forward(x, ours, kernel.reference)
            assert mx.allclose(got, layer(x, "causal", own), rtol=1e-5, atol=1e-5)


class Clock:
    """A clock that the two attentions move by what they are said to cost."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernel, "supports", lambda head_dim, width, dtype: True)


def long_context(monkeypatch, ours_s, stock_s, wrong=0.0):
    """A `LongContext` over a bf16 model, with attentions of given costs, and caches that hold 1,100 positions."""
    model, adapter = tiny.target("qwen3")
    model.set_dtype(mx.bfloat16)
    clock = Clock()
    reference = kernel.reference
    calls = itertools.count()

    def stock(*arrays, **sizes):
        clock.now += stock_s
        return reference(*arrays, **sizes)

    def ours(*arrays, **sizes):
        clock.now += ours_s
        next(calls)
        return reference(*arrays, **sizes) + wrong

    monkeypatch.setattr(kernel, "reference", stock)
    session = adapter.start()
    session.forward(mx.zeros((1, LEAST_CONTEXT + 76), mx.int32))
    return LongContext(adapter._parts.layers, ours, clock), session._caches, calls


@pytest.mark.parametrize(
    ("ours_s", "wrong", "wanted"),
    [(1.0, 0.0, True), (1.99, 0.0, False), (3.0, 0.0, False), (1.0, 0.1, False)],
)
def test_it_runs_only_where_it_is_faster_and_right(monkeypatch, on_a_gpu, ours_s, wrong, wanted):
    choice, caches, calls = long_context(monkeypatch, ours_s, stock_s=2.0, wrong=wrong)
    assert choice.wanted(4, caches) is wanted
    measured = next(calls)
    assert choice.wanted(4, caches) is wanted
    assert next(calls) == measured + 1, "the verdict is kept"


def test_short_contexts_single_tokens_and_other_devices_are_never_measured(monkeypatch):
    choice, caches, calls = long_context(monkeypatch, 1.0, 2.0)
    assert not choice.wanted(4, caches), "no kernel on this device"
    monkeypatch.setattr(kernel, "supports", lambda head_dim, width, dtype: True)
    assert not choice.wanted(1, caches)
    for cache in caches:
        cache.trim(cache.offset - LEAST_CONTEXT + 1)
    assert not choice.wanted(4, caches)
    assert next(calls) == 0


def test_a_whole_pass_with_it_is_the_models_own(monkeypatch):
    model, adapter = tiny.target("qwen3")
    session = adapter.start()
    session._long_context = LongContext(adapter._parts.layers, kernel.reference)
    monkeypatch.setattr(session._long_context, "wanted", lambda width, caches: width > 1)
    tokens = mx.arange(40)[None] % adapter.vocab_size
    rows = [session.forward(tokens[:, begin : begin + 8]).hidden for begin in range(0, 40, 8)]
    assert mx.allclose(adapter.logits(mx.concatenate(rows, axis=1)), model(tokens), atol=1e-4)
