"""Figures from hand-made cycles, whose answers are known."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.bench import numbers
from dflash.events import Cycle


def cycle(accepted, drafted, source="dflash", cut=None):
    tokens = tuple(range(accepted + 1))[:cut]
    return Cycle(tokens, drafted, accepted, drafted + 1, 0.1, source)


def test_a_spread_has_the_values_and_their_middle():
    assert numbers.spread([3.0, 1.0, 2.0]) == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "values": [3.0, 1.0, 2.0],
    }


def test_a_centre_tells_mean_from_median():
    assert numbers.centre([1.0, 1.0, 4.0]) == {"mean": 2.0, "median": 1.0, "min": 1.0, "count": 3}


def test_positions_count_where_a_proposal_was_reached_and_where_it_stood():
    found = numbers.by_position(
        [cycle(2, 3), cycle(0, 3), cycle(3, 3), cycle(9, 9, "lookup"), cycle(0, 0)], "dflash"
    )
    assert [(slot["position"], slot["reached"], slot["stood"]) for slot in found] == [
        (1, 3, 2),
        (2, 2, 2),
        (3, 2, 1),
    ]
    assert found[2]["share"] == 0.5
    assert [slot["position"] for slot in numbers.by_position([cycle(1, 4, "lookup")], "lookup")] == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=400))
def test_a_curve_along_an_answer_is_short_rising_and_has_the_means(drawn):
    cycles = [cycle(min(a, d), d) for a, d in drawn]
    curve = numbers.along(cycles)
    total = sum(len(one.tokens) for one in cycles)
    assert len(curve) <= 32
    starts = [point["token"] for point in curve]
    assert starts == sorted(set(starts)) and all(start < max(total, 1) for start in starts)
    if cycles:
        widths = [one.width for one in cycles]
        assert min(widths) <= min(p["width"] for p in curve) and max(p["width"] for p in curve) <= max(widths)


def test_a_curve_along_an_answer_shows_a_change_where_it_was():
    cycles = [cycle(0, 0)] * 64 + [cycle(7, 7)] * 8
    curve = numbers.along(cycles)
    assert {(p["width"], p["tokens_per_cycle"]) for p in curve if p["token"] < 64} == {(1, 1)}
    assert {(p["width"], p["tokens_per_cycle"]) for p in curve if p["token"] >= 64} == {(8, 8)}


def test_widths_are_counted_and_sorted():
    drawn = [cycle(0, random.Random(i).choice([0, 3, 11])) for i in range(40)]
    found = numbers.widths(drawn)
    assert sum(found.values()) == 40 and list(found) == ["1", "4", "12"]


@pytest.mark.parametrize(("part", "whole", "expected"), [(1, 4, 0.25), (0, 0, 0.0)])
def test_a_share_of_nothing_is_nothing(part, whole, expected):
    assert numbers.share(part, whole) == expected
