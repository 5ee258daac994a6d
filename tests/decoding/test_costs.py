"""A cost curve: what is measured, what lies between, and how it is kept."""

import itertools

import mlx.core as mx
import pytest
import tiny

from dflash import curves
from dflash.decoding.costs import CostCurve, measure, tie_margin
from dflash.drafts.base import Proposal, as_scored

CURVE = CostCurve(((1, 1.0), (4, 1.6), (8, 2.0)), ((1, 0.2), (7, 0.8)), 0.25, "a with b")


def test_between_measured_widths_lie_straight_lines():
    assert CURVE.plain_s == 1.0
    assert CURVE.cycle_s(4) == pytest.approx(1.6 + 0.4)
    assert CURVE.cycle_s(6) == pytest.approx(1.8 + 0.6)
    assert CURVE.cycle_s(12) == pytest.approx(2.0 + 0.8), "nothing is known beyond the last width"


def test_measuring_times_every_pass_of_a_real_pair():
    """Ticks of the clock stand for seconds: each pass is timed by itself, the first of each is not counted."""
    ticks = itertools.count()
    _, adapter = tiny.target("qwen3")

    class Drafter(tiny.ScriptedDrafter):
        def propose(self, anchor, count, weigh=as_scored):
            return Proposal(mx.zeros((1, count), mx.int32))

    class Draft(tiny.ScriptedDraft):
        block_size = 8

        def start(self, tables):
            return Drafter([0] * 400, 0, iter(()))

    curve = measure(adapter, Draft([0], 0, iter(())), 8, clock=lambda: float(next(ticks) ** 2))
    assert [width for width, _ in curve.verify_s] == [1, 2, 3, 4, 6, 8]
    assert [count for count, _ in curve.draft_s] == [1, 3, 7]
    seconds = [s for _, s in (*curve.verify_s, *curve.draft_s)]
    assert seconds == sorted(seconds) and len(set(seconds)) == len(seconds)


def test_without_a_draft_only_the_target_is_measured():
    _, adapter = tiny.target("qwen3")
    curve = measure(adapter, None, 32)
    assert [width for width, _ in curve.verify_s][-1] == 32 and curve.draft_s == ()


def test_the_tie_margin_is_what_width_changes(monkeypatch):
    _, adapter = tiny.target("llama")
    assert tie_margin(adapter) < 1e-3, "fp32"
    logits = adapter.logits

    def rounded_by_width(hidden):
        return logits(hidden) + (0.25 if hidden.shape[1] > 1 else 0.0)

    monkeypatch.setattr(adapter, "logits", rounded_by_width)
    assert tie_margin(adapter) == pytest.approx(0.5, abs=1e-3)


def test_a_saved_curve_is_the_same_and_can_be_listed_and_cleared(tmp_path):
    file = curves.file_for(tmp_path, {"model": "a", "draft": "b"})
    assert CostCurve.load(file) is None
    CURVE.save(file)
    assert CostCurve.load(file) == CURVE
    assert list(curves.saved(tmp_path)) == [(file, CURVE)]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert curves.clear(tmp_path) == 1 and list(curves.saved(tmp_path)) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"verify_s": [], "draft_s": []}', '{"verify_s": [[1, 0]]}'])
def test_a_damaged_curve_is_measured_anew(tmp_path, text):
    file = tmp_path / "curve.json"
    file.write_text(text)
    assert CostCurve.load(file) is None


def test_another_pair_or_block_has_another_curve(tmp_path):
    names = [
        curves.file_for(tmp_path, {"model": model, "block_size": block})
        for model in ("a", "b")
        for block in (8, 16)
    ]
    assert len(set(names)) == 4
