"""`scripts/resolve_draft.py`: the answer from the registry, from folders and from a stub hub."""

import json
import os
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import hub_stub
import mlx.core as mx
import pair
import pytest
import script
from hub_stub import Repo
from jsonschema import Draft202012Validator

from dflash import contract
from dflash.commands.resolve_draft import answer, listing, render
from dflash.errors import DraftNotFound, HubUnreachable, ModelIsDraft, ModelNotFound
from dflash.models.registry import entries
from dflash.models.survey import Survey, survey
from dflash.plan import Machine

ROOMY = Machine("cpu", 1 << 34, 1 << 34, "float32")
TIGHT = Machine("cpu", 1 << 20, 1 << 20, "float32")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("a pair with spaces")
    return pair.target(base / "target"), pair.draft(base / "draft")


def resolve(model, draft=None, *, context=1024, machine=ROOMY, cache=None, endpoint=None, offline=True):
    """The result, its warnings as {code: message}, checked against the published schema."""
    warnings = {}
    look = partial(survey, cache_dir=cache, endpoint=endpoint)
    result = answer(
        str(model),
        draft and str(draft),
        context,
        look,
        machine,
        warnings.__setitem__,
        offline=offline,
    )
    said = contract.success("dflash.resolve/1", result, [], 0.0)
    Draft202012Validator(contract.schema("dflash.resolve/1")).validate(said)
    assert render(result).startswith(str(model))
    return result, warnings


def repo(folder, **changes):
    return Repo({file.name: file.read_bytes() for file in folder.iterdir()}, **changes)


# ---------------------------------------------------------------- from the registry alone


def test_without_a_network_the_registry_still_answers(tmp_path):
    result, warnings = resolve("mlx-community/Qwen3-4B-4bit", cache=tmp_path)
    assert (result["target"], result["draft"]) == ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16")
    assert (result["generation"], result["kind"], result["licence"]) == (1, "attention", "MIT")
    assert result["download"] is result["memory"] is result["compatible"] is None
    assert any("thinking off" in note for note in result["notes"])
    assert "dflash_qwen3_4b_block7" in str(result["refused"])
    assert list(warnings) == ["hub_unreachable"]


def test_a_hub_that_fails_is_a_warning(tmp_path):
    with hub_stub.running() as stub:
        stub.status = 500
        result, warnings = resolve("Qwen/Qwen3-4B", cache=tmp_path, endpoint=stub.url, offline=False)
    assert list(warnings) == ["hub_failed"] and result["download"] is None


def test_a_hub_that_cannot_be_reached_is_asked_once():
    asked, warnings = [], {}

    def look(name, what, offline):
        asked.append((what, offline))
        return Survey(name, problem=HubUnreachable(f"no network for {name}"))

    answer("Qwen/Qwen3-4B", None, 1024, look, ROOMY, warnings.__setitem__)
    assert asked == [("model", False), ("draft", True)]
    assert warnings == {"hub_unreachable": "no network for Qwen/Qwen3-4B"}


def test_the_command_names_the_pair_and_the_way_it_was_asked_for(tmp_path):
    result, _ = resolve("mlx-community/Qwen3-4B-4bit", cache=tmp_path)
    words = shlex.split(result["command"])
    assert words[words.index("--model") + 1] == "mlx-community/Qwen3-4B-4bit"
    assert "--draft" not in words and "--offline" in words and "--prompt" in words
    assert Path(words[2]) == script.ROOT / "scripts" / "generate.py"


def test_a_bare_name_becomes_the_original_in_the_command_and_a_note_says_so(tmp_path):
    result, _ = resolve("qwen3-4b-8bit", cache=tmp_path)
    assert "--model Qwen/Qwen3-4B " in result["command"]
    assert "qwen3-4b-8bit names no owner" in result["notes"][0]


def test_the_embedded_pair_keeps_its_name(tmp_path):
    result, warnings = resolve("smollm2-135m", cache=tmp_path)
    assert result["draft"] == "smollm2-135m-dflash" and result["local"]["draft"] is not None
    assert "--model smollm2-135m " in result["command"]
    assert list(warnings) == ["memory_unknown"]


def test_other_drafts_are_listed_as_alternatives(tmp_path):
    result, _ = resolve("Qwen/Qwen3.6-27B", cache=tmp_path)
    assert result["draft"] not in [other["draft"] for other in result["alternatives"]]
    assert result["alternatives"] and not any(other["official"] for other in result["alternatives"])


def test_an_unknown_model_is_not_found_and_the_hub_is_not_asked(tmp_path):
    with hub_stub.running() as stub, pytest.raises(DraftNotFound) as error:
        resolve("Qwen/Qwen3-4B-Thinking-2507", cache=tmp_path, endpoint=stub.url, offline=False)
    assert error.value.details["nearest"][0]["target"] == "Qwen/Qwen3-4B"
    assert stub.requests == []


def test_a_path_that_does_not_exist_is_not_found_even_if_its_name_is_known():
    with pytest.raises(ModelNotFound, match="/none/Qwen3-4B"):
        resolve("/none/Qwen3-4B")


# ---------------------------------------------------------------- from the hub


def test_the_hub_adds_sizes_geometry_and_a_memory_plan(folders, tmp_path):
    target, draft = folders
    repos = {"Qwen__Qwen3-4B": repo(target), "z-lab__Qwen3-4B-DFlash-b16": repo(draft)}
    with hub_stub.running(**repos) as stub:
        result, warnings = resolve("Qwen/Qwen3-4B", cache=tmp_path, endpoint=stub.url, offline=False)
    assert warnings == {}
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    expected = {"model_bytes": sizes[0], "draft_bytes": sizes[1], "total_bytes": sum(sizes)}
    assert result["download"] == expected
    assert result["compatible"] is True and result["memory"]["fits"] is True
    assert result["local"] == {"model": None, "draft": None}


def test_a_gated_draft_is_a_warning_with_its_sizes_kept(folders, tmp_path):
    target, draft = folders
    repos = {"Qwen__Qwen3-4B": repo(target), "z-lab__Qwen3-4B-DFlash-b16": repo(draft, gated=True)}
    with hub_stub.running(**repos) as stub:
        result, warnings = resolve("Qwen/Qwen3-4B", cache=tmp_path, endpoint=stub.url, offline=False)
    assert list(warnings) == ["model_gated"]
    assert result["download"]["draft_bytes"] > 0 and result["memory"] is None


# ---------------------------------------------------------------- from folders


def test_two_folders_are_compared_and_planned(folders):
    target, draft = folders
    result, warnings = resolve(target, draft, context=300)
    assert result["compatible"] is True and len(result["checks"]) == 3
    assert result["target"] is None and result["generation"] == 1 and result["kind"] == "attention"
    assert result["local"] == {"model": str(target), "draft": str(draft)}
    assert result["download"]["total_bytes"] == 0
    assert result["memory"]["context"] == 300 and result["memory"]["device"] == "cpu"
    words = shlex.split(result["command"])
    assert words[words.index("--model") + 1] == str(target)
    assert words[words.index("--draft") + 1] == str(draft)
    assert warnings == {}


def test_relative_paths_become_absolute_in_the_command(folders, monkeypatch):
    monkeypatch.chdir(folders[0].parent)
    result, _ = resolve("./target", "./draft")
    assert str(folders[0]) in result["command"] and str(folders[1]) in result["command"]


def test_a_draft_of_another_geometry_is_told_and_gets_no_command(folders, tmp_path):
    other = pair.draft(tmp_path / "other", num_target_layers=5)
    result, warnings = resolve(folders[0], other)
    assert result["compatible"] is False and "5 layers" in result["checks"][0]
    assert result["command"] is None and "draft_mismatch" in warnings


def test_a_draft_known_for_another_target_is_told(tmp_path):
    _, warnings = resolve("Qwen/Qwen3-4B", "z-lab/Qwen3-8B-DFlash-b16", cache=tmp_path)
    assert "Qwen/Qwen3-8B" in warnings["draft_for_other_target"]


def test_a_draft_that_is_never_run_is_told_without_looking_at_it(tmp_path):
    result, warnings = resolve("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7", cache=tmp_path)
    assert result["compatible"] is False and "Markov" in warnings["unsupported_draft"]
    assert result["command"] is None


def test_a_folder_that_holds_a_draft_is_refused_as_the_model(folders):
    for other in (None, folders[1]):
        with pytest.raises(ModelIsDraft):
            resolve(folders[1], other)


def test_a_folder_the_registry_does_not_know_needs_a_draft(folders):
    with pytest.raises(DraftNotFound):
        resolve(folders[0])


def test_what_does_not_fit_is_a_warning_and_the_command_stays_within_what_does(folders):
    result, warnings = resolve(*folders, machine=TIGHT)
    assert result["memory"]["fits"] is False and "does_not_fit" in warnings
    size = result["memory"]["target_bytes"] + result["memory"]["draft_bytes"]
    some_room = Machine("cpu", 1 << 34, size + (8 << 20), "float32")
    result, _ = resolve(*folders, context=1 << 20, machine=some_room)
    assert f"--max-ctx {result['memory']['largest_context']}" in result["command"]


def test_weights_too_wide_in_fp32_are_planned_as_they_are_stored(folders, tmp_path):
    target = pair.target(tmp_path / "target")
    weights = mx.load(str(target / "model.safetensors"))
    halved = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    mx.save_safetensors(str(target / "model.safetensors"), halved)
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(settings | {"torch_dtype": "bfloat16"}))
    wide, warnings = resolve(target, folders[1])
    assert wide["memory"]["run_dtype"] == "float32" and warnings == {}
    room = replace(ROOMY, usable_bytes=wide["memory"]["needed_bytes"] - 1)
    narrow, warnings = resolve(target, folders[1], machine=room)
    assert narrow["memory"]["run_dtype"] == "stored" and narrow["memory"]["fits"] is True
    assert list(warnings) == ["runs_as_stored"]
    assert wide["memory"]["target_bytes"] == 2 * narrow["memory"]["target_bytes"]


# ---------------------------------------------------------------- the script


def test_the_list_has_every_target_and_is_small():
    outcome = listing()
    said = contract.success(outcome.schema, outcome.result, [], 0.0)
    Draft202012Validator(contract.schema("dflash.registry/1")).validate(said)
    assert len(outcome.result["targets"]) == len(entries())
    assert len(contract.to_line(said)) < 10_000  # harnesses cut longer answers
    assert all(row["draft"] or row["refused"] for row in outcome.result["targets"])


def test_the_script_lists(tmp_path):
    status, said, _ = script.run("resolve_draft", "--list", cwd=tmp_path)
    assert (status, said["schema"]) == (0, "dflash.registry/1")
    assert list(tmp_path.iterdir()) == []


def test_the_script_answers_about_folders(folders):
    status, said, _ = script.run("resolve_draft", folders[0], "--draft", folders[1], "--context", 200)
    assert (status, said["schema"]) == (0, "dflash.resolve/1")
    assert said["result"]["compatible"] is True and said["warnings"] == []
    assert said["result"]["memory"]["context"] == 200


def test_the_script_asks_the_hub_that_the_user_set(folders, tmp_path):
    repos = {"Qwen__Qwen3-4B": repo(folders[0]), "z-lab__Qwen3-4B-DFlash-b16": repo(folders[1])}
    with hub_stub.running(**repos) as stub:
        env = {**os.environ, "HF_ENDPOINT": stub.url}
        _, said, _ = script.run("resolve_draft", "Qwen/Qwen3-4B", "--cache-dir", tmp_path, env=env)
    assert said["result"]["download"]["total_bytes"] > 0 and said["warnings"] == []


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        ([], 2, "bad_usage"),
        (["Qwen/Qwen3-4B", "--list"], 2, "bad_usage"),
        (["Qwen/Qwen3-4B", "--context", "0"], 2, "bad_value"),
        (["Qwen/Qwen3-4B-Base", "--offline"], 3, "draft_not_found"),
        (["./none-such", "--offline"], 3, "model_not_found"),
        (["z-lab/Qwen3-4B-DFlash-b16"], 4, "model_is_draft"),
    ],
)
def test_a_wrong_call_is_one_envelope_with_its_exit_code(arguments, status, code, tmp_path):
    got, said, _ = script.run("resolve_draft", *arguments, cwd=tmp_path)
    assert (got, said["ok"], said["error"]["code"]) == (status, False, code)
    assert said["error"]["hint"]


def test_a_packed_draft_is_planned_as_it_will_run(tmp_path):
    folders = [
        make(tmp_path / name, hidden_size=64) for make, name in ((pair.target, "t"), (pair.draft, "d"))
    ]
    look = partial(survey, cache_dir=None)
    made = {
        bits: answer(str(folders[0]), str(folders[1]), 64, look, ROOMY, print, draft_bits=bits, offline=True)
        for bits in ("auto", "none", 8, 4)
    }
    memory = {bits: result["memory"] for bits, result in made.items()}
    assert memory["auto"] == memory["none"] and memory["auto"]["draft_bits"] is None
    assert memory[4]["draft_bytes"] < memory[8]["draft_bytes"] < memory["none"]["draft_bytes"]
    assert (memory[4]["draft_bits"], memory[4]["run_dtype"]) == (4, "float32")
    assert "--draft-bits 4" in made[4]["command"] and "--draft-bits" not in made["auto"]["command"]
