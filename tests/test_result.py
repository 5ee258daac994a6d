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


def test_a_draft_that_rested_most_of_the_time_is_said():
    drafted = [Cycle((6, 7), 3, 1, 4, 0.1)] * 10
    plain = [Cycle((6,), 0, 0, 1, 0.1)] * 20
    (notice,) = folded(Prefilled(1, 5, 0.5), *drafted, *plain).notices
    assert notice.code == "draft_rested" and "20 of 30" in notice.message
    assert folded(Prefilled(1, 5, 0.5), *drafted * 2, *plain[:9]).notices == ()
    limit = Notice("draft_context_limit", "x")
    assert folded(Prefilled(1, 5, 0.5), *drafted, limit, *plain).notices == (limit,)
    assert folded(Prefilled(1, 5, 0.5), *plain * 2).notices == (), "without a draft nothing rests"


def test_near_ties_add_up():
    cycle = Cycle((6, 7), 3, 1, 4, 0.1, near_ties=2)
    assert folded(Prefilled(1, 5, 0.5), cycle, cycle).near_ties == 4
