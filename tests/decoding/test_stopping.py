"""Stop texts, found wherever the pieces happen to be cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.decoding.stopping import StopTexts

LETTERS = st.text(alphabet="abc", max_size=30)


def shown(pieces, stops):
    stream = StopTexts(stops)
    out = "".join(stream.push(piece) for piece in pieces)
    return out + stream.finish(), stream.hit


@given(LETTERS, st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3), st.data())
def test_any_cut_into_pieces_gives_the_text_before_the_first_complete_stop(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    by_letter = shown(list(text), tuple(stops))
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        assert shown(pieces, tuple(stops)) == (text, False) == by_letter
    else:
        first_complete = min(ends)[0]
        begins = [text[:first_complete].find(stop) for stop in stops if stop in text[:first_complete]]
        assert by_letter == (text[: min(begins)], True)
        out, hit = shown(pieces, tuple(stops))
        assert hit and not any(stop in out for stop in stops)


def test_text_that_cannot_become_a_stop_is_not_held_back():
    stream = StopTexts(("END",))
    assert stream.push("the E") == "the "
    assert stream.push("nd") == "End"
    assert stream.push("EN") == ""
    assert stream.push("D of it") == ""
    assert stream.hit


@pytest.mark.parametrize("late", ["", "x", "END"])
def test_nothing_is_shown_after_a_hit(late):
    stream = StopTexts(("END",))
    assert stream.push("aENDb") == "a"
    assert stream.push(late) == ""
    assert stream.finish() == ""
