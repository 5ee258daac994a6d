"""Running a model layer by layer gives the model's own logits, and rolling back leaves no trace."""

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache

from dflash.models.loading import runs_like
from dflash.targets.choose import choose
from dflash.targets.opaque import OpaqueTarget


@pytest.mark.parametrize("family", tiny.ALL)
def test_logits_are_the_models_own(family):
    model, adapter = tiny.target(family)
    tokens = mx.arange(5, 45, 2)[None]  # longer than the windows
    features = adapter.start((0, 2)).forward(tokens)
    logits, own = adapter.logits(features.hidden), model(tokens)
    if family in tiny.HYBRIDS:  # another order of the recurrence's sums than mlx-lm's own
        assert mx.allclose(logits, own, rtol=1e-5, atol=1e-4)
    else:
        assert mx.array_equal(logits, own)
    assert runs_like(model, adapter)


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_taps_are_the_outputs_of_the_named_layers_in_the_named_order(family):
    model, adapter = tiny.target(family)
    tokens = mx.array([[5, 7, 11]])
    taps = adapter.start((2, 0)).forward(tokens).taps
    size = adapter.hidden_size
    hidden = model.model.embed_tokens(tokens)
    outputs = []
    for layer in model.model.layers:
        hidden = layer(hidden, "causal", None)
        outputs.append(hidden)
    assert mx.allclose(taps[..., :size], outputs[2], atol=1e-5)
    assert mx.allclose(taps[..., size:], outputs[0], atol=1e-5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.sampled_from(["qwen3", *tiny.OTHERS]),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=10),
    st.integers(0, 99),
)
def test_after_any_rollbacks_the_next_logits_are_those_of_the_kept_tokens_alone(family, blocks, seed):
    model, adapter = tiny.target(family)
    mx.random.seed(seed)
    session, kept = adapter.start(), []
    for width, keep in blocks:
        tokens = mx.random.randint(0, tiny.VOCAB, (1, width))
        session.forward(tokens)
        session.rollback(min(keep, width))
        kept += tokens[0, : min(keep, width)].tolist()
        assert session.offset == len(kept)
    probe = mx.array([[1]])
    after = adapter.logits(session.forward(probe).hidden)
    alone = model(mx.array([[*kept, 1]]))[:, -1:]
    assert mx.allclose(after, alone, atol=1e-4)


def test_the_adapter_holds_no_second_copy_of_the_weights():
    model, adapter = tiny.target("llama")
    before = mx.get_active_memory()
    adapter.start()
    again = choose(model, tiny.config("llama"))
    assert again is not adapter
    assert mx.get_active_memory() == before
    theirs = {id(array) for _, array in tree_flatten(model.parameters())}
    ours = {id(array) for layer in adapter._parts.layers for _, array in tree_flatten(layer.parameters())}
    assert ours <= theirs


def test_a_model_built_otherwise_is_run_as_a_whole_and_says_what_is_supported():
    _, adapter = tiny.target("lfm2")
    assert isinstance(adapter, OpaqueTarget)
    assert "lfm2" in adapter.why and "gemma4" in adapter.why


def test_a_model_with_other_caches_is_run_as_a_whole_and_says_which():
    model = tiny.model("llama")
    model.make_cache = lambda: [RotatingKVCache(max_size=8, keep=4) for _ in range(3)]
    adapter = choose(model, tiny.config("llama"))
    assert isinstance(adapter, OpaqueTarget)
    assert "RotatingKVCache" in adapter.why and "gemma4" in adapter.why


class Scaled(nn.Module):
    """A model that does more than its parts show: it scales its logits."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.model = inner.model
        self.lm_head = inner.lm_head

    @property
    def layers(self):
        return self.inner.layers

    def __call__(self, tokens, cache=None):
        return self.inner(tokens, cache) * 0.5


def test_the_probe_catches_a_model_that_its_parts_do_not_explain():
    model = Scaled(tiny.model("qwen3"))
    assert not runs_like(model, choose(model, tiny.config("qwen3")))
