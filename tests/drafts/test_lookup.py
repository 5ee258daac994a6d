"""Copies of earlier text: what is pointed at really stood there, and a departed copy finds its source again."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.drafts.lookup import Lookup

TEXTS = st.lists(st.integers(0, 3), max_size=60)  # few tokens: endings come again all the time


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TEXTS)
def test_a_match_is_a_match(text):
    lookup = Lookup()
    for end, token in enumerate(text, start=1):
        lookup.extend([token])
        if lookup.length is None:
            assert lookup.continuation(5) == ()
            continue
        at, length = lookup._at, lookup.length
        assert 0 < at < end
        assert text[at - length : at] == text[end - length : end]
        assert lookup.continuation(9)[: end - at] == tuple(text[at:end][:9])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TEXTS)
def test_an_ending_of_four_or_more_that_stood_before_is_found(text):
    lookup = Lookup(text)
    for n in (4, 8):
        before = (text[i : i + n] for i in range(len(text) - n))
        if text[-n:] in before:
            assert lookup.length >= n


@given(TEXTS, TEXTS)
def test_growing_in_pieces_is_like_growing_at_once(first, second):
    whole, pieces = Lookup(first + second), Lookup(first)
    pieces.extend(second)
    assert (whole.length, whole.continuation(7)) == (pieces.length, pieces.continuation(7))


def test_a_repetition_goes_round():
    assert Lookup([9, 1, 2, 3, 1, 2, 3]).continuation(7) == (1, 2, 3, 1, 2, 3, 1)
    assert Lookup([5, 5, 5]).continuation(4) == (5, 5, 5, 5)


def test_nothing_is_proposed_for_new_text():
    lookup = Lookup(range(50))
    assert lookup.length is None and lookup.continuation(3) == ()


def test_the_match_grows_with_the_copy():
    lookup = Lookup([*range(40), 10, 11])
    assert lookup.length == 2
    lookup.extend([12, 13])
    assert lookup.length == 4 and lookup.continuation(2) == (14, 15)


def departed(*new):
    """A copy of 0, 1, 2, ... that says `new` in place of 20."""
    return Lookup([*range(60), *range(10, 20), *new])


def test_a_changed_name_does_not_end_the_copy():
    assert departed(900).continuation(3) == (21, 22, 23)
    assert departed(900, 901, 902).continuation(3) == (21, 22, 23)
    back = departed(900, 901, 21)
    assert (back.length, back.continuation(3)) == (1, (22, 23, 24))
    back.extend([22, 23])
    assert back.length >= 3


def test_a_copy_that_leaves_something_out_or_puts_something_in_goes_on():
    assert departed(24).continuation(2) == (25, 26)  # 20 .. 23 left out
    assert departed(900, 20).continuation(2) == (21, 22)  # 900 put in


def test_a_long_detour_is_another_text():
    assert departed(*range(900, 907)).length == 0
    assert departed(*range(900, 920)).length is None


def test_a_longer_match_elsewhere_wins_over_the_old_source():
    other = [70, 71, 72, 73, 74, 75]
    lookup = Lookup([*other, *range(60), *range(10, 20), *other[:4]])
    assert lookup.length == 4 and lookup.continuation(2) == (74, 75)


def test_the_worst_text_takes_time_in_proportion():
    began = time.perf_counter()
    Lookup([1] * 40_000)
    Lookup(list(range(7)) * 6_000)
    assert time.perf_counter() - began < 20  # tenths of a second; scanning again would take minutes
