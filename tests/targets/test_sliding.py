"""Windowed layers: the window's cache against one that keeps everything, and whole models against mlx-lm."""

import itertools
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache

from dflash.decoding.loop import decode
from dflash.decoding.width import FixedWidth
from dflash.models.loading import runs_like
from dflash.targets.attention import trim
from dflash.targets.choose import choose
from dflash.targets.sliding import SlidingTarget, WindowCache, can_roll_back

PROMPT = [(7 * i * i + 3) % tiny.VOCAB for i in range(30)]  # longer than the window


def rows(numbers):
    """Keys (1, 1, n, 1) and values (1, 1, n, 2) that carry the numbers of their tokens."""
    keys = mx.array(list(numbers), mx.float32).reshape(1, 1, -1, 1)
    return keys, mx.concatenate([keys, -keys], axis=-1)


def seen(fetched, mask, count):
    """What each of `count` rows sees, as token numbers."""
    numbers = fetched[0, 0, :, 0].tolist()
    first = len(numbers) - count  # rows before the new ones
    if mask is None:
        return [numbers] * count
    if isinstance(mask, str):
        return [numbers[: first + i + 1] for i in range(count)]
    return [[n for n, visible in zip(numbers, line, strict=True) if visible] for line in mask.tolist()]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    window=st.integers(1, 12),
    blocks=st.lists(
        st.tuples(st.one_of(st.integers(1, 16), st.integers(60, 70)), st.integers(1, 70)), max_size=20
    ),
    as_array=st.booleans(),
)
def test_a_window_shows_what_a_cache_that_keeps_everything_would_show(window, blocks, as_array):
    cache, everything, number = WindowCache(window), [], itertools.count()
    for count, keep in blocks:
        new = list(itertools.islice(number, count))  # rejected tokens' numbers never come again
        mask = cache.make_mask(count, return_array=as_array)
        keys, values = cache.update_and_fetch(*rows(new))
        everything += new
        at = [len(everything) - count + i for i in range(count)]
        expected = [everything[max(0, p - window + 1) : p + 1] for p in at]
        assert seen(keys, mask, count) == expected
        assert mx.array_equal(values, mx.concatenate([keys, -keys], axis=-1))
        assert cache.keys.shape[2] <= window - 1 + max(count, 64)
        excess = count - min(keep, count)
        trim(cache, excess)
        del everything[len(everything) - excess :]
        assert cache.offset == len(everything)


def test_a_window_gives_back_the_last_forward_and_says_so_when_more_is_asked():
    cache = WindowCache(4)
    cache.update_and_fetch(*rows(range(9)))
    cache.update_and_fetch(*rows([9, 10, 11]))
    trim(cache, 1)
    assert cache.trim(3) == 2  # one of the three is gone already
    with pytest.raises(RuntimeError, match="0 of 1 rows"):
        trim(cache, 1)
    with pytest.raises(ValueError, match="window of 4"):
        cache.make_mask(2, window_size=3)


def test_mlx_lms_own_ring_cannot_be_wound_back_once_it_wrapped():
    """Why there is a cache of our own; if this fails, there may be no need for it any more."""
    ring = RotatingKVCache(max_size=8)
    for block in (range(8), range(8, 12)):
        ring.update_and_fetch(*rows(block))
    assert not ring.is_trimmable()


def test_a_ring_that_keeps_its_first_tokens_is_not_taken_for_a_window():
    assert can_roll_back(RotatingKVCache(max_size=8))
    assert not can_roll_back(RotatingKVCache(max_size=8, keep=4))


MAIN = [name for name in ("gemma3_text", "gemma4_text", "gpt_oss", "llama_sliding") if name in tiny.SLIDING]


@lru_cache
def answered(name):
    """A family with a long greedy answer by mlx-lm: (model, adapter, answer)."""
    model, adapter = tiny.target(name)
    return model, adapter, tiny.greedy(model, PROMPT, 220)


@pytest.mark.parametrize("name", tiny.SLIDING)
def test_windowed_families_are_recognised_by_their_caches(name):
    model, adapter, answer = answered(name)
    assert isinstance(adapter, SlidingTarget) and adapter.kind == "sliding"
    assert adapter.num_layers == tiny.config(name)["num_hidden_layers"]
    assert runs_like(model, adapter)
    assert len(set(answer)) > 60  # no loop: equality with it proves something


@pytest.mark.parametrize("width", [3, tiny.WINDOW, 13])
@pytest.mark.parametrize("right", ["always", "never", "alternating"])
@pytest.mark.parametrize("name", MAIN)
def test_answers_past_the_window_equal_mlx_lm(name, width, right):
    """At widths below, of and above the window, the prompt in chunks that wrap it in other places."""
    _, adapter, answer = answered(name)
    patience = {
        "always": itertools.repeat(99),
        "never": itertools.repeat(0),
        "alternating": itertools.cycle(range(width)),
    }[right]
    drafter = tiny.ScriptedDrafter(answer, len(PROMPT), patience)
    state = tiny.state(adapter, PROMPT, 80 if right == "never" else len(answer), drafter)
    list(decode(state, FixedWidth(width), {3: 512, tiny.WINDOW: 11, 13: 4}[width]))
    assert state.emitted == answer[: state.budget]


class Widths(FixedWidth):
    """One width after the other, below, of and above the window."""

    turn = itertools.cycle([1, 3, tiny.WINDOW, 13, 2, 16])

    def next_width(self):
        return next(self.turn)


@pytest.mark.parametrize("name", tiny.SLIDING)
def test_every_windowed_family_equals_mlx_lm_at_changing_widths(name):
    _, adapter, answer = answered(name)
    patience = itertools.cycle([0, 5, 2, 99, 1, 7, 3])
    state = tiny.state(adapter, PROMPT, len(answer), tiny.ScriptedDrafter(answer, len(PROMPT), patience))
    list(decode(state, Widths(0), 9))
    assert state.emitted == answer


@pytest.mark.parametrize("name", MAIN)
def test_plain_steps_past_the_window_equal_mlx_lm(name):
    _, adapter, answer = answered(name)
    state = tiny.state(adapter, PROMPT, 100)
    list(decode(state, FixedWidth(1), 7))
    assert state.emitted == answer[:100]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(tiny.SLIDING)),
    blocks=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_after_any_rollbacks_the_next_logits_are_those_of_the_kept_tokens_alone(name, blocks, seed):
    model, adapter = tiny.target(name)
    mx.random.seed(seed)
    session, kept = adapter.start(), []
    for width, keep in blocks:
        tokens = mx.random.randint(0, tiny.VOCAB, (1, width))
        session.forward(tokens)
        session.rollback(min(keep, width))
        kept += tokens[0, : min(keep, width)].tolist()
        assert session.offset == len(kept)
    after = adapter.logits(session.forward(mx.array([[1]])).hidden)
    alone = model(mx.array([[*kept, 1]]))[:, -1:]
    assert mx.allclose(after, alone, atol=2e-3, rtol=1e-3)


def test_a_long_generation_keeps_no_more_than_the_windows_rows():
    _, adapter = tiny.target("gpt_oss")
    session = adapter.start()
    sizes = []
    for chunk in (300, *[1] * 100, 40, *[16] * 10):
        session.forward(mx.zeros((1, chunk), dtype=mx.int32))
        mx.eval(session.arrays())
        sizes.append(max(c.keys.shape[2] for c in session._caches if isinstance(c, WindowCache)))
    assert sizes[0] <= tiny.WINDOW - 1 + 300  # the chunk itself
    assert max(sizes[1:]) <= tiny.WINDOW - 1 + 64


def test_gemmas_embeddings_carry_their_scale_and_its_logits_their_cap():
    model, adapter = tiny.target("gemma3_text")
    token = mx.array([[7]])
    assert mx.allclose(adapter.embed(token), model.model.embed_tokens(token) * 48**0.5, rtol=1e-2)
    if "gemma4_text" not in tiny.SLIDING:
        pytest.skip("this mlx-lm has no gemma4")
    model, adapter = tiny.target("gemma4_text", tie_word_embeddings=True)
    assert runs_like(model, adapter)
    hidden = 100 * mx.random.normal((1, 1, 48))
    assert mx.max(mx.abs(adapter.logits(hidden))).item() <= 30.0
    assert mx.max(mx.abs(adapter.project(hidden))).item() > 60.0
    assert mx.allclose(adapter.embed(token), model.model.embed_tokens(token) * 48**0.5)


def test_afmoes_embeddings_are_scaled_where_its_config_says_so():
    for scaled in (True, False):
        model, adapter = tiny.target("afmoe", mup_enabled=scaled)
        row = model.model.embed_tokens(mx.array([[7]]))
        assert mx.allclose(adapter.embed(mx.array([[7]])), row * (48**0.5 if scaled else 1.0))
        assert runs_like(model, adapter)


def test_muses_drafts_take_the_tables_rows_and_its_layers_take_normed_ones():
    if "muse_glimmer" not in tiny.SLIDING:
        pytest.skip("this mlx-lm has no muse_glimmer")
    model, adapter = tiny.target("muse_glimmer")
    assert mx.array_equal(adapter.embed(mx.array([[7]])), model.model.embed_tokens(mx.array([[7]])))


@pytest.mark.parametrize("name", [*tiny.SLIDING, *tiny.OTHERS])
def test_a_tap_is_what_the_model_would_answer_from_if_it_ended_there(name):
    model, adapter = tiny.target(name)
    tokens = mx.array([PROMPT])
    taps = adapter.start((1,)).forward(tokens).taps
    model.model.layers = model.model.layers[:2]
    if hasattr(model.model, "num_layers"):  # some of mlx-lm 0.31 count by themselves
        model.model.num_layers = 2
    assert mx.allclose(adapter.logits(model.model.norm(taps)), model(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MAIN)
def test_quantised_weights_run_as_in_the_model(name):
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64}
    model = tiny.model(name, **sizes)
    nn.quantize(
        model,
        group_size=32,
        bits=8,
        class_predicate=lambda _, m: (
            isinstance(m, (nn.Linear, nn.Embedding)) and m.weight.shape[-1] % 32 == 0
        ),
    )
    adapter = choose(model, tiny.config(name, **sizes))
    assert runs_like(model, adapter)
    assert (adapter.vocab_size, adapter.hidden_size) == (tiny.VOCAB, 64)
