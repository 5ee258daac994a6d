"""The greedy rule, against its definition."""

from hypothesis import given
from hypothesis import strategies as st

from dflash.decoding.acceptance import accepted_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(TOKENS, TOKENS)
def test_the_accepted_prefix_is_the_longest_common_one(proposals, choices):
    choices = [*choices, *[0] * (len(proposals) + 1)][: len(proposals) + 1]
    count = accepted_prefix(proposals, choices)
    assert proposals[:count] == choices[:count]
    assert count == len(proposals) or proposals[count] != choices[count]
