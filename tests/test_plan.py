"""The memory plan: caches as mlx-lm allocates them, weights as they run, and a limit that is named."""

import math
from dataclasses import replace

import mlx.core as mx
import pair
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from dflash import DFlashConfig, DFlashRuntime, plan
from dflash.models import headers
from dflash.models.headers import TensorInfo
from dflash.plan import Machine, Weights
from dflash.targets.sliding import WindowCache

CHUNK = 256
GIB = 1 << 30
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 101,
    "rope_theta": 1e4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SLIDING = (["sliding_attention"] * 3 + ["full_attention"]) * 2
DELTA = {
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
GPT_OSS = {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None}
GEMMA_4 = {
    "sliding_window": 200,
    "layer_types": SLIDING,
    "num_kv_shared_layers": 4,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# family -> (kind, config); among them each way in which mlx-lm lays out caches that the plan knows.
FAMILIES = {
    "llama": ("attention", {}),
    "qwen3": ("attention", {"layer_types": ["full_attention"] * 8, "sliding_window": 64}),
    "llama with a window": (
        "sliding",
        {"model_type": "llama", "layer_types": SLIDING, "sliding_window": 300},
    ),
    "gpt_oss": ("sliding", GPT_OSS),
    "gemma3_text": ("sliding", {"sliding_window": 200, "query_pre_attn_scalar": 16}),
    "gemma4_text": ("sliding", GEMMA_4),
    "qwen3_next": ("hybrid", DELTA | EXPERTS | {"partial_rotary_factor": 0.5}),
    "qwen3_5": (
        "hybrid",
        {"text_config": {**COMMON, **DELTA, "model_type": "qwen3_5_text", "rope_parameters": ROPE}},
    ),
}
CPU = Machine("cpu", 16 * GIB, 14 * GIB, "float32")
GPU = Machine("gpu", 16 * GIB, 14 * GIB, None)


def config(family):
    return {"model_type": family, **COMMON, **FAMILIES[family][1]}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planned_cache_is_what_mlx_lm_allocates(family):
    settings = config(family)
    pytest.importorskip(f"mlx_lm.models.{settings['model_type']}")
    model_class, args_class = _get_classes(settings)
    model = model_class(args_class.from_dict(settings))
    caches = make_prompt_cache(model)
    for _ in range(3):
        model(mx.zeros((1, CHUNK), mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
    arrays = [[c.keys, c.values] if hasattr(c, "keys") else c.cache for c in caches]
    real = sum(array.nbytes for _, array in tree_flatten(arrays))
    planned = plan.cache(settings, element_bytes=4)
    # A window holds one row less while a chunk is in it.
    spare = sum(size for size, _ in planned.windowed)
    assert real <= planned.at(3 * CHUNK, CHUNK) <= real + spare
    assert planned.gaps == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kind_of_a_target_is_read_from_its_config(family):
    assert plan.kind(config(family)) == FAMILIES[family][0]


@pytest.mark.parametrize("family", tiny.ALL)
def test_the_plan_and_the_adapter_agree_on_kind_and_windows(family):
    settings = tiny.config(family)
    _, adapter = tiny.target(family)
    assert plan.kind(settings) == adapter.kind
    windows = [c.window for c in getattr(adapter.start(), "_caches", []) if isinstance(c, WindowCache)]
    assert [window for _, window in plan.cache(settings, 4).windowed] == windows


@pytest.mark.parametrize("family", [*tiny.SLIDING, *tiny.OTHERS])
def test_the_planned_cache_is_no_less_than_a_session_keeps(family):
    settings = tiny.config(family)
    _, adapter = tiny.target(family)
    session = adapter.start()
    for _ in range(3):
        session.forward(mx.zeros((1, CHUNK), mx.int32))
        mx.eval(session.arrays())
    real = sum(array.nbytes for array in session.arrays())
    planned = plan.cache(settings, element_bytes=4)
    spare = 1.3 if family == "glm_moe_dsa" else 1.02  # mlx-lm 0.31 stores its index once, later ones twice
    assert real <= planned.at(3 * CHUNK, CHUNK) <= spare * real


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"model_type": "kimi_linear", "num_hidden_layers": 4}, "hybrid"),
        ({"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "hybrid"),
        ({"model_type": "gemma2", "num_hidden_layers": 8, "layer_types": SLIDING}, "attention"),
        ({"model_type": "new"}, "unknown"),
    ],
)
def test_families_of_other_makes_are_named_as_far_as_their_config_tells(settings, kind):
    assert plan.kind(settings) == kind


def test_what_cannot_be_counted_is_a_gap_and_not_a_zero_in_silence():
    assert "kimi_linear" in plan.cache({"model_type": "kimi_linear", "num_hidden_layers": 4}, 2).gaps[0]
    lfm = {**COMMON, "model_type": "lfm2", "layer_types": ["conv"] * 4 + ["full_attention"] * 4}
    assert "recurrent" in plan.cache(lfm, 2).gaps[0]
    weights = Weights(lfm, GIB, GIB)
    assert plan.plan(weights, None, CPU, 1024).gaps == plan.cache(lfm, 2).gaps


def test_latent_attention_keeps_the_latent():
    settings = {**COMMON, "model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    assert plan.cache(settings, 2).per_token == 8 * (32 + 8) * 2
    assert plan.cache({**settings, "model_type": "deepseek_v2"}, 2).per_token == 8 * (2 * 2 * 16) * 2


def test_a_drafts_sliding_layers_keep_only_their_window_whatever_its_model_type():
    settings = {**COMMON, "model_type": "qwen3", "layer_types": SLIDING, "sliding_window": 256}
    assert plan.cache(settings, 2).windowed == ()
    assert len(plan.cache(settings, 2, rotating=True).windowed) == 6


# ---------------------------------------------------------------- weights


def test_weights_count_as_they_run(tmp_path):
    folder = pair.target(tmp_path / "target")
    tensors = headers.tensors(folder)
    elements = sum(math.prod(info.shape) for info in tensors.values())
    assert plan.weight_bytes(tensors) == sum(info.nbytes for info in tensors.values())
    assert plan.weight_bytes(tensors, run_dtype="float32") == 4 * elements
    assert plan.weight_bytes(tensors, run_dtype="bfloat16") == 2 * elements


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantised_weights_run_unpacked(bits):
    weight = mx.random.normal((64, 128))
    packed = dict(zip(("weight", "scales", "biases"), mx.quantize(weight, 64, bits), strict=True))
    info = {
        f"layer.{k}": TensorInfo("U32" if k == "weight" else "F32", v.shape, v.nbytes)
        for k, v in packed.items()
    }
    info["norm.weight"] = TensorInfo("BF16", (64,), 128)
    by_default = plan.weight_bytes(info, {"bits": bits, "group_size": 64}, "float32")
    by_module = plan.weight_bytes(info, {"bits": 1, "group_size": 64, "layer": {"bits": bits}}, "float32")
    assert by_default == by_module == 64 * 128 * 4 + 64 * 4
    assert plan.weight_bytes(info, {"bits": bits}) == sum(i.nbytes for i in info.values())


def test_parts_that_mlx_lm_leaves_on_the_disk_are_not_counted():
    info = TensorInfo("BF16", (10,), 20)
    names = ["model.layers.0.mlp.up_proj.weight", "model.visual.patch.weight", "mtp.fc.weight"]
    assert plan.weight_bytes(dict.fromkeys(names, info)) == 20


@given(st.sampled_from([3, 4, 6, 8]), st.integers(1, 10**7))
def test_the_estimate_from_the_files_size_agrees_with_the_tensors(bits, words):
    words *= 64
    stored = words * bits // 8 + words // 64 * 4
    estimated = plan.estimated_weight_bytes(
        stored, {"quantization": {"bits": bits, "group_size": 64}}, "float32"
    )
    assert estimated == pytest.approx(4 * words, rel=0.01)


def test_the_estimate_of_plain_weights_follows_their_dtype():
    assert plan.estimated_weight_bytes(1000, {"torch_dtype": "bfloat16"}, "float32") == 2000
    assert plan.estimated_weight_bytes(1000, {"text_config": {"dtype": "float32"}}, "float32") == 1000
    assert plan.estimated_weight_bytes(1000, {"torch_dtype": "bfloat16"}) == 1000


# ---------------------------------------------------------------- the plan


def a_pair(nbytes=GIB):
    return Weights(config("qwen3"), nbytes, nbytes // 2), Weights(
        pair.draft_config(), nbytes // 8, nbytes // 8
    )


def test_the_need_is_the_sum_of_its_parts():
    made = plan.plan(*a_pair(), CPU, 4096)
    parts = made.cache_bytes + made.transient_bytes
    assert made.needed_bytes == made.target_bytes + made.draft_bytes + max(parts, made.loading_bytes)
    assert made.fits and "fits: needs" in made.reason


def test_a_wider_dtype_needs_both_widths_while_loading():
    target, draft = a_pair()
    assert plan.plan(target, draft, CPU, 256).loading_bytes == target.stored_bytes
    assert plan.plan(target, draft, GPU, 256).loading_bytes == 0


@given(st.integers(1, 1 << 15), st.integers(1, 1 << 15))
def test_more_context_never_needs_less(shorter, longer):
    shorter, longer = sorted((shorter, longer))
    needs = [plan.plan(*a_pair(), GPU, tokens).needed_bytes for tokens in (shorter, longer)]
    assert needs[0] <= needs[1]


@given(st.integers(1, 64))
def test_the_largest_context_fits_and_a_step_more_does_not(megabytes):
    target, draft = a_pair(nbytes=1 << 20)
    machine = replace(GPU, usable_bytes=megabytes << 20)
    largest = plan.plan(target, draft, machine, 1).largest_context
    limit = target.config["max_position_embeddings"]
    if largest:
        assert plan.plan(target, draft, machine, largest).fits
    if largest < limit:
        assert not plan.plan(target, draft, machine, largest + CHUNK).fits


def test_what_does_not_fit_names_need_limit_and_way_out():
    target, draft = a_pair()
    tight = replace(GPU, usable_bytes=target.nbytes + draft.nbytes + (10 << 20))
    made = plan.plan(target, draft, tight, 1 << 20)
    assert not made.fits and 0 < made.largest_context < 1 << 20
    assert (
        plan.gigabytes(made.needed_bytes) in made.reason and plan.gigabytes(tight.usable_bytes) in made.reason
    )
    assert f"{made.largest_context} tokens would fit" in made.reason
    none = plan.plan(target, draft, replace(GPU, usable_bytes=GIB), 256)
    assert not none.fits and none.largest_context == 0 and "at any context" in none.reason


def test_without_a_draft_the_target_alone_is_planned():
    target, draft = a_pair()
    alone, both = plan.plan(target, None, GPU, 4096), plan.plan(target, draft, GPU, 4096)
    assert alone.draft_bytes == 0 and alone.needed_bytes < both.needed_bytes - draft.nbytes


def test_the_plan_covers_the_measured_peak_of_a_run_without_exaggerating(tmp_path):
    folders = pair.target(tmp_path / "target"), pair.draft(tmp_path / "draft")
    runtime = DFlashRuntime.from_pretrained(str(folders[0]), str(folders[1]), DFlashConfig())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = runtime.generate("x" * 400, max_tokens=40, ignore_eos=True)
    measured = mx.get_peak_memory() - before
    sides = [Weights(headers.load_config(folder), 0, 0) for folder in folders]
    made = plan.plan(*sides, CPU, result.prompt_tokens + len(result.tokens))
    assert measured <= made.needed_bytes <= 3 * measured


# ---------------------------------------------------------------- the machine


def test_this_machine_has_memory_and_a_share_of_it_to_use():
    machine = plan.this_machine()
    assert 0 < machine.usable_bytes <= machine.memory_bytes
    assert machine.run_dtype == ("float32" if machine.device == "cpu" else None)


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_containers_limit_counts_in_either_version(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("1073741824\n")
    assert plan._container_limit(tmp_path) == GIB
    file.write_text("max\n")
    assert plan._container_limit(tmp_path) is None
