"""The adaptive width against simulated machines and texts: near the best fixed width, hardly ever below plain."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.decoding.costs import CostCurve
from dflash.decoding.width import AdaptiveWidth, FixedWidth
from dflash.events import Cycle

BLOCK = 16
# Relative costs as measured: a small model on a CPU; a big one on a GPU, where a wide pass costs little more.
CPU = CostCurve(((1, 1.0), (2, 1.12), (4, 1.31), (8, 1.53), (16, 1.87)), ((1, 0.26), (3, 0.32), (15, 0.36)))
GPU = CostCurve(((1, 1.0), (2, 1.02), (16, 1.35)), ((1, 0.12), (15, 0.12)))


def decode(policy, curve, acceptance, tokens, seed, slower=1.0):
    """Seconds that `tokens` tokens take, with `acceptance(token index)` the chance of each slot to stand."""
    dice = random.Random(seed)
    done = spent = 0
    while done < tokens:
        width = policy.next_width()
        if width == 1:
            for _ in range(min(policy.plain_run(), tokens - done)):
                seconds = curve.plain_s * slower
                policy.observe(Cycle((0,), 0, 0, 1, seconds))
                spent, done = spent + seconds, done + 1
            continue
        accepted = 0
        while accepted < width - 1 and dice.random() < acceptance(done):
            accepted += 1
        seconds = curve.cycle_s(width) * slower
        policy.observe(Cycle((0,) * (accepted + 1), width - 1, accepted, width, seconds))
        spent, done = spent + seconds, done + accepted + 1
    return spent


def best_fixed(curve, acceptance, tokens, seed):
    return min(decode(FixedWidth(w), curve, acceptance, tokens, seed) for w in range(1, BLOCK + 1))


@pytest.mark.parametrize("curve", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("chance", [0.3, 0.5, 0.6, 0.75, 0.9, 0.97])
def test_it_is_near_the_best_fixed_width_in_hindsight(curve, chance):
    runs = [
        decode(AdaptiveWidth(curve, BLOCK), curve, lambda _: chance, 400, seed)
        / best_fixed(curve, lambda _: chance, 400, seed)
        for seed in range(20)
    ]
    assert sum(runs) / len(runs) < 1.05, runs


@pytest.mark.parametrize("curve", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_draft_that_is_always_wrong_costs_next_to_nothing(curve):
    plain = 400 * curve.plain_s
    assert plain / decode(AdaptiveWidth(curve, BLOCK), curve, lambda _: 0.0, 400, 1) > 0.95


@pytest.mark.parametrize("curve", [CPU, GPU], ids=["cpu", "gpu"])
def test_it_follows_a_text_that_changes(curve):
    def acceptance(done):
        return 0.92 if done // 150 % 2 else 0.1

    adaptive = sum(decode(AdaptiveWidth(curve, BLOCK), curve, acceptance, 900, seed) for seed in range(5))
    fixed = sum(best_fixed(curve, acceptance, 900, seed) for seed in range(5))
    assert adaptive < 1.02 * fixed


def test_it_follows_a_machine_on_which_cycles_take_longer_than_measured():
    real = CostCurve(tuple((n, s * (1 if n == 1 else 2)) for n, s in CPU.verify_s), CPU.draft_s)
    policy = AdaptiveWidth(CPU, BLOCK)
    spent = decode(policy, real, lambda _: 0.55, 400, 3)
    assert 400 * real.plain_s / spent > 0.93, "here plain decoding is best, and the curve did not say so"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    extra=st.lists(st.floats(0.0, 0.4), min_size=4, max_size=4),
    draft=st.floats(0.02, 1.0),
    chance=st.floats(0.0, 0.98),
    seed=st.integers(0, 9),
)
def test_it_is_hardly_ever_slower_than_plain_steps(extra, draft, chance, seed):
    costs, total = [(1, 1.0)], 1.0
    for width, more in zip((2, 4, 8, 16), extra, strict=True):
        total += more
        costs.append((width, total))
    curve = CostCurve(tuple(costs), ((1, draft), (15, draft)))
    spent = decode(AdaptiveWidth(curve, BLOCK), curve, lambda _: chance, 500, seed)
    assert 500 * curve.plain_s / spent > 0.92


def test_a_fixed_width_is_fixed():
    policy = FixedWidth(5)
    for accepted in (0, 4, 0):
        assert policy.next_width() == 5
        policy.observe(Cycle((0,) * (accepted + 1), 4, accepted, 5, 1.0))


def test_only_slots_that_were_verified_are_learnt_from():
    policy = AdaptiveWidth(CPU, BLOCK)
    for _ in range(60):
        policy.observe(Cycle((0, 0, 0), 2, 2, 3, 1.6))
    first, second, third, *rest = policy.acceptance()
    assert first > 0.9 and second > 0.9 and abs(third - second) < 1e-9 and rest[-1] == third
    for _ in range(60):
        policy.observe(Cycle((0,), 2, 0, 3, 1.6))
    assert policy.acceptance()[0] < 0.1
