"""The fold: events in, one result out, at any moment."""

from dflash.events import Cycle, Finished, Notice, Prefilled, Prefilling, Text
from dflash.result import ResultFold


def folded(*events):
    fold = ResultFold()
    for event in events:
        fold.push(event)
    return fold.result()


def test_an_interrupted_run_is_a_cancelled_result_with_what_there_was():
    result = folded(
        Prefilling(3, 9), Prefilled(9, 5, 0.5), Text("a"), Cycle((6, 7), 3, 1, 4, 0.1), Text("bc")
    )
    assert (result.text, result.tokens, result.finish_reason) == ("abc", (5, 6, 7), "cancelled")
    assert result.prompt_tokens_per_second == 18


def test_accepted_tokens_cut_off_by_the_end_of_the_answer_do_not_count():
    result = folded(Prefilled(1, 5, 0.5), Cycle((6, 7), 7, 7, 8, 0.1), Finished("stop"))
    assert result.accepted_tokens == 2
    assert result.acceptance_rate == 2 / 3


def test_plain_steps_alone_are_a_baseline_whatever_was_loaded():
    result = folded(Prefilled(1, 5, 0.5), Cycle((6,), 0, 0, 1, 0.1), Finished("length"))
    assert (result.mode, result.accepted_length, result.acceptance_rate) == ("baseline", 1, 0)


def test_nothing_at_all_is_still_a_result():
    result = folded()
    assert (result.text, result.tokens, result.tokens_per_second) == ("", (), 0)


def test_notices_are_kept_in_order():
    result = folded(Notice("a", "x"), Notice("b", "y"))
    assert [notice.code for notice in result.notices] == ["a", "b"]
