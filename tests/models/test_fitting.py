"""What fits how, decided before a byte is allocated."""

import pair
import pytest

from dflash.errors import DoesNotFit
from dflash.models.fitting import fit
from dflash.plan import Machine


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("pair")
    return pair.target(base / "target"), pair.draft(base / "draft")


def cpu(usable):
    return Machine("cpu", usable, usable, "float32")


def halved(tmp_path):
    """The tiny target in fp16: as fp32 it needs twice what it is stored in."""
    import mlx.core as mx

    folder = pair.target(tmp_path / "half", hidden_size=768, intermediate_size=2048)
    weights = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(
        str(folder / "model.safetensors"), {k: v.astype(mx.float16) for k, v in weights.items()}
    )
    return folder, sum(v.nbytes for v in weights.values()) // 2


def test_a_cpu_with_room_widens(folders):
    found = fit(*folders, machine=cpu(10**9))
    assert found.widen and found.notice is None


def test_a_gpu_runs_weights_as_they_are_stored(folders):
    assert not fit(*folders, machine=Machine("gpu", 10**9, 10**9, None)).widen


def test_a_cpu_without_room_for_fp32_runs_as_stored_and_says_so(tmp_path):
    folder, stored = halved(tmp_path)
    found = fit(folder, None, context=8, machine=cpu(int(stored * 1.5)))
    assert not found.widen
    assert found.notice.code == "runs_as_stored"


def test_what_fits_neither_way_is_refused_with_both_numbers(tmp_path):
    folder, stored = halved(tmp_path)
    with pytest.raises(DoesNotFit, match="usable") as caught:
        fit(folder, None, machine=cpu(stored // 2))
    details = caught.value.details
    assert details["needed_bytes"] > details["usable_bytes"] == stored // 2


def test_a_context_that_is_too_long_names_one_that_fits(folders):
    with pytest.raises(DoesNotFit) as caught:
        fit(*folders, context=500, machine=cpu(3_500_000))
    largest = caught.value.details["largest_context"]
    assert 0 < largest < 500
    assert f"--max-ctx {largest}" in caught.value.hint
    assert fit(*folders, context=largest, machine=cpu(3_500_000)).widen is not None
