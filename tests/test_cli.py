"""The wrapper: what a call may say, what comes back, and that nothing runs unless all of it is right.

Calls are made in this process where only words matter, in a real one where pipes, terminals or signals do.
"""

import errno
import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from dflash import contract
from dflash.cli import COMMANDS, Console, Interrupted, Outcome, main, run
from dflash.cli.flags import flags_of, read
from dflash.cli.report import as_error
from dflash.cli.signals import Signals
from dflash.commands.benchmark import benchmark
from dflash.commands.generate import generate
from dflash.commands.resolve_draft import resolve_draft
from dflash.errors import Cancelled, ContextExceeded, DraftNotFound, UsageError
from dflash.version import __version__

ROOT = Path(__file__).parent.parent
SCHEMA = "test.sample/1"
ran = []


def sample(
    console: Console,
    *,
    prompt: str | None = None,
    model: str = "m",
    max_tokens: int = 512,
    ratio: float = 0.5,
    eos: bool = True,
    tokens: bool = False,
    no_stream: bool = False,
    stop: list[str] = (),
    mode: Literal["dflash", "baseline"] = "dflash",
    folder: Path | None = None,
    seed: int | None = None,
) -> Outcome:
    """Note what it was called with.

    Examples:
      sample.py "hello"

    Args:
      prompt: the words
      max_tokens: most tokens
      eos: stop at the end
      stop: ends the text
    """
    given = {name: value for name, value in locals().items() if name != "console"}
    ran.append(given)
    return Outcome(SCHEMA, {})


DEFAULTS = {
    "prompt": None,
    "model": "m",
    "max_tokens": 512,
    "ratio": 0.5,
    "eos": True,
    "tokens": False,
    "no_stream": False,
    "stop": (),
    "mode": "dflash",
    "folder": None,
    "seed": None,
}


@pytest.fixture
def call(capfd):
    """Run a command with these words in this process: (exit status, stdout, stderr). `ran` starts empty."""

    def made(*words, command=sample, positional="prompt"):
        status = run(command, list(words), positional=positional, prog="sample.py")
        return status, *capfd.readouterr()

    ran.clear()
    return made


def the_failure(stdout):
    """The one failure envelope that stdout consists of, validated."""
    value = json.loads(stdout)
    assert stdout == contract.to_line(value) + "\n"
    Draft202012Validator(contract.schema("dflash.error/1")).validate(value)
    return value["error"]


# ---------------------------------------------------------------- words to values

LITERALS = [
    "[1,2]",
    '{"a":1}',
    "{a: b}",
    "a,b",
    "(x)",
    "{'a','b'}",
    "1e5",
    "1e999",
    "0x1F",
    "1_000",
    "9",
    "-5",
    "5j",
    "...",
    "None",
    "True",
    'b"x"',
    '"quoted"',
    "'a' 'b'",
    "Hello # comment",
    "- list",
    "-",
    "",
    " spaces ",
    "a\nb",
    "漢字 🙂",
    "hi there",
]


@pytest.mark.parametrize("text", LITERALS)
def test_text_stays_text_whatever_it_looks_like(call, text):
    for words in (["--prompt", text], [f"--prompt={text}"], [text], ["--", text], ["--model", text]):
        status, stdout, stderr = call(*words)
        assert (status, stderr) == (0, "")
        assert json.loads(stdout)["ok"]
        name = "model" if words[0] == "--model" else "prompt"
        assert ran.pop() == DEFAULTS | {name: text}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("", {}),
        ("--prompt=--help", {"prompt": "--help"}),
        ("--prompt=-h", {"prompt": "-h"}),
        ("--prompt -m", {"prompt": "-m"}),
        ("--prompt=a=b", {"prompt": "a=b"}),
        ("--prompt=", {"prompt": ""}),
        ("-- --interactive", {"prompt": "--interactive"}),
        ("-- --completion", {"prompt": "--completion"}),
        ("-- --trace", {"prompt": "--trace"}),
        ("-- --help", {"prompt": "--help"}),
        ("-- -m", {"prompt": "-m"}),
        ("--seed 3 --", {"seed": 3}),
        ("--max-tokens 9", {"max_tokens": 9}),
        ("--max_tokens 9", {"max_tokens": 9}),
        ("--max-tokens=-5", {"max_tokens": -5}),
        ("--max-tokens -5", {"max_tokens": -5}),
        ("--seed +7", {"seed": 7}),
        ("--ratio 2", {"ratio": 2.0}),
        ("--ratio -1e-3", {"ratio": -0.001}),
        ("--ratio .5", {"ratio": 0.5}),
        ("--eos hi", {"eos": True, "prompt": "hi"}),
        ("--no-eos hi", {"eos": False, "prompt": "hi"}),
        ("--no_eos", {"eos": False}),
        ("--noeos", {"eos": False}),
        ("--no-eos false", {"eos": False, "prompt": "false"}),
        ("--eos False", {"eos": False}),
        ("--eos true", {"eos": True}),
        ("--eos no", {"eos": True, "prompt": "no"}),
        ("--eos=false", {"eos": False}),
        ("--eos=FALSE", {"eos": False}),
        ("--eos=no", {"eos": False}),
        ("--eos=0", {"eos": False}),
        ("--eos=off", {"eos": False}),
        ("--tokens", {"tokens": True}),
        ("--tokens=Yes", {"tokens": True}),
        ("--tokens=1", {"tokens": True}),
        ("--tokens=on", {"tokens": True}),
        ("--no-stream", {"no_stream": True}),
        ("--no-no-stream", {"no_stream": False}),
        ("--stop a", {"stop": ["a"]}),
        ("--stop a --stop b --stop a", {"stop": ["a", "b", "a"]}),
        ("--stop a,b", {"stop": ["a,b"]}),
        ("--mode baseline", {"mode": "baseline"}),
        ("--folder a/b", {"folder": Path("a/b")}),
        ("--folder ~/b", {"folder": Path.home() / "b"}),
        ("--format json --quiet hi", {"prompt": "hi"}),
    ],
)
def test_words_become_values_by_annotation(call, words, values):
    status, stdout, _ = call(*words.split())
    assert status == 0, stdout
    assert ran == [DEFAULTS | values]


REFUSED = [
    # words, code, what the message says, what the hint says
    (["--promt", "x"], "bad_usage", "unknown flag --promt", "--prompt?"),
    (["--max", "3"], "bad_usage", "unknown flag --max", "--max-tokens?"),
    (["--no-eso"], "bad_usage", "unknown flag --no-eso", "--no-eos?"),
    (["--Prompt", "x"], "bad_usage", "unknown flag --Prompt", "--prompt?"),
    (["--zzz"], "bad_usage", "unknown flag --zzz", "--help"),
    (["--interactive"], "bad_usage", "unknown flag", "--help"),
    (["--completion"], "bad_usage", "unknown flag", "--help"),
    (["--trace"], "bad_usage", "unknown flag", "--help"),
    (["--verbose"], "bad_usage", "unknown flag", "--help"),
    (["--separator", "x"], "bad_usage", "unknown flag", "--help"),
    (["--noprompt"], "bad_usage", "unknown flag --noprompt", "--prompt?"),
    (["--no-prompt"], "bad_usage", "unknown flag --no-prompt", "--prompt?"),
    (["--console", "x"], "bad_usage", "unknown flag --console", ""),
    (["-m", "5"], "bad_usage", "unknown flag -m", "spelled out"),
    (["-p", "hi"], "bad_usage", "unknown flag -p", "-- -p"),
    (["-mfoo"], "bad_usage", "unknown flag -mfoo", "spelled out"),
    (["hi", "there"], "bad_usage", "'there'", "quote"),
    (["hi", "-", "upper"], "bad_usage", "'upper'", "quote"),
    (["hi", "-"], "bad_usage", "'-'", "quote"),
    (["hi", "keys"], "bad_usage", "'keys'", "quote"),
    (["hi", "model"], "bad_usage", "'model'", "quote"),
    (["hi", "ok"], "bad_usage", "'ok'", "quote"),
    (["hi", "result", "text"], "bad_usage", "'text'", "quote"),
    (["hi", "--", "--interactive"], "bad_usage", "'--interactive'", "quote"),
    (["hi", "--prompt", "ho"], "bad_usage", "--prompt is given twice", "once"),
    (["--prompt"], "bad_usage", "--prompt needs a value", "--prompt TEXT"),
    (["--max-tokens"], "bad_usage", "--max-tokens needs a value", "--max-tokens N"),
    (["--mode"], "bad_usage", "--mode needs a value", "dflash|baseline"),
    (["--prompt", "--model", "x"], "bad_usage", "--prompt needs a value", "--prompt=--model"),
    (["--prompt", "--help me"], "bad_usage", "--prompt needs a value", "--prompt='--help me'"),
    (["--prompt", "--", "x"], "bad_usage", "--prompt needs a value", ""),
    (["--model", "a", "--model", "b"], "bad_usage", "--model is given twice", ""),
    (["--eos", "--no-eos"], "bad_usage", "--eos is given twice", ""),
    (["--no-eos=true"], "bad_usage", "--no-eos takes no value", ""),
    (["--max-tokens", "abc"], "bad_value", "a whole number, not 'abc'", ""),
    (["--max-tokens", "5.5"], "bad_value", "a whole number, not '5.5'", ""),
    (["--max-tokens", "1e5"], "bad_value", "not '1e5'", ""),
    (["--max-tokens", "0x1F"], "bad_value", "not '0x1F'", ""),
    (["--max-tokens", "1_000"], "bad_value", "not '1_000'", ""),
    (["--max-tokens", " 9"], "bad_value", "not ' 9'", ""),
    (["--max-tokens", "９"], "bad_value", "not '９'", ""),
    (["--max-tokens", "None"], "bad_value", "not 'None'", ""),
    (["--max-tokens", "9" * 5000], "bad_value", "a whole number", ""),
    (["--max-tokens="], "bad_value", "not ''", ""),
    (["--ratio", "nan"], "bad_value", "a finite number, not 'nan'", ""),
    (["--ratio", "inf"], "bad_value", "a finite number, not 'inf'", ""),
    (["--ratio", "1e999"], "bad_value", "a finite number, not '1e999'", ""),
    (["--ratio", "1_0"], "bad_value", "not '1_0'", ""),
    (["--eos=maybe"], "bad_value", "true or false, not 'maybe'", ""),
    (["--tokens=2"], "bad_value", "true or false, not '2'", ""),
    (["--mode", "x"], "bad_value", "--mode is one of dflash, baseline, not 'x'", ""),
    (["--folder="], "bad_value", "a path, not ''", ""),
    (["--format", "yaml"], "bad_value", "--format is one of json, text, ndjson, not 'yaml'", ""),
    (["--format", "json", "--format", "json"], "bad_usage", "--format is given twice", ""),
    (["--max-tokens", "5", "hi", "--max-tokens=x"], "bad_usage", "given twice", ""),
]


@pytest.mark.parametrize(("words", "code", "message", "hint"), REFUSED, ids=lambda part: str(part)[:40])
def test_a_wrong_call_is_refused_before_anything_runs(call, words, code, message, hint):
    status, stdout, stderr = call(*words)
    error = the_failure(stdout)
    assert (status, stderr, ran) == (2, "", [])
    assert error["code"] == code
    assert message in error["message"]
    assert hint in error["hint"]


def test_a_word_too_many_is_refused_where_no_word_is_expected(call):
    status, stdout, _ = call("hi", positional=None)
    assert (status, ran) == (2, [])
    assert "'hi'" in the_failure(stdout)["message"]


def test_a_parameter_without_default_is_required(call):
    def needy(console: Console, *, model: str) -> Outcome:
        raise AssertionError("must not run")

    status, stdout, _ = call(command=needy)
    error = the_failure(stdout)
    assert (status, error["message"], error["hint"]) == (2, "--model is required", "add --model TEXT")


def unannotated(console, *, prompt=None): ...
def swallowing(console, **kwargs: str): ...
def of_two_minds(console, *, prompt: int | str = 1): ...
def taking_ours(console, *, format: str = "x"): ...


@pytest.mark.parametrize("command", [unannotated, swallowing, of_two_minds, taking_ours])
def test_a_signature_that_cannot_be_checked_is_a_fault_of_ours_and_never_called(call, command):
    status, stdout, stderr = call(command=command)
    assert (status, the_failure(stdout)["code"]) == (1, "internal_error")
    assert "TypeError" in stderr


def test_values_that_annotations_can_name_are_converted(call):
    def typed(console: Console, *, size: Literal[1, 2] = 1, ids: list[int] = (), rate: float | None = None):
        ran.append((size, ids, rate))
        return Outcome(SCHEMA, {})

    assert call("--size", "2", "--ids", "3", "--ids=4", "--rate", "1", command=typed)[0] == 0
    assert ran == [(2, [3, 4], 1.0)]


@given(st.text())
def test_any_text_given_to_a_flag_arrives_as_it_is(text):
    flags = flags_of(sample)
    assert read([f"--prompt={text}"], flags).values(flags, "prompt") == {"prompt": text}
    assert read(["--", text], flags).values(flags, "prompt") == {"prompt": text}


WORDS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["--", "-", "--prompt", "--eos", "--no-eos", "--max-tokens=3", "--stop", "-x"]),
)


@given(st.lists(WORDS, max_size=6))
def test_any_words_are_either_understood_or_refused(words):
    flags = flags_of(sample)
    try:
        values = read(words, flags).values(flags, "prompt")
    except UsageError as error:
        assert error.message
        assert error.hint
    else:
        assert values.keys() <= flags.keys()


# ---------------------------------------------------------------- help


@pytest.mark.parametrize(
    "words", [["--help"], ["-h"], ["hi", "--help"], ["--prompt", "--help"], ["--promt", "-h", "x"]]
)
def test_help_is_answered_wherever_it_stands_and_nothing_runs(call, words):
    status, stdout, stderr = call(*words)
    assert (status, stderr, ran) == (0, "", [])
    assert stdout.startswith("Note what it was called with.\n")


def test_help_shows_every_flag_with_type_choices_and_default(call):
    _, text, _ = call("--help")
    rows = [line.split() for line in text.splitlines() if line.startswith("  -")]
    assert ["--prompt", "TEXT", "the", "words"] in rows
    assert ["--max-tokens", "N", "most", "tokens", "(default", "512)"] in rows
    assert ["--ratio", "NUMBER", "(default", "0.5)"] in rows
    assert ["--[no-]eos", "stop", "at", "the", "end", "(default", "on)"] in rows
    assert ["--tokens"] in rows
    assert ["--stop", "TEXT", "ends", "the", "text", "(repeatable)"] in rows
    assert ["--mode", "dflash|baseline", "(default", "dflash)"] in rows
    assert ["--folder", "PATH"] in rows
    assert 'sample.py "hello"' in text
    assert "Usage: sample.py [PROMPT]" in text
    assert "Exit status" in text
    assert "Args:" not in text
    for flag in flags_of(sample).values():
        assert flag.spelling[2:] in text


def test_version_is_plain_text(call):
    assert call("--version") == (0, f"dflash {__version__}\n", "")


@pytest.mark.parametrize("command", [benchmark, generate, resolve_draft])
def test_every_flag_of_a_real_command_is_described(command):
    assert [flag.name for flag in flags_of(command).values() if not flag.help] == []


@pytest.fixture
def without_heavy_modules(tmp_path):
    """An environment in which importing MLX, its companions or Fire fails."""
    for name in ("mlx", "mlx_lm", "transformers", "fire"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "__init__.py").write_text(f"raise ImportError('{name} was imported')")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "broken"), str(ROOT)])}


def dflash_command(*words, **options):
    code = "import sys; from dflash.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        **{"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 120} | options,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_real_command_is_short_and_needs_no_mlx(name, without_heavy_modules):
    done = dflash_command(name, "--help", env=without_heavy_modules)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) < 55
    assert max(map(len, done.stdout.splitlines())) <= 110


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_call_of_a_real_command_needs_no_mlx(name, without_heavy_modules):
    done = dflash_command(name, "--promt", "x", env=without_heavy_modules)
    assert done.returncode == 2
    assert the_failure(done.stdout)["code"] == "bad_usage"


# ---------------------------------------------------------------- the dflash command


def test_main_lists_its_commands(capfd):
    assert main(["--help"]) == 0
    text = capfd.readouterr().out
    assert all(f"dflash {name}" in text for name in COMMANDS)


def test_main_tells_its_version(capfd):
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"dflash {__version__}\n"


@pytest.mark.parametrize("spelling", ["resolve-draft", "resolve_draft"])
def test_main_takes_both_spellings_of_a_command(capfd, spelling):
    assert main([spelling, "--help"]) == 0
    assert "Usage: dflash resolve-draft [MODEL]" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ([], "no command", "generate, benchmark, resolve-draft"),
        (["genrate", "hi"], "'genrate'", "generate?"),
        (["xyz"], "'xyz'", "dflash --help"),
        (["--format", "json"], "'--format'", "dflash --help"),
    ],
)
def test_main_refuses_what_is_no_command(capfd, words, message, hint):
    assert main(words) == 2
    error = the_failure(capfd.readouterr().out)
    assert message in error["message"]
    assert hint in error["hint"]


# ---------------------------------------------------------------- outcomes and errors


def returning(result=None, **fields):
    def command(console: Console) -> Outcome:
        return Outcome(SCHEMA, result if result is not None else {}, **fields)

    return command


def raising(error):
    def command(console: Console) -> Outcome:
        raise error

    return command


@pytest.mark.parametrize(
    "result",
    [{}, {"a": 1, "b": "x"}, {"list": [1, 2], "pair": (1, 2)}, {"keys": "x", "text": "漢\u2028"}],
    ids=str,
)
def test_a_result_is_printed_as_one_envelope_whatever_its_shape(call, result):
    status, stdout, stderr = call(command=returning(result))
    assert (status, stderr) == (0, "")
    assert stdout.splitlines() == [stdout.rstrip("\n")]
    envelope = json.loads(stdout)
    assert envelope["result"] == json.loads(json.dumps(result))
    assert envelope.keys() == {"ok", "schema", "result", "warnings", "meta"}
    assert (envelope["ok"], envelope["schema"], envelope["warnings"]) == (True, SCHEMA, [])


def test_a_cancelled_outcome_keeps_its_exit_status(call):
    status, stdout, _ = call(command=returning({"text": "so far"}, exit_status=143))
    assert status == 143
    assert json.loads(stdout)["result"] == {"text": "so far"}


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (DraftNotFound("none", model="x/y"), "draft_not_found", 3),
        (ContextExceeded("too long"), "context_exceeded", 5),
        (Interrupted(signal.SIGTERM), "cancelled", 143),
        (KeyboardInterrupt(), "cancelled", 130),
        (MemoryError(), "does_not_fit", 5),
        (RuntimeError("[malloc] Unable to allocate 99 bytes."), "does_not_fit", 5),
        (RuntimeError("[metal::malloc] Attempting to allocate 99 bytes"), "does_not_fit", 5),
        (RuntimeError("Command buffer execution failed: Insufficient Memory"), "does_not_fit", 5),
        (RuntimeError("cudaMallocAsync failed: out of memory"), "does_not_fit", 5),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "disk_full", 5),
    ],
    ids=repr,
)
def test_what_is_foreseen_has_its_code_and_no_traceback(call, error, code, status):
    got, stdout, stderr = call(command=raising(error))
    assert (got, the_failure(stdout)["code"], stderr) == (status, code, "")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("surprise"),
        RuntimeError("surprise"),
        PermissionError(errno.EACCES, "surprise"),
        SystemExit("surprise"),
        GeneratorExit("surprise"),
    ],
    ids=repr,
)
def test_what_nobody_foresaw_has_an_envelope_and_a_traceback(call, error):
    status, stdout, stderr = call(command=raising(error))
    failure = the_failure(stdout)
    assert (status, failure["code"]) == (1, "internal_error")
    assert type(error).__name__ in failure["message"]
    assert "surprise" in failure["message"]
    assert "Traceback" in stderr
    assert "raise error" in stderr


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}], ids=str)
def test_a_result_that_is_not_json_is_a_fault_of_ours(call, value):
    status, stdout, stderr = call(command=returning({"speed": value}))
    assert (status, the_failure(stdout)["code"]) == (1, "internal_error")
    assert "Traceback" in stderr


def test_a_command_that_returns_nothing_is_a_fault_of_ours(call):
    status, stdout, _ = call(command=lambda console: None)
    assert (status, the_failure(stdout)["code"]) == (1, "internal_error")


def test_details_that_are_not_json_do_not_cost_the_error(call):
    status, stdout, _ = call(command=raising(DraftNotFound("none", rate=float("nan"))))
    error = the_failure(stdout)
    assert (status, error["code"], error["details"]) == (3, "draft_not_found", {})


def test_an_error_of_ours_is_passed_on_as_it_is():
    error = DraftNotFound("none")
    assert as_error(error) is error


# ---------------------------------------------------------------- formats


def chatty(console: Console, *, fail: bool = False, name: str = "x") -> Outcome:
    """Talk in every way there is."""
    console.note("loading")
    console.warn("slow", "this is slow")
    console.event("cycle", name=name, width=4)
    console.piece("two\nlines ")
    console.piece("")
    console.piece("é")
    if fail:
        raise DraftNotFound("no draft", "pass --draft")
    return Outcome(SCHEMA, {"text": "é"}, summary="1 token")


def test_json_is_one_line_and_warnings_are_in_it(call):
    status, stdout, stderr = call("--format", "json", command=chatty)
    envelope = json.loads(stdout)
    assert (status, stdout.count("\n")) == (0, 1)
    assert envelope["warnings"] == [{"code": "slow", "message": "this is slow"}]
    assert stderr == "loading\nwarning: this is slow\n"


def test_json_is_the_default_when_stdout_is_not_a_terminal(call):
    assert json.loads(call(command=chatty)[1])["ok"]


def test_text_streams_ends_its_line_and_puts_the_summary_on_stderr(call):
    status, stdout, stderr = call("--format", "text", command=chatty)
    assert (status, stdout) == (0, "two\nlines é\n")
    assert stderr == "loading\nwarning: this is slow\n1 token\n"


@pytest.mark.parametrize("text", ["a table", "a table\n"])
def test_text_of_a_command_that_does_not_stream_is_printed_at_the_end(call, text):
    assert call("--format=text", command=returning(text=text))[:2] == (0, "a table\n")


def test_text_without_any_text_prints_nothing(call):
    assert call("--format=text", command=returning()) == (0, "", "")


def test_a_failure_as_text_is_two_lines_on_stderr_and_nothing_on_stdout(call):
    command = raising(DraftNotFound("none", "pass --draft x"))
    assert call("--format", "text", command=command) == (3, "", "error: none\nhint: pass --draft x\n")


def test_a_failure_after_streamed_text_ends_its_line(call):
    status, stdout, stderr = call("--format", "text", "--fail", "--quiet", command=chatty)
    assert (status, stdout, stderr) == (3, "two\nlines é\n", "error: no draft\nhint: pass --draft\n")


def test_every_ndjson_line_but_the_last_is_an_event(call):
    status, stdout, _ = call("--format", "ndjson", command=chatty)
    event, envelope = map(json.loads, stdout.splitlines())
    assert status == 0
    assert event == {"event": "cycle", "name": "x", "width": 4}
    assert envelope["ok"]
    assert "event" not in envelope


def test_a_failure_as_ndjson_is_the_last_line(call):
    status, stdout, _ = call("--format", "ndjson", "--fail", command=chatty)
    *_, last = stdout.splitlines(keepends=True)
    assert (status, the_failure(last)["code"]) == (3, "draft_not_found")


def test_quiet_silences_stderr_and_keeps_the_warnings(call):
    for format in ("json", "text"):
        status, _, stderr = call("--quiet", "--format", format, command=chatty)
        assert (status, stderr) == (0, "")
    assert json.loads(call("--quiet", command=chatty)[1])["warnings"]


@pytest.mark.parametrize(
    ("words", "stdout_is"),
    [
        (["--bogus", "--format", "text"], "empty"),
        (["--format=text", "--format=text"], "failure"),
        (["--format", "ndjson", "a", "b"], "failure"),
        (["--prompt", "--format", "text"], "empty"),
        (["--bogus", "--", "--format", "text"], "failure"),
    ],
)
def test_a_refusal_has_the_format_that_was_asked_for(call, words, stdout_is):
    status, stdout, stderr = call(*words)
    assert status == 2
    if stdout_is == "empty":
        assert stdout == ""
        assert stderr.startswith("error: ")
    else:
        the_failure(stdout)
        assert stderr == ""


# ---------------------------------------------------------------- --output


def test_output_holds_the_line_that_stdout_has(call, tmp_path):
    file = tmp_path / "a b.json"
    file.write_text("old")
    status, stdout, _ = call("--output", str(file), command=returning({"text": "漢"}))
    assert status == 0
    assert file.read_text(encoding="utf-8") == stdout
    assert [file] == list(tmp_path.iterdir())


def test_output_holds_the_envelope_in_the_text_format_too(call, tmp_path):
    file = tmp_path / "out.json"
    assert call("--output", str(file), "--format=text", command=returning(text="hi"))[1] == "hi\n"
    assert json.loads(file.read_text())["ok"]


def test_output_holds_failures(call, tmp_path):
    file = tmp_path / "out.json"
    status, stdout, _ = call(f"--output={file}", command=raising(DraftNotFound("none")))
    assert (status, file.read_text()) == (3, stdout)


def test_output_means_the_folder_of_the_call_wherever_the_command_goes(call, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def wandering(console: Console) -> Outcome:
        os.chdir(tmp_path)
        return Outcome(SCHEMA, {})

    assert call("--output", "out.json", command=wandering)[0] == 0
    assert (tmp_path / "here" / "out.json").exists()


def test_output_follows_a_link_and_leaves_it_in_place(call, tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")
    assert call("--output", str(link), command=returning())[0] == 0
    assert link.is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["ok"]


@pytest.mark.parametrize("where", ["missing/out.json", ".", "file/out.json", "pipe", "n" * 300])
def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(call, tmp_path, where):
    (tmp_path / "file").write_text("not a folder")
    os.mkfifo(tmp_path / "pipe")  # stands for devices too: a rename would put a plain file in their place
    status, stdout, _ = call("--output", str(tmp_path / where))
    error = the_failure(stdout)
    assert (status, error["code"], ran) == (2, "bad_value", [])
    assert "--output" in error["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_without_permission_is_refused_before_anything_runs(call, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    mine = tmp_path / "mine.json"
    mine.touch(0o400)
    for file in (tmp_path / "locked" / "out.json", mine):
        assert call("--output", str(file))[0] == 2
    assert ran == []


def test_an_output_that_fails_at_the_end_keeps_the_result(call, tmp_path):
    def removing(console: Console) -> Outcome:
        (tmp_path / "folder").rmdir()
        return Outcome(SCHEMA, {"text": "minutes of work"})

    (tmp_path / "folder").mkdir()
    status, stdout, _ = call("--output", str(tmp_path / "folder" / "out.json"), command=removing)
    error = the_failure(stdout)
    assert (status, error["code"]) == (1, "internal_error")
    assert error["details"] == {"result": {"text": "minutes of work"}}


# ---------------------------------------------------------------- real processes


@pytest.fixture
def script(tmp_path):
    """Write a script whose command has this body; returns its command line."""

    def written(body, parameters="", imports=""):
        lines = [
            f"import sys; sys.path.insert(0, {str(ROOT)!r})",
            textwrap.dedent(imports),
            "from dflash.cli import Interrupted, Outcome, run",
            "from dflash.errors import DraftNotFound",
            f"def command(console, *, {parameters} _unused: bool = False) -> Outcome:",
            '    """Do what this test needs."""',
            textwrap.indent(textwrap.dedent(body), "    "),
            f"    return Outcome({SCHEMA!r}, {{}})",
            "sys.exit(run(command))",
        ]
        file = tmp_path / "script.py"
        file.write_text("\n".join(lines), encoding="utf-8")
        return [sys.executable, "-W", "error", str(file)]

    return written


def finished(command, **options):
    return subprocess.run(command, **{"capture_output": True, "timeout": 120} | options)


PRINTING = """
    print("python")
    print("python, unflushed", end="")
    os.write(1, b"descriptor\\n")
    subprocess.run(["echo", "child"], check=True)
    ctypes.CDLL(None).printf(b"C, in a buffer until the process ends\\n")
    atexit.register(print, "at exit")
    logging.basicConfig(stream=sys.__stdout__)
    logging.warning("logged")
"""


@pytest.mark.parametrize("format", ["json", "text", "ndjson"])
def test_stdout_has_the_envelope_alone_whatever_prints(script, format):
    imports = "import atexit, ctypes, logging, os, subprocess"
    done = finished([*script(PRINTING, imports=imports), "--format", format])
    assert done.returncode == 0
    if format == "text":
        assert done.stdout == b""
    else:
        assert json.loads(done.stdout)["ok"]
        assert done.stdout.count(b"\n") == 1
    for noise in (b"python", b"unflushed", b"descriptor", b"child", b"C, in", b"at exit", b"logged"):
        assert noise in done.stderr


def test_the_envelope_is_the_last_line_when_both_streams_share_a_pipe(script):
    command = ["sh", "-c", 'exec "$@" 2>&1', "sh", *script('print("noise")\nconsole.note("note")')]
    done = finished(command)
    *noise, last = done.stdout.splitlines()
    assert noise == [b"noise", b"note"]
    assert json.loads(last)["ok"]


@pytest.mark.parametrize("format", ["json", "text", "ndjson"])
def test_any_text_can_be_printed_in_the_c_locale(script, format):
    body = r"""
        text = "é 漢字 🙂 \ud83d"
        console.note(text); console.piece(text); console.event("text", text=text)
        return Outcome("test.sample/1", {"text": text}, summary=text)
    """
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = finished([*script(body), "--format", format], env=env)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    if format == "text":
        assert done.stdout.decode("utf-8") == "é 漢字 🙂 \\ud83d\n"
    else:
        last = json.loads(done.stdout.decode("utf-8").splitlines()[-1])
        assert last["result"]["text"] == "é 漢字 🙂 \ud83d"


@pytest.mark.parametrize(
    "body, status", [("console.piece('x' * 100_000)", 0), ("raise DraftNotFound('none')", 3)]
)
@pytest.mark.parametrize("format", ["json", "text"])
def test_a_reader_that_went_away_changes_nothing(script, format, body, status):
    reading, writing = os.pipe()
    os.close(reading)
    done = finished(
        [*script(body), "--format", format], capture_output=False, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert done.returncode == status
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr


def test_a_closed_stderr_does_not_cost_the_envelope(script):
    reading, writing = os.pipe()
    os.close(reading)
    done = finished(
        script("console.note('nobody listens')"), capture_output=False, stdout=subprocess.PIPE, stderr=writing
    )
    os.close(writing)
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"]


def test_a_process_without_stdout_does_not_write_into_the_next_file_it_opens(script, tmp_path):
    body = f"""
        import os
        with open({str(tmp_path / "mine")!r}, "w") as file:
            print("noise")
            os.write(1, b"noise")
    """
    done = finished(["sh", "-c", 'exec "$@" >&-', "sh", *script(body)])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine").read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_said_and_is_not_a_success(script):
    with open("/dev/full", "wb") as full:
        done = finished(script(""), capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 5
    assert b"cannot write to stdout" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_long_envelope_goes_through_a_non_blocking_pipe_whole(script):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    body = "return Outcome('test.sample/1', {'text': 'x' * 1_000_000})"
    process = subprocess.Popen(script(body), stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    with open(reading, "rb") as pipe:
        envelope = json.loads(pipe.read())
    assert process.communicate(timeout=120)[1] == b""
    assert process.returncode == 0
    assert envelope["result"]["text"] == "x" * 1_000_000


def on_terminal(command, env=None):
    """Run with stdout and stderr on a pseudo-terminal: (exit status, what was shown)."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's way of saying that the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return process.wait(timeout=120), shown.decode().replace("\r\n", "\n")


def test_a_terminal_gets_text_by_default(script):
    body = "console.piece('an answer')\nreturn Outcome('test.sample/1', {}, summary='2 tokens')"
    assert on_terminal(script(body)) == (0, "an answer\n2 tokens\n")


def test_a_terminal_gets_json_when_it_asks(script):
    status, shown = on_terminal([*script("console.piece('an answer')"), "--format", "json"])
    assert (status, json.loads(shown)["ok"]) == (0, True)


def test_a_refusal_on_a_terminal_is_two_lines(script):
    status, shown = on_terminal([*script(""), "--bogus"])
    assert status == 2
    assert shown.splitlines()[0] == "error: unknown flag --bogus"
    assert shown.splitlines()[1].startswith("hint: ")
    assert len(shown.splitlines()) == 2


def test_help_on_a_terminal_opens_no_pager(script, tmp_path):
    env = {**os.environ, "PAGER": f"sh -c 'touch {tmp_path}/paged'", "TERM": "xterm"}
    status, shown = on_terminal([*script(""), "--help"], env)
    assert status == 0
    assert shown.startswith("Do what this test needs.\n")
    assert not (tmp_path / "paged").exists()


def test_progress_is_for_a_terminal_that_is_not_quiet(script):
    body = "console.piece(str(console.progress))"
    assert on_terminal(script(body)) == (0, "True\n")
    assert on_terminal([*script(body), "--quiet"]) == (0, "False\n")
    assert finished([*script(body), "--format", "text"]).stdout == b"False\n"


# ---------------------------------------------------------------- signals

WAITING = """
    import os, signal, threading
    console.note("ready")
    threading.Event().wait(60)
"""
# A command that keeps what it has, and is hit again while it does (uv hands on what the group already had).
KEEPING = """
    import os, signal, threading
    try:
        console.note("ready")
        threading.Event().wait(60)
    except Interrupted as stop:
        os.kill(os.getpid(), stop.signal_number)
        os.kill(os.getpid(), signal.SIGINT)
        status = 128 + stop.signal_number
        return Outcome("test.sample/1", {"text": "so far"}, exit_status=status)
"""
both_signals = pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)


def interrupted(command, number):
    """Start, wait until it says that it is ready, send the signal: (exit status, stdout, rest of stderr)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr.readline() == b"ready\n"
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout.decode(), stderr.decode()


@both_signals
def test_a_signal_before_a_result_ends_in_a_cancelled_envelope(script, number, status):
    got, stdout, stderr = interrupted(script(WAITING), number)
    error = the_failure(stdout)
    assert (got, stderr) == (status, "")
    assert (error["code"], error["details"]) == ("cancelled", {"signal": int(number)})
    assert number.name in error["message"]


@both_signals
def test_signals_during_cleanup_do_not_cost_what_there_is(script, number, status):
    got, stdout, stderr = interrupted(script(KEEPING), number)
    assert (got, stderr) == (status, "")
    assert json.loads(stdout)["result"] == {"text": "so far"}


@both_signals
def test_a_signal_that_was_ignored_at_the_start_is_heard(script, number, status):
    """As a shell does with SIGINT for what it starts in the background."""
    ignore = f"trap '' {number.name.removeprefix('SIG')}; exec \"$@\""
    got, stdout, _ = interrupted(["sh", "-c", ignore, "sh", *script(WAITING)], number)
    assert (got, the_failure(stdout)["code"]) == (status, "cancelled")


@both_signals
def test_a_signal_while_modules_are_imported_ends_in_an_envelope(script, tmp_path, number, status):
    (tmp_path / "slow_module.py").write_text("import threading\nthreading.Event().wait(60)\n")
    got, stdout, _ = interrupted(script('console.note("ready")\nimport slow_module'), number)
    assert (got, the_failure(stdout)["code"]) == (status, "cancelled")


@pytest.fixture
def signals():
    made = Signals()
    made.install()
    yield made
    made.restore()


def test_a_later_signal_interrupts_the_cleanup_too(signals):
    signals.SAME_REQUEST_S = 0.0
    for _ in range(2):
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.signal_number == signal.SIGTERM


def test_nothing_interrupts_the_report(signals):
    signals.held = True
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    made = Signals()
    made.install()
    assert signal.getsignal(signal.SIGINT) != before[0]
    made.restore()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_interruption_says_which_signal_it_was():
    error = as_error(Interrupted(signal.SIGTERM))
    assert isinstance(error, Cancelled)
    assert error.exit_status == 143
