"""The registry: one model has many names, and a similar name is another model."""

import json
import subprocess
import sys

import pair
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.drafts.checkpoint import DraftConfig
from dflash.errors import DFlashError, DraftNotFound, ModelIsDraft
from dflash.models import embedded, registry
from dflash.models.registry import base_name, difference, entries, lookup, parse

TARGETS = {target.name: target for target in entries()}
RUNNABLE = sorted(name for name, target in TARGETS.items() if target.runnable)
OWNERS = ["", "mlx-community/", "Qwen/", "lmstudio-community/", "some.one/"]
STORAGE = [
    *("-4bit", "-8bit", "-3.5bit", "-4-bit", "-4.5bpw-exl2", "-bf16", "-fp16", "-F16", "-float32"),
    *("-mxfp4", "-MXFP4-Q4", "-nvfp4", "-NVFP4A16", "-FP8", "-FP8-dynamic", "-quantized.w4a16", "-mixed_3_6"),
    *("-DWQ", "-4bit-DWQ-053125", "-4bit-DWQ-v2", "-qat-4bit", "-AWQ", "-GPTQ-Int4", "-unsloth-bnb-4bit"),
    *("-8bit-gs32", "-4bit-g64", "-group-size-128", "-oQ6", "-MLX", "-MLX-8bit", "-GGUF", "-i1-GGUF"),
    *("-UD-Q4_K_XL", "-Q8_0", "-IQ4_XS", ".Q4_K_M.gguf", "-Q4_K_M-00001-of-00002.gguf"),
]
OTHER_MODELS = ["Base", "Thinking", "Thinking-2507", "2507", "abliterated", "Uncensored-v2", "2", "1M"]


def known_pair(**changes):
    """A registry of one target, as TOML; a value of None leaves a key out."""
    draft = {"repo": "z-lab/A-1B-DFlash", "generation": 1, "layout": "z-lab"}
    draft |= {k[6:]: v for k, v in changes.items() if k.startswith("draft_")}
    target = {"name": "owner/A-1B", "kind": "attention"}
    target |= {k: v for k, v in changes.items() if not k.startswith("draft_")}
    lines = ["[[target]]", *(f"{k} = {json.dumps(v)}" for k, v in target.items() if v is not None)]
    lines += ["[[target.draft]]", *(f"{k} = {json.dumps(v)}" for k, v in draft.items() if v is not None)]
    return "\n".join(lines)


# ---------------------------------------------------------------- the same model under other names


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_target_finds_its_first_draft_by_its_own_name(name):
    match = lookup(name)
    assert (match.target, match.draft) == (name, TARGETS[name].runnable[0].repo)
    assert name in match.reason and match.draft in match.reason


@given(
    st.sampled_from(RUNNABLE),
    st.sampled_from(OWNERS),
    st.lists(st.sampled_from(STORAGE), max_size=2),
    st.sampled_from([str, str.lower, str.upper]),
)
def test_owner_storage_format_and_case_do_not_matter(name, owner, storage, case):
    spelled = owner + case(name.partition("/")[2]) + "".join(storage)
    assert lookup(spelled).target == name


@pytest.mark.parametrize("name", RUNNABLE)
def test_uploaders_who_write_the_owner_into_the_name_are_understood(name):
    assert lookup(f"bartowski/{name.replace('/', '_')}-GGUF").target == name


def test_meta_llama_and_llama_are_one_name():
    for name in ("meta-llama/Meta-Llama-3.1-8B-Instruct", "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"):
        assert lookup(name).target == "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize("pair", embedded.PAIRS, ids=lambda pair: pair.name)
def test_the_embedded_pair_is_known_by_all_its_names(pair):
    for name in (*pair.names, pair.name.upper()):
        assert lookup(name).draft == pair.draft


def test_the_base_model_on_the_hub_is_not_the_embedded_pair_of_the_same_word():
    with pytest.raises(DraftNotFound) as error:
        lookup("HuggingFaceTB/SmolLM2-135M")
    assert "without 'Instruct'" in error.value.message


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_word_of_a_targets_own_name_is_taken_for_a_storage_format(name):
    assert base_name(name) == name.partition("/")[2]


# ---------------------------------------------------------------- other models


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_further_word_makes_another_model(name):
    for word in OTHER_MODELS:
        with pytest.raises(DraftNotFound) as error:
            lookup(f"{name}-{word}-4bit")
        nearest = error.value.details["nearest"][0]
        assert nearest == {"target": name, "difference": f"'{word}' makes it another model"}


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_word_in_front_makes_another_model(name):
    with pytest.raises(DraftNotFound):
        lookup(f"someone/DeepThought-{name.partition('/')[2]}")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-7B", "Qwen/Qwen4-8B", "google/gemma-4-12B", "gpt-oss-21b"])
def test_another_size_or_version_is_another_model(name):
    with pytest.raises(DraftNotFound):
        lookup(name)


def test_a_miss_says_what_is_near_and_what_differs():
    with pytest.raises(DraftNotFound) as error:
        lookup("mlx-community/Qwen3-4B-Thinking-2507-4bit")
    assert error.value.exit_status == 3
    assert "nearest: Qwen/Qwen3-4B, but 'Thinking-2507' makes it another model" in error.value.message
    assert "--draft" in error.value.hint and "--mode baseline" in error.value.hint
    assert error.value.details == {
        "model": "mlx-community/Qwen3-4B-Thinking-2507-4bit",
        "nearest": [{"target": "Qwen/Qwen3-4B", "difference": "'Thinking-2507' makes it another model"}],
        "refused": [],
    }


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("Qwen3-7B", "Qwen/Qwen3-8B", "'7B' in place of '8B' makes it another model"),
        ("gemma-4-12B-4bit", "google/gemma-4-12B-it", "without 'it' it is another model"),
        ("Qwen3-4B-Base", "Qwen/Qwen3-4B", "'Base' makes it another model"),
    ],
)
def test_the_difference_is_told_in_words(name, target, said):
    assert difference(name, target) == said


def test_a_name_like_no_other_has_no_nearest():
    with pytest.raises(DraftNotFound) as error:
        lookup("someone/zzzz")
    assert error.value.details["nearest"] == [] and "nearest" not in error.value.message


@given(st.text(max_size=40))
def test_any_text_is_either_found_or_refused(text):
    try:
        assert lookup(text).target in TARGETS
    except (DraftNotFound, ModelIsDraft) as error:
        assert error.details["model"] == text


# ---------------------------------------------------------------- folders and files


def folder(path, **config):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    return str(path)


def test_a_folder_goes_by_its_own_name(tmp_path, monkeypatch):
    path = folder(tmp_path / "Qwen3-4B-4bit", _name_or_path="Qwen/Qwen3-8B")
    monkeypatch.chdir(path)
    for name in (path, f"{path}/", "."):
        assert lookup(name).target == "Qwen/Qwen3-4B"


def test_a_folder_of_another_name_goes_by_the_origin_it_states_and_says_so(tmp_path):
    match = lookup(folder(tmp_path / "mine", _name_or_path="Qwen/Qwen3-8B"))
    assert match.target == "Qwen/Qwen3-8B"
    assert "config.json" in match.reason and "fine-tuned" in match.reason


def test_a_folder_of_the_hubs_cache_goes_by_the_repository(tmp_path):
    path = folder(tmp_path / "models--mlx-community--Qwen3-8B-4bit" / "snapshots" / ("a" * 40))
    assert lookup(path).target == "Qwen/Qwen3-8B"


def test_a_folder_without_a_readable_config_is_only_its_name(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{")
    with pytest.raises(DraftNotFound):
        lookup(str(tmp_path / "mine"))


def test_an_existing_folder_is_not_taken_for_the_embedded_pair(tmp_path, monkeypatch):
    folder(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DraftNotFound):
        lookup("smollm2-135m")


def test_a_gguf_file_goes_by_its_name(tmp_path):
    (tmp_path / "Qwen3-4B-UD-Q4_K_XL.gguf").touch()
    assert lookup(str(tmp_path / "Qwen3-4B-UD-Q4_K_XL.gguf")).target == "Qwen/Qwen3-4B"


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize("repo", [repo for t in entries() for d in t.drafts for repo in (d.repo, *d.mirrors)])
def test_a_draft_as_the_model_is_refused_with_its_target(repo):
    with pytest.raises(ModelIsDraft) as error:
        lookup(repo)
    target = TARGETS[error.value.details["target"]]
    assert repo in {name for d in target.drafts for name in (d.repo, *d.mirrors)}
    assert f"--model {(*target.alias, target.name)[0]}" in error.value.hint


def test_a_quantised_copy_of_a_draft_is_that_draft():
    with pytest.raises(ModelIsDraft) as error:
        lookup("someone/Qwen3-8B-DFlash-b16-4bit")
    assert error.value.hint.endswith("--model Qwen/Qwen3-8B --draft someone/Qwen3-8B-DFlash-b16-4bit")


def test_refused_drafts_are_named_with_the_reason_and_never_chosen():
    with pytest.raises(DraftNotFound) as error:
        lookup("Qwen/Qwen3-14B")
    assert "deepseek-ai/dspark_qwen3_14b_block7" in error.value.message
    assert len(error.value.details["refused"]) == 2
    match = lookup("Qwen/Qwen3-4B")
    assert "deepseek-ai/dflash_qwen3_4b_block7" in {draft.repo for draft in match.refused}
    assert "deepseek-ai/dflash_qwen3_4b_block7" not in {match.draft, *(d.repo for d in match.alternatives)}


def test_official_drafts_come_before_newer_ones_and_newer_before_older():
    drafts = [draft for draft in TARGETS["Qwen/Qwen3.6-27B"].drafts if draft.refused is None]
    ranks = [(draft.official, draft.generation) for draft in drafts]
    assert ranks == [(True, 1), (False, 2), (False, 2), (False, 1)]
    match = lookup("Qwen/Qwen3.6-27B")
    assert match.draft == drafts[0].repo and "official before others" in match.reason


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "Qwen/Qwen3-8B"])
def test_drafts_trained_with_thinking_off_say_so(name):
    assert any("thinking off" in note for note in lookup(name).notes)


def test_gates_licences_and_mirrors_are_told():
    assert lookup("moonshotai/Kimi-K2.6").gated is True
    assert lookup("meta-llama/Llama-3.1-8B-Instruct").target_gated is True
    assert lookup("zai-org/GLM-5.3-Flash").licence == "CC-BY-NC-ND-4.0"
    assert lookup("Qwen/Qwen3.8-27B").mirrors == ("z-lab/Qwen3.8-27B-DFlash2",)


def test_the_registry_chooses_layouts_that_the_checkpoint_reader_takes():
    configs = {"z-lab": pair.draft_config(), "speculators": pair.speculators_config()}
    assert configs.keys() == registry.LAYOUTS
    for config in configs.values():
        assert DraftConfig.from_json(config).taps == (0, 1)
    assert lookup("Qwen/Qwen3-30B-A3B").layout == "speculators"
    with pytest.raises(DraftNotFound, match="hyper-connections"):
        lookup("deepseek-ai/DeepSeek-V4-Flash")


# ---------------------------------------------------------------- the file


def test_the_file_holds_no_geometry():
    """Shapes come from a draft's own config: repositories are re-uploaded in place with others."""
    numbers = [v for t in entries() for d in t.drafts for k, v in vars(d).items() if type(v) is int]
    assert set(numbers) == {1, 2} and len(numbers) == sum(len(t.drafts) for t in entries())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": 16}, "unknown keys: block_size"),
        ({"draft_taps": [1, 9]}, "unknown keys: taps"),
        ({"kind": "recurrent"}, "kind is one of"),
        ({"kind": None}, "lacks a key"),
        ({"draft_repo": None}, "lacks a key"),
        ({"draft_generation": 3}, "generation is one of"),
        ({"draft_layout": "gguf"}, "layout is one of"),
        ({"draft_official": "yes"}, "official must be a bool"),
        ({"draft_mirrors": "a/b"}, "mirrors must be a list of texts"),
        ({"notes": [1]}, "notes must be a list of texts"),
        ({"also": ["A-1B-4bit"]}, "more than once"),
    ],
)
def test_a_mistake_in_the_file_is_an_error_that_names_it(changes, said):
    parse(known_pair())
    with pytest.raises(DFlashError, match=said):
        parse(known_pair(**changes))


def test_a_target_without_drafts_and_foreign_tables_are_mistakes_too():
    with pytest.raises(DFlashError, match="has no draft"):
        parse(known_pair().partition("[[target.draft]]")[0])
    with pytest.raises(DFlashError, match="expected only target"):
        parse(known_pair() + "\n[other]\nx = 1")


def test_a_lookup_imports_neither_mlx_nor_the_hubs_client():
    code = (
        "import sys, dflash.models.registry as r; r.lookup('Qwen/Qwen3-4B');"
        "print([m for m in ('mlx', 'mlx_lm', 'huggingface_hub', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
