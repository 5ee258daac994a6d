"""GGUF files written here, converted, and compared with the model that they were written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_writer
import mlx.core as mx
import numpy as np
import pytest
from gguf_writer import (
    BF16,
    F16,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q6_K,
    Q8_0,
    Tensor,
    byte_level_vocabulary,
    f32,
    geometry,
    q4_0,
    q8_0,
)
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_model, load_tokenizer

from dflash.errors import BadCheckpoint, UnsupportedModel
from dflash.models import gguf, gguf_file, gguf_tensors, gguf_tokenizer


def piece_vocabulary() -> dict[str, Any]:
    """SentencePiece: "▁th" scores better than "he", which comes first only where there is no "▁"."""
    pieces = {"▁": -1.0, "t": -2.0, "h": -3.0, "e": -4.0, "▁t": -0.5, "▁th": -0.6, "he": -0.7}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def original(tied: bool, seed: int = 0) -> llama.Model:
    """A llama with rotary pairs side by side: the order that GGUF files have."""
    mx.random.seed(seed)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        vocab_size=len(byte_level_vocabulary()["tokenizer.ggml.tokens"]),
        rope_theta=5000.0,
        rope_traditional=True,
        tie_word_embeddings=tied,
    )
    model = llama.Model(args)
    # Norms that differ from one, so that a norm in the wrong place shows.
    changed = [(n, a * mx.random.uniform(0.5, 2, a.shape)) for n, a in tree_flatten(model.parameters())]
    model.load_weights(changed)
    return model


def gguf_names(model: llama.Model) -> dict[str, np.ndarray]:
    names = {path: name for name, path in gguf._LAYER.items()}
    tensors = {}
    for name, array in tree_flatten(model.parameters()):
        path = name.removesuffix(".weight")
        if path.startswith("model.layers."):
            _, _, layer, rest = path.split(".", 3)
            tensors[f"blk.{layer}.{names[rest]}.weight"] = np.array(array)
        else:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            tensors[f"{top[path]}.weight"] = np.array(array)
    return tensors


def tensors_of(model: llama.Model) -> dict[str, Tensor]:
    return {name: f32(array) for name, array in gguf_names(model).items()}


def write(path: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    return gguf_writer.write(path / "m.gguf", geometry(**changes) | byte_level_vocabulary(), tensors)


def logits(model: llama.Model) -> np.ndarray:
    return np.array(model(mx.array([[5, 9, 3, 30, 7, 7, 12]])))


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_gives_the_logits_of_the_model_it_was_written_from(
    tmp_path: Path, tied: bool
) -> None:
    model = original(tied)
    gguf.convert(write(tmp_path, tensors_of(model)), tmp_path / "out")
    converted, config = load_model(tmp_path / "out")
    assert config["rope_traditional"] is False
    assert config["tie_word_embeddings"] is tied
    np.testing.assert_allclose(logits(converted), logits(model), rtol=1e-4, atol=1e-5)


def test_rows_left_in_the_file_s_order_would_give_other_logits(tmp_path: Path) -> None:
    model = original(tied=True)
    gguf.convert(write(tmp_path, tensors_of(model)), tmp_path / "out")
    converted, _ = load_model(tmp_path / "out")
    names = {name: mx.array(array) for name, array in gguf_names(model).items()}
    converted.model.layers[0].self_attn.q_proj.weight = names["blk.0.attn_q.weight"]
    assert np.abs(logits(converted) - logits(model)).max() > 1e-2


def test_quantised_tensors_stay_quantised_each_with_its_own_bits(tmp_path: Path) -> None:
    model = original(tied=True)
    arrays = gguf_names(model)
    tensors = {name: f32(array) if array.ndim == 1 else q4_0(array) for name, array in arrays.items()}
    tensors["token_embd.weight"] = q8_0(arrays["token_embd.weight"])
    tensors["blk.1.ffn_up.weight"] = f32(arrays["blk.1.ffn_up.weight"])
    file = write(tmp_path, tensors)
    gguf.convert(file, tmp_path / "out")
    converted, config = load_model(tmp_path / "out")
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    layer = converted.model.layers[1]
    assert (layer.mlp.gate_proj.bits, converted.model.embed_tokens.bits) == (4, 8)
    assert type(layer.mlp.up_proj).__name__ == "Linear"

    stored = mx.load(str(file))  # the same tensors by MLX's own reader of GGUF
    for name in ("token_embd", "blk.0.ffn_down"):
        path = "model.embed_tokens" if name == "token_embd" else "model.layers.0.mlp.down_proj"
        module = dict(converted.named_modules())[path]
        for part in ("weight", "scales", "biases"):
            assert mx.array_equal(getattr(module, part), stored[f"{name}.{part}"])
    rows = converted.model.layers[0].self_attn.k_proj
    by_rows = [mx.dequantize(rows.weight, rows.scales, rows.biases, group_size=32, bits=4)]
    by_rows.append(
        mx.dequantize(*(stored[f"blk.0.attn_k.{p}"] for p in ("weight", "scales", "biases")), 32, 4)
    )
    assert sorted(by_rows[0].tolist()) == sorted(by_rows[1].tolist())
    assert by_rows[0].tolist() != by_rows[1].tolist()


def random_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def blocks(kind: int, count: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a tensor type with sane half-precision factors, as bytes (count, block size)."""
    size, factors = {
        Q4_0: (18, [0]),
        Q4_1: (20, [0, 2]),
        Q8_0: (34, [0]),
        Q4_K: (144, [0, 2]),
        Q6_K: (210, [208]),
    }[kind]
    data = random_bytes(count * size, seed).reshape(count, size)
    for number, start in enumerate(factors):
        halves = np.random.default_rng(seed + 1 + number).uniform(1e-3, 2e-2, count).astype("<f2")
        data[:, start : start + 2] = halves.view(np.uint8).reshape(count, 2)
    return data


@pytest.mark.parametrize(("kind", "name"), [(Q4_0, "Q4_0"), (Q8_0, "Q8_0"), (Q6_K, "Q6_K")])
def test_a_tensor_type_decodes_as_by_mlx_s_own_reader(tmp_path: Path, kind: int, name: str) -> None:
    data, shape = blocks(kind, 6 if kind == Q6_K else 48).reshape(-1), (3, 512)
    file = gguf_writer.write(tmp_path / "t.gguf", {"a": 1}, {"t.weight": Tensor(shape, kind, data.tobytes())})
    expected = mx.load(str(file))
    arrays = gguf_tensors.decode(name, data, shape).named("t")
    assert arrays.keys() == expected.keys()
    for key, array in arrays.items():
        assert array.dtype == expected[key].dtype
        assert mx.array_equal(array, expected[key]), key


# No reference for these is MLX's reader of GGUF: older releases get the first wrong, newer ones the second.
@pytest.mark.parametrize(("kind", "name", "count"), [(Q4_1, "Q4_1", 32), (Q4_K, "Q4_K", 4)])
def test_a_tensor_type_decodes_as_its_definition_says(kind: int, name: str, count: int) -> None:
    data = blocks(kind, count)
    weight = gguf_tensors.decode(name, data.reshape(-1), (2, 512))
    found = mx.dequantize(*(mx.array(a) for a in (weight.weight, weight.scales, weight.biases)), 32, 4)
    define = {"Q4_1": q4_1_block, "Q4_K": q4_k_block}[name]
    expected = np.stack([define(block) for block in data]).reshape(2, 512)
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, rtol=2e-3, atol=2e-3)


def q4_1_block(block: np.ndarray) -> np.ndarray:
    """The 32 weights of one block: a scale, a minimum, 16 quants in low nibbles, 16 in high ones."""
    scale, minimum = (float(block[at : at + 2].view("<f2")[0]) for at in (0, 2))
    return scale * np.concatenate([block[4:] & 15, block[4:] >> 4]).astype(np.float32) + minimum


def q4_k_block(block: np.ndarray) -> np.ndarray:
    """The 256 weights of one block, one group after the other, from the description of the format."""
    factor, least = (float(block[at : at + 2].view("<f2")[0]) for at in (0, 2))
    packed, quants = [int(byte) for byte in block[4:16]], block[16:]
    groups = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        shared = quants[group // 2 * 32 : group // 2 * 32 + 32]
        values = shared >> 4 if group % 2 else shared & 15
        groups.append(factor * scale * values.astype(np.float32) - least * minimum)
    return np.concatenate(groups)


def test_bfloat16_keeps_numbers_that_half_precision_cannot_hold() -> None:
    values = mx.array([1e-30, 3e38, -1.5, 0.0]).astype(mx.bfloat16)
    data = np.array(values.view(mx.uint16)).view(np.uint8)
    assert mx.array_equal(gguf_tensors.decode("BF16", data, (1, 4)).weight, values[None])


def test_fp32_tensors_are_narrowed_only_where_nothing_is_lost() -> None:
    exact, inexact = mx.array([1.0, 0.5]), mx.array([1.0, 1 / 3])
    beside_half = gguf._narrowed({"a": exact, "b": inexact, "c": mx.array([1.0], mx.float16)})
    assert [array.dtype for array in beside_half.values()] == [mx.float16, mx.float32, mx.float16]
    assert gguf._narrowed({"a": exact})["a"].dtype == mx.bfloat16
    assert gguf._narrowed({"a": mx.array([1 + 2**-9])})["a"].dtype == mx.float32


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rotary_factors_become_the_rule_they_came_from(tmp_path: Path, factor: float) -> None:
    rule = {"factor": factor, **gguf._LLAMA3_ROPE}
    scaled = llama.initialize_rope(HEAD_DIM, 500000.0, False, rule | {"type": "llama3"}, 131072)
    plain = 500000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = np.array(scaled._freqs) / plain  # mlx-lm's own, by its own formula
    tensors = tensors_of(original(tied=True)) | {"rope_freqs.weight": f32(factors)}
    gguf.convert(write(tmp_path, tensors, **{"rope.freq_base": 500000.0}), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"] == rule | {"type": "llama3", "factor": pytest.approx(factor)}


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"attention.head_count": [4, 2]}, "head_count"),
        ({"attention.value_length": 32}, "value_length"),
        ({"rope.dimension_count": 8}, "dimension_count"),
    ],
)
def test_a_geometry_that_mlx_lm_s_llama_lacks_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        gguf.convert(write(tmp_path, tensors_of(original(tied=True)), **changes), tmp_path / "out")


def test_unknown_tensors_and_factors_are_refused_by_name(tmp_path: Path) -> None:
    tensors = tensors_of(original(tied=True))
    for name, extra in {
        "ffn_gate_exps": {"blk.0.ffn_gate_exps.weight": f32(np.ones((2, 32)))},
        "rope_freqs": {"rope_freqs.weight": f32(np.linspace(1, 3, HEAD_DIM // 2))},
    }.items():
        with pytest.raises(UnsupportedModel, match=name):
            gguf.convert(write(tmp_path, tensors | extra), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_architecture_and_tensor_type_are_refused_by_name(tmp_path: Path) -> None:
    tensors = tensors_of(original(tied=True))
    file = gguf_writer.write(tmp_path / "m.gguf", {"general.architecture": "qwen2"}, tensors)
    with pytest.raises(UnsupportedModel, match="qwen2"):
        gguf.convert(file, tmp_path / "out")
    odd = {"output_norm.weight": Tensor((32,), Q5_0, bytes(22))}
    with pytest.raises(UnsupportedModel, match="Q5_0"):
        gguf.convert(write(tmp_path, tensors | odd), tmp_path / "out")


def test_missing_and_misshapen_tensors_make_a_bad_checkpoint(tmp_path: Path) -> None:
    tensors = tensors_of(original(tied=True))
    for name in ("blk.1.ffn_norm.weight", "token_embd.weight"):
        with pytest.raises(BadCheckpoint, match=name):
            gguf.convert(write(tmp_path, without(tensors, name)), tmp_path / "out")
    square = {"blk.0.attn_k.weight": f32(np.ones((HIDDEN, HIDDEN)))}
    with pytest.raises(BadCheckpoint, match=r"blk.0.attn_k.weight has shape \(64, 64\), expected \(32, 64\)"):
        gguf.convert(write(tmp_path, tensors | square), tmp_path / "out")


def test_a_file_cut_off_anywhere_is_a_bad_checkpoint_and_leaves_no_folder(tmp_path: Path) -> None:
    whole = write(tmp_path, tensors_of(original(tied=True))).read_bytes()
    cut = tmp_path / "cut.gguf"
    header_ends = whole.index(b"blk.1.ffn_down.weight")
    for length in [*range(0, header_ends, 97), len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(BadCheckpoint):
            gguf.convert(cut, tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("content", [b"", b"not a GGUF file" * 100, b"GGUF" + b"\xff" * 4000])
def test_something_else_under_the_name_of_a_gguf_file_is_a_bad_checkpoint(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises((BadCheckpoint, UnsupportedModel)):
        gguf.convert(tmp_path / "x.gguf", tmp_path / "out")


def test_a_damaged_header_never_raises_anything_but_our_own_errors(tmp_path: Path) -> None:
    whole = write(tmp_path, tensors_of(original(tied=True))).read_bytes()
    random = np.random.default_rng(0)
    file = tmp_path / "damaged.gguf"
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[int(random.integers(0, 4000))] = int(random.integers(0, 256))
        file.write_bytes(damaged)
        try:
            gguf_file.read(file)
            outcomes.add("read")
        except (BadCheckpoint, UnsupportedModel) as error:
            outcomes.add(error.code)
    assert outcomes >= {"read", "bad_checkpoint"}


def tokenizer_of(path: Path, vocabulary: dict[str, Any]) -> Any:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    gguf_tokenizer.write_tokenizer(vocabulary, path)
    return load_tokenizer(path)


def test_a_byte_level_vocabulary_tokenises_by_its_merges_markers_and_word_rule(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary()
    tokens = vocabulary["tokenizer.ggml.tokens"]
    tokenizer = tokenizer_of(tmp_path / "t", vocabulary)

    def pieces(text: str) -> list[str]:
        return [tokens[token] for token in tokenizer.encode(text)]

    assert pieces("a the 10<|im_end|>he<tool>") == [
        *["a", "Ġthe", "Ġ", "1", "0"],  # this rule sets digits apart, so that "1 0" never meets its merge
        *["<|im_end|>", "he", "<tool>"],
    ]
    assert tokenizer.decode(tokenizer.encode("ab the 7")) == "ab the 7"
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b<tool>"), skip_special_tokens=True) == "ab<tool>"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], add_generation_prompt=True)
    assert [tokens[token] for token in prompt] == ["<|im_start|>", "he", "<|im_end|>", "<|im_start|>"]
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert gguf_tokenizer.end_tokens(vocabulary) == [2, 0]
    assert type(tokenizer.detokenizer).__name__ == "BPEStreamingDetokenizer"


def test_the_word_rule_of_the_file_decides_where_merges_apply(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary()
    tokens = vocabulary["tokenizer.ggml.tokens"]
    cuts = {}
    for rule in ("smollm", "gpt-2", "llama-bpe", "qwen2", "default"):
        tokenizer = tokenizer_of(tmp_path / rule, vocabulary | {"tokenizer.ggml.pre": rule})
        cuts[rule] = [tokens[token] for token in tokenizer.encode("a 10") if token != 1]
    assert cuts["gpt-2"] == ["a", "Ġ", "10"] == cuts["llama-bpe"] == cuts["default"]
    assert cuts["smollm"] == ["a", "Ġ", "1", "0"] == cuts["qwen2"]


@pytest.mark.parametrize(("flag", "first"), [(True, 1), (False, 3), (None, 3)])
def test_the_start_token_is_added_when_the_file_says_so(
    tmp_path: Path, flag: bool | None, first: int
) -> None:
    vocabulary = byte_level_vocabulary()
    del vocabulary["tokenizer.ggml.add_bos_token"]
    if flag is not None:
        vocabulary["tokenizer.ggml.add_bos_token"] = flag
    tokenizer = tokenizer_of(tmp_path / "t", vocabulary)
    assert tokenizer.encode("a")[0] == first
    assert tokenizer.encode("a", add_special_tokens=False) == [3]


def test_a_sentencepiece_vocabulary_joins_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    vocabulary = piece_vocabulary()
    tokens = vocabulary["tokenizer.ggml.tokens"]
    tokenizer = tokenizer_of(tmp_path / "t", vocabulary)

    def pieces(text: str) -> list[str]:
        return [tokens[token] for token in tokenizer.encode(text)]

    assert pieces("the") == ["<s>", "▁th", "e"]
    assert pieces("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    for text in ("the the", "héé  t", " the", "日本 the"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert type(tokenizer.detokenizer).__name__ == "SPMStreamingDetokenizer"


def test_a_sentencepiece_vocabulary_without_a_space_prefix_adds_none(tmp_path: Path) -> None:
    vocabulary = piece_vocabulary() | {
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokens = vocabulary["tokenizer.ggml.tokens"]
    tokenizer = tokenizer_of(tmp_path / "t", vocabulary)
    assert [tokens[token] for token in tokenizer.encode("the")] == ["t", "he", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" the", add_special_tokens=False)) == " the"


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, UnsupportedModel, "tekken"),
        ({"tokenizer.ggml.pre": None}, UnsupportedModel, "rule None"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModel, "bert"),
        ({"tokenizer.ggml.tokens": []}, BadCheckpoint, "no vocabulary"),
        ({"tokenizer.ggml.merges": ["h q9"]}, BadCheckpoint, "vocabulary"),
        ({"tokenizer.ggml.merges": ["he"]}, BadCheckpoint, "vocabulary"),
        ({"tokenizer.ggml.merges": None}, BadCheckpoint, "vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, BadCheckpoint, "vocabulary"),
        ({"tokenizer.ggml.eos_token_id": 99999}, BadCheckpoint, "eos token is 99999"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused_with_its_reason(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        gguf_tokenizer.write_tokenizer(byte_level_vocabulary() | changes, tmp_path)


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    gguf.convert(tmp_path / "absent.gguf", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_room_asked_for_is_the_room_that_decoding_takes() -> None:
    shape = (2, 512)
    for name, kind in {
        "Q4_0": Q4_0,
        "Q8_0": Q8_0,
        "Q4_K": Q4_K,
        "Q6_K": Q6_K,
        "F16": F16,
        "BF16": BF16,
    }.items():
        count = 4 if kind in (Q4_K, Q6_K) else 32
        data = bytes_for_floats(shape) if kind in (F16, BF16) else blocks(kind, count).reshape(-1)
        arrays = gguf_tensors.decode(name, data, shape).named("t").values()
        assert gguf_tensors.decoded_bytes(name, shape) == sum(array.nbytes for array in arrays), name


def bytes_for_floats(shape: tuple[int, int]) -> np.ndarray:
    return random_bytes(2 * shape[0] * shape[1], seed=3)
