"""`scripts/generate.py` as a user or an agent calls it, on a tiny pair: answers, formats, and bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pair
import pytest
import script

GENERATE = str(script.ROOT / "scripts" / "generate.py")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("a pair with spaces")
    return pair.target(base / "target"), pair.draft(base / "draft")


@pytest.fixture
def here(folders):
    """The flags that name the tiny pair."""
    return ["--model", folders[0], "--draft", folders[1]]


def test_one_json_object_with_the_whole_result(here, tmp_path):
    status, said, _ = script.run(
        "generate", "Hello", *here, "--max-tokens", 40, "--no-eos", "--tokens", "--seed", 7, cwd=tmp_path
    )
    assert (status, said["ok"], said["schema"]) == (0, True, "dflash.generate/1")
    result = said["result"]
    assert len(result["tokens"]) == result["usage"]["completion_tokens"] == 40
    assert result["mode"] == "dflash" and result["finish_reason"] == "length"
    assert result["model"] == str(here[1]) and result["draft"] == str(here[3])
    assert result["sampling"]["temperature"] == 0 and result["sampling"]["seed"] == 7
    assert result["speculation"]["block_size"] == 8  # the draft's own
    assert sum(result["speculation"]["width_histogram"].values()) == result["speculation"]["cycles"]
    assert result["memory"]["peak_bytes"] > 0
    assert list(tmp_path.iterdir()) == []  # nothing is left in the user's folder


def test_drawn_answers_report_their_settings_and_repeat_with_their_seed(here, folders):
    flags = [
        "--max-tokens",
        40,
        "--no-eos",
        "--tokens",
        "--temperature",
        0.8,
        "--top-p",
        0.9,
        "--min-p",
        0.01,
    ]
    flags += ["--presence-penalty", -0.5, "--logit-bias", '{"7": 1.5}']
    _, first, _ = script.run("generate", "Hello", *here, *flags)
    used = first["result"]["sampling"]
    assert (used["temperature"], used["top_p"], used["min_p"], used["top_k"]) == (0.8, 0.9, 0.01, 0)
    assert (used["presence_penalty"], used["logit_bias"]) == (-0.5, {"7": 1.5})
    plain = ["--model", folders[0], "--mode", "baseline"]
    _, again, _ = script.run("generate", "Hello", *plain, *flags, "--seed", used["seed"])
    assert again["result"]["tokens"] == first["result"]["tokens"]
    status, said, _ = script.run("generate", "Hello", "--top-p", 0)
    assert (status, said["error"]["code"]) == (2, "bad_value")


def test_tokens_are_left_out_unless_asked_for(here):
    _, said, _ = script.run("generate", "Hello", *here, "--max-tokens", 3)
    assert "tokens" not in said["result"]


def test_every_source_of_the_prompt_gives_the_same_answer(here, tmp_path):
    text = "Hello, 世界"
    (tmp_path / "p.txt").write_text(text, encoding="utf-8")
    (tmp_path / "m.json").write_text(json.dumps([{"role": "user", "content": text}]))
    common = [*here, "--max-tokens", "30", "--no-eos"]
    answers = [
        script.run("generate", text, *common),
        script.run("generate", "--prompt", text, *common),
        script.run("generate", "--prompt-file", tmp_path / "p.txt", *common),
        script.run("generate", "--messages-file", tmp_path / "m.json", *common),
        script.run("generate", "--prompt", "-", *common, input=text),
        script.run("generate", "-", *common, input=text),
    ]
    texts = {said["result"]["text"] for _, said, _ in answers}
    assert len(texts) == 1 and texts != {""}


def test_block_size_and_mode_change_the_work_and_not_the_answer(here, folders):
    common = ["Hello", "--max-tokens", 60, "--no-eos", "--tokens"]
    runs = [script.run("generate", *common, *here, "--block-size", n) for n in (1, 2, 7, 8)]
    runs.append(script.run("generate", *common, "--model", folders[0], "--mode", "baseline"))
    assert len({tuple(said["result"]["tokens"]) for _, said, _ in runs}) == 1
    assert [said["result"]["mode"] for _, said, _ in runs] == ["baseline", *["dflash"] * 3, "baseline"]
    assert runs[3][1]["result"]["speculation"]["width_histogram"].keys() >= {"8"}


def test_copies_need_no_draft_and_are_told_apart_from_a_drafts_proposals(folders, here):
    common = ["generate", "a b c d a b c d a b c d a b", "--no-chat-template", "--max-tokens", 30, "--no-eos"]
    status, said, _ = script.run(*common, "--model", folders[0], "--mode", "lookup")
    result, made = said["result"], said["result"]["speculation"]["proposals"]
    assert (status, result["mode"], result["draft"], result["draft_weights"]) == (0, "lookup", None, None)
    assert (
        made["dflash"]["drafted"] == 0 < made["lookup"]["drafted"] == result["speculation"]["drafted_tokens"]
    )
    _, drafted, _ = script.run(*common, *here, "--no-lookup")
    assert drafted["result"]["text"] == result["text"]
    assert drafted["result"]["speculation"]["proposals"]["lookup"]["drafted"] == 0


def test_a_system_message_and_stop_texts_reach_the_model(here):
    _, plain, _ = script.run("generate", "Hello", *here, "--max-tokens", 40, "--no-eos")
    _, told, _ = script.run(
        "generate", "Hello", *here, "--max-tokens", 40, "--no-eos", "--system", "Be brief."
    )
    assert told["result"]["usage"]["prompt_tokens"] > plain["result"]["usage"]["prompt_tokens"]
    text = plain["result"]["text"]
    stop = re.search(r"[^\ufffd\s]{3}", text[5:])[0]  # the random model's text is mostly not text
    _, cut, _ = script.run(
        "generate", "Hello", *here, "--max-tokens", 40, "--no-eos", f"--stop={stop}", "--stop=@never@"
    )
    assert cut["result"]["text"] == text[: text.index(stop)]
    assert cut["result"]["finish_reason"] == "stop_string"


def test_ndjson_streams_events_and_ends_with_the_envelope(here):
    call = [sys.executable, GENERATE, "Hello", *map(str, here), "--max-tokens", "30", "--no-eos"]
    done = subprocess.run([*call, "--format", "ndjson"], capture_output=True, text=True)
    *events, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and last["ok"]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "prefilled" and {"cycle", "text"} <= set(kinds)
    assert "".join(e["text"] for e in events if e["event"] == "text") == last["result"]["text"]
    assert sum(e["tokens"] for e in events if e["event"] == "cycle") == 29


def test_text_format_prints_the_text_and_a_summary_apart(here):
    done = subprocess.run(
        [sys.executable, GENERATE, "Hello", *map(str, here), "--max-tokens", "20", "--format", "text"],
        capture_output=True,
        text=True,
    )
    _, said, _ = script.run("generate", "Hello", *here, "--max-tokens", 20)
    assert done.stdout.rstrip("\n") == said["result"]["text"].rstrip("\n")
    assert "tokens per cycle" in done.stderr


def test_output_also_writes_the_envelope_to_a_file(here, tmp_path):
    file = tmp_path / "answer.json"
    _, said, _ = script.run("generate", "Hello", *here, "--max-tokens", 5, "--output", file)
    assert json.loads(file.read_text())["result"]["text"] == said["result"]["text"]


def test_standard_input_that_is_not_utf8_still_answers(here):
    done = subprocess.run(
        [sys.executable, GENERATE, "-", *map(str, here), "--max-tokens", "3"],
        input=b"caf\xe9",
        capture_output=True,
    )
    assert script.envelope(done.stdout.decode())["ok"]


def test_an_argument_that_is_not_utf8_is_refused():
    status, said, _ = script.run("generate", "caf\udce9")
    assert (status, said["error"]["code"]) == (2, "bad_value")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_was_generated(here, number):
    call = [sys.executable, GENERATE, "Hello", *map(str, here), "--no-eos", "--max-tokens", "450"]
    call += ["--block-size", "2", "--format", "ndjson"]
    lines = []
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout:
            lines.append(json.loads(line))
            if len(lines) == 20:
                running.send_signal(number)
    assert running.returncode == 128 + number
    result = lines[-1]["result"]
    assert result["finish_reason"] == "cancelled"
    assert result["text"] == "".join(e["text"] for e in lines[:-1] if e["event"] == "text")
    assert 0 < result["usage"]["completion_tokens"] < 450


def test_an_interruption_before_the_first_token_is_an_error_envelope(tmp_path):
    reading, writing = os.pipe()  # standard input that never ends holds the script before any work
    running = subprocess.Popen(
        [sys.executable, GENERATE, "-"],
        stdin=reading,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(1.5)
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=60)
    os.close(writing)
    os.close(reading)
    said = script.envelope(out, err)
    assert (running.returncode, said["error"]["code"]) == (143, "cancelled")


BAD_CALLS = [
    (["Hi", "--promt", "x"], 2, "bad_usage", "--prompt"),
    ([], 2, "empty_prompt", "no prompt"),
    ([""], 2, "empty_prompt", "empty"),
    (["--prompt", "  "], 2, "empty_prompt", "empty"),
    (["Hi", "--prompt", "Hi"], 2, "bad_usage", ""),
    (["Hi", "--prompt-file", "x.txt"], 2, "bad_usage", "exclude"),
    (["Hi", "--max-tokens", "0"], 2, "bad_value", "max_tokens"),
    (["Hi", "--max-tokens", "-1"], 2, "bad_value", "max_tokens"),
    (["Hi", "--max-tokens", "abc"], 2, "bad_value", "max-tokens"),
    (["Hi", "--max-tokens", "5.5"], 2, "bad_value", "max-tokens"),
    (["Hi", "--mode", "turbo"], 2, "bad_value", "baseline"),
    (["Hi", "--format", "xml"], 2, "bad_value", "ndjson"),
    (["Hi", "--stop="], 2, "bad_value", "stop"),
    (["Hi", "--chat-template-args", "{"], 2, "bad_value", "JSON"),
    (["Hi", "--chat-template-args", "[]"], 2, "bad_value", "object"),
    (["Hi", "--mode", "baseline", "--draft", "x"], 2, "bad_usage", "--draft"),
    (["Hi", "--mode", "lookup", "--draft", "x"], 2, "bad_usage", "--draft"),
    (["Hi", "--mode", "lookup", "--draft-bits", "8", "--save-draft", "x"], 2, "bad_usage", "--save-draft"),
    (["--prompt-file", "/no/such/file"], 3, "file_not_found", "/no/such/file"),
    (["--messages-file", "/no/such/file"], 3, "file_not_found", "/no/such/file"),
    (["Hi", "--model", "/no/such/folder"], 3, "model_not_found", "/no/such/folder"),
    (["Hi", "--model", "./nothing.gguf"], 3, "model_not_found", "nothing.gguf"),
    (["Hi", "--model", "noslash-nomodel"], 3, "model_not_found", "noslash-nomodel"),
    (["Hi", "--model", "noslash-nomodel", "--mode", "baseline"], 3, "model_not_found", "noslash-nomodel"),
]


@pytest.mark.parametrize(("arguments", "status", "code", "said"), BAD_CALLS, ids=lambda v: str(v)[:40])
def test_a_bad_call_gets_its_code_and_says_why(arguments, status, code, said, tmp_path):
    got, envelope, stderr = script.run("generate", *arguments, cwd=tmp_path)
    error = envelope["error"]
    assert (got, error["code"]) == (status, code), error
    assert said in error["message"] + error["hint"]
    assert error["hint"]
    assert "Traceback" not in stderr


def write(file, content):
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def spoil(folder, what):
    """Damage a copy of the tiny target or draft in one way."""
    config, weights = folder / "config.json", folder / "model.safetensors"
    if what == "no config":
        config.unlink()
    elif what == "broken JSON":
        write(config, config.read_text()[:-5])
    elif what == "cut off":
        write(weights, weights.read_bytes()[:-100])
    elif what == "no weights":
        weights.unlink()
    elif what == "unknown type":
        write(config, config.read_text().replace('"model_type": "llama"', '"model_type": "nothing_known"'))
    elif what == "remote code":
        write(config, config.read_text().replace("{", '{"model_file": "evil.py", ', 1))
    elif what == "markov":
        write(config, config.read_text().replace("{", '{"markov_rank": 64, ', 1))
    elif what == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("what", "status", "code", "said"),
    [
        ("no config", 3, "model_not_found", "config.json"),
        ("broken JSON", 3, "bad_checkpoint", "JSON"),
        ("cut off", 3, "bad_checkpoint", "model.safetensors"),
        ("no weights", 3, "bad_checkpoint", "safetensors"),
        ("unknown type", 4, "unsupported_model", "nothing_known"),
        ("remote code", 4, "unsupported", "evil.py"),
        ("no tokenizer", 3, "bad_checkpoint", "tokenizer"),
    ],
)
def test_a_spoilt_target_is_refused_with_its_code(folders, tmp_path, what, status, code, said):
    broken = spoil(pair.target(tmp_path / "broken"), what)
    got, envelope, stderr = script.run("generate", "Hi", "--model", broken, "--draft", folders[1])
    error = envelope["error"]
    assert (got, error["code"]) == (status, code), error
    assert said in error["message"]
    assert "Traceback" not in stderr


def missing_tensor(folder):
    import mlx.core as mx

    weights = mx.load(str(folder / "model.safetensors"))
    del weights["layers.1.mlp.up_proj.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.mark.parametrize(
    ("make", "status", "code", "said"),
    [
        (lambda d: pair.draft(d, hidden_size=64), 4, "draft_mismatch", "hidden size 64"),
        (
            lambda d: missing_tensor(pair.draft(d)),
            3,
            "bad_checkpoint",
            "layers.1.mlp.up_proj.weight is missing",
        ),
        (lambda d: spoil(pair.draft(d), "cut off"), 3, "bad_checkpoint", "model.safetensors"),
        (lambda d: spoil(pair.draft(d), "broken JSON"), 3, "bad_checkpoint", "JSON"),
        (lambda d: spoil(pair.draft(d), "markov"), 4, "unsupported_draft", "Markov"),
        (lambda d: pair.target(d), 4, "unsupported_draft", "not a DFlash draft"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_with_its_code(folders, tmp_path, make, status, code, said):
    got, envelope, _ = script.run(
        "generate", "Hi", "--model", folders[0], "--draft", make(tmp_path / "draft")
    )
    error = envelope["error"]
    assert (got, error["code"]) == (status, code), error
    assert said in error["message"]


def test_a_draft_given_as_the_model_says_which_flag_it_belongs_to(folders):
    got, envelope, _ = script.run("generate", "Hi", "--model", folders[1], "--mode", "baseline")
    assert (got, envelope["error"]["code"]) == (4, "model_is_draft")
    assert "--draft" in envelope["error"]["hint"]


def test_a_prompt_longer_than_the_context_is_exit_5_with_both_numbers(here):
    got, envelope, _ = script.run("generate", "x" * 600, *here)
    assert (got, envelope["error"]["code"]) == (5, "context_exceeded")
    assert envelope["error"]["details"]["context_tokens"] == 512


def test_reaching_the_context_limit_is_a_warning_in_the_result(here):
    _, said, _ = script.run("generate", "Hi", *here, "--no-eos", "--max-tokens", 5000, "--max-ctx", 90)
    assert "context_full" in {warning["code"] for warning in said["warnings"]}
    assert said["result"]["finish_reason"] == "length"


def test_it_runs_from_a_folder_full_of_decoys(here, tmp_path):
    for name in ("dflash.py", "jinja2.py", "mlx.py", "json.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported from the working folder')")
    status, _, _ = script.run("generate", "Hi", *here, "--max-tokens", 2, cwd=tmp_path)
    assert status == 0
