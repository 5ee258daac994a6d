"""The recurrence and its replay: the Metal body (emulated) and the CUDA twin (on a GPU) against the definition."""

import emulate
import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops

from dflash.kernels import gated_delta as ours
from dflash.kernels.device import backend

needs_compiler = pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ to compile the Metal body with")
needs_gpu = pytest.mark.skipif(backend() is None, reason="no GPU here")


def problem(seed, batch=1, steps=4, key_heads=2, value_heads=4, dk=32, dv=16, dtype=mx.float32, vector=False):
    """Random inputs of the sizes and ranges that a model makes."""
    mx.random.seed(seed)
    q, k = (mx.random.normal((batch, steps, key_heads, dk)) for _ in range(2))
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = mx.random.normal((batch, steps, value_heads, dv))
    g = mx.random.uniform(0.5, 1.0, (batch, steps, value_heads, *([dk] if vector else [])))
    beta = mx.random.uniform(0, 1, (batch, steps, value_heads))
    state = mx.random.normal((batch, value_heads, dv, dk))
    return [x.astype(dtype) for x in (q * dk**-0.5, k, v, g, beta)] + [state]


def emulated_forward(q, k, v, g, beta, state):
    inputs = dict(zip(ours.FORWARD_INPUTS, (q, k, v, g, beta, state, mx.array([v.shape[1]])), strict=True))
    outputs = {
        "y": (v.shape, v.dtype),
        "after": (state.shape, mx.float32),
        "innovation": (v.shape, mx.float32),
    }
    template = [*ours.template(k, v, g), ("OutT", v.dtype)]
    return emulate.run(
        ours.FORWARD, inputs=inputs, outputs=outputs, template=template, header=ours.RECORD, **ours.grid(v)
    )


def emulated_replay(innovation, k, g, state, keep):
    values = (state, *ours.tape_inputs(ours.Tape(innovation, k, g), keep))
    inputs = dict(zip(ours.REPLAY_INPUTS, values, strict=True))
    outputs = {"base": (state.shape, mx.float32)}
    template = ours.template(k, innovation, g)
    return emulate.run(
        ours.REPLAY, inputs=inputs, outputs=outputs, template=template, **ours.grid(innovation)
    )[0]


def error(a, b):
    return mx.max(mx.abs(a.astype(mx.float32) - b.astype(mx.float32))).item()


def first(inputs, steps):
    *blocks, state = inputs
    return [x[:, :steps] for x in blocks] + [state]


SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "steps": st.sampled_from([1, 2, 5, 16, 32]),
        "key_heads": st.sampled_from([1, 2]),
        "value_heads": st.sampled_from([2, 4]),
        "dk": st.sampled_from([64, 128, 256]),
        "dv": st.sampled_from([16, 64]),
        "dtype": st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
        "vector": st.booleans(),
    }
)


@needs_compiler
@settings(max_examples=12, deadline=None, derandomize=True)
@given(sizes=SHAPES, seed=st.integers(0, 99))
def test_the_metal_body_gives_the_definitions_outputs_states_and_tapes(sizes, seed):
    inputs = problem(seed, **sizes)
    y, after, innovation = emulated_forward(*inputs)
    expected_y, expected_after, expected_innovation = ours.reference_forward(*inputs)
    assert error(after, expected_after) < 2e-5
    assert error(innovation, expected_innovation) < 2e-5
    assert error(y, expected_y) < (2e-5 if sizes["dtype"] == mx.float32 else 2e-2)


@needs_compiler
@settings(max_examples=12, deadline=None, derandomize=True)
@given(sizes=SHAPES, seed=st.integers(0, 99), data=st.data())
def test_a_replayed_metal_state_is_bitwise_that_of_the_kept_steps_alone(sizes, seed, data):
    inputs = problem(seed, **sizes)
    keep = data.draw(st.integers(1, sizes["steps"]))
    _, k, _, g, _, state = inputs
    innovation = emulated_forward(*inputs)[2]
    alone = emulated_forward(*first(inputs, keep))[1]
    assert mx.array_equal(emulated_replay(innovation, k, g, state, keep), alone)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(sizes=SHAPES, seed=st.integers(0, 99), data=st.data())
def test_on_this_device_replay_is_bitwise_that_of_the_kept_steps_alone(sizes, seed, data):
    inputs = problem(seed, **sizes)
    keep = data.draw(st.integers(1, sizes["steps"]))
    tape = ours.forward_with_tape(*inputs)[2]
    alone = ours.forward_with_tape(*first(inputs, keep))[1]
    assert mx.array_equal(ours.replay(tape, inputs[-1], keep), alone)


@pytest.mark.parametrize("vector", [False, True])
def test_the_definition_is_mlx_lms(vector):
    inputs = problem(3, batch=2, steps=7, vector=vector)
    y, after, _ = ours.reference_forward(*inputs)
    expected_y, expected_after = gated_delta_ops(*inputs)
    assert error(y, expected_y) < 1e-5
    assert error(after, expected_after) < 1e-5


def test_prefill_is_a_forward_without_a_tape():
    inputs = problem(4, steps=40)
    y, after = ours.prefill(*inputs)
    expected_y, expected_after, _ = ours.reference_forward(*inputs)
    assert error(y, expected_y) < 1e-5 and error(after, expected_after) < 1e-5


def test_a_tape_keeps_values_and_no_states():
    inputs = problem(5, steps=16, dk=128, dv=64)
    tape = ours.forward_with_tape(*inputs)[2]
    per_state = inputs[-1].nbytes
    assert tape.innovation.nbytes == 16 * 4 * 64 * 4
    assert tape.innovation.nbytes + tape.k.nbytes + tape.g.nbytes < per_state


MIXED = st.fixed_dictionaries(
    {
        "steps": st.sampled_from([1, 3, 16]),
        "dtype": st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
        "seed": st.integers(0, 99),
        "sizes": st.sampled_from(
            [ours.Sizes(1, 2, 64, 16), ours.Sizes(2, 4, 128, 32), ours.Sizes(2, 2, 256, 16)]
        ),
    }
)


def mixed_problem(steps, dtype, seed, sizes):
    """A layer's convolution output and gates, in the ranges that models have."""
    mx.random.seed(seed)
    width = 2 * sizes.key_heads * sizes.dk + sizes.value_heads * sizes.dv
    mixed = mx.random.normal((2, steps, width)).astype(dtype)
    a, b = (mx.random.normal((2, steps, sizes.value_heads)).astype(dtype) for _ in range(2))
    a_log = mx.random.uniform(-1, 2, (sizes.value_heads,))
    dt_bias = mx.random.normal((sizes.value_heads,)).astype(dtype)
    state = mx.random.normal((2, sizes.value_heads, sizes.dv, sizes.dk))
    return mixed, a, b, ours.Gates(a_log, dt_bias, 1e-6 / sizes.dk), sizes, ours.Start(state)


def check_mix(problem, done):
    """Against the definition from the ops. Half types may round a unit apart where sums have another order."""
    mixed, a, b, gates, sizes, _ = problem
    inputs = ours.prepare(mixed, a, b, gates, sizes)
    expected_y, expected_after, innovation = ours.reference_forward(*inputs, done.base)
    y, after, tape = done.y, done.after, done.tape
    loose = {mx.float32: 5e-5, mx.float16: 2e-2, mx.bfloat16: 1e-1}[mixed.dtype]
    assert error(tape.k, inputs[1]) < loose and error(tape.g, inputs[3]) < loose / 4
    assert error(y, expected_y) < loose and error(after, expected_after) < loose
    assert error(tape.innovation, innovation) < loose


def emulated_mix(mixed, a, b, gates, sizes, start):
    """One run of the Metal body, resumed from a tape where `start` has one."""
    names, body = ours.MIX_INPUTS, ours.MIX
    constants = ours.norm_constants(gates, sizes)
    values = [mixed, a, b, gates.a_log, gates.dt_bias, start.state, mx.array([mixed.shape[1]]), constants]
    if start.tape is not None:
        names, body = names + ours.TAPE_INPUTS, ours.RESUMED_MIX
        values += ours.tape_inputs(start.tape, start.keep)
    outputs = ours.mix_outputs(mixed, sizes, start, taped=True)
    written = emulate.run(
        body,
        inputs=dict(zip(names, values, strict=True)),
        outputs=outputs,
        template=ours.mix_template(mixed, sizes),
        header=ours.RECORD,
        grid=(32, sizes.dv, 2 * sizes.value_heads),
        threadgroup=(32, 4, 1),
    )
    out = dict(zip(outputs, written, strict=True))
    tape = ours.Tape(out["innovation"], out["k"], out["g"])
    return ours.Mixed(out["y"], out.get("base", start.state), out["after"], tape)


def check_resumption(problem, run, keep):
    """A block after a rollback begins, bit for bit, where the kept steps alone end."""
    mixed, a, b, gates, sizes, start = problem
    tape = run(*problem).tape
    alone = run(mixed[:, :keep], a[:, :keep], b[:, :keep], gates, sizes, start).after
    resumed = run(mixed, a, b, gates, sizes, ours.Start(start.state, tape, keep))
    assert mx.array_equal(resumed.base, alone)
    straight = run(mixed, a, b, gates, sizes, ours.Start(alone))
    assert mx.array_equal(resumed.after, straight.after) and mx.array_equal(resumed.y, straight.y)


@needs_compiler
@settings(max_examples=8, deadline=None, derandomize=True)
@given(drawn=MIXED, data=st.data())
def test_the_metal_body_normalises_gates_and_resumes_as_the_model_does(drawn, data):
    problem = mixed_problem(**drawn)
    check_mix(problem, emulated_mix(*problem))
    check_resumption(problem, emulated_mix, data.draw(st.integers(1, drawn["steps"])))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(drawn=MIXED, data=st.data())
def test_on_this_device_a_mixed_block_is_the_definitions_and_resumes_bitwise(drawn, data):
    problem = mixed_problem(**drawn)
    done = ours.mix(*problem)
    check_mix(problem, done)
    check_resumption(problem, ours.mix, data.draw(st.integers(1, drawn["steps"])))
    assert mx.array_equal(ours.mix(*problem, taped=False).after, done.after)


@needs_gpu
@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes=SHAPES, seed=st.integers(0, 99))
def test_the_gpu_kernel_gives_the_definitions_outputs_states_and_tapes(sizes, seed):
    inputs = problem(seed, **sizes)
    y, after, tape = ours.forward_with_tape(*inputs)
    expected_y, expected_after, expected_innovation = ours.reference_forward(*inputs)
    assert error(after, expected_after) < 1e-4
    assert error(tape.innovation, expected_innovation) < 1e-4
    assert error(y, expected_y) < (1e-4 if sizes["dtype"] == mx.float32 else 2e-2)
