"""The loop against mlx-lm's greedy decoding: whatever the draft says, the tokens are the target's."""

import itertools
import random

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.decoding.loop import decode
from dflash.decoding.width import FixedWidth
from dflash.events import Cycle, Finished, Notice, Prefilled, Prefilling

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]


def run(state, width, chunk=512):
    events = list(decode(state, FixedWidth(width), chunk))
    assert isinstance(events[-1], Finished)
    return events


def cycles(events):
    return [event for event in events if isinstance(event, Cycle)]


@pytest.fixture(scope="module", params=[*tiny.FAMILIES, *tiny.HYBRIDS])
def family(request):
    """A family with a long greedy answer by mlx-lm: (name, adapter, answer)."""
    model, adapter = tiny.target(request.param)
    return request.param, adapter, tiny.greedy(model, PROMPT, 400)


def test_the_reference_answers_do_not_fall_into_a_loop(family):
    _, _, answer = family
    assert len(set(answer)) > 60  # else equality over hundreds of tokens would prove little


@pytest.mark.parametrize("width", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("right", ["always", "never", "alternating"])
def test_output_equals_mlx_lm_for_any_quality_of_draft(family, width, right):
    _, adapter, answer = family
    patience = {
        "always": itertools.repeat(99),
        "never": itertools.repeat(0),
        "alternating": itertools.cycle(range(width)),  # every accepted length 0 .. width - 1
    }[right]
    drafter = tiny.ScriptedDrafter(answer, len(PROMPT), patience)
    state = tiny.state(adapter, PROMPT, len(answer), drafter)
    events = run(state, width)
    assert state.emitted == answer
    accepted = [cycle.accepted for cycle in cycles(events)]
    assert accepted[:-2] == [min(k, width - 1) for k in drafter.expected[: len(accepted) - 2]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_mix_of_widths_chunks_and_luck_equals_mlx_lm(data):
    family = data.draw(st.sampled_from(list(tiny.ALL)))
    seed = data.draw(st.integers(0, 3))
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    prompt = [rng.randrange(tiny.VOCAB) for _ in range(data.draw(st.integers(1, 40)))]
    count = data.draw(st.integers(1, 160))
    model, adapter = tiny.target(family, seed)
    answer = tiny.greedy(model, prompt, count)

    class AnyWidth(FixedWidth):
        def next_width(self):
            return rng.randint(1, 16)

        def plain_run(self):
            return rng.randint(1, 9)

    patience = iter(lambda: rng.randint(0, 16), None)
    state = tiny.state(adapter, prompt, count, tiny.ScriptedDrafter(answer, len(prompt), patience))
    state.tie_margin, state.exact = (
        data.draw(st.sampled_from([0.0, 0.3, float("inf")])),
        data.draw(st.booleans()),
    )
    list(decode(state, AnyWidth(0), data.draw(st.integers(1, 17))))
    assert state.emitted == answer


def test_exact_mode_leaves_every_near_tie_to_a_plain_step(family):
    _, adapter, answer = family
    for margin in (0.0, 0.2, float("inf")):
        drafter = tiny.ScriptedDrafter(answer, len(PROMPT), itertools.repeat(99))
        state = tiny.state(adapter, PROMPT, 120, drafter)
        state.tie_margin, state.exact = margin, True
        made = cycles(run(state, 8))
        assert state.emitted == answer[:120]
        for cycle, following in itertools.pairwise(made):
            if cycle.width > 1 and cycle.near_ties:
                assert following.width == 1 and len(cycle.tokens) < cycle.width
        blocks = [cycle for cycle in made if cycle.width > 1]
        if margin == 0.0:
            assert not any(cycle.near_ties for cycle in blocks)
        if margin == float("inf"):
            assert all(cycle.tokens == () for cycle in blocks)


def test_plain_steps_equal_mlx_lm(family):
    _, adapter, answer = family
    state = tiny.state(adapter, PROMPT, 300)
    events = run(state, 1)
    assert state.emitted == answer[:300]
    assert {cycle.width for cycle in cycles(events)} == {1}


def test_an_end_token_in_the_middle_of_a_block_ends_the_answer(family):
    _, adapter, answer = family
    at = 37
    end = answer[at]
    first = answer.index(end)
    drafter = tiny.ScriptedDrafter(answer, len(PROMPT), itertools.repeat(99))
    state = tiny.state(adapter, PROMPT, 300, drafter, end_tokens=[end])
    events = run(state, 16)
    assert state.emitted == answer[: first + 1]
    assert events[-1] == Finished("stop")


@pytest.mark.parametrize("budget", [1, 2, 3, 15, 16, 17, 18, 33])
def test_the_budget_is_met_exactly(budget):
    model, adapter = tiny.target("qwen3")
    answer = tiny.greedy(model, PROMPT, budget)
    drafter = tiny.ScriptedDrafter(answer, len(PROMPT), itertools.repeat(99))
    state = tiny.state(adapter, PROMPT, budget, drafter)
    events = run(state, 16)
    assert state.emitted == answer
    assert sum(len(cycle.tokens) for cycle in cycles(events)) == budget - 1
    assert events[-1] == Finished("length")


def test_caches_cover_every_token_but_the_anchor_after_each_cycle():
    model, adapter = tiny.target("llama")
    answer = tiny.greedy(model, PROMPT, 60)
    drafter = tiny.ScriptedDrafter(answer, len(PROMPT), itertools.cycle([0, 3, 7, 1]))
    state = tiny.state(adapter, PROMPT, 60, drafter)
    for event in decode(state, FixedWidth(8), 512):
        if isinstance(event, (Prefilled, Cycle)):
            assert state.session.offset == len(PROMPT) + len(state.emitted) - 1 or not state.remaining


def test_prefill_reports_each_chunk():
    _, adapter = tiny.target("llama")
    state = tiny.state(adapter, PROMPT, 1)
    events = run(state, 1, chunk=4)
    assert events[:2] == [Prefilling(4, 11), Prefilling(8, 11)]
    assert isinstance(events[2], Prefilled) and events[2].prompt_tokens == 11


def test_past_the_drafts_reach_decoding_goes_on_plainly_and_says_so():
    model, adapter = tiny.target("llama")
    answer = tiny.greedy(model, PROMPT, 80)
    drafter = tiny.ScriptedDrafter(answer, len(PROMPT), itertools.repeat(3))
    state = tiny.state(adapter, PROMPT, 80, drafter)
    state.draft_limit = 40
    events = run(state, 4)
    assert state.emitted == answer
    notice = next(i for i, event in enumerate(events) if isinstance(event, Notice))
    assert events[notice].code == "draft_context_limit"
    assert all(cycle.width == 1 for cycle in cycles(events[notice:]))
    assert any(cycle.width == 4 for cycle in cycles(events[:notice]))
