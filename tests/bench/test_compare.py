"""Two results side by side."""

import json

import pytest
from bench import results

from dflash.bench.compare import compare
from dflash.errors import BadValue, NotFound, UsageError


def saved(folder, name, result):
    file = folder / name
    file.write_text(
        json.dumps({"ok": True, "schema": "dflash.benchmark/1", "result": result, "warnings": []})
    )
    return file


def test_equal_results_have_changed_nothing(tmp_path):
    a, b = saved(tmp_path, "a", results.result()), saved(tmp_path, "b", results.result())
    found = compare(a, b)
    assert found["ratio"] == {"ratio_of_ratios": 1.0, "a": 2.0, "b": 2.0}
    assert found["differences"] == found["only_in_a"] == found["only_in_b"] == []


def test_a_faster_engine_is_told_by_kind_length_and_run(tmp_path):
    slow, fast = results.result(seconds=0.5), results.result(seconds=0.5)
    for run in fast["runs"]:
        if run["kind"] == "code":
            run["ratio"]["median"] = 3.0
    found = compare(saved(tmp_path, "a", slow), saved(tmp_path, "b", fast))
    assert (
        found["by_kind"]["chat"]["ratio_of_ratios"] == 1
        and found["by_kind"]["code"]["ratio_of_ratios"] == 1.5
    )
    assert found["by_length"]["16"]["ratio_of_ratios"] == pytest.approx(1.5**0.5, abs=1e-4)
    assert [(one["id"], one["ratio_of_ratios"]) for one in found["by_run"] if one["length"] == 64] == [
        ("chat-1", 1.0),
        ("code-1", 1.5),
    ]


def test_runs_of_one_side_only_are_named_and_not_compared(tmp_path):
    a = saved(tmp_path, "a", results.result(lengths=(16, 64)))
    b = saved(tmp_path, "b", results.result(lengths=(16, 32), seconds=0.25))
    found = compare(a, b)
    assert found["ratio"] == {"ratio_of_ratios": 2.0, "a": 2.0, "b": 4.0}
    assert found["only_in_a"] == ["chat-1 at 64 tokens", "code-1 at 64 tokens"]
    assert found["only_in_b"] == ["chat-1 at 32 tokens", "code-1 at 32 tokens"]
    assert {"what": "settings.lengths", "a": [16, 64], "b": [16, 32]} in found["differences"]


def test_what_differs_in_the_environment_is_told_and_the_time_is_not(tmp_path):
    there = results.ENVIRONMENT | {
        "cores": 8,
        "time_utc": "later",
        "versions": {"mlx": "0.33.0"},
        "load_average": 6.5,
    }
    found = compare(
        saved(tmp_path, "a", results.result()),
        saved(tmp_path, "b", results.result(environment=there, draft=None)),
    )
    told = {one["what"]: (one["a"], one["b"]) for one in found["differences"]}
    assert told["draft"] == ("draft", None) and told["environment.cores"] == (2, 8)
    assert told["environment.versions.mlx"] == ("0.32.4", "0.33.0")
    assert told["environment.load_average"] == (0.1, 6.5)  # the other machine was busy
    assert "environment.time_utc" not in told


def test_results_without_a_run_in_common_are_refused(tmp_path):
    a = saved(tmp_path, "a", results.result(lengths=(16,)))
    with pytest.raises(UsageError, match="in common"):
        compare(a, saved(tmp_path, "b", results.result(lengths=(32,))))


def test_a_file_that_is_no_result_is_refused(tmp_path):
    good = saved(tmp_path, "a", results.result())
    with pytest.raises(NotFound):
        compare(good, tmp_path / "none")
    for text in ("{", "[]", '{"ok": true, "schema": "dflash.generate/1"}', "\xff"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(BadValue, match="bad"):
            compare(tmp_path / "bad", good)
