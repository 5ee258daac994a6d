"""Settings: what is refused, and whose word counts when several have one."""

import pytest

from dflash.config import NEUTRAL, DFlashConfig, SamplingParams
from dflash.errors import BadValue

WARM = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "eos_token_id": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "warm"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_k": -1},
        {"top_k": 1.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": 101},
        {"penalty_context": 0},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {1: "2"}},
        {"logit_bias": {True: 1}},
        {"logit_bias": [1]},
        {"seed": -1},
        {"seed": 1 << 63},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(wrong):
    with pytest.raises(BadValue, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize("wrong", [{"acceptance": "typical"}, {"proposals": "best"}], ids=str)
def test_an_unknown_rule_is_refused(wrong):
    with pytest.raises(BadValue, match=next(iter(wrong))):
        DFlashConfig(**wrong)


def test_a_bias_from_json_has_ids_as_text():
    assert SamplingParams(logit_bias={"7": -3, 8: 1.5}).logit_bias == {7: -3.0, 8: 1.5}


def test_nothing_asked_for_is_greedy_whatever_the_model_says():
    settled = SamplingParams().effective(WARM)
    assert {name: getattr(settled, name) for name in NEUTRAL} == NEUTRAL and settled.seed is None


def test_the_models_defaults_fill_in_what_was_not_asked_for():
    settled = SamplingParams(model_defaults=True, top_p=0.5).effective(WARM | {"top_k": None})
    assert (settled.temperature, settled.top_p, settled.top_k) == (0.6, 0.5, 0)


def test_an_explicit_zero_is_greedy_against_the_models_defaults():
    settled = SamplingParams(model_defaults=True, temperature=0).effective(WARM)
    assert (settled.temperature, settled.seed) == (0, None)


@pytest.mark.parametrize(
    "model", [{}, {"temperature": 0.7}, {"do_sample": False, "temperature": 0.7}], ids=str
)
def test_a_model_that_does_not_ask_for_sampling_gets_none(model):
    assert SamplingParams(model_defaults=True).effective(model).temperature == 0


def test_a_model_that_asks_for_sampling_without_a_temperature_means_one():
    assert SamplingParams(model_defaults=True).effective({"do_sample": True}).temperature == 1


def test_a_seed_is_drawn_for_each_request_that_draws_and_kept_when_given():
    seeds = {SamplingParams(temperature=1).effective().seed for _ in range(5)}
    assert len(seeds) == 5 and None not in seeds
    assert SamplingParams(temperature=1, seed=0).effective().seed == 0
    assert SamplingParams(seed=4).effective().seed == 4


def test_settled_settings_stay_as_they_are():
    settled = SamplingParams(model_defaults=True).effective(WARM)
    assert settled.effective({"do_sample": True, "temperature": 9.0}) == settled
