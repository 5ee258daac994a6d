"""The public API on a tiny pair: one answer whichever way it is asked for."""

import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pair
import pytest
import tiny
from mlx.utils import tree_flatten
from mlx_lm.utils import load

from dflash import DFlashConfig, DFlashRuntime, SamplingParams
from dflash.errors import (
    BadCheckpoint,
    BadValue,
    ChatTemplateFailed,
    ContextExceeded,
    DraftMismatch,
    EmptyPrompt,
    ModelIsDraft,
    UnsupportedDraft,
    UnsupportedModel,
)
from dflash.events import Cycle, Finished, Notice, Text

QUESTION = "Why is the sky blue? 空"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("pair")
    return pair.target(base / "target"), pair.draft(base / "draft")


@pytest.fixture(scope="module")
def runtime(folders):
    target, draft = folders
    return DFlashRuntime.from_pretrained(str(target), str(draft), DFlashConfig(draft_block_size=6))


@pytest.fixture(scope="module")
def baseline(folders):
    return DFlashRuntime.from_pretrained(str(folders[0]), config=DFlashConfig(mode="baseline"))


def codes(result):
    """The remarks of a result, but for those that this random draft always earns."""
    return [notice.code for notice in result.notices if notice.code not in ("low_acceptance", "draft_rested")]


def test_a_draft_that_never_helps_is_remarked_on(runtime, baseline):
    result = runtime.generate(QUESTION, max_tokens=90, ignore_eos=True)
    assert [notice.code for notice in result.notices] == ["low_acceptance"]
    short = runtime.generate(QUESTION, max_tokens=10, ignore_eos=True)
    assert short.notices == ()
    assert baseline.generate(QUESTION, max_tokens=90, ignore_eos=True).notices == ()


def test_the_answer_equals_mlx_lm_and_baseline(folders, runtime, baseline):
    model, tokenizer = load(str(folders[0]))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True
    )
    expected = tiny.greedy(model, prompt, 120)
    with_draft = runtime.generate(QUESTION, max_tokens=120, ignore_eos=True)
    without = baseline.generate(QUESTION, max_tokens=120, ignore_eos=True)
    assert list(with_draft.tokens) == expected == list(without.tokens)
    assert with_draft.text == without.text == tokenizer.decode(expected)
    assert (with_draft.mode, without.mode) == ("dflash", "baseline")
    assert with_draft.drafted_tokens > 0 and without.drafted_tokens == 0


def test_text_and_messages_are_the_same_request(runtime):
    asked = runtime.generate(QUESTION, max_tokens=20)
    told = runtime.generate([{"role": "user", "content": QUESTION}], max_tokens=20)
    assert asked.tokens == told.tokens


def test_without_a_template_the_bare_text_is_the_prompt(runtime):
    result = runtime.generate("abc", use_chat_template=False, max_tokens=3)
    assert result.prompt_tokens == 3


def test_streamed_pieces_joined_are_the_text(runtime):
    whole = runtime.generate(QUESTION, max_tokens=150, ignore_eos=True)
    pieces = list(runtime.stream_generate(QUESTION, max_tokens=150, ignore_eos=True))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 10


def test_the_first_piece_comes_before_the_last_cycle(runtime):
    kinds = [type(event) for event in runtime.events(QUESTION, max_tokens=100, ignore_eos=True)]
    assert kinds.index(Text) < len(kinds) - kinds[::-1].index(Cycle) - 1
    assert kinds[-1] is Finished


def test_requests_leave_nothing_behind(runtime):
    first = runtime.generate(QUESTION, max_tokens=60, ignore_eos=True)
    runtime.generate("something else entirely", max_tokens=33)
    abandoned = runtime.stream_generate(QUESTION, max_tokens=60)
    next(abandoned)
    abandoned.close()
    again = runtime.generate(QUESTION, max_tokens=60, ignore_eos=True)
    assert (again.tokens, again.width_histogram) == (first.tokens, first.width_histogram)
    assert again.mode == "dflash"


def test_a_thousand_short_requests_all_succeed(runtime):
    for index in range(1000):
        result = runtime.generate(f"question {index}", max_tokens=1 + index % 4, ignore_eos=True)
        assert len(result.tokens) == 1 + index % 4


@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_stop_text_across_token_borders_ends_the_answer_and_is_not_in_it(folders, width):
    target, draft = folders
    runtime = DFlashRuntime.from_pretrained(str(target), str(draft), DFlashConfig(draft_block_size=width))
    whole = runtime.generate(QUESTION, max_tokens=80, ignore_eos=True)
    stop = re.search(r"[^\ufffd]{4}", whole.text[8:])[0]  # the random model's text is mostly not text
    result = runtime.generate(QUESTION, max_tokens=80, ignore_eos=True, stop=[stop])
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.finish_reason == "stop_string"
    assert whole.tokens[: len(result.tokens)] == result.tokens
    text_up_to = runtime.target.tokenizer.decode(list(result.tokens))
    assert text_up_to.endswith(stop)  # the token that completed it is the last one counted


def test_the_end_token_ends_the_answer_without_being_part_of_the_text(folders, runtime):
    free = runtime.generate(QUESTION, max_tokens=80, ignore_eos=True)
    end = free.tokens[30]
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "generation_config.json").write_text(json.dumps({"eos_token_id": [pair.END, end]}))
    try:
        again = DFlashRuntime.from_pretrained(str(folders[0]), str(folders[1]))
    finally:
        (folders[0] / "generation_config.json").unlink()
    assert config["eos_token_id"] == pair.END
    result = again.generate(QUESTION, max_tokens=80)
    first = free.tokens.index(end)
    assert result.tokens == free.tokens[: first + 1]
    assert result.finish_reason == "stop"
    assert result.text == again.target.tokenizer.decode(list(free.tokens[:first]))


def test_figures_are_consistent(runtime):
    result = runtime.generate(QUESTION, max_tokens=90, ignore_eos=True)
    assert result.finish_reason == "length" and len(result.tokens) == 90
    assert sum(result.width_histogram.values()) == result.cycles
    assert result.accepted_length == pytest.approx(89 / result.cycles)
    assert result.acceptance_rate == pytest.approx(result.accepted_tokens / 90)
    assert result.drafted_tokens == sum((width - 1) * n for width, n in result.width_histogram.items())
    assert result.cycles + result.accepted_tokens == 89  # each cycle adds one token of the target's own


def test_the_context_limit_ends_the_answer_and_is_named(folders):
    runtime = DFlashRuntime.from_pretrained(*map(str, folders), DFlashConfig(max_ctx=40))
    result = runtime.generate("abcdefgh", use_chat_template=False, max_tokens=100, ignore_eos=True)
    assert len(result.tokens) == 32
    assert result.finish_reason == "length"
    assert codes(result) == ["context_full"]


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(folders):
    runtime = DFlashRuntime.from_pretrained(*map(str, folders), DFlashConfig(max_ctx=40))
    with pytest.raises(ContextExceeded) as caught:
        runtime.generate("x" * 40, use_chat_template=False)
    assert caught.value.details == {"prompt_tokens": 40, "context_tokens": 40}


@pytest.mark.parametrize("prompt_tokens", [20, 59, 60, 80])
def test_past_the_drafts_own_limit_decoding_is_plain_and_says_so(folders, tmp_path, baseline, prompt_tokens):
    short = pair.draft(tmp_path / "short", max_position_embeddings=60)
    runtime = DFlashRuntime.from_pretrained(str(folders[0]), str(short), DFlashConfig(lookup=False))
    settings = {"use_chat_template": False, "max_tokens": 70, "ignore_eos": True}
    result = runtime.generate("y" * prompt_tokens, **settings)
    assert result.tokens == baseline.generate("y" * prompt_tokens, **settings).tokens
    assert codes(result) == ["draft_context_limit"]
    assert result.mode == ("dflash" if prompt_tokens < 59 else "baseline")
    again = runtime.generate("y" * 5, **settings)  # the next request starts afresh
    assert again.mode == "dflash"


def test_one_copy_of_the_target_whatever_the_mode(folders):
    sizes = {}
    for mode in ("baseline", "dflash"):
        before = mx.get_active_memory()
        draft = str(folders[1]) if mode == "dflash" else None
        runtime = DFlashRuntime.from_pretrained(str(folders[0]), draft, DFlashConfig(mode=mode))
        sizes[mode] = mx.get_active_memory() - before
        weights = sum(a.nbytes for _, a in tree_flatten(runtime.target.model.parameters()))
        if mode == "dflash":
            weights += sum(a.nbytes for _, a in tree_flatten(runtime.draft.parameters()))
        assert sizes[mode] < weights * 1.5  # arrays are padded; a second copy would double it
        del runtime


def test_template_arguments_reach_the_template(tmp_path, folders):
    template = "{{ raise_exception('no mood') if not mood is defined else mood }}"
    target = pair.target(tmp_path / "moody", chat_template=template)
    runtime = DFlashRuntime.from_pretrained(str(target), config=DFlashConfig(mode="baseline"))
    result = runtime.generate("x", chat_template_args={"mood": "glad"}, max_tokens=2)
    assert result.prompt_tokens == 4
    with pytest.raises(ChatTemplateFailed, match=r"user.*no mood") as caught:
        runtime.generate("x")
    assert caught.value.details["roles"] == ["user"]


def test_a_model_without_a_template_takes_text_and_says_so(tmp_path):
    target = pair.target(tmp_path / "plain", chat_template=None)
    runtime = DFlashRuntime.from_pretrained(str(target), config=DFlashConfig(mode="baseline"))
    result = runtime.generate("abcd", max_tokens=2)
    assert result.prompt_tokens == 4
    assert codes(result) == ["no_chat_template"]
    with pytest.raises(BadValue):
        runtime.generate([{"role": "user", "content": "abcd"}])


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", EmptyPrompt),
        (" \n", EmptyPrompt),
        ([], EmptyPrompt),
        ([{"content": "x"}], BadValue),
        ({}, BadValue),
    ],
)
def test_prompts_that_are_none_are_refused(runtime, prompt, error):
    with pytest.raises(error):
        runtime.generate(prompt)


@pytest.mark.parametrize(
    "settings", [{"max_tokens": 0}, {"max_tokens": -1}, {"stop": "x"}, {"stop": [""]}, {"top": 1}]
)
def test_settings_that_make_no_sense_are_refused(runtime, settings):
    with pytest.raises(BadValue):
        runtime.generate("x", **settings)


def test_params_may_be_given_whole(runtime):
    assert len(runtime.generate("x", params=SamplingParams(max_tokens=4, ignore_eos=True)).tokens) == 4


def test_a_width_beyond_the_trained_block_is_refused(folders):
    with pytest.raises(BadValue, match="trained for 8"):
        DFlashRuntime.from_pretrained(*map(str, folders), DFlashConfig(draft_block_size=9))


def test_the_width_follows_a_curve_that_is_measured_once(folders, baseline, tmp_path, monkeypatch, capsys):
    config = DFlashConfig(cache_dir=tmp_path, lookup=False)
    first = DFlashRuntime.from_pretrained(*map(str, folders), config, progress=True)
    assert first.block_size == 8
    answer = first.generate(QUESTION, max_tokens=90, ignore_eos=True)
    assert capsys.readouterr().err.count("measuring") == 1
    assert answer.tokens == baseline.generate(QUESTION, max_tokens=90, ignore_eos=True).tokens
    assert set(answer.width_histogram) != {8}, "a random draft does not earn its whole block"
    (saved,) = tmp_path.glob("curves/*.json")

    def never(*_):
        raise AssertionError("measured twice")

    monkeypatch.setattr("dflash.curves.measure", never)
    second = DFlashRuntime.from_pretrained(*map(str, folders), config)
    assert second.measured.curve == first.measured.curve
    saved.write_text("damaged")
    third = DFlashRuntime.from_pretrained(*map(str, folders), config)
    with pytest.raises(AssertionError, match="measured twice"):
        third.generate(QUESTION, max_tokens=9)


def test_a_draft_given_as_the_model_is_named_as_one(folders):
    with pytest.raises(ModelIsDraft):
        DFlashRuntime.from_pretrained(str(folders[1]), str(folders[1]))


def test_a_model_given_as_the_draft_is_refused(folders):
    with pytest.raises(UnsupportedDraft, match="not a DFlash draft"):
        DFlashRuntime.from_pretrained(str(folders[0]), str(folders[0]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, "hidden size 64, the target has 48"),
        ({"num_target_layers": 30}, "30 layers"),
        ({"dflash_config": {"mask_token_id": 9000, "target_layer_ids": [0, 1]}}, "mask token 9000"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 3]}}, "taps layer 3"),
    ],
)
def test_a_draft_of_another_target_is_refused_with_the_difference(folders, tmp_path, changes, said):
    other = pair.draft(tmp_path / "other", **changes)
    with pytest.raises(DraftMismatch, match=said):
        DFlashRuntime.from_pretrained(str(folders[0]), str(other))


def test_weights_that_are_cut_off_are_a_damaged_checkpoint(folders, tmp_path):
    broken = pair.target(tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        DFlashRuntime.from_pretrained(str(broken), str(folders[1]))


def test_an_unknown_model_type_is_unsupported(folders, tmp_path):
    odd = pair.target(tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text()) | {"model_type": "no_such_family"}
    (odd / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="no_such_family"):
        DFlashRuntime.from_pretrained(str(odd), str(folders[1]))


@pytest.fixture(scope="module")
def opaque(tmp_path_factory):
    return pair.target(tmp_path_factory.mktemp("opaque") / "lfm2", "lfm2")


def test_a_family_without_an_adapter_runs_plainly_and_refuses_a_named_draft(folders, opaque):
    runtime = DFlashRuntime.from_pretrained(str(opaque), config=DFlashConfig(mode="baseline"))
    model, _ = load(str(opaque))
    result = runtime.generate("abc", use_chat_template=False, max_tokens=60, ignore_eos=True)
    prompt = runtime.target.tokenizer.encode("abc")
    assert list(result.tokens) == tiny.greedy(model, prompt, 60)
    with pytest.raises(UnsupportedModel, match=r"lfm2.*supported.*gemma4") as caught:
        DFlashRuntime.from_pretrained(str(opaque), str(folders[1]))
    assert caught.value.exit_status == 4


def test_a_family_without_an_adapter_goes_without_a_draft_that_nobody_named(folders, opaque, monkeypatch):
    known = SimpleNamespace(draft=str(folders[1]))
    monkeypatch.setattr("dflash.runtime.lookup", lambda model: known)
    runtime = DFlashRuntime.from_pretrained(str(opaque))
    result = runtime.generate("abc", use_chat_template=False, max_tokens=9, ignore_eos=True)
    assert (result.mode, runtime.draft_name) == ("baseline", None)
    said = [notice.message for notice in result.notices if notice.code == "no_adapter"]
    assert len(said) == 1 and "lfm2" in said[0]


LIST = "1. red apple 2. red apple 3. red apple 4. red apple 5. red"


def test_copies_need_no_draft_and_leave_the_answer_as_it_is(folders, baseline):
    runtime = DFlashRuntime.from_pretrained(str(folders[0]), config=DFlashConfig(mode="lookup"))
    assert (runtime.draft, runtime.draft_name) == (None, None)
    settings = {"use_chat_template": False, "max_tokens": 60, "ignore_eos": True}
    result = runtime.generate(LIST, **settings)
    assert result.tokens == baseline.generate(LIST, **settings).tokens
    assert result.mode == "lookup" and set(result.proposals) == {"lookup"}
    assert result.drafted_tokens == result.proposals["lookup"].drafted > 0
    assert runtime.block_size == 32


def test_copies_are_no_wider_than_asked_for(folders):
    settings = {"use_chat_template": False, "max_tokens": 60, "ignore_eos": True}
    for width in (1, 3):
        config = DFlashConfig(mode="lookup", draft_block_size=width)
        runtime = DFlashRuntime.from_pretrained(str(folders[0]), config=config)
        assert max(runtime.generate(LIST, **settings).width_histogram) == width == runtime.block_size
    with pytest.raises(BadValue, match="32 tokens at a time"):
        DFlashRuntime.from_pretrained(
            str(folders[0]), config=DFlashConfig(mode="lookup", draft_block_size=33)
        )


def test_both_kinds_of_proposals_are_counted_and_copies_can_be_left_out(folders, baseline):
    settings = {"use_chat_template": False, "max_tokens": 60, "ignore_eos": True}
    results = {}
    for lookup in (True, False):
        config = DFlashConfig(draft_block_size=4, lookup=lookup)
        results[lookup] = DFlashRuntime.from_pretrained(*map(str, folders), config).generate(LIST, **settings)
        assert results[lookup].tokens == baseline.generate(LIST, **settings).tokens
        made = results[lookup].proposals.values()
        assert sum(one.drafted for one in made) == results[lookup].drafted_tokens
        assert sum(one.accepted for one in made) == results[lookup].accepted_tokens
    assert set(results[True].proposals) == {"dflash", "lookup"}
    assert set(results[False].proposals) == {"dflash"} and results[False].mode == "dflash"


def test_a_target_that_cannot_be_rolled_back_refuses_copies(opaque):
    with pytest.raises(UnsupportedModel, match="lfm2"):
        DFlashRuntime.from_pretrained(str(opaque), config=DFlashConfig(mode="lookup"))


def test_notices_are_events_too(folders):
    runtime = DFlashRuntime.from_pretrained(*map(str, folders), DFlashConfig(max_ctx=20))
    events = list(runtime.events("abc", use_chat_template=False, max_tokens=50, ignore_eos=True))
    assert [event.code for event in events if isinstance(event, Notice)] == ["context_full"]


# ---------------------------------------------------------------- drawing

DRAWN = {"max_tokens": 50, "ignore_eos": True, "temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.2}


def test_one_seed_is_one_text_whoever_proposes(folders, runtime, baseline):
    with_draft = runtime.generate(QUESTION, seed=5, **DRAWN)
    assert with_draft.tokens == baseline.generate(QUESTION, seed=5, **DRAWN).tokens
    assert with_draft.mode == "dflash" and with_draft.params.seed == 5
    for config in (DFlashConfig(draft_block_size=3, proposals="likeliest"), DFlashConfig(draft_block_size=8)):
        other = DFlashRuntime(runtime.target, runtime.draft, config)
        assert other.generate(QUESTION, seed=5, **DRAWN).tokens == with_draft.tokens
    assert runtime.generate(QUESTION, seed=6, **DRAWN).tokens != with_draft.tokens
    assert runtime.generate(QUESTION, max_tokens=50, ignore_eos=True).tokens != with_draft.tokens


def test_without_a_seed_requests_differ_and_report_what_repeats_them(runtime):
    first, second = (runtime.generate(QUESTION, **DRAWN) for _ in range(2))
    assert first.params.seed != second.params.seed and first.tokens != second.tokens
    assert runtime.generate(QUESTION, seed=first.params.seed, **DRAWN).tokens == first.tokens


def test_fresh_threads_draw_as_the_seed_says(runtime):
    texts = []
    for _ in range(2):
        ask = threading.Thread(target=lambda: texts.append(runtime.generate(QUESTION, seed=5, **DRAWN).text))
        ask.start()
        ask.join()
    assert texts == [runtime.generate(QUESTION, seed=5, **DRAWN).text] * 2


def test_the_residual_rule_repeats_itself_and_runs_the_draft(runtime):
    engine = DFlashRuntime(
        runtime.target, runtime.draft, DFlashConfig(draft_block_size=5, acceptance="residual")
    )
    first, second = (engine.generate(QUESTION, seed=5, **DRAWN) for _ in range(2))
    assert first.tokens == second.tokens and first.mode == "dflash"


def test_a_models_own_settings_are_used_when_asked_for_and_shown(folders, runtime):
    offered = {"do_sample": True, "temperature": 1.2, "top_k": 5}
    engine = DFlashRuntime(replace(runtime.target, generation_defaults=offered), runtime.draft)
    settled = engine.generate("Hi", max_tokens=3, model_defaults=True).params
    assert (settled.temperature, settled.top_k, settled.top_p) == (1.2, 5, 1.0)
    assert engine.generate("Hi", max_tokens=3, model_defaults=True, temperature=0).params.temperature == 0
    assert engine.generate("Hi", max_tokens=3).params.temperature == 0
    damaged = replace(runtime.target, generation_defaults={"do_sample": True, "temperature": "hot"})
    with pytest.raises(BadCheckpoint, match=r"generation_config\.json.*temperature"):
        DFlashRuntime(damaged).generate("Hi", model_defaults=True)


def test_settings_that_change_nothing_are_remarked_on_and_impossible_ones_refused(runtime):
    result = runtime.generate("Hi", max_tokens=3, top_p=0.5, top_k=4)
    assert "top_p, top_k" in next(notice.message for notice in result.notices if notice.code == "greedy")
    with pytest.raises(BadValue, match="token 99999"):
        runtime.generate("Hi", logit_bias={99999: 1.0})
