"""Replays accept what the pattern says, whatever the target would have chosen, and say how often it agreed."""

import itertools

import mlx.core as mx
import pytest
import tiny

from dflash.bench import efficiency
from dflash.bench.race import Race, Task
from dflash.bench.replay import Replay, parse
from dflash.bench.shapes import random_draft
from dflash.bench.verify_cost import SHAPES, build
from dflash.drafts.base import Proposal, as_scored
from dflash.errors import BadValue

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "gemma3_text"])
def target(request):
    if request.param not in tiny.ALL:
        pytest.skip("not in this mlx-lm")
    return tiny.target(request.param)


class CountingDraft:
    """A draft that is wrong in every slot, and knows how often it was asked."""

    taps, block_size, max_context = (1,), 8, 1 << 20

    def __init__(self):
        self.passes = self.rows = 0

    def start(self, tables):
        return self

    def propose(self, anchor, count, weigh=as_scored):
        self.passes += 1
        return Proposal(mx.full((1, count), 3))

    def observe(self, taps):
        self.rows += taps.shape[1]

    def arrays(self):
        return []


@pytest.mark.parametrize("pattern", [(6,), (1,), (8, 2, 5)])
def test_every_cycle_accepts_what_the_pattern_says_and_the_answer_stays(target, pattern):
    built, adapter = target
    replay = Replay(adapter, None, pattern, 8)
    timed = replay(Task("p", "chat", PROMPT, 60))
    assert list(timed.tokens) == tiny.greedy(built, PROMPT, 60)
    assert replay.agreements == [1.0]
    whole = [cycle for cycle in timed.cycles if cycle.width == 8]
    expected = itertools.islice(itertools.cycle(pattern), len(whole))
    assert [len(cycle.tokens) for cycle in whole][:-1] == list(expected)[:-1]


def test_a_target_that_would_choose_otherwise_does_not_leave_the_script():
    _, adapter = tiny.target("llama")
    _, other = tiny.target("llama", seed=1)
    task = Task("p", "chat", PROMPT, 40)
    script = Replay(other, None, (4,), 8).plain(task)
    replay = Replay(adapter, None, (4,), 8)
    replay._answers[task.id, task.length] = script
    timed = replay(task)
    assert timed.tokens == script.tokens
    assert {cycle.accepted for cycle in timed.cycles if cycle.width == 8} == {3}
    assert replay.agreements[0] < 0.5


def test_a_real_drafts_passes_are_made_and_its_tokens_put_aside():
    built, adapter = tiny.target("llama")
    draft = CountingDraft()
    timed = Replay(adapter, draft, (4,), 8)(Task("p", "chat", PROMPT, 40))
    assert list(timed.tokens) == tiny.greedy(built, PROMPT, 40)
    assert draft.passes == sum(cycle.width > 1 for cycle in timed.cycles)
    assert draft.rows == len(PROMPT) + 39


def test_a_proposal_takes_the_time_that_was_asked_for():
    _, adapter = tiny.target("llama")
    timed = Replay(adapter, None, (4,), 8, draft_s=0.02)(Task("p", "chat", PROMPT, 20))
    proposals = sum(cycle.width > 1 for cycle in timed.cycles)
    assert proposals >= 4 and timed.decode_s >= 0.02 * proposals


@pytest.mark.parametrize("pattern", ["", "six", "0", "9", "3,,2", "-1", "2.5", "²"])
def test_a_pattern_that_no_cycle_can_have_is_refused(pattern):
    with pytest.raises(BadValue, match="--replay"):
        parse(pattern, 8)


def test_a_pattern_is_read():
    assert parse("8, 2,5", 8) == (8, 2, 5)


def test_the_cycle_is_put_over_its_passes_at_the_width_that_most_cycles_had():
    _, adapter = tiny.target("llama")
    task = Task("p", "chat", PROMPT, 60)
    replay = Replay(adapter, None, (4,), 8, draft_s=0.02)
    races = [Race(task, (replay.plain(task),), (replay(task),))]
    found = efficiency.cycle_efficiency(adapter, None, races, waited_s=0.02)
    assert (found["width"], found["context"], found["draft_s"]) == (8, 35, 0.02)
    assert found["cycle_s"] >= 0.02 and found["verify_s"] > 0
    assert found["ratio"] == pytest.approx(found["cycle_s"] / (found["verify_s"] + 0.02), rel=1e-3)
    plain = [Race(task, (replay.plain(task),), (replay.plain(task),))]
    assert efficiency.cycle_efficiency(adapter, None, plain) is None


def test_each_shape_has_a_draft_of_its_geometry():
    _, adapter = build("qwen3.5-tiny")
    draft = random_draft("qwen3.5-tiny")
    draft.config.check_target(
        hidden_size=adapter.hidden_size, num_layers=adapter.num_layers, vocab_size=adapter.vocab_size
    )
    for name in SHAPES:
        from dflash.bench.shapes import _COMMON, _DRAFTS
        from dflash.drafts.checkpoint import DraftConfig

        config, target = DraftConfig.from_json(_COMMON | _DRAFTS[name]), SHAPES[name]
        config.check_target(
            hidden_size=target["hidden_size"],
            num_layers=target["num_hidden_layers"],
            vocab_size=target["vocab_size"],
        )
