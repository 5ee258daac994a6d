"""The envelope: its schemas hold for what is printed, and nothing but JSON gets into it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

# Commands register the schemas of their results when they are imported.
import dflash.commands.benchmark
import dflash.commands.generate
import dflash.commands.resolve_draft  # noqa: F401
from dflash import contract
from dflash.contract import Stdout, encoded, failure, success, to_line
from dflash.errors import Cancelled, DFlashError, all_errors

GENERATED = {
    "text": "Hi",
    "finish_reason": "stop",
    "mode": "dflash",
    "model": "m",
    "draft": None,
    "draft_weights": None,
    "sampling": {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": -0.5,
        "penalty_context": 20,
        "logit_bias": {"7": -100.0},
        "seed": None,
    },
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    "speed": {"prefill_s": 0.1, "decode_s": 0.0, "tokens_per_s": 0.0, "prompt_tokens_per_s": 30.0},
    "speculation": {
        "block_size": 4,
        "cycles": 0,
        "accepted_length": 0.0,
        "acceptance_rate": 0.0,
        "near_ties": 0,
        "exact": False,
        "drafted_tokens": 0,
        "proposals": {source: {"drafted": 0, "accepted": 0} for source in ("dflash", "lookup")},
        "width_histogram": {},
    },
    "memory": {"peak_bytes": 1},
}


def errors_of(envelope):
    """What the published schema has against an envelope after a trip through JSON."""
    validator = Draft202012Validator(contract.schema(envelope["schema"]))
    return [error.message for error in validator.iter_errors(json.loads(to_line(envelope)))]


def test_commands_publish_a_schema_for_each_result():
    assert {"dflash.error/1", "dflash.generate/1"} < set(contract.schema_names())


@pytest.mark.parametrize("name", contract.schema_names())
def test_each_schema_is_a_valid_draft_2020_12_schema(name):
    schema = contract.schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert schema["properties"]["schema"] == {"const": name}


def test_an_unknown_schema_is_a_key_error():
    with pytest.raises(KeyError):
        contract.schema("dflash.nothing/1")


@pytest.mark.parametrize("cls", list(all_errors()), ids=lambda cls: cls.__name__)
def test_each_error_makes_a_valid_failure(cls):
    error = cls("stopped", 15) if cls is Cancelled else cls("received x, expected y", path="/a")
    envelope = failure(error, time.perf_counter())
    assert errors_of(envelope) == []
    assert envelope["error"]["code"] == cls.code
    assert envelope["error"]["hint"] == cls.default_hint


def test_a_failure_with_an_unpublished_code_is_not_valid():
    envelope = failure(DFlashError("m"), time.perf_counter())
    envelope["error"]["code"] = "never_published"
    assert errors_of(envelope)


def test_a_result_makes_a_valid_success():
    warnings = [{"code": "blas_missing", "message": "slow"}]
    assert errors_of(success("dflash.generate/1", GENERATED, warnings, time.perf_counter())) == []


@pytest.mark.parametrize(
    "change",
    [{"extra": 1}, {"text": None}, {"finish_reason": "bored"}, {"tokens": [-1]}, {"memory": {}}],
    ids=str,
)
def test_a_result_of_another_shape_is_not_valid(change):
    assert errors_of(success("dflash.generate/1", GENERATED | change, [], time.perf_counter()))


def test_meta_names_versions_time_and_device():
    import mlx.core  # noqa: F401  (its presence is what meta looks at)

    meta = contract.meta(time.perf_counter() - 1.5)
    assert meta["elapsed_s"] >= 1.5
    assert meta["device"] in ("cpu", "gpu")
    assert set(meta["packages"]) == {"mlx", "mlx-lm"}


def test_meta_does_not_import_mlx_to_say_that_it_was_not_used():
    code = "import sys, dflash.contract as c; print(c.meta(0)['device'], 'mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
    assert done.stdout.split() == [b"none", b"False"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_numbers_that_json_lacks_are_refused(value):
    with pytest.raises(ValueError):
        to_line(value)


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object(), 1j], ids=lambda v: type(v).__name__)
def test_values_that_json_lacks_are_refused_and_not_turned_into_text(value):
    with pytest.raises((TypeError, ValueError)):
        to_line({"value": value})


def test_paths_are_written_as_text():
    assert to_line({"path": Path("/a/b")}) == '{"path":"/a/b"}'


def test_a_line_is_one_line_for_every_reader():
    text = "a\nb\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029z"
    line = to_line({"text": text})
    assert line.splitlines() == [line]
    assert json.loads(line) == {"text": text}


@pytest.mark.parametrize("text", ["é漢字🙂", "\ud83d", "a\udc80b", '"\\'], ids=ascii)
def test_any_text_survives_encoding(text):
    assert json.loads(encoded(to_line(text)).decode("utf-8")) == text


def test_the_guard_sends_everything_but_its_own_writes_to_stderr(capfd):
    print("before")
    with Stdout.guarded() as stdout:
        print("python")
        os.write(1, b"descriptor\n")
        subprocess.run(["echo", "child"], check=True)
        stdout.write_line({"ok": True})
    print("after")
    out, err = capfd.readouterr()
    assert out == 'before\n{"ok":true}\nafter\n'
    assert sorted(err.split()) == ["child", "descriptor", "python"]


def test_the_guard_gives_stdout_back_after_an_exception(capfd):
    with pytest.raises(RuntimeError), Stdout.guarded():
        raise RuntimeError
    print("after")
    assert capfd.readouterr().out == "after\n"


def test_writing_to_a_closed_pipe_is_not_an_error():
    reading, writing = os.pipe()
    os.close(reading)
    stdout = Stdout(writing)
    stdout.write("nobody listens")
    os.close(writing)
    with pytest.raises(OSError):  # while a descriptor that is no longer there is one
        stdout.write("nowhere to go")


def test_a_child_process_does_not_hold_the_real_stdout_open():
    """A reader waits for the end of the pipe: a helper that outlives us must not keep it from coming."""
    with Stdout.guarded() as stdout:
        assert not os.get_inheritable(stdout._descriptor)
