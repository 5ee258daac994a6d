"""Downloads from a stub hub: what is fetched, what is reused, and what each failure is called."""

from __future__ import annotations

import contextlib
import errno
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import hub_stub
import pytest
from hub_stub import COMMIT, HubStub, Repo

from dflash.errors import (
    DiskFull,
    GatedModel,
    HubFailed,
    HubUnreachable,
    ModelNotFound,
    NotFound,
    UnsupportedModel,
)
from dflash.models import hub

NAME = "owner/model"


def safetensors(values: int = 4) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * values)


def model_files() -> dict[str, bytes]:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"w": shards[0], "v": shards[1]}}
    small = [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    ]
    return {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        shards[0]: safetensors(4),
        shards[1]: safetensors(8),
        **{name: name.encode() for name in small},
    }


UNWANTED = [
    "README.md",
    "modeling_llama.py",
    "tokenizer_custom.py",
    "pytorch_model.bin",
    "model.pt",
    "model.gguf",
    "consolidated.safetensors",
    "onnx/model.onnx",
    "original/model.safetensors",
    "tokenizer.bin",
]


@pytest.fixture
def stub() -> Iterator[HubStub]:
    files = model_files() | dict.fromkeys(UNWANTED, b"not wanted")
    with hub_stub.running(owner__model=Repo(files)) as running:
        yield running


def fetch(stub: HubStub, cache: Path, **options: object) -> Path:
    options = {"cache_dir": cache, "progress": False, "endpoint": stub.url} | options
    return hub.snapshot(NAME, **options)


def test_a_snapshot_holds_exactly_the_files_that_a_model_needs(stub: HubStub, tmp_path: Path) -> None:
    folder = fetch(stub, tmp_path)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == model_files()
    assert stub.fetched() == set(model_files())


def test_weights_come_last_so_that_a_snapshot_with_weights_is_complete() -> None:
    ordered = hub.needed([*UNWANTED, *model_files()])
    assert set(ordered) == set(model_files())
    assert [name.endswith(".safetensors") for name in ordered] == [False] * (len(ordered) - 2) + [True] * 2


def test_weights_under_another_name_are_found_and_copies_in_other_layouts_are_not() -> None:
    names = ["config.json", "consolidated.safetensors", "adapter_model.safetensors", "draft.safetensors"]
    assert hub.needed(names) == ["config.json", "draft.safetensors"]


def test_a_second_call_asks_for_the_listing_and_fetches_nothing(stub: HubStub, tmp_path: Path) -> None:
    first = fetch(stub, tmp_path)
    stub.requests.clear()
    assert fetch(stub, tmp_path) == first
    assert stub.fetched() == set()


def test_only_missing_files_are_fetched_after_an_interrupted_download(stub: HubStub, tmp_path: Path) -> None:
    lost = fetch(stub, tmp_path) / "model-00002-of-00002.safetensors"
    lost.resolve().unlink()
    lost.unlink()
    stub.requests.clear()
    folder = fetch(stub, tmp_path)
    assert stub.fetched() == {lost.name}
    assert (folder / lost.name).read_bytes() == model_files()[lost.name]


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(stub: HubStub, tmp_path: Path) -> None:
    name = "model-00002-of-00002.safetensors"
    large = stub.repos[NAME].files[name] = safetensors(3_500_000)
    stub.cut_after = 12_000_000  # past the first of the pieces in which huggingface_hub writes to disk
    with contextlib.suppress(
        HubUnreachable
    ):  # before its 1.0 huggingface_hub leaves going on to the next call
        fetch(stub, tmp_path)
    assert (fetch(stub, tmp_path) / name).read_bytes() == large
    ranges = [asked for method, path, asked in stub.requests if method == "GET" and path.endswith(name)]
    assert len(ranges) == 2
    assert ranges[1] not in (None, "bytes=0-")


def test_a_complete_snapshot_is_found_without_a_network(stub: HubStub, tmp_path: Path) -> None:
    assert hub.cached(NAME, cache_dir=tmp_path) is None
    folder = fetch(stub, tmp_path)
    stub.requests.clear()
    assert hub.cached(NAME, cache_dir=tmp_path) == folder
    assert hub.cached(NAME, revision=COMMIT, cache_dir=tmp_path) == folder
    assert hub.cached(NAME, revision="other", cache_dir=tmp_path) is None
    assert fetch(stub, tmp_path, offline=True) == folder
    assert stub.requests == []


@pytest.mark.parametrize(
    "lost", ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_a_snapshot_with_a_file_missing_does_not_count_as_cached(
    stub: HubStub, tmp_path: Path, lost: str
) -> None:
    (fetch(stub, tmp_path) / lost).unlink()
    assert hub.cached(NAME, cache_dir=tmp_path) is None


def test_a_cached_snapshot_serves_while_the_hub_is_away(
    stub: HubStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch(stub, tmp_path)
    stub.status = 503
    assert fetch(stub, tmp_path, progress=True) == folder
    assert fetch(stub, tmp_path, endpoint="http://127.0.0.1:9") == folder
    out, err = capsys.readouterr()
    assert out == ""
    assert "using the copy of owner/model on this disk" in err


def test_offline_without_a_copy_says_so_and_asks_nobody(stub: HubStub, tmp_path: Path) -> None:
    with pytest.raises(HubUnreachable, match="offline") as caught:
        fetch(stub, tmp_path, offline=True)
    assert str(tmp_path) in caught.value.message
    assert stub.requests == []


def test_a_hub_that_cannot_be_connected_to_is_unreachable(stub: HubStub, tmp_path: Path) -> None:
    with pytest.raises(HubUnreachable, match="cannot be reached"):
        fetch(stub, tmp_path, endpoint="http://127.0.0.1:9")


def test_a_hub_that_never_answers_is_given_up_after_the_time_limit(stub: HubStub, tmp_path: Path) -> None:
    stub.silent = True
    with pytest.raises(HubUnreachable):
        fetch(stub, tmp_path, timeout_s=0.2)
    with pytest.raises(HubUnreachable):
        hub.read_file(NAME, "config.json", cache_dir=tmp_path, endpoint=stub.url, timeout_s=0.2)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_error_of_the_hub_is_reported_with_its_status(stub: HubStub, tmp_path: Path, status: int) -> None:
    stub.status = status
    with pytest.raises(HubFailed, match=str(status)) as caught:
        fetch(stub, tmp_path)
    assert caught.value.code == "hub_failed"
    assert caught.value.details["status"] == status


def test_a_missing_repository_is_named_and_the_double_meaning_of_401_is_said(
    stub: HubStub, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotFound, match=r"owner/other.*private.*401"):
        hub.snapshot("owner/other", cache_dir=tmp_path, endpoint=stub.url, progress=False)


def test_a_missing_revision_is_not_a_missing_model(stub: HubStub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="has no revision v9"):
        fetch(stub, tmp_path, revision="v9")


def test_a_gated_repository_is_told_from_a_missing_one(tmp_path: Path) -> None:
    with hub_stub.running(owner__model=Repo(model_files(), gated=True)) as stub:
        with pytest.raises(GatedModel, match="accepted terms") as caught:
            fetch(stub, tmp_path)
        assert "hf auth login" in caught.value.hint


def test_a_repository_without_safetensors_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with hub_stub.running(owner__model=Repo({"model-Q4_0.gguf": b"x", "config.json": b"{}"})) as stub:
        with pytest.raises(UnsupportedModel, match="without a config"):
            fetch(stub, tmp_path)
        assert stub.fetched() == set()


def test_a_download_larger_than_the_disk_is_refused_with_both_numbers(tmp_path: Path) -> None:
    claimed = {"model-00002-of-00002.safetensors": 10**18}
    with hub_stub.running(owner__model=Repo(model_files(), sizes=claimed)) as stub:
        with pytest.raises(DiskFull) as caught:
            fetch(stub, tmp_path)
        assert stub.fetched() == set()
    details = caught.value.details
    assert details["needed_bytes"] > 10**18 > details["free_bytes"] > 0
    assert f"{details['needed_bytes']:,}" in caught.value.message
    assert f"{details['free_bytes']:,}" in caught.value.message


def test_sizes_are_those_of_the_files_that_would_be_fetched(stub: HubStub) -> None:
    expected = {name: len(content) for name, content in model_files().items()}
    assert hub.file_sizes(NAME, endpoint=stub.url) == expected
    assert stub.fetched() == set()


def test_one_file_is_read_without_the_others_and_from_the_cache_offline(
    stub: HubStub, tmp_path: Path
) -> None:
    with pytest.raises(HubUnreachable):
        hub.read_file(NAME, "config.json", cache_dir=tmp_path, offline=True)
    path = hub.read_file(NAME, "config.json", revision=COMMIT, cache_dir=tmp_path, endpoint=stub.url)
    assert path.read_bytes() == model_files()["config.json"]
    assert stub.fetched() == {"config.json"}
    stub.status = 500
    for options in ({"offline": True}, {"endpoint": stub.url}):
        assert hub.read_file(NAME, "config.json", revision=COMMIT, cache_dir=tmp_path, **options) == path


def test_a_file_that_the_repository_lacks_is_named(stub: HubStub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no_such"):
        hub.read_file(NAME, "no_such.json", cache_dir=tmp_path, endpoint=stub.url)


@pytest.mark.parametrize("name", ["two words/x", "a/b/c", "--", ""])
def test_a_name_that_no_repository_can_have_is_not_found(stub: HubStub, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNotFound, match="hub name"):
        hub.snapshot(name, cache_dir=tmp_path, endpoint=stub.url, progress=False)
    assert hub.cached(name, cache_dir=tmp_path) is None
    assert stub.requests == []


def test_a_cache_folder_that_cannot_be_written_is_named(stub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFound, match=r"file.*cannot be written"):
        fetch(stub, tmp_path / "file")


def test_a_full_disk_is_recognised_behind_another_error() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = RuntimeError("transfer failed")
    wrapped.__cause__ = full
    native = RuntimeError("IO error: No space left on device (os error 28)")
    for error in (full, wrapped, native):
        assert isinstance(hub.translate(error, NAME), DiskFull)
    assert isinstance(hub.translate(PermissionError(errno.EACCES, "denied", "/x"), NAME), NotFound)
    assert isinstance(hub.translate(OSError("consistency check"), NAME), HubFailed)
    assert hub.translate(ZeroDivisionError(), NAME) is None


def test_progress_goes_to_stderr_and_only_when_asked_for(
    stub: HubStub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fetch(stub, tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    fetch(stub, tmp_path / "loud", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching owner/model: 13 files" in err
