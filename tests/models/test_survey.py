"""What is known of a model before it is fetched: from this disk, from a stub hub, and when neither tells."""

import json

import hub_stub
import pair
import pytest
from hub_stub import Repo

from dflash.errors import BadCheckpoint, GatedModel, HubUnreachable, ModelNotFound, UnsupportedModel
from dflash.models import embedded
from dflash.models.survey import survey

UNREACHABLE = "http://127.0.0.1:9"  # the discard port: nobody listens


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return pair.target(tmp_path_factory.mktemp("survey") / "target")


def repo(folder, **changes):
    return Repo({file.name: file.read_bytes() for file in folder.iterdir()}, **changes)


def test_a_folder_tells_everything_and_needs_no_download(target):
    found = survey(str(target))
    assert found.path == target and found.download_bytes == 0 and found.problem is None
    assert found.config["model_type"] == "llama"
    assert found.stored_bytes == sum(info.nbytes for info in found.tensors.values()) > 0


def test_damaged_weights_are_a_finding_and_the_config_still_counts(tmp_path):
    folder = pair.target(tmp_path / "target")
    (folder / "model.safetensors").write_bytes(b"short")
    found = survey(str(folder))
    assert isinstance(found.problem, BadCheckpoint)
    assert found.config["model_type"] == "llama" and found.stored_bytes is None


@pytest.mark.parametrize("name", ["./none", "/none/such", "~/none-such", "models/none.gguf", "bare-word"])
def test_a_path_or_word_that_is_nothing_is_not_found_without_asking_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with hub_stub.running() as stub, pytest.raises(ModelNotFound):
        survey(name, endpoint=stub.url, cache_dir=tmp_path)
    assert stub.requests == []


def test_a_folder_that_is_no_model_is_not_found(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        survey(str(tmp_path))


def test_a_gguf_file_tells_its_size(tmp_path):
    (tmp_path / "m.gguf").write_bytes(bytes(100))
    found = survey(str(tmp_path / "m.gguf"))
    assert (found.stored_bytes, found.download_bytes, found.config) == (100, 0, None)


def test_the_embedded_draft_lies_in_the_package(tmp_path):
    for name in (embedded.DEFAULT.name, embedded.DEFAULT.draft):
        found = survey(name, "draft", cache_dir=tmp_path)
        assert found.path == embedded.DEFAULT.draft_folder and found.stored_bytes > 0


def test_the_embedded_target_is_known_once_it_was_made(tmp_path):
    assert survey(embedded.DEFAULT.name, cache_dir=tmp_path).path is None
    made = pair.target(embedded.target_folder(embedded.DEFAULT, tmp_path))
    assert survey(embedded.DEFAULT.name, cache_dir=tmp_path).path == made


def test_the_hub_tells_sizes_and_config_and_no_weight_is_fetched(target, tmp_path):
    with hub_stub.running(owner__model=repo(target)) as stub:
        found = survey("owner/model", endpoint=stub.url, cache_dir=tmp_path)
    assert found.config["model_type"] == "llama" and found.problem is None and found.path is None
    assert found.stored_bytes == (target / "model.safetensors").stat().st_size
    assert found.download_bytes == sum(file.stat().st_size for file in target.iterdir())
    assert stub.fetched() == {"config.json"}


def test_a_gated_repository_lists_sizes_and_says_that_it_is_closed(target, tmp_path):
    with hub_stub.running(owner__model=repo(target, gated=True)) as stub:
        found = survey("owner/model", endpoint=stub.url, cache_dir=tmp_path)
    assert isinstance(found.problem, GatedModel) and found.config is None
    assert found.download_bytes > 0


def test_what_the_hub_does_not_have_is_a_finding(tmp_path):
    with hub_stub.running(owner__gguf=Repo({"a.gguf": b"x"})) as stub:
        missing = survey("owner/none", endpoint=stub.url, cache_dir=tmp_path)
        other = survey("owner/gguf", endpoint=stub.url, cache_dir=tmp_path)
    assert isinstance(missing.problem, ModelNotFound)
    assert isinstance(other.problem, UnsupportedModel)


def test_without_a_network_nothing_is_known_and_nothing_raised(tmp_path):
    asked = survey("owner/model", endpoint=UNREACHABLE, cache_dir=tmp_path)
    with hub_stub.running() as stub:
        told_not_to = survey("owner/model", offline=True, endpoint=stub.url, cache_dir=tmp_path)
    assert stub.requests == []
    for found in (asked, told_not_to):
        assert isinstance(found.problem, HubUnreachable) and found.download_bytes is None


def test_a_broken_config_of_a_named_folder_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(BadCheckpoint):
        survey(str(tmp_path))
