"""`scripts/benchmark.py` as a user or an agent calls it, on a tiny pair."""

import json
import signal
import subprocess
import sys

import pair
import pytest
import script

import dflash.commands.benchmark  # noqa: F401  (publishes the schemas of its results)
from dflash.commands.benchmark import benchmark

BENCHMARK = str(script.ROOT / "scripts" / "benchmark.py")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Flags that name a tiny pair, a few prompts, and a cache of this module's own."""
    base = tmp_path_factory.mktemp("a bench with spaces")
    asked = ["Hello", {"prompt": "1+1?", "kind": "math", "id": "sum"}]
    (base / "mine.json").write_text(json.dumps(asked))
    flags = ["--model", pair.target(base / "target"), "--draft", pair.draft(base / "draft")]
    return [*flags, "--prompts", base / "mine.json", "--cache-dir", base / "cache"]


@pytest.fixture(scope="module")
def measured(here, tmp_path_factory):
    """One whole benchmark: (exit status, envelope, stderr, folder of its files)."""
    folder = tmp_path_factory.mktemp("measured")
    flags = ["--lengths", "24,12", "--repeats", 2, "--no-eos"]
    files = ["--report", folder / "report.html", "--output", folder / "a.json"]
    return *script.run("benchmark", *here, *flags, *files), folder


def test_every_prompt_runs_at_every_length_against_mlx_lm(measured):
    status, said, stderr, _ = measured
    result = said["result"]
    assert (status, said["schema"], result["baseline"]) == (0, "dflash.benchmark/1", "mlx_lm.stream_generate")
    assert [(run["id"], run["kind"], run["length"]) for run in result["runs"]] == [
        ("mine-1", "own", 12),
        ("mine-1", "own", 24),
        ("sum", "math", 12),
        ("sum", "math", 24),
    ]
    for run in result["runs"]:
        assert run["tokens"] == run["length"] and run["first_difference"] is None
        assert len(run["ratio"]["values"]) == 2
        assert run["dflash"]["peak_bytes"] > 0 < run["baseline"]["peak_bytes"]
        assert sum(run["speculation"]["width_histogram"].values()) == run["speculation"]["cycles"]
    assert (
        result["summary"]["tokens"]["verdict"] == "equal" and result["complete"] and result["replay"] is None
    )
    assert set(result["summary"]["by_kind"]) == {"own", "math"}
    assert set(result["summary"]["by_length"]) == {"12", "24"}
    assert "4/4 sum 24 tokens" in stderr


def test_the_environment_is_recorded(measured):
    where = measured[1]["result"]["environment"]
    assert where["dtype"] == "float32" and where["versions"]["mlx"] and where["cores"] >= 1
    assert where["weight_bytes"] > 0 and where["memory_bytes"] > 0


def test_the_report_and_the_result_are_written(measured):
    _, said, _, folder = measured
    assert said["result"]["report"] == str(folder / "report.html")
    assert "DFlash against mlx_lm.stream_generate" in (folder / "report.html").read_text()
    assert json.loads((folder / "a.json").read_text())["result"]["runs"] == said["result"]["runs"]


def test_two_results_are_compared(measured):
    file = measured[3] / "a.json"
    status, said, _ = script.run("benchmark", "--compare", file, file)
    assert (status, said["schema"]) == (0, "dflash.benchmark-comparison/1")
    assert said["result"]["ratio"]["ratio_of_ratios"] == 1 and said["result"]["differences"] == []
    assert set(said["result"]["by_kind"]) == {"own", "math"}


def test_the_costs_that_the_width_followed_are_shown_and_cleared(measured, here):
    where = here[-2:]
    _, shown, _ = script.run("benchmark", "--curve", *where)
    (curve,) = shown["result"]["curves"]
    assert curve["pair"] == f"{here[1]} with {here[3]}" and curve["tie_margin"] < 0.01
    assert curve["verify_ms"] == measured[1]["result"]["curve"]["verify_ms"] and "8" in curve["verify_ms"]
    _, cleared, _ = script.run("benchmark", "--clear-curves", *where)
    assert cleared["result"]["removed"] == 1
    _, shown, _ = script.run("benchmark", "--curve", *where)
    assert shown["result"]["curves"] == []


def test_a_replay_is_labelled_wherever_it_is_told(here, tmp_path):
    flags = [
        "--lengths",
        25,
        "--repeats",
        1,
        "--replay",
        "6,2",
        "--kinds",
        "math",
        "--report",
        tmp_path / "r.html",
    ]
    _, said, stderr = script.run("benchmark", *here, *flags)
    result = said["result"]
    assert result["replay"]["accepted_lengths"] == [6, 2] and result["replay"]["agreement"] == 1
    assert (
        "pass of" in result["replay"]["draft_cost"] and "not the speed of answers" in result["replay"]["note"]
    )
    assert [warning["code"] for warning in said["warnings"]] == ["replay"] and "not the speed" in stderr
    assert result["runs"][0]["speculation"]["accepted_length"] == 4  # 24 tokens after the first, in 6 cycles
    assert result["cycle_efficiency"]["width"] == 8 and result["cycle_efficiency"]["draft_s"] > 0
    assert "A replay, not a measurement of answers" in (tmp_path / "r.html").read_text()


def test_a_replay_runs_on_a_shape_with_random_weights():
    flags = ["--replay", 6, "--lengths", 12, "--contexts", "8,40", "--repeats", 1, "--replay-draft-ms", 1]
    _, said, _ = script.run("benchmark", "--shape", "qwen3.5-tiny", *flags)
    result = said["result"]
    assert result["model"] == "qwen3.5-tiny (random weights)" and result["draft"] is None
    assert [run["prompt_tokens"] for run in result["runs"]] == [8, 40]
    assert result["replay"]["draft_cost"].endswith("waits 1 ms per proposal")
    assert result["replay"]["ratio_to_plain"]["count"] == 2


def test_copies_alone_need_no_draft(here):
    flags = [*here[:2], *here[4:], "--mode", "lookup", "--lengths", 12, "--repeats", 1, "--no-eos"]
    status, said, _ = script.run("benchmark", *flags)
    assert (status, said["result"]["draft"], said["result"]["curve"]["draft_ms"]) == (0, None, {})


def test_prompts_that_do_not_fit_are_left_out_with_a_warning(here):
    _, said, _ = script.run("benchmark", *here, "--lengths", "8,500", "--repeats", 1, "--no-eos")
    assert {left["length"] for left in said["result"]["left_out"]} == {500}
    assert {warning["code"] for warning in said["warnings"]} == {"left_out"}


def test_text_for_people_has_the_ratios_and_a_last_line(here):
    call = [sys.executable, BENCHMARK, *map(str, here), "--lengths", "12", "--repeats", "1", "--no-eos"]
    done = subprocess.run([*call, "--format", "text"], capture_output=True, text=True)
    assert "12 tokens" in done.stdout and "per cycle" in done.stdout
    assert "times mlx_lm.stream_generate on average" in done.stderr.splitlines()[-1]


def test_an_interruption_keeps_the_runs_that_were_over(here):
    call = [sys.executable, BENCHMARK, *map(str, here), "--lengths", "12,400", "--repeats", "40", "--no-eos"]
    lines = []
    with subprocess.Popen([*call, "--format", "ndjson"], stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout:
            lines.append(json.loads(line))
            if len(lines) == 1:
                running.send_signal(signal.SIGINT)
    result = lines[-1]["result"]
    assert running.returncode == 130 and not result["complete"] and len(result["runs"]) == 1
    assert lines[0]["event"] == "run" and lines[0]["id"] == "mine-1"
    assert "incomplete" in {warning["code"] for warning in lines[-1]["warnings"]}


BAD_CALLS = [
    (["--lengths", "abc"], 2, "bad_value", "--lengths"),
    (["--lengths", "1"], 2, "bad_value", "decode speed"),
    (["--lengths", "0"], 2, "bad_value", "--lengths"),
    (["--repeats", "0"], 2, "bad_value", "repeats"),
    (["--per-kind", "0"], 2, "bad_value", "per_kind"),
    (["--cooldown-s", "-1"], 2, "bad_value", "cooldown_s"),
    (["--kinds", "poetry"], 2, "bad_value", "poetry"),
    (["--mode", "lookup", "--draft", "x"], 2, "bad_usage", "--draft"),
    (["--shape", "qwen3-8b"], 2, "bad_usage", "--replay"),
    (["--replay", "6", "--shape", "qwen9"], 2, "bad_value", "qwen3-8b"),
    (["--replay-draft-ms", "3"], 2, "bad_usage", "--replay"),
    (["--replay", "6", "--mode", "lookup"], 2, "bad_usage", "--replay"),
    (["--replay", "6", "--shape", "qwen3-8b", "--kinds", "chat"], 2, "bad_usage", "--kinds"),
    (["--replay", "6", "--exact"], 2, "bad_usage", "--exact"),
    (["--compare", "a.json"], 2, "bad_usage", "two files"),
    (["--compare", "a.json", "--curve"], 2, "bad_usage", "exclude"),
    (["--compare", "/no/a.json", "/no/b.json"], 3, "file_not_found", "/no/a.json"),
    (["--prompts", "/no/such.json"], 3, "file_not_found", "/no/such.json"),
    (["--report", "/no/such/folder/r.html"], 2, "bad_value", "/no/such/folder"),
    (["--model", "/no/such/folder"], 3, "model_not_found", "/no/such/folder"),
]


@pytest.mark.parametrize(("arguments", "status", "code", "said"), BAD_CALLS, ids=lambda v: str(v)[:50])
def test_a_bad_call_gets_its_code_and_says_why(arguments, status, code, said, capfd):
    from dflash.cli import run

    got = run(benchmark, arguments, positional="compare", prog="benchmark.py")
    shown = capfd.readouterr()
    error = script.envelope(shown.out, shown.err)["error"]
    assert (got, error["code"]) == (status, code), error
    assert said in error["message"] + error["hint"]
    assert "Traceback" not in shown.err


def test_the_shapes_on_offer_are_those_that_can_be_built():
    from dflash.bench import settings, shapes, verify_cost

    assert set(settings.SHAPES) == set(verify_cost.SHAPES) == set(shapes._DRAFTS)
