"""Drafts in less memory: what is packed, when, what it takes, and the packed draft on disk again."""

import json

import mlx.core as mx
import mlx.nn as nn
import pair
import pytest
import script
from mlx.utils import tree_flatten

from dflash import DFlashConfig, DFlashRuntime
from dflash.drafts.checkpoint import DraftConfig
from dflash.drafts.dflash2 import DFlash2Draft
from dflash.errors import BadValue
from dflash.models import headers
from dflash.models.draft_bits import Step, ladder, quantise, save, weight_bytes
from dflash.models.fitting import fit
from dflash.models.loading import load_draft, load_target
from dflash.plan import Machine

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # groups of 64 have to go into every row
CPU = Machine("cpu", 1 << 34, 1 << 34, "float32")
NARROW = Machine("cpu", 1 << 34, 1 << 34, None)
GPU = Machine("gpu", 1 << 34, 1 << 34, None)
SETTINGS = {"use_chat_template": False, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("pair")
    return pair.target(base / "target", **WIDE), pair.draft(base / "draft", **WIDE)


@pytest.fixture(scope="module")
def target(folders):
    return load_target(folders[0], widen=True)


def packed_modules(draft):
    return {name for name, module in draft.named_modules() if isinstance(module, nn.QuantizedLinear)}


def nbytes(module):
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def test_only_the_large_linear_layers_are_packed():
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 64, "selector_top_k": 4}
    settings = pair.draft_config(architectures=["DFlash2DraftModel"], **WIDE, **sizes)
    draft = DFlash2Draft(DraftConfig.from_json(settings))
    quantise(draft, 4)
    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    expected = {f"layers.{i}.{name}" for i in range(draft.config.num_layers) for name in layer}
    assert packed_modules(draft) == {"fc", *expected}


@pytest.mark.parametrize("bits", [8, 4])
def test_the_answer_is_the_targets_and_the_plan_knows_the_bytes(folders, target, bits):
    draft = load_draft(folders[1], target.adapter, widen=True, bits=bits)
    assert nbytes(draft) == weight_bytes(headers.tensors(folders[1]), None, "float32", bits)
    assert nbytes(draft) < 0.5 * nbytes(load_draft(folders[1], target.adapter, widen=True))
    drafted = DFlashRuntime(target, draft, DFlashConfig(draft_block_size=8))
    plain = DFlashRuntime(target, config=DFlashConfig(mode="baseline"))
    assert drafted.generate("abc", **SETTINGS).tokens == plain.generate("abc", **SETTINGS).tokens
    assert drafted.draft_bits == bits and plain.draft_bits is None


def test_a_saved_draft_loads_as_it_was_packed(folders, target, tmp_path):
    kept = tmp_path / "deep" / "kept"
    (folders[1] / "README.md").write_text("a card")
    packed = load_draft(folders[1], target.adapter, widen=False, bits=8, save_to=kept)
    config = json.loads((kept / "config.json").read_text())
    assert config["quantization"] == {"group_size": 64, "bits": 8}
    assert (kept / "README.md").read_text() == "a card"
    again = load_draft(kept, target.adapter, widen=False)
    assert packed_modules(again) == packed_modules(packed) != set()
    equal = zip(tree_flatten(packed.parameters()), tree_flatten(again.parameters()), strict=True)
    assert all(one == other and mx.array_equal(a, b) for (one, a), (other, b) in equal)
    wide = load_draft(kept, target.adapter, widen=True)
    assert packed_modules(wide) == set() and wide.dtype == mx.float32
    with pytest.raises(BadValue, match="exists"):
        save(packed, folders[1], kept)


def test_what_is_stored_packed_is_not_packed_otherwise(folders, target, tmp_path):
    kept = tmp_path / "kept"
    load_draft(folders[1], target.adapter, widen=False, bits=8, save_to=kept)
    assert packed_modules(load_draft(kept, target.adapter, widen=True, bits=8))
    with pytest.raises(BadValue, match="8 bits and cannot be packed to 4"):
        load_draft(kept, target.adapter, widen=True, bits=4)


@pytest.mark.parametrize(
    ("machine", "asked", "draft", "steps"),
    [
        (CPU, "auto", {}, [(CPU, None), (NARROW, None), (NARROW, 8), (NARROW, 4)]),
        (GPU, "auto", {}, [(GPU, None), (GPU, 8), (GPU, 4)]),
        (GPU, "none", {}, [(GPU, None)]),
        (CPU, "none", {}, [(CPU, None), (NARROW, None)]),
        (CPU, 4, {}, [(CPU, 4), (NARROW, 4)]),
        (GPU, 8, {}, [(GPU, 8)]),
        (GPU, "auto", {"quantization": {"bits": 4}}, [(GPU, None)]),
        (GPU, "auto", None, [(GPU, None)]),
    ],
)
def test_packing_is_the_last_resort_unless_it_was_asked_for(machine, asked, draft, steps):
    assert list(ladder(machine, asked, draft)) == [Step(*step) for step in steps]


def test_the_draft_is_packed_where_the_pair_would_not_fit_and_the_result_can_say_why(folders):
    roomy = fit(*folders, machine=GPU)
    assert (roomy.draft_bits, roomy.notice) == (None, None) and "fits" in roomy.draft_reason
    stored = sum(info.nbytes for folder in folders for info in headers.tensors(folder).values())
    found = {}
    for usable in range(stored * 3, 0, -20_000):
        try:
            fitted = fit(*folders, context=8, machine=Machine("gpu", usable, usable, None))
        except Exception:
            break
        found.setdefault(fitted.draft_bits, fitted)
    assert list(found) == [None, 8, 4]
    assert found[8].notice.code == "draft_packed" and "usable" in found[8].notice.message
    assert "packed to fit" in found[4].draft_reason


def test_flags_reach_the_result_and_the_saved_draft_runs(folders, tmp_path):
    call = ["generate", "abc", "--model", folders[0], "--no-chat-template", "--max-tokens", 6]
    kept = tmp_path / "kept"
    status, said, _ = script.run(*call, "--draft", folders[1], "--draft-bits", 8, "--save-draft", kept)
    assert status == 0 and said["result"]["draft_weights"] == {"bits": 8, "reason": "asked for 8 bits"}
    status, again, _ = script.run(*call, "--draft", kept)
    assert status == 0 and again["result"]["draft_weights"]["reason"].startswith("stored in 8 bits")
    assert again["result"]["text"] == said["result"]["text"]


@pytest.mark.parametrize("flags", ["--save-draft x", "--draft-bits 5", "--draft-bits none --save-draft x"])
def test_calls_that_make_no_sense_are_refused(folders, flags):
    status, said, _ = script.run(
        "generate", "abc", "--model", folders[0], "--draft", folders[1], *flags.split()
    )
    assert status == 2 and said["error"]["code"] in ("bad_usage", "bad_value")
