"""Drafts as they are published: two layouts, odd keys, extra tensors, shards; and relatives refused by name."""

import json

import mlx.core as mx
import pair
import pytest
from mlx.utils import tree_flatten

from dflash import DFlashConfig, DFlashRuntime
from dflash.drafts.checkpoint import DraftConfig, clean_names, is_draft
from dflash.drafts.dflash import DFlashDraft
from dflash.errors import BadCheckpoint, DraftMismatch, UnsupportedDraft
from dflash.models.loading import load_draft, load_target

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(pair.target(tmp_path_factory.mktemp("pair") / "target"), widen=True)


def rewrite(folder, change):
    """The folder with its tensors passed through `change`, which takes and returns a dict."""
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    mx.eval(weights)  # they are read on first use, and their file is about to be overwritten
    mx.save_safetensors(file, change(weights))
    return folder


def states(target, folder):
    """Hidden states of a whole block after a fixed context: what the draft computes."""
    draft = load_draft(folder, target.adapter, widen=True)
    drafter = draft.start(target.adapter)
    drafter.observe(target.adapter.start(draft.taps).forward(mx.arange(40)[None] + 20).taps)
    return drafter.hidden(target.adapter.embed(mx.arange(draft.block_size)[None]))


def same(one, other):
    """Whether states are equal but for rounding, which depends on where in memory a tensor was loaded to."""
    return mx.abs(one - other).max().item() < 1e-5


def respelled(tmp_path, config, change=lambda weights: weights):
    """The tiny draft's weights under another config."""
    folder = rewrite(pair.draft(tmp_path / "respelled"), change)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---------------------------------------------------------------- the speculators layout


def test_the_speculators_layout_is_the_same_draft_in_other_words(target, tmp_path):
    tables = {"embed_tokens.weight": mx.zeros((259, 48)), "lm_head.weight": mx.zeros((259, 48))}
    whole = {**tables, "t2d": mx.ones((259,), mx.bool_), "d2t": mx.zeros((259,), mx.int64)}
    other = respelled(tmp_path, pair.speculators_config(), lambda weights: weights | whole)
    assert same(states(target, other), states(target, pair.draft(tmp_path / "usual")))


def test_stored_layer_ids_are_one_above_the_tapped_layers():
    assert DraftConfig.from_json(pair.speculators_config(aux_hidden_state_layer_ids=[1, 3])).taps == (0, 2)
    with pytest.raises(UnsupportedDraft, match="embedding"):
        DraftConfig.from_json(pair.speculators_config(aux_hidden_state_layer_ids=[0, 3]))
    config = DraftConfig.from_json(pair.speculators_config(aux_hidden_state_layer_ids=[1, 4]))
    with pytest.raises(DraftMismatch, match="taps layer 3"):
        config.check_target(hidden_size=48, num_layers=3, vocab_size=259)


def test_settings_outside_the_nested_part_win_and_null_is_like_absent():
    config = pair.speculators_config(**SLIDING)
    config["transformer_layer_config"] |= {"sliding_window": None, "layer_types": None}
    assert DraftConfig.from_json(config).windows == (32, None)


def own_vocabulary(tmp_path, ids):
    """A draft that proposes from `ids` only, with a random head of its own."""
    mx.random.seed(5)
    offsets = mx.array(ids, mx.int64) - mx.arange(len(ids), dtype=mx.int64)
    head = {"lm_head.weight": mx.random.normal((len(ids), 48)), "d2t": offsets}
    return respelled(tmp_path, pair.speculators_config(len(ids)), lambda weights: weights | head)


def test_a_vocabulary_of_its_own_is_mapped_to_the_targets_ids(target, tmp_path):
    ids = list(range(7, 259, 9))
    folder = own_vocabulary(tmp_path, ids)
    draft = load_draft(folder, target.adapter, widen=True)
    hidden = mx.random.normal((1, 6, 48))
    logits = draft.start(target.adapter).logits(hidden)
    assert logits.shape == (1, 6, len(ids))
    expected = [ids[best] for best in mx.argmax(hidden @ draft.lm_head.weight.T, axis=-1)[0].tolist()]
    proposal = draft.select(None, hidden, logits)
    assert proposal.tokens[0].tolist() == expected
    assert proposal.scores.shape == proposal.ids.shape == (6, len(ids))
    assert proposal.ids[3].tolist() == ids, "what is drawn among is named by the target's ids"
    drafter = draft.start(target.adapter)
    drafter.observe(mx.random.normal((1, 9, 96)))
    assert set(drafter.propose(mx.array([[5]]), 7).tokens[0].tolist()) <= set(ids)


def test_a_vocabulary_of_its_own_leaves_the_answer_as_it_is(target, tmp_path):
    draft = load_draft(own_vocabulary(tmp_path, list(range(3, 259, 4))), target.adapter, widen=True)
    settings = {"use_chat_template": False, "max_tokens": 40, "ignore_eos": True}
    drafted = DFlashRuntime(target, draft, DFlashConfig(draft_block_size=8)).generate("abc", **settings)
    plain = DFlashRuntime(target, config=DFlashConfig(mode="baseline")).generate("abc", **settings)
    assert drafted.tokens == plain.tokens and drafted.mode == "dflash"


def test_a_table_of_ids_that_no_size_announces_is_refused():
    with pytest.raises(UnsupportedDraft, match="d2t"):
        clean_names({"d2t": mx.array([0, 3])})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"speculators_model_type": "dspark"}, "dspark"),
        ({"sample_from_anchor": True}, "anchor slot"),
        ({"shift_label": True}, "shift_label"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"draft_ffn_type": "moe"}, "moe"),
        ({"target_hidden_size": 96}, "target_hidden_size"),
        ({"markov_rank": 64}, "Markov"),
        ({"transformer_layer_config": {"hc_mult": 4}}, "hyper-connected"),
    ],
)
def test_speculators_that_compute_something_else_are_refused_by_name(changes, said):
    config = pair.speculators_config(**changes)
    assert is_draft(config)
    with pytest.raises(UnsupportedDraft, match=said):
        DraftConfig.from_json(config)


@pytest.mark.parametrize("gone", ["transformer_layer_config", "aux_hidden_state_layer_ids"])
def test_a_speculator_that_lacks_a_part_is_damaged(gone):
    config = pair.speculators_config()
    del config[gone]
    with pytest.raises(BadCheckpoint, match=gone):
        DraftConfig.from_json(config)


# ---------------------------------------------------------------- causality


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        (pair.draft_config(**SLIDING), (True, False)),
        (pair.draft_config(**SLIDING, is_causal=None), (True, False)),
        (pair.draft_config(**SLIDING, is_causal=False), (False, False)),
        (pair.draft_config(**SLIDING, is_causal=True), (True, True)),
        (pair.draft_config(is_causal=True), (True, True)),
        (pair.draft_config(dflash_config={"mask_token_id": 0, "causal": True}), (True, True)),
        (pair.draft_config(**SLIDING, dflash_config={"mask_token_id": 0, "causal": False}), (False, False)),
        (pair.speculators_config(**SLIDING), (True, False)),
        (pair.speculators_config(**SLIDING, sliding_window_non_causal=True), (False, False)),
        (pair.speculators_config(**SLIDING, sliding_window_non_causal=False), (True, False)),
        (pair.speculators_config(sliding_window_non_causal=False), (False, False)),
    ],
)
def test_causality_is_what_the_config_says(config, causal):
    assert DraftConfig.from_json(config).causal == causal


@pytest.mark.parametrize(
    "flag", [{"is_causal": True}, {"dflash_config": {"mask_token_id": 0, "causal": True}}]
)
def test_a_causal_draft_sees_no_later_slot_and_another_does(target, flag):
    """The first slots' hidden states, with the later slots' embeddings changed."""
    for changes, alike in ((flag, True), ({}, False)):
        mx.random.seed(1)
        draft = DFlashDraft(DraftConfig.from_json(pair.draft_config(**changes)))
        block = mx.random.normal((1, 8, 48))
        changed = mx.concatenate([block[:, :5], block[:, 5:] * -3], axis=1)
        first, second = (draft.start(target.adapter).hidden(rows)[:, :5] for rows in (block, changed))
        assert (mx.abs(first - second).max().item() < 1e-6) is alike


# ---------------------------------------------------------------- relatives


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"markov_rank": 0}, "Markov"),
        ({"dflash_config": {"markov_rank": 64}}, "Markov"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark.*Qwen3DSparkModel"),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, "Meta"),
        ({"dflash_config": {"sample_from_anchor": True}}, "anchor slot"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ],
)
def test_relatives_and_foreign_packings_are_refused_by_name(changes, said):
    config = pair.draft_config(**changes)
    assert is_draft(config)
    with pytest.raises(UnsupportedDraft, match=said):
        DraftConfig.from_json(config)


@pytest.mark.parametrize(
    "name",
    ["markov_head.weight", "confidence_head.weight", "encoder.fc.weight", "layers.0.attention_sink_bias"],
)
def test_tensors_that_change_the_computation_are_refused_by_name(name):
    with pytest.raises(UnsupportedDraft, match=name):
        clean_names({name: mx.zeros((1,))})


# ---------------------------------------------------------------- names, shards, ropes, dtypes


def test_prefixes_and_extra_heads_change_nothing(target, tmp_path):
    expected = states(target, pair.draft(tmp_path / "usual"))

    def dressed(weights):
        extra = ("lm_head.weight", "embed_tokens.weight", "mtp.layers.0.norm.weight", "rotary_emb.inv_freq")
        return {f"model.{name}": array for name, array in weights.items()} | dict.fromkeys(
            extra, mx.ones((4, 4))
        )

    assert same(states(target, rewrite(pair.draft(tmp_path / "dressed"), dressed)), expected)


def test_a_sharded_draft_loads_like_a_whole_one_and_a_missing_shard_is_named(target, tmp_path):
    folder = pair.draft(tmp_path / "sharded")
    expected = states(target, folder)
    weights = mx.load(str(folder / "model.safetensors"))
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in shards.items():
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in some})
    # What no index names is no part of the draft: here, noise under a name that sorts last.
    noise = {name: array + 1 for name, array in weights.items()}
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "zz.safetensors"), noise)
    index = {"weight_map": {name: file for file, some in shards.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(states(target, folder), expected)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="00002-of-00002"):
        load_draft(folder, target.adapter, widen=True)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": YARN},
        {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
        {"rope_scaling": {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}}},
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.25}},
    ],
)
def test_every_spelling_of_a_rope_is_the_same_rope(target, tmp_path, spelling):
    plain = states(target, pair.draft(tmp_path / "plain"))
    yarn = states(target, pair.draft(tmp_path / "yarn", rope_scaling=YARN))
    assert not same(yarn, plain)
    assert same(states(target, pair.draft(tmp_path / "spelled", **spelling)), yarn)


def test_the_drafts_own_pairing_of_rope_dimensions_is_honoured(target, tmp_path):
    halves = states(target, pair.draft(tmp_path / "halves", is_neox_style=True))
    assert same(halves, states(target, pair.draft(tmp_path / "usual")))
    assert not same(halves, states(target, pair.draft(tmp_path / "pairs", is_neox_style=False)))


def test_mixed_dtypes_run_in_one(target, tmp_path):
    kinds = [mx.bfloat16, mx.float16, mx.float32]

    def mixed(weights):
        return {name: array.astype(kinds[i % 3]) for i, (name, array) in enumerate(sorted(weights.items()))}

    draft = load_draft(rewrite(pair.draft(tmp_path / "mixed"), mixed), target.adapter, widen=False)
    assert {array.dtype for _, array in tree_flatten(draft.parameters())} == {mx.float32}


def test_code_beside_a_checkpoint_never_runs(tmp_path):
    """`auto_map` asks transformers to import the repository's own files."""
    mark = tmp_path / "it ran"
    code = f"open({str(mark)!r}, 'w').close()\n"
    folders = pair.target(tmp_path / "target"), pair.draft(tmp_path / "draft")
    automatic = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoModelForCausalLM": "evil.M"}
    for folder in folders:
        (folder / "evil.py").write_text(code)
        for name in ("config.json", "tokenizer_config.json"):
            if (file := folder / name).exists():
                tokenizer = {"AutoTokenizer": ["evil.T", None]} if name.startswith("tokenizer") else {}
                file.write_text(
                    json.dumps(json.loads(file.read_text()) | {"auto_map": automatic | tokenizer})
                )
    runtime = DFlashRuntime.from_pretrained(*map(str, folders))
    assert runtime.generate("abc", max_tokens=4).tokens
    assert not mark.exists()
