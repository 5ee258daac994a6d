"""The parity matrix: sound pairs are identical, near-ties are told from faults, faults and the control are found."""

import jsonschema
import mlx.core as mx
import pair
import pytest
import script
import tiny

from dflash import DFlashRuntime, contract
from dflash.bench import parity as bench
from dflash.bench import schema  # noqa: F401  (registers the schema)
from dflash.config import DFlashConfig

TEXTS = ["def merge(left, right): once upon a", "red apple red apple red"]


def matrix(folder, family="llama", draft=True, tokens=32):
    target = pair.target(folder / "target", family)
    layers = 4 if family in tiny.HYBRIDS else 3
    named = str(pair.draft(folder / "draft", num_target_layers=layers)) if draft else None
    config = DFlashConfig(mode="dflash" if draft else "lookup", cache_dir=folder)
    runtime = DFlashRuntime.from_pretrained(str(target), named, config)
    prompts = [runtime.target.tokenizer.encode(text) for text in TEXTS]
    return bench.Parity(runtime, prompts, tokens)


@pytest.mark.parametrize(("family", "draft"), [("llama", True), ("qwen3_5", True), ("gemma3_text", False)])
def test_a_sound_pair_is_identical_in_every_cell_and_the_control_is_found(tmp_path, family, draft):
    checked = matrix(tmp_path, family, draft)
    found = [checked.run(cell) for cell in checked.cells()]
    assert {one.verdict for one in found} == {"identical"}
    assert all(one.equal_tokens == one.tokens == 64 for one in found)
    assert {cell.drafter for cell in checked.cells()} >= {"none", "always right", "always wrong", "lookup"}
    assert ({"own", "own and lookup"} <= {one.cell.drafter for one in found}) is draft
    mixed = next(one for one in found if one.cell == bench.Cell("right for k", 7, "greedy"))
    assert set(mixed.accepted_lengths) == set(range(1, 8)), "every accepted length occurs"
    control = checked.control()
    assert control.verdict == "broken" and control.margin > checked.tie_margin
    assert bench.overall(found, control) == "identical"


def test_a_wrong_acceptance_is_found(tmp_path, monkeypatch):
    checked = matrix(tmp_path)
    wrong = bench.Cell("always wrong", 4, "greedy")
    assert checked.run(wrong).verdict == "identical"
    monkeypatch.setattr("dflash.decoding.cycle.accepted_prefix", lambda proposals, choices: len(proposals))
    assert checked.run(wrong).verdict == "broken"


def test_a_difference_where_the_choice_was_close_is_a_near_tie(tmp_path, monkeypatch):
    checked = matrix(tmp_path)
    cell = bench.Cell("right for k", 4, "greedy")
    logits = checked._adapter.logits

    def rounded_by_width(hidden):
        out = logits(hidden)
        return out + 2.0 * mx.sin(mx.arange(out.shape[-1])) if hidden.shape[1] > 1 else out

    monkeypatch.setattr(checked._adapter, "logits", rounded_by_width)
    found = checked.run(cell)
    assert found.verdict == "broken" and found.expected != found.got
    checked.tie_margin = found.margin + 0.1
    assert checked.run(cell).verdict == "near_tie"


def test_a_run_whose_control_goes_unnoticed_proves_nothing(tmp_path):
    checked = matrix(tmp_path, tokens=8)
    sound = checked.run(bench.Cell("none", 1, "greedy"))
    assert bench.overall([sound], sound) == "proves_nothing"


def test_the_flag_gives_one_envelope_with_the_verdict(tmp_path):
    target, draft = pair.target(tmp_path / "t"), pair.draft(tmp_path / "d")
    call = [
        "--parity",
        "--model",
        target,
        "--draft",
        draft,
        "--kinds",
        "code",
        "--per-kind",
        1,
        "--lengths",
        8,
    ]
    status, said, _ = script.run("benchmark", *call, "--cache-dir", tmp_path)
    assert (status, said["ok"], said["schema"]) == (0, True, "dflash.parity/1")
    jsonschema.validate(said, contract.schema("dflash.parity/1"))
    assert said["result"]["verdict"] == "identical" and said["result"]["control"]["detected"]
    status, said, _ = script.run("benchmark", *call, "--report", tmp_path / "x.html")
    assert (status, said["error"]["code"]) == (2, "bad_usage")
