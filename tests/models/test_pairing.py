"""Whether a draft belongs to a target, told from two configs."""

import pair
import pytest
import tiny

from dflash.models.pairing import check_pair

TARGET = tiny.config("llama", vocab_size=259)


def test_a_matching_pair_is_compatible_and_says_what_was_compared():
    verdict = check_pair(TARGET, pair.draft_config())
    assert verdict.compatible is True and verdict.code is None and verdict.generation == 1
    for figure in ("hidden size 48", "3 layers", "vocabulary 259"):
        assert any(figure in reason for reason in verdict.reasons)


def test_a_wrapped_targets_text_config_is_the_one_that_counts():
    wrapped = {"model_type": "gemma4", "vocab_size": 1, "text_config": TARGET}
    assert check_pair(wrapped, pair.draft_config()).compatible is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, "hidden size 64"),
        ({"num_target_layers": 4}, "4 layers"),
        ({"dflash_config": {"mask_token_id": 259, "target_layer_ids": [0, 1]}}, "mask token 259"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 3]}}, "taps layer 3"),
    ],
)
def test_a_draft_of_another_geometry_is_not_compatible(changes, said):
    verdict = check_pair(TARGET, pair.draft_config(**changes))
    assert verdict.compatible is False and verdict.code == "draft_mismatch"
    assert said in verdict.reasons[0]


def test_a_draft_of_the_speculators_layout_is_compared_like_any_other():
    assert check_pair(TARGET, pair.speculators_config()).compatible is True
    verdict = check_pair(TARGET, pair.speculators_config(aux_hidden_state_layer_ids=[1, 4]))
    assert verdict.compatible is False and "taps layer 3" in verdict.reasons[0]


@pytest.mark.parametrize(
    "draft",
    [
        pair.draft_config(markov_rank=0),
        pair.draft_config(architectures=["Qwen3DSparkModel"], dflash_config={}),
        pair.speculators_config(speculators_model_type="eagle3"),
    ],
)
def test_a_relative_of_dflash_is_not_compatible(draft):
    verdict = check_pair(TARGET, draft)
    assert verdict.compatible is False and verdict.code == "unsupported_draft"


def test_configs_that_do_not_tell_leave_it_open():
    draft = pair.draft_config()
    assert check_pair({"model_type": "llama"}, draft).compatible is None
    del draft["hidden_size"]
    assert check_pair(TARGET, draft).compatible is None
