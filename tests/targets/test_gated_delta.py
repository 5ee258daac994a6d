"""Hybrid targets: the recurrent layers give the model's own outputs, and a rolled back state leaves no trace."""

import itertools

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.decoding.loop import decode
from dflash.decoding.width import FixedWidth
from dflash.kernels.gated_delta import MAX_TAPE_STEPS, replay
from dflash.models.loading import runs_like
from dflash.targets.choose import choose
from dflash.targets.gated_delta import GatedDeltaTarget, LinearMemory

FAMILIES = list(tiny.HYBRIDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_hybrids_are_recognised_by_their_layers(family):
    _, adapter = tiny.target(family)
    assert isinstance(adapter, GatedDeltaTarget)
    assert adapter.kind == "hybrid"


@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_weights_run_as_in_the_model(family):
    # group size 32 divides every projection of the tiny models whose input has 64 elements or more
    model = tiny.model(family, hidden_size=64, head_dim=32, linear_value_head_dim=32, intermediate_size=64)
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda _, m: isinstance(m, nn.Linear))
    adapter = choose(model, tiny.config(family, hidden_size=64))
    assert runs_like(model, adapter)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    blocks=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=8),
    seed=st.integers(0, 99),
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
    after = adapter.logits(session.forward(mx.array([[1]])).hidden)
    alone = model(mx.array([[*kept, 1]]))[:, -1:]
    assert mx.allclose(after, alone, atol=2e-3, rtol=1e-3)


def memory_after(family, blocks):
    """A linear layer's memory after (inputs, keep) blocks."""
    model, _ = tiny.target(family)
    layers = (model.language_model if hasattr(model, "language_model") else model).model.layers
    memory = LinearMemory(layers[0].linear_attn)
    for x, keep in blocks:
        memory.forward(x)
        if keep < x.shape[1]:
            memory.rollback(keep)
    return memory


def state_of(memory):
    start = memory._start
    return start.state if start.tape is None else replay(start.tape, start.state, start.keep)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keep", range(1, 9))
def test_a_rolled_back_memory_is_that_of_the_kept_steps_alone(family, keep):
    mx.random.seed(keep)
    before, block = mx.random.normal((1, 5, 48)), mx.random.normal((1, 8, 48))
    rolled = memory_after(family, [(before, 5), (block, keep)])
    alone = memory_after(family, [(before, 5), (block[:, :keep], keep)])
    # Projections of 8 rows and of `keep` rows may round apart; that replay adds nothing is the kernels' own test.
    assert mx.allclose(rolled._window, alone._window, atol=1e-5)
    assert mx.allclose(state_of(rolled), state_of(alone), atol=1e-5)


def test_a_block_that_stands_costs_nothing():
    _, adapter = tiny.target("qwen3_5")
    session = adapter.start()
    session.forward(mx.array([[1, 2, 3]]))
    starts = [m._start for m in session._memories if isinstance(m, LinearMemory)]
    session.rollback(3)
    assert all(a is b for a, b in zip(starts, [m._start for m in session._memories[:3]], strict=True))


def test_a_prompt_chunk_keeps_no_tape_and_cannot_be_rolled_back():
    _, adapter = tiny.target("qwen3_next")
    session = adapter.start()
    session.forward(mx.zeros((1, MAX_TAPE_STEPS + 1), dtype=mx.int32))
    with pytest.raises(RuntimeError, match="rolled back"):
        session.rollback(3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "chunk"), [(8, 512), (5, 20)])
def test_hundreds_of_tokens_past_position_1024_equal_mlx_lm(family, width, chunk):
    """The prompt goes in by chunks of both kinds, with and without a tape, and every accepted length occurs."""
    model, adapter = tiny.target(family)
    prompt = [(7 * i * i + 3) % tiny.VOCAB for i in range(950)]
    answer = tiny.greedy(model, prompt, 150)
    drafter = tiny.ScriptedDrafter(answer, len(prompt), itertools.cycle(range(width)))
    state = tiny.state(adapter, prompt, len(answer), drafter)
    list(decode(state, FixedWidth(width), chunk))
    assert state.emitted == answer
