"""Drawing: every warper and penalty against a definition in float64 or mlx-lm's own, every rule by chi-square.

Rows of one wide block are as many independent draws, so thousands cost one pass. Seeds are fixed: a test either
always passes or always fails. The bound is the chi-square quantile of probability 1 - 1e-6, and the wrong rules at the
end must exceed it many times over.
"""

import itertools
import threading

import mlx.core as mx
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from dflash.config import SamplingParams
from dflash.decoding.acceptance import Matching, Place, Residual, accepted_prefix, rule_for
from dflash.decoding.loop import decode
from dflash.decoding.sampling import Noise, Purpose, Warpers, adjustment, window_counts
from dflash.decoding.width import FixedWidth
from dflash.drafts.base import Proposal, as_scored
from dflash.drafts.checkpoint import DraftConfig
from dflash.drafts.dflash import DFlashDraft
from dflash.drafts.dflash2 import DFlash2Draft
from dflash.targets.base import Features

VOCAB = 8
TARGET = np.array([1.1, -0.4, 0.3, 2.0, -1.5, 0.9, -3.0, 0.2])
DRAFT_LOGITS = np.array([1.6, 0.9, 0.2, 0.8, -0.2, -1.0, 0.1, 0.4])
WARPERS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.8, "min_p": 0.2},
    {"temperature": 1.5, "top_p": 0.95, "min_p": 0.05, "top_k": 5},
]
RULES = [("matching", "likeliest"), ("matching", "coupled"), ("residual", "coupled")]


def params(**changes):
    return SamplingParams(**{"seed": 11} | changes).effective()


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def defined(logits, temperature, top_p=1.0, min_p=0.0, top_k=0):
    """The distribution that the settings define, token by token in float64, in mlx-lm's order."""
    p = softmax(np.asarray(logits, np.float64))
    ranked = np.argsort(-p)
    above = np.cumsum(p[ranked]) - p[ranked]
    kept = {token for token, mass in zip(ranked, above, strict=True) if mass < top_p}
    kept = [token for token in ranked if token in kept and p[token] >= min_p * p.max()]
    kept = kept[: top_k or None]
    weights = np.zeros_like(p)
    weights[kept] = p[kept] ** (1 / temperature)
    return weights / weights.sum()


def bound(degrees, z=4.753):
    """The chi-square quantile of a normal quantile z (of 1 - 1e-6), by Wilson and Hilferty."""
    return degrees * (1 - 2 / (9 * degrees) + z * (2 / (9 * degrees)) ** 0.5) ** 3


def misfit(counts, expected):
    """Chi-square of counts (V,) against probabilities (V,), over its bound: at most 1 if they fit. The rarest are
    taken together until 8 are expected."""
    assert counts[expected == 0].sum() == 0, "something impossible was drawn"
    ranked = np.argsort(expected)
    counts, mean = counts[ranked], expected[ranked] * counts.sum()
    rare = np.searchsorted(np.cumsum(mean), 8) + 1
    counts, mean = (np.array([x[:rare].sum(), *x[rare:]]) for x in (counts, mean))
    return ((counts - mean) ** 2 / mean).sum() / bound(max(len(mean) - 1, 1))


def count(tokens, vocab=VOCAB):
    return np.bincount(np.array(tokens), minlength=vocab)


# ---------------------------------------------------------------- noise


def test_the_noise_of_a_position_does_not_depend_on_the_call_it_came_from():
    noise = Noise(3, Purpose.CHOICE)
    whole = noise.gumbel(100, 9, 50)
    for at, size in [(0, 9), (2, 1), (5, 3)]:
        assert mx.array_equal(noise.gumbel(100 + at, size, 50), whole[at : at + size])
    key = mx.random.split(mx.random.key(3), 4)[Purpose.CHOICE] + mx.array([0, 104], dtype=mx.uint32)
    alone = mx.random.gumbel((50,), key=key)
    assert mx.array_equal(whole[4], alone)


def test_positions_seeds_and_purposes_have_noise_of_their_own():
    keys = itertools.product((0, 1, 2**63 - 1), (Purpose.CHOICE, Purpose.DRAFT), (0, 1))
    draws = [Noise(seed, purpose).uniform(position, 1).item() for seed, purpose, position in keys]
    assert len(set(draws)) == len(draws)
    many = np.array(Noise(5, Purpose.ACCEPT).uniform(0, 20000))
    assert abs(many.mean() - 0.5) < 0.01 and abs(np.corrcoef(many[1:], many[:-1])[0, 1]) < 0.03
    assert np.array_equal(many, np.array(Noise(5, Purpose.ACCEPT).uniform(0, 20000)))


def test_a_fresh_thread_draws_what_this_one_draws():
    here, there = Noise(9, Purpose.CHOICE).gumbel(4, 2, 5).tolist(), []
    for _ in range(2):
        thread = threading.Thread(
            target=lambda: there.append(Noise(9, Purpose.CHOICE).gumbel(4, 2, 5).tolist())
        )
        thread.start()
        thread.join()
    assert there == [here, here]


# ---------------------------------------------------------------- penalties and warpers


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_window_counts_are_those_of_each_row_by_itself(data):
    tokens = st.integers(0, 5)
    block = data.draw(st.lists(tokens, min_size=1, max_size=9))
    before = data.draw(st.lists(tokens, max_size=12))
    window = data.draw(st.integers(1, 14))
    before = before[len(before) - min(len(before), window - 1) :]
    line = [*before, *block]
    expected = [count(line[: len(before) + i + 1][-window:], 6).tolist() for i in range(len(block))]
    assert window_counts(mx.array(block), before, window, 6).tolist() == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_penalties_inside_a_block_are_mlx_lms_on_each_row(data):
    number = st.floats(-2, 2).map(lambda x: round(x, 2))
    asked = {
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.3, 0.8])),
        "presence_penalty": data.draw(number),
        "frequency_penalty": data.draw(number),
        "logit_bias": data.draw(st.dictionaries(st.integers(0, VOCAB - 1), number, max_size=3)),
    }
    context = data.draw(st.integers(1, 12))
    tokens = st.integers(0, VOCAB - 1)
    prompt = data.draw(st.lists(tokens, max_size=15))
    block = data.draw(st.lists(tokens, min_size=1, max_size=8))
    logits = mx.random.normal((1, len(block), VOCAB), key=mx.random.key(data.draw(st.integers(0, 99))))
    adjust = adjustment(params(penalty_context=context, **asked), VOCAB)
    ours = adjust(
        logits[0], mx.array([block]), prompt[max(0, len(prompt) - adjust.reach) :] if adjust.reach else []
    )
    contexts = {f"{name}_context_size": context for name in ("repetition", "presence", "frequency")}
    processors = make_logits_processors(**asked, **contexts)
    for row in range(len(block)):
        theirs = mx.array(logits[:, row])
        for processor in processors:
            theirs = processor(mx.array([*prompt, *block[: row + 1]]), theirs)
        assert mx.allclose(ours[row], theirs[0], rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    top_k=st.sampled_from([0, 1, 4, VOCAB, 99]),
)
def test_warped_scores_are_the_defined_distribution_row_by_row(seed, temperature, top_p, min_p, top_k):
    logits = mx.random.normal((2, 3, VOCAB), key=mx.random.key(seed)) * 2
    asked = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "top_k": top_k}
    ours = np.array(mx.softmax(Warpers(params(**asked))(logits), axis=-1))
    for row in np.ndindex(2, 3):
        assert np.allclose(ours[row], defined(np.array(logits)[row], **asked), atol=1e-4)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 100])
def test_extreme_temperatures_stay_numbers(temperature):
    scores = Warpers(params(temperature=temperature))(mx.array([[5e4, -5e4, 4.9e4]]))
    assert np.isfinite(np.array(mx.softmax(scores))).all() and mx.argmax(scores).item() == 0


# ---------------------------------------------------------------- one round, as thousands of draws


class FirstGeneration(DFlashDraft):
    def __init__(self):
        super().__init__(DraftConfig.from_json(tiny_draft_config("DFlashDraftModel")))


class SecondGeneration(DFlash2Draft):
    """Four candidates of eight, scored by random codebooks."""

    def __init__(self):
        mx.random.seed(1)
        config = DraftConfig.from_json(
            tiny_draft_config(
                "DFlash2DraftModel", selector_rank=4, selector_top_k=4, conv_kernel_size=2, conv_group_size=4
            )
        )
        super().__init__(config)
        selector = self.candidate_selector
        selector.predecessor_codebook = mx.random.normal(selector.predecessor_codebook.shape)
        selector.successor_codebook = mx.random.normal(selector.successor_codebook.shape)


def tiny_draft_config(architecture, **nested):
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        **{"head_dim": 8, "intermediate_size": 8, "vocab_size": VOCAB, "rms_norm_eps": 1e-6},
        **{"rope_theta": 1e4, "max_position_embeddings": 64, "block_size": 8, "num_target_layers": 2},
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0], **nested},
    }


def one_round(rule, draft, slots, target=TARGET):
    """The block (1, slots + 1) and the choices after each row; `draft` None proposes token 0 without scores."""
    verdict = rule.open(Place(40, slots + 1, ()))
    anchor, hidden = mx.array([[1]]), mx.random.normal((1, slots, 8), key=mx.random.key(5))
    logits = mx.broadcast_to(mx.array(DRAFT_LOGITS, mx.float32), (1, slots, VOCAB))
    proposal = Proposal(mx.zeros((1, slots), dtype=mx.int32))
    if draft is not None:
        proposal = draft.select(anchor, hidden, logits, verdict.weigh)
    block = mx.concatenate([anchor, proposal.tokens.astype(mx.int32)], axis=1)
    rows = mx.array(target, mx.float32)
    rows = mx.broadcast_to(rows, (1, slots + 1, VOCAB)) if rows.ndim == 1 else rows[block]
    return np.array(block)[0], np.array(verdict.choices(rows, block, proposal).tokens)[0]


DRAFTS = {
    "first": (FirstGeneration, 20000),
    "second": (SecondGeneration, 3000),
    "certain": (lambda: None, 20000),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", RULES, ids="-".join)
@pytest.mark.parametrize("asked", WARPERS, ids=str)
def test_every_choice_has_the_targets_distribution(asked, rule, draft):
    make, slots = DRAFTS[draft]
    if draft == "second" and asked not in (WARPERS[0], WARPERS[-1]):
        slots = 1000
    block, choices = one_round(rule_for(params(**asked), VOCAB, *rule), make(), slots)
    expected = defined(TARGET, **asked)
    assert misfit(count(choices), expected) < 1
    # Neighbours are independent: pairs fit the product.
    pairs = np.outer(expected, expected).ravel()
    often = pairs * (len(choices) - 1) > 8
    seen = count(choices[1:] * VOCAB + choices[:-1], VOCAB**2)
    mean = pairs[often] * (len(choices) - 1)
    assert ((seen[often] - mean) ** 2 / mean).sum() < bound(often.sum())
    assert 0.02 < np.mean(block[1:] == choices[:-1]) < 0.98


@pytest.mark.parametrize("rule", RULES, ids="-".join)
def test_a_choice_depends_on_the_token_before_it_as_the_target_says(rule):
    table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))
    settled = params(temperature=1.0, presence_penalty=1.0, logit_bias={3: 0.5}, penalty_context=1)
    block, choices = one_round(rule_for(settled, VOCAB, *rule), FirstGeneration(), 4000, table)
    for token in np.unique(block[1:]):
        logits = table[token] + 0.5 * (np.arange(VOCAB) == 3) - (np.arange(VOCAB) == token)
        assert misfit(count(choices[block == token]), softmax(logits)) < 1


class ForgetsToSubtract(Residual):
    """The usual mistake: after a rejection, draw from p itself."""

    @staticmethod
    def leftover(p, q):
        return p


class SubtractsTheWrongWay(Residual):
    @staticmethod
    def leftover(p, q):
        return mx.maximum(q - p, 0)


@pytest.mark.parametrize("wrong", [ForgetsToSubtract, SubtractsTheWrongWay])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_wrong_residual_is_found(wrong, draft):
    make, slots = DRAFTS[draft]
    right = rule_for(params(temperature=1.0), VOCAB, "residual", "coupled")
    _, choices = one_round(wrong(right.target, 11, VOCAB), make(), slots)
    assert misfit(count(choices), defined(TARGET, 1.0)) > 3


def test_a_wrong_claim_about_the_proposals_is_found():
    """A draft that proposes its likeliest tokens, and says that it drew them."""
    rule = rule_for(params(temperature=1.0), VOCAB, "residual", "coupled")
    verdict = rule.open(Place(40, 20001, ()))
    scores = verdict.weigh(mx.broadcast_to(mx.array(DRAFT_LOGITS, mx.float32), (20000, VOCAB)))
    proposal = Proposal(mx.zeros((1, 20000), dtype=mx.int32), scores)
    block = mx.concatenate([mx.array([[1]]), proposal.tokens], axis=1)
    rows = mx.broadcast_to(mx.array(TARGET, mx.float32), (1, 20001, VOCAB))
    choices = np.array(verdict.choices(rows, block, proposal).tokens)[0]
    assert misfit(count(choices), defined(TARGET, 1.0)) > 3


# ---------------------------------------------------------------- the loop

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]


class DrawingDrafter:
    """Scores every slot with `logits` (V,) and proposes what weighs most."""

    def __init__(self, logits):
        self._logits = mx.array(logits, mx.float32)

    def observe(self, taps):
        pass

    def propose(self, anchor, count, weigh=as_scored):
        scores = weigh(mx.broadcast_to(self._logits, (count, len(self._logits))), None)
        return Proposal(mx.argmax(scores, axis=-1)[None], scores)

    def arrays(self):
        return []


class TableTarget:
    """A Markov chain: the logits after a token are a row of a table."""

    vocab_size = VOCAB

    def __init__(self, table):
        self._table = mx.array(table, mx.float32)

    def start(self, taps=()):
        return TableSession()

    def logits(self, hidden):
        return self._table[hidden]


class TableSession:
    offset = 0

    def forward(self, tokens):
        self._last = tokens.shape[1]
        self.offset += self._last
        return Features(tokens, tokens[..., None])

    def rollback(self, keep):
        self.offset -= self._last - keep

    def arrays(self):
        return []


def answer(adapter, rule, drafter=None, width=1, budget=60, prompt=PROMPT):
    state = tiny.state(adapter, prompt, budget, drafter)
    state.rule = rule
    events = list(decode(state, FixedWidth(width), 512))
    return state.emitted, events


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("rule", [*RULES, "wrong"], ids=str)
def test_whole_answers_are_the_targets_chain(rule, width):
    """Transition counts of answers over several seeds: what cycles and their borders do to the distribution."""
    table = np.random.default_rng(2).normal(size=(VOCAB, VOCAB)) * 0.8
    counts = np.zeros((VOCAB, VOCAB))
    for seed in range(4):
        settled = params(temperature=1.0, seed=seed)
        built = rule_for(settled, VOCAB, *(("residual", "coupled") if rule == "wrong" else rule))
        if rule == "wrong":
            built = ForgetsToSubtract(built.target, seed, VOCAB)
        tokens, _ = answer(TableTarget(table), built, DrawingDrafter(2 * DRAFT_LOGITS), width, 900, [1])
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    mean = np.stack([softmax(row) for row in table]) * counts.sum(axis=1, keepdims=True)
    often = mean > 5
    strangeness = ((counts - mean)[often] ** 2 / mean[often]).sum() / bound(often.sum())
    assert strangeness > 1.5 if rule == "wrong" else strangeness < 1


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("width", [2, 7])
def test_one_seed_is_one_text_with_any_draft_or_none_at_any_width(family, width):
    _, adapter = tiny.target(family)
    settled = params(temperature=0.8, top_p=0.95, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.1)
    rule = rule_for(settled, tiny.VOCAB, "matching", "coupled")
    plain, _ = answer(adapter, rule)
    for patience in (itertools.repeat(0), itertools.cycle(range(width)), itertools.repeat(99)):
        drafter = tiny.ScriptedDrafter(plain, len(PROMPT), patience)
        assert answer(adapter, rule, drafter, width)[0] == plain
    for proposals in ("likeliest", "coupled"):
        rule = rule_for(settled, tiny.VOCAB, "matching", proposals)
        assert answer(adapter, rule, DrawingDrafter(np.zeros(tiny.VOCAB)), width)[0] == plain
    other = rule_for(params(temperature=0.8, seed=12), tiny.VOCAB, "matching", "coupled")
    assert answer(adapter, other)[0] != plain


def test_the_residual_rule_repeats_itself_for_a_seed():
    _, adapter = tiny.target("llama")
    rule = rule_for(params(temperature=0.8), tiny.VOCAB, "residual", "coupled")
    texts = [answer(adapter, rule, DrawingDrafter(np.zeros(tiny.VOCAB)), 5)[0] for _ in range(2)]
    assert texts[0] == texts[1]


def penalised(model, prompt, count, processors):
    """Greedy decoding with mlx-lm's processors over prompt and answer. (Its own loop shows them the whole prompt only
    since some version after 0.31.1.)"""
    cache, line = make_prompt_cache(model), list(prompt)
    logits = model(mx.array([line]), cache=cache)[:, -1]
    while True:
        for processor in processors:
            logits = processor(mx.array(line), logits)
        line.append(mx.argmax(logits, axis=-1).item())
        if len(line) == len(prompt) + count:
            return line[len(prompt) :]
        logits = model(mx.array([line[-1:]]), cache=cache)[:, -1]


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("context", [1, 20, 200])
def test_penalised_greedy_answers_are_those_of_mlx_lms_processors(width, context):
    model, adapter = tiny.target("llama")
    asked = {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 2.0},
    }
    contexts = {f"{name}_context_size": context for name in ("repetition", "presence", "frequency")}
    expected = penalised(model, PROMPT, 100, make_logits_processors(**asked, **contexts))
    assert expected != tiny.greedy(model, PROMPT, 100)
    rule = rule_for(params(penalty_context=context, **asked), tiny.VOCAB, "matching", "coupled")
    drafter = tiny.ScriptedDrafter(expected, len(PROMPT), itertools.cycle([2, 0, 7, 1]))
    assert answer(adapter, rule, drafter if width > 1 else None, width, 100)[0] == expected


def test_coupled_proposals_agree_as_often_as_the_distributions_are_alike():
    """Draft and target the same: every proposal stands. Unlike: at least the bound of Gumbel coupling."""
    p, q = softmax(TARGET), softmax(DRAFT_LOGITS)
    least = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(VOCAB))
    rule = rule_for(params(temperature=1.0), VOCAB, "matching", "coupled")
    block, choices = one_round(rule, FirstGeneration(), 20000)
    assert np.mean(block[1:] == choices[:-1]) == pytest.approx(least, abs=0.015)
    block, choices = one_round(rule, FirstGeneration(), 2000, DRAFT_LOGITS)
    assert accepted_prefix(block[1:].tolist(), choices.tolist()) == 2000


def test_matching_rules_are_told_apart_from_residual_ones():
    assert isinstance(rule_for(params(temperature=1.0), 4, "matching", "coupled"), Matching)
    assert isinstance(rule_for(params(temperature=1.0), 4, "residual", "coupled"), Residual)
    assert rule_for(params(), 4, "residual", "coupled").reach == 0
