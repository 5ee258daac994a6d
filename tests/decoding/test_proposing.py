"""Who proposes: the one that promises more tokens for its time, and never something else than the target's tokens."""

import itertools
import random

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.decoding.loop import decode
from dflash.decoding.proposing import (
    CPU_COSTS,
    GPU_COSTS,
    LOOKUP_WIDTH,
    Acceptance,
    Costs,
    DraftOnly,
    Turn,
    WithLookup,
)
from dflash.decoding.width import FixedWidth
from dflash.drafts.lookup import Lookup
from dflash.events import Cycle
from dflash.kernels.gated_delta import MAX_TAPE_STEPS
from dflash.targets.opaque import OpaqueTarget

FREE = Costs(((1, 1.0), (2, 1.0)), draft=0.0)  # wide blocks cost nothing: every copy is worth a try
LISTING = list(range(100, 160))


# ---------------------------------------------------------------- the policy


def test_blocks_with_copies_fit_every_kind_of_rollback():
    assert LOOKUP_WIDTH <= MAX_TAPE_STEPS


@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS])
def test_wider_costs_more_and_a_draft_pass_is_paid_for(costs):
    verify = [costs.of(width) for width in range(1, 50)]
    assert verify[0] == 1.0 and verify == sorted(verify)
    assert costs.of(8, drafted=True) == pytest.approx(costs.of(8) + costs.draft)


def test_costs_between_measured_widths_are_linear():
    costs = Costs(((1, 1.0), (5, 2.0), (9, 4.0)), draft=0.5)
    assert [costs.of(width) for width in (1, 3, 5, 7, 9, 11)] == pytest.approx([1, 1.5, 2, 3, 4, 5])


@given(st.lists(st.tuples(st.integers(0, 31), st.booleans()), max_size=40), st.integers(0, 31))
def test_expected_tokens_lie_between_one_and_all(history, count):
    seen = Acceptance(0.5)
    for stood, fell in history:
        seen.observe(stood, fell)
    assert 0 < seen.rate < 1
    assert 1 <= seen.tokens(count) <= count + 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_turn_is_never_wider_than_allowed(data):
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    widest = data.draw(st.integers(1, LOOKUP_WIDTH))
    proposing = WithLookup(Lookup(rng.choices(range(4), k=30)), rng.choice([FREE, CPU_COSTS]), widest)
    for _ in range(30):
        most = rng.randint(1, 40)
        drafted = rng.randint(1, min(most, 16))
        turn = proposing.next_turn(drafted, most)
        assert turn.width <= most
        if turn.copied:
            assert len(turn.copied) == turn.width - 1 and turn.width <= widest
        else:
            assert turn == Turn(drafted)
        proposing.extend(rng.choices(range(4), k=rng.randint(1, turn.width)))


def test_a_long_match_is_copied_and_new_text_is_drafted():
    proposing = WithLookup(Lookup([*LISTING, *LISTING[:20]]), CPU_COSTS)
    turn = proposing.next_turn(4, 100)
    assert turn.width > 8 and list(turn.copied) == LISTING[20 : 19 + turn.width]
    proposing.extend([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert proposing.next_turn(4, 100) == Turn(4)


def test_copies_grow_longer_as_they_stand_and_stop_when_they_fall():
    proposing = WithLookup(Lookup([*LISTING * 2, *LISTING[:2]]), CPU_COSTS)
    first = proposing.next_turn(4, 100)
    for begin in range(2, 42, 4):
        proposing.extend(LISTING[begin : begin + 4])
    assert proposing.next_turn(4, 100).width > first.width
    wrong = WithLookup(Lookup(), CPU_COSTS)
    for other in range(100, 112):  # a pair that comes again and again, each time with another continuation
        for token in (7, 8, other):
            wrong.extend([token])
    wrong.extend([7, 8])
    assert wrong.lookup.length and wrong.next_turn(4, 100) == Turn(4)


def test_what_the_draft_says_teaches_what_copies_are_worth():
    """Copies are judged although none was verified."""
    proposing = WithLookup(Lookup([*LISTING, *LISTING[:3]]), Costs(((1, 1.0), (2, 9.0)), draft=0.1))
    seen = proposing._class()
    before = seen.rate
    assert proposing.next_turn(1, 100) == Turn(1)
    proposing.extend(LISTING[3:6])
    risen = seen.rate
    assert risen > before
    again = WithLookup(Lookup([*LISTING, *LISTING[:3]]), CPU_COSTS)
    seen = again._class()
    again.extend([1, 2, 3])
    assert seen.rate < before


def test_a_good_draft_is_kept_and_a_bad_one_gives_way_to_a_doubtful_copy():
    def after(accepted):
        proposing = WithLookup(Lookup([*LISTING, *LISTING[:2]]), CPU_COSTS)
        for _ in range(20):
            proposing.observe(Cycle((1,) * (accepted + 1), 7, accepted, 8, 0.1))
        return proposing.next_turn(8, 100)

    assert after(7) == Turn(8)
    assert after(0).copied


def test_without_copies_the_draft_always_proposes():
    assert DraftOnly().next_turn(5, 9) == Turn(5) and not DraftOnly().copies


# ---------------------------------------------------------------- with a target


def looping(family, seed):
    """A target whose greedy answer soon repeats itself: small weights make the attention flat."""
    model, adapter = tiny.target(family, seed)
    model.apply(lambda array: array / 2.5 if array.ndim > 1 else array)
    return model, adapter


@settings(max_examples=14, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_text_any_partner_any_luck_gives_the_targets_tokens(data):
    family = data.draw(st.sampled_from([*tiny.FAMILIES, *tiny.HYBRIDS]))
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    model, adapter = (looping if rng.random() < 0.6 else tiny.target)(family, rng.randrange(4))
    phrase = [rng.randrange(tiny.VOCAB) for _ in range(rng.randint(1, 9))]
    prompt = (phrase * 20)[: rng.randint(1, 40)]
    count = rng.randint(1, 90)
    answer = tiny.greedy(model, prompt, count)
    drafter = None
    if rng.random() < 0.7:
        patience = iter(lambda: rng.randint(0, 8), None)
        drafter = tiny.ScriptedDrafter(answer, len(prompt), patience)
    state = tiny.state(adapter, prompt, count, drafter)
    state.proposing = WithLookup(Lookup(prompt), rng.choice([FREE, CPU_COSTS]))
    events = list(decode(state, FixedWidth(rng.randint(1, 9)), rng.randint(1, 17)))
    assert state.emitted == answer
    assert state.proposing.lookup._tokens == prompt + answer
    cycles = [event for event in events if isinstance(event, Cycle)]
    assert sum(len(cycle.tokens) for cycle in cycles) == len(answer) - 1


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_text_that_stood_before_comes_in_whole_blocks(family):
    """The lookup is told the answer beforehand; a hybrid's tape holds the widest of these blocks."""
    model, adapter = tiny.target(family)
    answer = tiny.greedy(model, LISTING, 150)
    state = tiny.state(adapter, LISTING, 150)
    state.proposing = WithLookup(Lookup([*LISTING, *answer, *LISTING]), CPU_COSTS)
    cycles = [event for event in decode(state, FixedWidth(1), 512) if isinstance(event, Cycle)]
    assert state.emitted == answer
    assert len(cycles) < 20 and max(cycle.width for cycle in cycles) == LOOKUP_WIDTH
    assert {cycle.source for cycle in cycles if cycle.drafted} == {"lookup"}


def test_an_opaque_target_with_plain_caches_verifies_copies():
    model, _ = tiny.target("llama")
    opaque = OpaqueTarget(model, vocab_size=tiny.VOCAB, max_context=None, why="for this test")
    assert opaque.max_block is None
    answer = tiny.greedy(model, LISTING, 120)
    almost = [token if i % 9 else token - 1 for i, token in enumerate(answer, start=1)]
    state = tiny.state(opaque, LISTING, 120)
    state.proposing = WithLookup(Lookup([*LISTING, *almost, *LISTING]), FREE)
    cycles = [event for event in decode(state, FixedWidth(1), 512) if isinstance(event, Cycle)]
    assert state.emitted == answer
    assert any(0 < cycle.accepted < cycle.drafted for cycle in cycles)


def test_past_the_drafts_reach_copies_go_on():
    model, adapter = looping("llama", 1)
    answer = tiny.greedy(model, LISTING, 120)
    state = tiny.state(adapter, LISTING, 120, tiny.ScriptedDrafter(answer, len(LISTING), itertools.repeat(1)))
    state.draft_limit = len(LISTING) + 20
    state.proposing = WithLookup(Lookup(LISTING), FREE)
    events = list(decode(state, FixedWidth(4), 512))
    assert state.emitted == answer
    late = itertools.dropwhile(lambda event: getattr(event, "code", "") != "draft_context_limit", events)
    assert any(event.accepted for event in late if isinstance(event, Cycle))
