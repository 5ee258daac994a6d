"""Both generations of drafts against vectors computed by the format's authors, and against a plain restatement."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.drafts.checkpoint import DraftConfig
from dflash.drafts.dflash import DFlashDraft
from dflash.drafts.dflash2 import DFlash2Draft
from dflash.errors import BadCheckpoint

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"


class Tables:
    """A target reduced to its tied token table."""

    def __init__(self, embedding):
        self._embedding = embedding

    def embed(self, tokens):
        return self._embedding[tokens]

    def project(self, hidden):
        return hidden @ self._embedding.T


def golden(name):
    config = DraftConfig.from_json(json.loads((GOLDEN / name / "config.json").read_text()))
    draft = (DFlash2Draft if config.generation == 2 else DFlashDraft)(config)
    draft.load(mx.load(str(GOLDEN / name / "model.safetensors")))
    vectors = mx.load(str(GOLDEN / name / "io.safetensors"))
    return draft, draft.start(Tables(vectors["target_embedding"])), vectors


@pytest.mark.parametrize("name", ["v1_full", "v1_sliding", "v1_mixed_softcap", "v2_selector"])
def test_hidden_states_logits_and_tokens_equal_the_golden_vectors(name):
    draft, drafter, vectors = golden(name)
    tables = Tables(vectors["target_embedding"])
    cycles = sorted({key.split(".")[0] for key in vectors if key.startswith("cycle")})
    assert len(cycles) == 5
    for cycle in cycles:
        block = vectors[f"{cycle}.block"]
        drafter.observe(vectors[f"{cycle}.target_hidden"])
        embedded = tables.embed(block) * draft.config.embedding_scale
        hidden = drafter.hidden(embedded)[:, 1:]
        logits = drafter.logits(hidden)
        assert mx.abs(hidden - vectors[f"{cycle}.hidden"]).max().item() < 1e-4
        assert mx.abs(logits - vectors[f"{cycle}.logits"]).max().item() < 1e-4
        assert mx.array_equal(draft.select(block[:, :1], hidden, logits).tokens, vectors[f"{cycle}.tokens"])


@pytest.mark.parametrize("name", ["v1_full", "v1_sliding", "v1_mixed_softcap", "v2_selector"])
def test_fewer_slots_are_the_first_of_the_whole_block(name):
    _, drafter, vectors = golden(name)
    drafter.observe(vectors["cycle0.target_hidden"])
    anchor = vectors["cycle0.block"][:, :1]
    whole = drafter.propose(anchor, 7).tokens
    assert mx.array_equal(whole, vectors["cycle0.tokens"])
    for count in range(1, 7):
        assert mx.array_equal(drafter.propose(anchor, count).tokens, whole[:, :count])


def plain_pass(draft, tables, fused, block):
    """A draft pass without any cache: all context rows at once, masks written out position by position."""
    config = draft.config
    context, width = fused.shape[1], block.shape[1]
    x = tables.embed(block) * config.embedding_scale
    position = mx.arange(context + width)
    for layer, window, causal in zip(draft.layers, config.windows, config.causal, strict=True):
        query, key = position[context:, None], position[None]
        seen = (query - key < window) | (key >= context) if window else (key >= 0) & (query >= 0)
        if causal:
            seen = seen & (key <= query)
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        keys, values = attention.keys_values(mx.concatenate([fused, normed], axis=1), 0)
        queries = attention.q_proj(normed).reshape(1, width, -1, config.head_dim)
        queries = attention._rope(attention.q_norm(queries).transpose(0, 2, 1, 3), offset=context)
        repeat = config.num_heads // config.num_kv_heads
        keys, values = mx.repeat(keys, repeat, axis=1), mx.repeat(values, repeat, axis=1)
        scores = queries @ keys.swapaxes(-1, -2) * config.head_dim**-0.5
        weights = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1)
        out = (weights @ values).transpose(0, 2, 1, 3).reshape(1, width, -1)
        x = x + attention.o_proj(out)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return draft.norm(x)


@pytest.mark.parametrize("name", ["v1_full", "v1_sliding", "v1_mixed_softcap"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(increments=st.lists(st.integers(1, 9), min_size=1, max_size=24), prompt=st.integers(1, 300))
def test_any_history_of_increments_equals_keeping_everything(name, increments, prompt):
    """One-row appends into a full window included: masks go by position, not by place in a buffer."""
    draft, drafter, vectors = golden(name)
    tables = Tables(vectors["target_embedding"])
    block = vectors["cycle0.block"]
    mx.random.seed(prompt)
    taps = mx.random.normal((1, prompt + sum(increments), 3 * draft.config.hidden_size))
    done = 0
    for count in [prompt, *increments]:
        drafter.observe(taps[:, done : done + count])
        done += count
        hidden = drafter.hidden(tables.embed(block) * draft.config.embedding_scale)
    expected = plain_pass(draft, tables, draft.fuse(taps), block)
    assert mx.abs(hidden - expected).max().item() < 1e-4


def test_observing_without_proposing_loses_nothing():
    _, drafter, vectors = golden("v1_sliding")
    _, other, _ = golden("v1_sliding")
    taps = vectors["cycle0.target_hidden"]
    for row in range(taps.shape[1]):
        drafter.observe(taps[:, row : row + 1])
    other.observe(taps)
    anchor = vectors["cycle0.block"][:, :1]
    assert mx.array_equal(drafter.propose(anchor, 7).tokens, other.propose(anchor, 7).tokens)


def test_quantised_layers_are_those_that_carry_scales():
    draft, _, _ = golden("v1_full")
    weights = dict(nn.utils.tree_flatten(draft.parameters()))
    mixed = {}
    for name, array in weights.items():
        if name.endswith("mlp.down_proj.weight"):  # only these are quantised, as some published drafts mix
            packed, scales, biases = mx.quantize(array, group_size=32, bits=8)
            stem = name.removesuffix("weight")
            mixed |= {name: packed, f"{stem}scales": scales, f"{stem}biases": biases}
        else:
            mixed[name] = array
    config = json.loads((GOLDEN / "v1_full" / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    loaded = DFlashDraft(DraftConfig.from_json(config))
    loaded.load(mixed)
    assert isinstance(loaded.layers[0].mlp.down_proj, nn.QuantizedLinear)
    assert isinstance(loaded.layers[0].mlp.up_proj, nn.Linear)
    x = mx.random.normal((1, 4, 64))
    assert mx.abs(loaded.layers[0].mlp(x) - draft.layers[0].mlp(x)).max().item() < 0.05


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("fc.weight"), "fc.weight is missing"),
        (lambda w: w.update({"layers.9.odd.weight": mx.zeros((2,))}), "layers.9.odd.weight is unknown"),
        (lambda w: w.update({"norm.weight": mx.zeros((63,))}), "norm.weight is (63,), expected (64,)"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(change, said):
    weights = mx.load(str(GOLDEN / "v1_full" / "model.safetensors"))
    change(weights)
    config = DraftConfig.from_json(json.loads((GOLDEN / "v1_full" / "config.json").read_text()))
    with pytest.raises(BadCheckpoint) as caught:
        DFlashDraft(config).load(weights)
    assert said in caught.value.message


def test_a_leading_model_prefix_is_accepted():
    weights = mx.load(str(GOLDEN / "v1_full" / "model.safetensors"))
    config = DraftConfig.from_json(json.loads((GOLDEN / "v1_full" / "config.json").read_text()))
    DFlashDraft(config).load({f"model.{name}": array for name, array in weights.items()})


def test_the_selectors_walk_equals_one_written_out_step_by_step():
    draft, drafter, vectors = golden("v2_selector")
    drafter.observe(vectors["cycle0.target_hidden"])
    block, hidden, logits = (vectors[f"cycle0.{name}"] for name in ("block", "hidden", "logits"))
    selector, before, path = draft.candidate_selector, block[0, 0].item(), []
    for slot in range(logits.shape[1]):
        projected = selector.hidden_projection(hidden[:, slot])[0]
        ranked = mx.argsort(-logits[0, slot]).tolist()[: draft.config.selector_top_k]
        scores = {
            c: logits[0, slot, c].item()
            + mx.sum(
                selector.predecessor_codebook[before] * projected * selector.successor_codebook[c]
            ).item()
            for c in ranked
        }
        before = max(scores, key=scores.get)
        path.append(before)
    assert draft.select(block[:, :1], hidden, logits).tokens.tolist() == [path]


def test_ids_beyond_the_selectors_vocabulary_are_never_proposed():
    draft, _, vectors = golden("v2_selector")
    object.__setattr__(draft.config, "selector_vocab", 20)
    hidden, logits = vectors["cycle0.hidden"], vectors["cycle0.logits"]
    assert mx.max(draft.select(vectors["cycle0.block"][:, :1], hidden, logits).tokens).item() < 20
