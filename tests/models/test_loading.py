"""From folders to weights: other prefixes, extra and missing tensors, dtypes, and what a model's defaults may do."""

import json

import mlx.core as mx
import mlx.nn as nn
import pair
import pytest
import tiny
from mlx.utils import tree_flatten

from dflash import DFlashConfig, DFlashRuntime
from dflash.errors import BadCheckpoint
from dflash.models.loading import load_draft, load_target


def changed(folder, change):
    """The folder with `change` made to its tensors, a dict."""
    file = str(folder / "model.safetensors")
    tensors = change(mx.load(file))
    mx.eval(tensors)  # what is still to be read would be read from the file that is being written
    mx.save_safetensors(file, tensors)
    return folder


def rewritten(folder, rename):
    """The folder with every tensor name passed through `rename`."""
    return changed(folder, lambda tensors: {rename(name): array for name, array in tensors.items()})


def add(folder, tensors):
    return changed(folder, lambda own: own | tensors)


def in_dtype(folder, dtype):
    return changed(folder, lambda tensors: {name: array.astype(dtype) for name, array in tensors.items()})


def answer(folder):
    runtime = DFlashRuntime.from_pretrained(str(folder), config=DFlashConfig(mode="baseline"))
    return runtime.generate("abc", use_chat_template=False, max_tokens=12, ignore_eos=True).tokens


def test_a_vision_checkpoint_gives_its_text_model(tmp_path):
    """Text weights under another prefix; vision and multi-token-prediction weights beside them are left out."""
    plain = pair.target(tmp_path / "plain", "qwen3_5")
    expected = answer(plain)
    vision = rewritten(
        pair.target(tmp_path / "vision", "qwen3_5"),
        lambda name: name.replace("language_model.model.", "model.language_model."),
    )
    add(vision, {"model.visual.patch.weight": mx.zeros((3, 3)), "mtp.layers.0.norm.weight": mx.zeros((48,))})
    assert answer(vision) == expected


WRAPPED = {  # a vision family -> its text family
    "gemma3": ("gemma3_text", {}),
    "gemma4": ("gemma4_text", {}),
    "mistral3": ("ministral3", {}),
    "mistral3 of llama": ("llama_sliding", {"model_type": "llama"}),
    "kimi_k25": ("deepseek_v3", {}),
}
WRAPPED = {name: entry for name, entry in WRAPPED.items() if entry[0] in tiny.ALL}
EXTRA = ("vision_tower.patch.weight", "multi_modal_projector.linear.weight", "mtp.layers.0.norm.weight")
LAYOUTS = {
    "as mlx-lm writes it": (lambda name: f"language_model.{name}", lambda name: name),
    "as transformers wrote it": (lambda name: f"language_model.{name}", lambda name: name),
    "as transformers writes it": (
        lambda name: f"model.language_{name}" if name.startswith("model.") else name,
        lambda name: f"model.{name}",
    ),
}


def wrapped(folder, family, layout):
    """The text model of `family` as a checkpoint that also sees images; returns (it, the text model alone)."""
    text, changes = WRAPPED[family]
    plain = pair.target(folder / "plain", text)
    vision = pair.target(folder / "vision", text)
    config = json.loads((vision / "config.json").read_text())
    settings = {
        "model_type": family.split()[0],
        "vocab_size": config["vocab_size"],
        "text_config": config | changes,
        "eos_token_id": config["eos_token_id"],
    }
    (vision / "config.json").write_text(json.dumps(settings))
    inner, outer = LAYOUTS[layout]
    rewritten(vision, inner)
    return add(vision, {outer(name): mx.zeros((3,)) for name in EXTRA}), plain


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", WRAPPED)
def test_a_windowed_vision_checkpoint_gives_its_text_model(tmp_path, family, layout):
    vision, plain = wrapped(tmp_path, family, layout)
    loaded = load_target(vision, widen=True)
    assert loaded.why_plain is None
    text = load_target(plain, widen=True)
    assert (loaded.adapter.kind, loaded.adapter.vocab_size) == (text.adapter.kind, text.adapter.vocab_size)
    tokens = mx.arange(3 * tiny.WINDOW)[None]
    ours, theirs = (t.adapter.logits(t.adapter.start((0,)).forward(tokens).hidden) for t in (loaded, text))
    assert mx.array_equal(ours, theirs)


def test_heads_for_several_tokens_do_not_change_how_norms_are_read(tmp_path):
    """mlx-lm 0.31 takes them for a sign of unconverted weights, and a converted checkpoint answers gibberish."""
    folder = pair.target(tmp_path / "heads", "qwen3_5")
    expected = answer(folder)
    add(folder, {"language_model.mtp.layers.0.norm.weight": mx.zeros((48,))})
    assert answer(folder) == expected


def test_a_prefix_that_no_family_knows_is_an_error_that_names_tensors(tmp_path):
    folder, _ = wrapped(tmp_path, "gemma3", "as mlx-lm writes it")
    rewritten(folder, lambda name: f"thinker.{name}")
    with pytest.raises(BadCheckpoint, match=r"thinker\.language_model\.model"):
        load_target(folder, widen=True)


@pytest.mark.parametrize("gone", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor_is_named(tmp_path, gone):
    folder = pair.target(tmp_path / "hole")
    changed(folder, lambda tensors: {name: array for name, array in tensors.items() if name != gone})
    with pytest.raises(BadCheckpoint, match=gone):
        load_target(folder, widen=True)


def test_an_unknown_tensor_is_refused_by_name_and_not_loaded_anywhere(tmp_path):
    folder = add(pair.target(tmp_path / "extra"), {"model.layers.0.mtp_head.weight": mx.zeros((4, 4))})
    with pytest.raises(BadCheckpoint, match=r"mtp_head"):
        load_target(folder, widen=True)


def test_a_sharded_checkpoint_loads_like_a_whole_one(tmp_path):
    folder = pair.target(tmp_path / "whole")
    expected = answer(folder)
    weights = mx.load(str(folder / "model.safetensors"))
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in parts.items():
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in some})
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert answer(folder) == expected
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="00002-of-00002"):
        answer(folder)


def quantised(folder):
    """The tiny target in 8 bits, as mlx-lm stores it."""
    config = json.loads((folder / "config.json").read_text())
    model_class, args_class = tiny._get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.load_weights(str(folder / "model.safetensors"))
    nn.quantize(model, group_size=32, bits=8)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    settings = {"quantization": {"group_size": 32, "bits": 8}}
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def test_widened_quantised_weights_are_exactly_the_values_they_stand_for(tmp_path):
    folder = quantised(pair.target(tmp_path / "q", hidden_size=64, intermediate_size=64))
    stored = load_target(folder, widen=False).model.model.layers[0].mlp.up_proj
    wide = load_target(folder, widen=True).model.model.layers[0].mlp.up_proj
    assert isinstance(stored, nn.QuantizedLinear) and type(wide) is nn.Linear
    exact = mx.dequantize(stored.weight, stored.scales, stored.biases, group_size=32, bits=8)
    assert wide.weight.dtype == mx.float32
    assert mx.array_equal(wide.weight, exact)


def test_half_precision_weights_are_widened_or_kept_as_asked(tmp_path):
    folder = in_dtype(pair.target(tmp_path / "half"), mx.bfloat16)
    for widen, dtype in ((True, mx.float32), (False, mx.bfloat16)):
        model = load_target(folder, widen=widen).model
        assert {array.dtype for _, array in tree_flatten(model.parameters())} == {dtype}


def test_a_draft_never_runs_in_fp16(tmp_path):
    folder = in_dtype(pair.target(tmp_path / "t"), mx.float16)
    target = load_target(folder, widen=False)
    draft = load_draft(pair.draft(tmp_path / "d"), target.adapter, widen=False)
    assert {array.dtype for _, array in tree_flatten(draft.parameters())} == {mx.bfloat16}
    drafter = draft.start(target.adapter)
    drafter.observe(target.adapter.start(draft.taps).forward(mx.array([[1, 2, 3]])).taps)
    assert drafter.propose(mx.array([[4]]), 3).tokens.shape == (1, 3)


def test_sampling_defaults_of_a_model_do_not_make_decoding_random(tmp_path):
    folder = pair.target(tmp_path / "warm")
    expected = answer(folder)
    defaults = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "eos_token_id": pair.END}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    assert answer(folder) == expected


@pytest.mark.parametrize(("family", "layers"), [("qwen3_5", 4), ("gpt_oss", 3), ("gemma3_text", 3)])
def test_a_pair_of_every_kind_runs_end_to_end(tmp_path, family, layers):
    target = pair.target(tmp_path / "target", family)
    draft = pair.draft(tmp_path / "draft", num_target_layers=layers)
    drafted = DFlashRuntime.from_pretrained(str(target), str(draft), DFlashConfig(draft_block_size=8))
    result = drafted.generate("abc", use_chat_template=False, max_tokens=40, ignore_eos=True)
    plain = DFlashRuntime.from_pretrained(str(target), config=DFlashConfig(mode="baseline"))
    assert (
        result.tokens == plain.generate("abc", use_chat_template=False, max_tokens=40, ignore_eos=True).tokens
    )
    assert result.mode == "dflash"
