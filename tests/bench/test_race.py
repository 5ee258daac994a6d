"""Races: who runs when, what is compared, and that the baseline is mlx-lm's own answer."""

import pair
import pytest
import tiny

from dflash.bench import figures, race
from dflash.bench.prompts import BenchPrompt
from dflash.bench.race import Engine, Race, Stock, StockSteps, Task, Timed
from dflash.config import DFlashConfig
from dflash.errors import ContextExceeded
from dflash.runtime import DFlashRuntime


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    base = tmp_path_factory.mktemp("pair")
    config = DFlashConfig(draft_block_size=4)
    return DFlashRuntime.from_pretrained(str(pair.target(base / "t")), str(pair.draft(base / "d")), config)


def told(text, length, runtime):
    return Task("p", "chat", runtime.encode(text), length, text)


def test_all_contenders_give_mlx_lms_greedy_tokens(runtime):
    task = told("Hello", 30, runtime)
    expected = tiny.greedy(runtime.target.model, task.ids, 30)
    for contender in (
        Stock(runtime.target, eos=False),
        StockSteps(runtime.target.model),
        Engine(runtime, eos=False),
    ):
        timed = contender(task)
        assert list(timed.tokens) == expected
        assert timed.prefill_s > 0 and timed.decode_s > 0 and timed.peak_bytes > 0
        assert timed.tokens_per_s == pytest.approx(29 / timed.decode_s)


def test_an_end_token_ends_both_answers_and_counts_in_both(runtime):
    task = told("Hello", 30, runtime)
    end = tiny.greedy(runtime.target.model, task.ids, 30)[7]
    target = runtime.target
    runtime.target = type(target)(target.model, target.adapter, target.tokenizer, frozenset({end}))
    try:
        stock, ours = Stock(runtime.target, eos=True)(task), Engine(runtime, eos=True)(task)
        assert stock.tokens == ours.tokens and stock.tokens[-1] == end and len(stock.tokens) <= 8
        assert len(Stock(runtime.target, eos=False)(task).tokens) == 30
    finally:
        runtime.target = target


def test_an_engines_cycles_and_gaps_cover_its_answer(runtime):
    timed = Engine(runtime, eos=False)(told("Hello", 30, runtime))
    assert sum(len(cycle.tokens) for cycle in timed.cycles) == 29
    assert len(timed.gaps_s) == len(timed.cycles) and sum(timed.gaps_s) == pytest.approx(timed.decode_s)


def timed(tokens, seconds=1.0):
    return Timed(tuple(tokens), 0.1, seconds, 1)


def test_contenders_run_in_turn_and_who_begins_alternates():
    order = []
    runners = [lambda task, name=name: order.append((task.id, name)) or timed(range(9)) for name in "sd"]
    todo = [Task(name, "chat", [1], 9) for name in ("a", "b")]
    found = list(race.races(todo, *runners, repeats=3, cooldown_s=0))
    assert [name for _, name in order] == list("dssddssddssd")
    assert [task for task, _ in order] == ["a"] * 6 + ["b"] * 6
    assert all(len(one.ratios) == 3 for one in found)


def test_an_answer_that_ended_by_itself_is_not_asked_for_again_at_a_greater_length():
    todo = [Task(name, "chat", [1], length) for name in ("short", "long") for length in (4, 8, 16)]
    answers = {"short": range(6), "long": range(16)}
    runner = lambda task: timed(answers[task.id][: task.length])  # noqa: E731
    found = list(race.races(todo, runner, runner, repeats=1, cooldown_s=0))
    assert [(one.task.id, one.task.length) for one in found] == [
        ("short", 4),
        ("short", 8),
        ("long", 4),
        ("long", 8),
        ("long", 16),
    ]


def test_a_rest_stands_between_answers(monkeypatch):
    rests = []
    monkeypatch.setattr(race.time, "sleep", rests.append)
    runner = lambda task: timed(range(9))  # noqa: E731
    todo = [Task("a", "chat", [1], 9), Task("b", "chat", [1], 9)]
    list(race.races(todo, runner, runner, repeats=2, cooldown_s=1.5))
    assert rests == [1.5] * 7  # of eight answers, before all but the first


def test_prompts_that_the_context_does_not_hold_are_left_out_by_name(runtime):
    prompts = [BenchPrompt("fits", "chat", "Hello"), BenchPrompt("long", "chat", "x" * 460)]
    found, left_out = race.tasks(runtime, prompts, [8, 480])
    assert [(task.id, task.length) for task in found] == [("fits", 8), ("fits", 480), ("long", 8)]
    assert [(left["id"], left["length"]) for left in left_out] == [("long", 480)]
    with pytest.raises(ContextExceeded, match="512"):
        race.tasks(runtime, prompts[1:], [480])


def test_the_margin_is_that_of_the_two_likeliest_tokens(runtime):
    import mlx.core as mx

    ids = runtime.encode("Hello")
    logits = sorted(runtime.target.model(mx.array([ids]))[0, -1].tolist())
    assert race.top_two_margin(runtime.target.model, ids) == pytest.approx(logits[-1] - logits[-2], abs=1e-4)


# ---------------------------------------------------------------- records and verdicts


def raced(stock, ours, seconds=(1.0, 0.5)):
    return Race(Task("p", "chat", [7, 7], 9), (timed(stock, seconds[0]),), (timed(ours, seconds[1]),))


def test_a_record_has_the_ratio_and_no_difference_for_equal_answers():
    record = figures.record(raced(range(9), range(9)), margin=lambda ids: 1 / 0)
    assert record["ratio"]["median"] == 2 and record["first_difference"] is None


@pytest.mark.parametrize(
    ("ours", "index", "token"), [([0, 1, 9, 3], 2, 9), ([0, 1], 2, None), ([5, 1, 2, 3], 0, 5)]
)
def test_a_difference_is_told_with_the_margin_of_the_text_before_it(ours, index, token):
    asked = []
    record = figures.record(raced([0, 1, 2, 3], ours), margin=lambda ids: asked.append(ids) or 0.25)
    found = record["first_difference"]
    assert (found["index"], found["baseline"], found["dflash"], found["margin"]) == (
        index,
        index,
        token,
        0.25,
    )
    assert asked == [[7, 7, *range(index)]]


@pytest.mark.parametrize(
    ("margins", "dtype", "verdict"),
    [
        ([None, None], "bfloat16", "equal"),
        ([None, 0.1], "bfloat16", "near_ties"),
        ([0.1, 3.0], "bfloat16", "differs"),
        ([None, 0.0], "float32", "differs"),
        ([0.01], "float16", "near_ties"),
        ([0.1], "float16", "differs"),
    ],
)
def test_rounding_excuses_near_ties_in_low_precision_only(margins, dtype, verdict):
    runs = [{"first_difference": margin if margin is None else {"margin": margin}} for margin in margins]
    found = figures.agreement(runs, dtype)
    assert found["verdict"] == verdict
    assert found["equal_runs"] + found["different_runs"] == len(margins)


def test_the_measured_error_of_a_target_excuses_too_but_not_in_fp32():
    runs = [{"first_difference": {"margin": 0.7}}]
    assert figures.agreement(runs, "bfloat16", tie_margin=0.8)["verdict"] == "near_ties"
    assert figures.agreement(runs, "float32", tie_margin=0.8)["verdict"] == "differs"


def test_a_summary_groups_by_kind_and_length():
    runs = []
    for kind, length, seconds in (("chat", 9, 0.5), ("chat", 20, 2.0), ("code", 9, 0.25)):
        one = raced(range(9), range(9), (1.0, seconds))
        runs.append(
            figures.record(Race(Task("p", kind, [7], length), one.baseline, one.dflash), lambda ids: 0.0)
        )
    found = figures.summary(runs, "float32")
    assert (
        found["ratio"] == {"mean": 2.1667, "median": 2.0, "min": 0.5, "count": 3} and found["below_one"] == 1
    )
    assert found["by_kind"]["chat"]["ratio"]["mean"] == 1.25
    assert found["by_length"]["9"]["ratio"]["mean"] == 3 and list(found["by_length"]) == ["9", "20"]
